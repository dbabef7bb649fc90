"""Attention kernels to hold against one contract, sequences in scattered pages to run them on, and attention written
out densely to compare with."""

from __future__ import annotations

import functools
from collections.abc import Sequence as Listed
from dataclasses import dataclass

import numpy as np
import torch

from kernels.contract import AttentionKernel, Geometry, LayerAttention, LayerCache, RaggedBatch
from kernels.cpu.attention import CpuAttention
from kernels.cpu.build import ISAS
from kernels.cpu.library import Library, find
from kernels.reference import ReferenceAttention
from worker.kv_cache import KVCache

CPU = torch.device("cpu")
TORCH = "torch"


@functools.cache
def usable_isas() -> list[str]:
    """The instruction sets of the C++ library that this processor has; none where it is not built."""
    library = find()
    if not isinstance(library, Library):
        return []
    before = library.isa
    usable = [isa for isa in ISAS if library.select(isa)]
    library.select(before)
    return usable


@dataclass(frozen=True)
class Kind:
    """A kernel to be made: the torch reference, or the C++ kernel of an instruction set."""

    isa: str
    dtype: torch.dtype

    def __str__(self) -> str:
        return f"{self.isa}-{str(self.dtype).removeprefix('torch.')}"

    def make(self, geometry: Geometry) -> AttentionKernel:
        if self.isa == TORCH:
            return ReferenceAttention(geometry, self.dtype, CPU)
        library = find()
        assert isinstance(library, Library)
        assert library.select(self.isa)
        return CpuAttention(library, geometry, self.dtype)


KINDS = [
    *(Kind(TORCH, dtype) for dtype in (torch.float32, torch.bfloat16, torch.float16)),
    *(Kind(isa, dtype) for isa in usable_isas() for dtype in (torch.float32, torch.bfloat16)),
]


@dataclass(eq=False)
class Sequence:
    """One sequence's queries, keys and values for its whole length, and the pages that it owns."""

    query: torch.Tensor  # [length, heads, dim]
    key: torch.Tensor  # [length, kv heads, dim]
    value: torch.Tensor
    pages: list[int]

    @property
    def length(self) -> int:
        return len(self.query)


class Pool:
    """One layer's cache, and sequences whose pages are scattered over it."""

    def __init__(self, geometry: Geometry, kind: Kind, num_pages: int = 400, host_pages: int = 0) -> None:
        self.geometry = geometry
        self.kernel = kind.make(geometry)
        self.dtype = kind.dtype
        self.pages = KVCache(self.kernel, 1, num_pages - 1, host_pages)
        self.generator = torch.Generator().manual_seed(5)
        self.free = (torch.randperm(num_pages - 1, generator=self.generator) + 1).tolist()

    @property
    def cache(self) -> LayerCache:
        return self.pages.layers[0]

    def sequence(self, length: int) -> Sequence:
        g = self.geometry
        heads = (g.num_heads, g.num_kv_heads, g.num_kv_heads)
        query, key, value = (torch.randn((length, h, g.head_dim), generator=self.generator).to(self.dtype)
                             for h in heads)  # fmt: skip
        pages = [self.free.pop() for _ in range(-(-length // g.block_size))]
        return Sequence(query, key, value, pages)

    def attend(self, parts: Listed[tuple[Sequence, int, int]], layer: LayerAttention) -> list[torch.Tensor]:
        """One pass over tokens ``start .. stop`` of each sequence; the outputs of each."""
        size = self.geometry.block_size
        table = np.full((len(parts), max(len(s.pages) for s, _, _ in parts)), 2**31 - 1, dtype=np.int32)
        for number, (sequence, _, stop) in enumerate(parts):
            used = -(-stop // size)  # junk past the last key
            table[number, :used] = sequence.pages[:used]
        if self.kernel.name == TORCH:
            table[table == 2**31 - 1] = 0  # it gathers whole tiles, and drops what is hidden
        positions = np.concatenate([np.arange(start, stop) for _, start, stop in parts])
        owner = np.repeat(np.arange(len(parts)), [stop - start for _, start, stop in parts])
        start_of = np.concatenate([[0], np.cumsum([stop - start for _, start, stop in parts])])
        slots = table[owner, positions // size].astype(np.int64) * size + positions % size
        batch = RaggedBatch(start_of, positions + 1, table, slots)
        ragged = [torch.cat([getattr(s, name)[a:b] for s, a, b in parts]) for name in ("query", "key", "value")]
        out = self.kernel.attend(self.kernel.plan(batch), self.cache, *ragged, layer)
        return list(out.split([stop - start for _, start, stop in parts]))

    def attend_in_pieces(self, sequence: Sequence, stops: Listed[int], layer: LayerAttention) -> torch.Tensor:
        """One sequence alone, from its beginning to each of ``stops`` in turn; the outputs together."""
        pieces = zip([0, *stops[:-1]], stops, strict=True)
        return torch.cat([self.attend([(sequence, a, b)], layer)[0] for a, b in pieces])


def dense(sequence: Sequence, layer: LayerAttention) -> torch.Tensor:
    """``[length, heads, dim]`` causal attention in float64, with nothing clever in it."""
    group = sequence.query.shape[1] // sequence.key.shape[1]
    query, key, value = (x.double() for x in (sequence.query, sequence.key, sequence.value))
    key, value = (x.repeat_interleave(group, dim=1) for x in (key, value))
    scores = torch.einsum("qhd,khd->hqk", query, key) * layer.scaling
    if layer.softcap is not None:
        scores = layer.softcap * torch.tanh(scores / layer.softcap)
    place = torch.arange(sequence.length)
    hidden = place[None, :] > place[:, None]
    if layer.window is not None:
        hidden |= place[None, :] <= place[:, None] - layer.window
    scores = scores.masked_fill(hidden, float("-inf"))
    if layer.sinks is not None:
        sinks = layer.sinks.double()[:, None, None].expand(-1, sequence.length, 1)
        scores = torch.cat([scores, sinks], dim=-1)
    weights = scores.softmax(dim=-1)[..., : sequence.length]
    return torch.einsum("hqk,khd->qhd", weights, value)


def around(*edges: int) -> list[int]:
    """Single tokens across each edge: for ``attend_in_pieces``."""
    return [edge + step for edge in edges for step in (-1, 0, 1, 2)]
