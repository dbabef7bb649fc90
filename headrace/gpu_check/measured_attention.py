"""Attention over pages at the sizes of serving, timed, beside the time to read what it must read."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from headrace.gpu_check.backends import Kind, Refused
from headrace.gpu_check.rig import Rig
from headrace.gpu_check.timing import sets_for
from kernels.contract import DeviceKernel, Geometry, LayerAttention, LayerCache, RaggedBatch
from kernels.device_batch import on_device

Call = Callable[[], object]

FLEX_S = 25.0
"""Less than that is not begun: it compiles for long, and can't be interrupted."""

POOL_SHARE = 0.35
"""Of the memory that is free, for pages."""


@dataclass(frozen=True)
class Cell:
    """Sequences that are all alike: ``queries`` of each, the last of its ``context`` tokens."""

    batch: int
    queries: int
    context: int

    @property
    def decode(self) -> bool:
        return self.queries == 1

    @property
    def name(self) -> str:
        return "attention, decode" if self.decode else f"attention, {self.queries} queries each"

    @property
    def keys_seen(self) -> int:
        """By all queries of the batch together."""
        last = self.context
        first = self.context - self.queries + 1
        return self.batch * (first + last) * self.queries // 2


class Pages:
    """Pages full of random numbers, as many as there is room for up to what the largest cell needs twice."""

    def __init__(self, rig: Rig, kernel: DeviceKernel, geometry: Geometry, largest_tokens: int) -> None:
        self.geometry = geometry
        token_bytes = stored_bytes(kernel.allocate(1), geometry.block_size)
        room = int(POOL_SHARE * rig.free_bytes() // token_bytes)
        self.num_pages = max(2, min(2 * largest_tokens, room) // geometry.block_size)
        self.cache = kernel.allocate(self.num_pages)
        self.token_bytes = token_bytes
        generator = rig.generator(3)
        for pages in (self.cache.key, self.cache.value):
            fill(pages, generator)
        for scale in (self.cache.key_scale, self.cache.value_scale):
            if scale is not None:
                scale.fill_(0.01)
        order = torch.randperm(self.num_pages, generator=torch.Generator().manual_seed(3))
        self._order = order.numpy().astype(np.int32)

    @property
    def num_tokens(self) -> int:
        return self.num_pages * self.geometry.block_size

    def batches(self, cell: Cell, count: int) -> Iterable[RaggedBatch]:
        """``count`` of the same shape, on pages of their own as far as there are so many."""
        size = self.geometry.block_size
        width = -(-cell.context // size)
        needed = cell.batch * width
        for number in range(count):
            first = number * needed % max(1, self.num_pages - needed + 1)
            table = self._order[first : first + needed].reshape(cell.batch, width)
            position = np.arange(cell.context - cell.queries, cell.context)
            slots = table[:, position // size].astype(np.int64) * size + position % size
            start = np.arange(cell.batch + 1, dtype=np.int64) * cell.queries
            yield RaggedBatch(start, np.tile(position + 1, cell.batch), table, slots.ravel())

    def dense(self, cell: Cell) -> tuple[torch.Tensor, torch.Tensor]:
        """The same memory as keys and values ``[batch, kv heads, context, dim]`` of sequences in one piece each."""
        g = self.geometry
        tokens = cell.batch * cell.context
        return tuple(  # type: ignore[return-value]
            pages.view(-1, g.num_kv_heads, g.head_dim)[:tokens]
            .view(cell.batch, cell.context, g.num_kv_heads, g.head_dim)
            .transpose(1, 2)
            for pages in (self.cache.key, self.cache.value)
        )


def stored_bytes(cache: LayerCache, tokens: int) -> int:
    """Of one token's keys and values in a layer, scales included."""
    return sum(tensor.nbytes for tensor in cache.tensors()) // tokens


def fill(pages: torch.Tensor, generator: torch.Generator, piece: int = 1 << 26) -> None:
    """Random numbers, piece by piece: no copy of a large pool in float32."""
    flat = pages.view(-1)
    for first in range(0, len(flat), piece):
        part = flat[first : first + piece]
        if part.dtype.itemsize == 1:
            noise = torch.randint(-100, 101, part.shape, generator=generator, device=part.device, dtype=torch.int8)
            part.copy_(noise.float().to(part.dtype))
        else:
            part.normal_(generator=generator)


def query_of(rig: Rig, geometry: Geometry, cell: Cell) -> torch.Tensor:
    shape = (cell.batch * cell.queries, geometry.num_heads, geometry.head_dim)
    return torch.randn(shape, generator=rig.generator(4), device=rig.device).to(rig.dtype)


def measure(rig: Rig, kind: Kind, pages: Pages, cell: Cell) -> None:
    """One row: the reading half of attention (writing has a row of its own)."""
    try:
        kernel = kind.make(pages.geometry)
    except Refused as reason:
        rig.row(**about(kind.name, True, cell), note=str(reason))
        return
    layer = LayerAttention(pages.geometry.head_dim**-0.5)
    query = query_of(rig, pages.geometry, cell)
    data_bytes = cell.batch * cell.context * pages.token_bytes
    count = sets_for(data_bytes, rig.timer.l2_bytes, pages.num_tokens * pages.token_bytes)

    def call(batch: RaggedBatch) -> Call:
        there = on_device(batch, rig.device)
        if cell.decode:  # as in a captured graph
            there = replace(there, host=None)
        plan = kernel.plan_device(there)
        return lambda: kernel.read(plan, pages.cache, query, layer)

    calls = [call(batch) for batch in pages.batches(cell, count)]
    seconds = rig.timer.seconds(calls, data_bytes)
    rig.row(**about(kind.name + stored_note(kind), True, cell), **figures(rig, pages, cell, seconds))


def stored_note(kind: Kind) -> str:
    return "" if kind.storage == kind.dtype else f", pages {str(kind.storage).removeprefix('torch.')}"


def about(backend: str, ours: bool, cell: Cell) -> dict[str, Any]:
    return {"kernel": cell.name, "backend": backend, "ours": ours, "batch": cell.batch, "context": cell.context}


def figures(rig: Rig, pages: Pages, cell: Cell, seconds: float, token_bytes: int | None = None) -> dict[str, Any]:
    """Beside the floor: reading keys and values once (with queries and outputs), and the products."""
    g = pages.geometry
    moved = cell.batch * cell.context * (token_bytes or pages.token_bytes)
    moved += 2 * cell.batch * cell.queries * g.num_heads * g.head_dim * rig.dtype.itemsize
    return against_floor(rig, seconds, moved, 4.0 * g.num_heads * g.head_dim * cell.keys_seen)


def against_floor(rig: Rig, seconds: float, moved: float, flops: float = 0.0) -> dict[str, Any]:
    """A time beside the least that the measured limits allow for so many bytes and operations."""
    found: dict[str, Any] = {"us": seconds * 1e6, "gb_s": moved / seconds / 1e9}
    by_bytes = moved / rig.copy_bytes_s if rig.copy_bytes_s else 0.0
    by_flops = flops / rig.gemm_flops if rig.gemm_flops else 0.0
    if by_bytes:
        found["copy_share"] = by_bytes / seconds
    if floor := max(by_bytes, by_flops):
        found["floor_us"] = floor * 1e6
        found["floor_share"] = floor / seconds
        found["bound"] = "bytes" if by_bytes >= by_flops else "products"
    return found


# --- PyTorch's own ----------------------------------------------------------------------------------------------------


def measure_sdpa(rig: Rig, pages: Pages, cell: Cell) -> None:
    """``scaled_dot_product_attention`` over keys and values that lie in one piece: it reads no pages."""
    key, value = pages.dense(cell)
    query = batched_query(rig, pages, cell)
    attend = torch.nn.functional.scaled_dot_product_attention
    causal = not cell.decode

    def call() -> torch.Tensor:
        return attend(query, key, value, is_causal=causal, enable_gqa=True)

    seconds = rig.timer.seconds([call], cell.batch * cell.context * pages.token_bytes)
    rig.row(**about("SDPA, no pages", False, cell), **figures(rig, pages, cell, seconds))


def measure_flex(rig: Rig, pages: Pages, cell: Cell) -> None:
    """FlexAttention, compiled, likewise over keys and values in one piece."""
    backend = "FlexAttention, no pages"
    try:
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention

        if not rig.rehearsal and rig.left_s < FLEX_S:
            rig.row(**about(backend, False, cell), note=f"not compiled: {rig.left_s:.0f} s were left")
            return
        key, value = pages.dense(cell)
        query = batched_query(rig, pages, cell)
        mask = None
        if not cell.decode:
            mask = create_block_mask(
                lambda b, h, q, kv: q >= kv, None, None, cell.queries, cell.context, device=str(rig.device)
            )
        compiled: Any = flex_attention if rig.rehearsal else torch.compile(flex_attention, dynamic=False)

        def call() -> object:
            return compiled(query, key, value, block_mask=mask, enable_gqa=True)

        call()
        seconds = rig.timer.seconds([call], cell.batch * cell.context * pages.token_bytes)
    except Exception as error:
        if not rig.usable_after(error):
            raise
        reason = " ".join(str(error).split())[:120]
        rig.row(**about(backend, False, cell), note=f"does not run: {type(error).__name__}: {reason}")
        return
    rig.row(**about(backend, False, cell), **figures(rig, pages, cell, seconds))


def batched_query(rig: Rig, pages: Pages, cell: Cell) -> torch.Tensor:
    g = pages.geometry
    return query_of(rig, g, cell).view(cell.batch, cell.queries, g.num_heads, g.head_dim).transpose(1, 2)
