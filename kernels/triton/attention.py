""":class:`~kernels.contract.DeviceKernel` in Triton. The kernel is in :mod:`kernels.triton.attention_kernel`, its tiles
and grids in :mod:`kernels.triton.attention_shapes`."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch

from kernels.contract import DeviceBatch, DeviceKernel, Geometry, LayerAttention, LayerCache, RaggedBatch
from kernels.device_batch import on_device
from kernels.device_pages import allocate
from kernels.triton.attention_kernel import merge_pieces, paged_attention
from kernels.triton.attention_shapes import (
    MERGED_ROWS,
    MERGING_WARPS,
    Launch,
    kinds_of_launch,
    launches,
    power_of_two,
)
from kernels.triton.cache import write_pages
from kernels.triton.launching import FUSED, INTERPRETED, unit_stride

LOG2_E = math.log2(math.e)

DTYPES = (torch.float32, torch.bfloat16, torch.float16)

MAX_HEAD = 256
MAX_GROUP = 128

FP8_CAPABILITY = (8, 9)
"""Compute capability from which the hardware converts fp8 e4m3."""


def refusal(geometry: Geometry, dtype: torch.dtype, storage: torch.dtype, capability: tuple[int, int]) -> str:
    """Why this kernel can't serve that on a GPU of this compute capability; empty if it can."""
    if dtype not in DTYPES:
        return f"it computes in float32, bfloat16 and float16, not in {str(dtype).removeprefix('torch.')}"
    if storage == torch.float8_e4m3fn and capability < FP8_CAPABILITY:
        return "a GPU reads and writes fp8 pages from compute capability {}.{} on, this one has {}.{}".format(
            *FP8_CAPABILITY, *capability
        )
    if geometry.head_dim % 16 or geometry.head_dim > MAX_HEAD:
        return f"its heads have a multiple of 16 dimensions up to {MAX_HEAD}, not {geometry.head_dim}"
    if geometry.group > MAX_GROUP:
        return f"at most {MAX_GROUP} query heads share a key, not {geometry.group}"
    return ""


@dataclass(slots=True, eq=False)
class Pass:
    """One launch of each layer with the same window, and what the second pass over its pieces reads."""

    launch: Launch
    partials: torch.Tensor | None
    sums: torch.Tensor | None


@dataclass(slots=True, eq=False)
class TritonPlan:
    batch: DeviceBatch
    windows: dict[int | None, list[Pass]] = field(default_factory=dict)


class TritonAttention(DeviceKernel):
    """See the module. ``storage`` is what pages hold, if not ``dtype``: fp8 (e4m3) or int8.

    ``batch_invariant``: one tile and pieces at fixed places for everything, so that the bits of a query depend on its
    own sequence alone. ``num_sms`` is how many multiprocessors the device has.
    """

    name = "triton"

    def __init__(
        self,
        geometry: Geometry,
        dtype: torch.dtype,
        device: torch.device,
        *,
        storage: torch.dtype | None = None,
        num_sms: int,
        batch_invariant: bool = False,
    ) -> None:
        self.geometry = geometry
        self.dtype = dtype
        self.device = device
        self.storage = storage or dtype
        self.num_sms = num_sms
        self.batch_invariant = batch_invariant
        self.warpgroups = device.type != "cuda" or torch.cuda.get_device_capability(device)[0] == 9

    def allocate(self, num_pages: int) -> LayerCache:
        return allocate(self.geometry, self.storage, num_pages, self.device)

    # --- once per forward pass ---------------------------------------------------------------------------------------

    def plan(self, batch: RaggedBatch) -> TritonPlan:
        return self.plan_device(on_device(batch, self.device))

    def plan_device(self, batch: DeviceBatch) -> TritonPlan:
        return TritonPlan(batch)

    def _passes(self, plan: TritonPlan, window: int | None) -> list[Pass]:
        passes = plan.windows.get(window)
        if passes is None:
            batch = plan.batch
            counts = None if batch.host is None else np.diff(batch.host.query_start)
            found = launches(
                self.geometry, self.dtype.itemsize, self.storage.itemsize, tokens=batch.num_tokens,
                sequences=batch.num_sequences, max_query=batch.max_query, max_keys=batch.max_keys, window=window,
                num_sms=self.num_sms, invariant=self.batch_invariant, warpgroups=self.warpgroups,
                least_query=1 if counts is None else int(counts[counts > 0].min(initial=batch.max_query)),
            )  # fmt: skip
            passes = plan.windows[window] = [self._pass(launch) for launch in found]
        return passes

    def _pass(self, launch: Launch) -> Pass:
        if launch.splits == 1:
            return Pass(launch, None, None)
        g = self.geometry
        pieces = (launch.blocks * g.num_kv_heads, launch.slots, launch.queries * g.group)
        partials = torch.empty((*pieces, power_of_two(g.head_dim)), dtype=torch.float32, device=self.device)
        return Pass(launch, partials, torch.empty((*pieces, 2), dtype=torch.float32, device=self.device))

    # --- once per layer ----------------------------------------------------------------------------------------------

    def write(self, plan: TritonPlan, cache: LayerCache, key: torch.Tensor, value: torch.Tensor) -> None:
        write_pages(cache, key, value, plan.batch)

    def read(self, plan: TritonPlan, cache: LayerCache, query: torch.Tensor, layer: LayerAttention) -> torch.Tensor:
        """``[T, num_heads, head_dim]``; nothing is written to the rows behind the last query."""
        query = unit_stride(query)
        out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        for one in self._passes(plan, layer.window):
            self._launch(one, plan.batch, cache, query, out, layer)
        return out

    def warm_ups(self, cache: LayerCache, layers: Sequence[LayerAttention]) -> Iterator[Callable[[], None]]:
        """See :meth:`~kernels.contract.DeviceKernel.warm_ups`: each sort of launch over a sequence without queries."""
        g, device = self.geometry, self.device

        def numbers(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        nobody = DeviceBatch(numbers(2), numbers(1), numbers(1, 1), numbers(1, dtype=torch.int64), 1, 1)
        query = numbers(1, g.num_heads, g.head_dim, dtype=self.dtype)
        sorts = {(layer.window is None, layer.softcap is None, layer.sinks is None): layer for layer in layers}
        for launch in kinds_of_launch(
            g, self.dtype.itemsize, self.storage.itemsize, invariant=self.batch_invariant, warpgroups=self.warpgroups
        ):
            for layer in sorts.values():
                yield partial(self._launch, self._pass(launch), nobody, cache, query, torch.empty_like(query), layer)

    def _launch(
        self,
        one: Pass,
        batch: DeviceBatch,
        cache: LayerCache,
        query: torch.Tensor,
        out: torch.Tensor,
        layer: LayerAttention,
    ) -> None:
        g, launch, tile = self.geometry, one.launch, one.launch.tile
        programs = launch.blocks * g.num_kv_heads
        if not programs:
            return
        scale, softcap = layer.scaling * LOG2_E, None
        if layer.softcap is not None:
            scale, softcap = 2 * scale / layer.softcap, layer.softcap * LOG2_E
        sizes = {"HEADS": g.num_heads, "KV_HEADS": g.num_kv_heads, "HEAD_DIM": g.head_dim,
                 "WIDTH": power_of_two(g.head_dim), "QUERIES": launch.queries, "TILE": tile.keys,
                 "SEARCH": launch.search, "FIXED": self.batch_invariant}  # fmt: skip
        bounds = (launch.fewest, launch.most, launch.splits, launch.piece_tiles, launch.slots)
        sinks = layer.sinks if one.partials is None else None
        paged_attention[(programs, launch.splits)](
            out, one.partials, one.sums, query, cache.key, cache.value, cache.key_scale, cache.value_scale, sinks,
            batch.query_start, batch.visible, batch.block_tables, batch.num_sequences, batch.block_tables.stride(0),
            query.stride(0), query.stride(1), scale, softcap, layer.window, *bounds,
            PAGE=g.block_size, ROWS=tile.rows, UPCAST=INTERPRETED, **sizes,
            num_warps=tile.warps, num_stages=tile.stages, **FUSED,
        )  # fmt: skip
        if one.partials is not None:
            merge_pieces[(programs, -(-launch.queries * g.group // MERGED_ROWS))](
                out, one.partials, one.sums, layer.sinks, batch.query_start, batch.visible, batch.num_sequences,
                layer.window, *bounds, ROWS=MERGED_ROWS, **sizes, num_warps=MERGING_WARPS, **FUSED,
            )  # fmt: skip
