""":class:`~kernels.contract.AttentionKernel` in C++: paged attention over a ragged batch on a CPU.

Bits: keys come in tiles of fixed positions, and splits of tiles are merged in their order, for decodes and chunks alike
(``attention.h``), so a query's result depends on its own sequence alone.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import numpy as np
import torch

from kernels.contract import Geometry, LayerAttention, LayerCache, RaggedBatch
from kernels.cpu.library import Attention, Batch, Library
from kernels.pages import zeros

DTYPES = {torch.float32: 0, torch.bfloat16: 1}
"""What the library computes in, and its numbers for them."""

BLOCK = 16
"""Tokens that lie together in a page; a page holds whole blocks."""

MAX_HEAD = 256
MAX_GROUP = 48


def refusal(geometry: Geometry, dtype: torch.dtype, device: torch.device) -> str:
    """Why the C++ kernel can't serve this; empty if it can."""
    if device.type != "cpu":
        return f"it runs on a CPU, not on {device.type}"
    if dtype not in DTYPES:
        return f"it computes in float32 and bfloat16, not in {str(dtype).removeprefix('torch.')}"
    if geometry.block_size % BLOCK:
        return f"its pages hold a multiple of {BLOCK} tokens, not {geometry.block_size}"
    if geometry.head_dim % BLOCK or geometry.head_dim > MAX_HEAD:
        return f"its heads have a multiple of {BLOCK} dimensions up to {MAX_HEAD}, not {geometry.head_dim}"
    if geometry.group > MAX_GROUP:
        return f"at most {MAX_GROUP} query heads share a key, not {geometry.group}"
    return ""


@dataclass(frozen=True, slots=True, eq=False)
class CpuPlan:
    batch: RaggedBatch  # keeps alive what the struct points into
    struct: Batch


def contiguous(batch: RaggedBatch) -> RaggedBatch:
    """The batch as the library reads it."""
    return RaggedBatch(
        np.ascontiguousarray(batch.query_start, dtype=np.int64),
        np.ascontiguousarray(batch.visible, dtype=np.int64),
        np.ascontiguousarray(batch.block_tables, dtype=np.int32),
        np.ascontiguousarray(batch.write_slots, dtype=np.int64),
    )


def ragged_struct(batch: RaggedBatch) -> Batch:
    """``HrBatch`` of a :func:`contiguous` batch, whose arrays it points into."""
    struct = Batch()
    struct.query_start = batch.query_start.ctypes.data
    struct.visible = batch.visible.ctypes.data
    struct.tables = batch.block_tables.ctypes.data
    struct.write_slots = batch.write_slots.ctypes.data
    struct.num_tokens = batch.num_tokens
    struct.num_sequences = len(batch.query_start) - 1
    struct.table_stride = batch.block_tables.shape[1]
    return struct


class CpuAttention:
    """See the module. ``refusal`` says what it can't serve. Calls use the library's threads, and let go of the GIL."""

    batch_invariant = True

    def __init__(self, library: Library, geometry: Geometry, dtype: torch.dtype) -> None:
        reason = refusal(geometry, dtype, torch.device("cpu"))
        if reason:
            raise ValueError(f"the C++ attention kernel can't be used: {reason}")
        self.name = f"cpu-{library.isa}"
        self.geometry = geometry
        self.dtype = dtype
        self.library = library

    def allocate(self, num_pages: int) -> LayerCache:
        """Pages of zeros. Within a page the order is the kernel's own (``attention.h``), not the shape's."""
        g = self.geometry
        shape = (num_pages, g.num_kv_heads, 2, g.block_size, g.head_dim)
        both = zeros(shape, self.dtype, torch.device("cpu"))
        return LayerCache(both[:, :, 0].transpose(1, 2), both[:, :, 1].transpose(1, 2))

    def plan(self, batch: RaggedBatch) -> CpuPlan:
        batch = contiguous(batch)
        return CpuPlan(batch, ragged_struct(batch))

    def attend(
        self,
        plan: CpuPlan,
        cache: LayerCache,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        layer: LayerAttention,
    ) -> torch.Tensor:
        g = self.geometry
        self._check(plan, query, key, value)
        query, key, value = query.contiguous(), key.contiguous(), value.contiguous()
        sinks = None if layer.sinks is None else layer.sinks.float().contiguous()
        out = torch.empty_like(query)
        call = Attention()
        call.dtype, call.heads, call.kv_heads = DTYPES[self.dtype], g.num_heads, g.num_kv_heads
        call.head_dim, call.page = g.head_dim, g.block_size
        call.scaling, call.softcap, call.window = layer.scaling, layer.softcap or 0.0, layer.window or 0
        call.sinks = None if sinks is None else sinks.data_ptr()
        call.query, call.key, call.value, call.out = (x.data_ptr() for x in (query, key, value, out))
        call.query_stride = call.out_stride = g.num_heads * g.head_dim
        call.key_stride = call.value_stride = g.num_kv_heads * g.head_dim
        call.key_cache, call.value_cache = cache.key.data_ptr(), cache.value.data_ptr()
        self.library.c.headrace_attention(ctypes.byref(plan.struct), ctypes.byref(call))
        return out

    def _check(self, plan: CpuPlan, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
        """What the library would read past. Raises ValueError."""
        g, tokens = self.geometry, plan.batch.num_tokens
        for heads, x in ((g.num_heads, query), (g.num_kv_heads, key), (g.num_kv_heads, value)):
            if x.shape != (tokens, heads, g.head_dim) or x.dtype != self.dtype:
                raise ValueError(f"{tuple(x.shape)} in {x.dtype} is not {(tokens, heads, g.head_dim)} in {self.dtype}")
