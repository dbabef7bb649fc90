"""flash-attn beside a paged kernel: each part of a batch goes to whoever serves it best, and the outputs come back in
the order of the tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from kernels.contract import DeviceBatch, DeviceKernel, Geometry, LayerAttention, LayerCache, RaggedBatch
from kernels.device_batch import on_device, upload
from kernels.flash.libraries import Chunks, Fresh, Library, Rows
from kernels.flash.parts import Part, Use, cut
from kernels.quantized_pages import dequantize


@dataclass(frozen=True, slots=True, eq=False)
class Call:
    """One part of the batch, as a library takes it."""

    library: Library
    rows: slice | torch.Tensor  # of the batch: int64 indices where they do not lie side by side
    asked: Fresh | Rows | Chunks


@dataclass(frozen=True, slots=True, eq=False)
class FlashPlan:
    whole: Any  # the paged kernel's plan of all: it writes by it, and reads the layers that a library refuses
    calls: list[Call]
    rest: tuple[slice | torch.Tensor, Any] | None  # rows that the paged kernel reads beside the calls, by which plan


class FlashAttention(DeviceKernel):
    """:class:`~kernels.contract.DeviceKernel`. The pages, all writing, and reading what no library is given for are the
    paged kernel's.

    A row's bits depend on where its sequence was cut, since a library has other reductions than the paged kernel.
    """

    batch_invariant = False

    def __init__(
        self,
        geometry: Geometry,
        dtype: torch.dtype,
        device: torch.device,
        paged: DeviceKernel,
        libraries: Mapping[Use, Library],
    ) -> None:
        """``libraries``: who serves what; see :meth:`~kernels.flash.libraries.Library.refusal` for what each can."""
        self.geometry = geometry
        self.dtype = dtype
        self.device = device
        self.paged = paged
        self.libraries = dict(libraries)
        self.name = " + ".join([paged.name, *sorted({library.name for library in self.libraries.values()})])

    def allocate(self, num_pages: int) -> LayerCache:
        return self.paged.allocate(num_pages)

    # --- once per forward pass ---------------------------------------------------------------------------------------

    def plan(self, batch: RaggedBatch) -> FlashPlan:
        return self.plan_device(on_device(batch, self.device))

    def plan_device(self, batch: DeviceBatch) -> FlashPlan:
        """Where the host does not know the batch (in a captured graph), only a step of single rows can be told."""
        whole = self.paged.plan_device(batch)
        library = self.libraries.get(Use.ROWS)
        if library is None and batch.max_query == 1:
            return FlashPlan(whole, [], None)
        if batch.host is None:
            if library is None or batch.max_query != 1:
                return FlashPlan(whole, [], None)
            return FlashPlan(whole, [Call(library, slice(0, batch.num_tokens), self._unknown_rows(batch))], None)
        parts = cut(batch, batch.host, self.geometry.block_size, self.libraries)
        left = parts.pop(None, None)
        calls = [Call(self.libraries[use], part.rows, self._ask(use, part)) for use, part in parts.items() if use]
        if left is None or not calls:
            return FlashPlan(whole, calls, None)
        return FlashPlan(whole, calls, (left.rows, self.paged.plan_device(left.batch)))

    def _ask(self, use: Use, part: Part) -> Fresh | Rows | Chunks:
        batch = part.batch
        if use is Use.FRESH:
            return Fresh(batch.query_start, batch.max_query, batch.write_slots)
        tables = self._narrow(batch)
        if use is Use.ROWS:
            return Rows(tables, batch.visible)
        assert batch.host is not None
        count = batch.host.visible[batch.host.query_start[1:] - 1]
        keys, key_starts = upload([count, np.concatenate([[0], np.cumsum(count)])], self.device)
        return Chunks(tables, keys, key_starts, batch.query_start, batch.max_query, batch.max_keys)

    def _unknown_rows(self, batch: DeviceBatch) -> Rows:
        """Each row with its sequence's pages. Rows behind the last query, whose numbers are anything, get a key of page
        0, which every pool has; their outputs are nobody's."""
        row = torch.arange(batch.num_tokens, dtype=torch.int32, device=batch.visible.device)
        sequence = torch.searchsorted(batch.query_start[1:], row, right=True, out_int32=True)
        known = row < batch.query_start[-1]
        tables = self._narrow(batch).index_select(0, sequence.clamp_(max=batch.num_sequences - 1))
        return Rows(tables.masked_fill_(~known[:, None], 0), batch.visible.where(known, 1))

    def _narrow(self, batch: DeviceBatch) -> torch.Tensor:
        """Tables no wider than the keys: libraries take the width for the longest context, and cut work by it."""
        return batch.block_tables[:, : -(-batch.max_keys // self.geometry.block_size)]

    # --- once per layer ----------------------------------------------------------------------------------------------

    def write(self, plan: FlashPlan, cache: LayerCache, key: torch.Tensor, value: torch.Tensor) -> None:
        self.paged.write(plan.whole, cache, key, value)

    def read(self, plan: FlashPlan, cache: LayerCache, query: torch.Tensor, layer: LayerAttention) -> torch.Tensor:
        if not plan.calls or any(call.library.layer_refusal(layer) for call in plan.calls):
            return self.paged.read(plan.whole, cache, query, layer)
        rows = plan.calls[0].rows
        if isinstance(rows, slice) and rows == slice(0, len(query)):
            return self._call(plan.calls[0], cache, query, layer)
        output = torch.empty_like(query, memory_format=torch.contiguous_format)
        for call in plan.calls:
            _place(output, call.rows, self._call(call, cache, query[call.rows], layer))
        if plan.rest is not None:
            rows, rest = plan.rest
            _place(output, rows, self.paged.read(rest, cache, query[rows], layer))
        return output

    def warm_ups(self, cache: LayerCache, layers: Sequence[LayerAttention]) -> Iterator[Callable[[], None]]:
        """See :meth:`~kernels.contract.DeviceKernel.warm_ups`. A library's own are compiled in its trial."""
        return self.paged.warm_ups(cache, layers)

    def _call(self, call: Call, cache: LayerCache, query: torch.Tensor, layer: LayerAttention) -> torch.Tensor:
        asked = call.asked
        if isinstance(asked, Rows):
            return call.library.rows(asked, cache, query, layer)
        if isinstance(asked, Chunks):
            return call.library.chunks(asked, cache, query, layer)
        # from the pages, not as the model made them: there they are finite, and rounded as later steps will see them
        key = _tokens(cache.key, cache.key_scale, asked.slots, query.dtype)
        value = _tokens(cache.value, cache.value_scale, asked.slots, query.dtype)
        return call.library.fresh(asked, query, key, value, layer)


def _place(output: torch.Tensor, rows: slice | torch.Tensor, part: torch.Tensor) -> None:
    if isinstance(rows, slice):
        output[rows] = part
    else:
        output.index_copy_(0, rows, part)


def _tokens(pages: torch.Tensor, scale: torch.Tensor | None, slots: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """``[tokens, num_kv_heads, head_dim]`` from the pages."""
    flat = pages.view(-1, *pages.shape[2:])
    if scale is None:
        return flat.index_select(0, slots)
    stored = flat.view(torch.uint8).index_select(0, slots).view(pages.dtype)  # not every torch gathers fp8
    return dequantize(stored, scale.view(-1, scale.shape[2]).index_select(0, slots), dtype)
