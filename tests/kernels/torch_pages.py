"""A device kernel with nothing clever in it: for what is composed with a paged kernel, on a CPU and without Triton."""

from __future__ import annotations

import itertools

import torch
from fake_flash import attention

from kernels.contract import DeviceBatch, DeviceKernel, Geometry, LayerAttention, LayerCache, RaggedBatch
from kernels.device_batch import on_device
from kernels.device_pages import allocate
from kernels.quantized_pages import dequantize, has_scales, quantize
from kernels.reference import LARGEST_KEY


class TorchPages(DeviceKernel):
    """:class:`~kernels.contract.DeviceKernel`. Counts the queries that it is asked for."""

    name = "paged"
    batch_invariant = True

    def __init__(self, geometry: Geometry, dtype: torch.dtype, storage: torch.dtype | None = None) -> None:
        self.geometry = geometry
        self.dtype = dtype
        self.storage = storage or dtype
        self.tokens = 0

    def allocate(self, num_pages: int) -> LayerCache:
        return allocate(self.geometry, self.storage, num_pages, torch.device("cpu"))

    def plan(self, batch: RaggedBatch) -> DeviceBatch:
        return on_device(batch, torch.device("cpu"))

    def plan_device(self, batch: DeviceBatch) -> DeviceBatch:
        return batch

    def write(self, plan: DeviceBatch, cache: LayerCache, key: torch.Tensor, value: torch.Tensor) -> None:
        largest = torch.finfo(self.dtype).max
        live = int(plan.query_start[-1])
        for pages, scales, new, bound in (
            (cache.key, cache.key_scale, key, min(LARGEST_KEY, largest)),
            (cache.value, cache.value_scale, value, largest),
        ):
            finite = torch.nan_to_num(new[:live], posinf=largest, neginf=-largest).clamp(-bound, bound)
            slots = plan.write_slots[:live]
            if scales is None:
                pages.view(-1, *pages.shape[2:])[slots] = finite
            else:
                stored, scale = quantize(finite, self.storage)
                pages.view(-1, *pages.shape[2:])[slots] = stored
                scales.view(-1, scales.shape[2])[slots] = scale

    def read(self, plan: DeviceBatch, cache: LayerCache, query: torch.Tensor, layer: LayerAttention) -> torch.Tensor:
        out = torch.full_like(query, torch.nan, memory_format=torch.contiguous_format)
        starts = plan.query_start.tolist()
        self.tokens += starts[-1]
        window = (-1 if layer.window is None else layer.window - 1, 0)
        for sequence, (start, stop) in enumerate(itertools.pairwise(starts)):
            for rows in self._together(plan.visible, start, stop):
                seen = int(plan.visible[rows.stop - 1])
                pages = plan.block_tables[sequence, : -(-seen // self.geometry.block_size)].long()
                key, value = (self._numbers(*one, pages)[:seen] for one in
                              ((cache.key, cache.key_scale), (cache.value, cache.value_scale)))  # fmt: skip
                out[rows] = attention(
                    query[rows], key, value, layer.scaling, True, window, layer.softcap or 0.0, layer.sinks
                )
        return out

    def _together(self, visible: torch.Tensor, start: int, stop: int) -> list[slice]:
        """All rows of a sequence if each sees one key more than the one before; else one by one."""
        if stop > start and torch.equal(
            visible[start:stop] - visible[start], torch.arange(stop - start, dtype=visible.dtype)
        ):
            return [slice(start, stop)]
        return [slice(row, row + 1) for row in range(start, stop)]

    def _numbers(self, stored: torch.Tensor, scale: torch.Tensor | None, pages: torch.Tensor) -> torch.Tensor:
        found = stored[pages].flatten(0, 1)
        if not has_scales(self.storage):
            return found
        assert scale is not None
        return dequantize(found, scale[pages].flatten(0, 1), self.dtype)
