"""Attention kernels to hold against one contract, sequences in scattered pages to run them on, and attention written
out densely to compare with."""

from __future__ import annotations

import functools
from collections.abc import Sequence as Listed
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from kernels.contract import AttentionKernel, Geometry, LayerAttention, LayerCache, RaggedBatch
from kernels.cpu.attention import CpuAttention
from kernels.cpu.build import ISAS
from kernels.cpu.library import Library, find
from kernels.quantized_pages import dequantize, quantize
from kernels.reference import ReferenceAttention
from worker.kv_cache import KVCache

CPU = torch.device("cpu")
TORCH = "torch"
TRITON = "triton"
TRITON_INVARIANT = "triton-invariant"

INTERPRETED_SMS = 8
"""Multiprocessors of the device that Triton's interpreter stands for: few, so that small batches do not split."""


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
    """A kernel to be made: the torch reference, the C++ kernel of an instruction set, or the Triton kernel in its
    interpreter (the tests' ``conftest.py`` turns it on)."""

    isa: str
    dtype: torch.dtype
    storage: torch.dtype | None = None  # of pages; None: dtype

    def __str__(self) -> str:
        names = (str(one).removeprefix("torch.") for one in (self.dtype, self.storage) if one is not None)
        return "-".join((self.isa, *names))

    @property
    def interpreted(self) -> bool:
        """Slow: a hundredth of a second for each block of queries."""
        return self.isa in (TRITON, TRITON_INVARIANT)

    def make(self, geometry: Geometry) -> AttentionKernel:
        if self.isa == TORCH:
            return ReferenceAttention(geometry, self.dtype, CPU, self.storage)
        if self.interpreted:
            import interpreted  # noqa: F401  makes the interpreter compute as GPUs do

            from kernels.triton.attention import TritonAttention

            return TritonAttention(
                geometry, self.dtype, CPU, storage=self.storage, num_sms=INTERPRETED_SMS,
                batch_invariant=self.isa == TRITON_INVARIANT,
            )  # fmt: skip
        library = find()
        assert isinstance(library, Library)
        assert library.select(self.isa)
        return CpuAttention(library, geometry, self.dtype)


QUANTIZED = [(torch.float32, torch.int8), (torch.bfloat16, torch.float8_e4m3fn), (torch.float16, torch.float8_e4m3fn)]

INTERPRETED_KINDS = [
    *(
        Kind(isa, dtype)
        for isa in (TRITON, TRITON_INVARIANT)
        for dtype in (torch.float32, torch.bfloat16, torch.float16)
    ),
    *(Kind(isa, *pair) for isa in (TRITON, TRITON_INVARIANT) for pair in QUANTIZED),
]

KINDS = [
    *(Kind(TORCH, dtype) for dtype in (torch.float32, torch.bfloat16, torch.float16)),
    *(Kind(TORCH, *pair) for pair in QUANTIZED),
    *(Kind(isa, dtype) for isa in usable_isas() for dtype in (torch.float32, torch.bfloat16)),
    Kind(TRITON, torch.bfloat16),
    Kind(TRITON_INVARIANT, torch.float32),
]
"""For tests of one thing each. Of the interpreted ones two: the others are in ``test_any_attention_batch.py``."""


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
        self.kind = kind
        self.kernel = kind.make(geometry)
        self.dtype = kind.dtype
        self.pages = KVCache(self.kernel, 1, num_pages - 1, host_pages)
        self.generator = torch.Generator().manual_seed(5)
        self.free = (torch.randperm(num_pages - 1, generator=self.generator) + 1).tolist()

        if kind.interpreted:
            poison(self.cache)

    @property
    def cache(self) -> LayerCache:
        return self.pages.layers[0]

    def stored(self, sequence: Sequence) -> Sequence:
        """The sequence with the keys and values that its pages hold of it, where those are rounded."""
        if self.kind.storage is None:
            return sequence
        place = torch.arange(sequence.length)
        rows = torch.tensor(sequence.pages)[place // self.geometry.block_size], place % self.geometry.block_size
        key, value = (
            dequantize(pages.view(torch.uint8)[rows].view(pages.dtype), scales[rows], torch.float32)
            for pages, scales in ((self.cache.key, self.cache.key_scale), (self.cache.value, self.cache.value_scale))
            if scales is not None
        )
        return Sequence(sequence.query, key, value, sequence.pages)

    def sequence(self, length: int) -> Sequence:
        g = self.geometry
        heads = (g.num_heads, g.num_kv_heads, g.num_kv_heads)
        query, key, value = (torch.randn((length, h, g.head_dim), generator=self.generator).to(self.dtype)
                             for h in heads)  # fmt: skip
        pages = [self.free.pop() for _ in range(-(-length // g.block_size))]
        return Sequence(query, key, value, pages)

    def put(self, sequence: Sequence, stop: int) -> None:
        """The first ``stop`` keys and values into the pages, by the contract's view of them and not by the kernel
        (the C++ one has an order of its own within a page, so it must)."""
        if isinstance(self.kernel, CpuAttention):
            self.attend([(sequence, 0, stop)], LayerAttention(1.0))
            return
        place = torch.arange(stop)
        rows = torch.tensor(sequence.pages)[place // self.geometry.block_size], place % self.geometry.block_size
        for pages, scales, new in (
            (self.cache.key, self.cache.key_scale, sequence.key[:stop]),
            (self.cache.value, self.cache.value_scale, sequence.value[:stop]),
        ):
            if scales is not None:
                new, scales[rows] = quantize(new, pages.dtype)
            pages.view(torch.uint8)[rows] = new.contiguous().view(torch.uint8)

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
        plan = self.kernel.plan(batch)
        if self.kind.interpreted:  # a program for each token takes it too long: what does the same to a CPU's tensors
            self._write_twin(plan, *ragged[1:])
            out = self.kernel.read(plan, self.cache, ragged[0], layer)
        else:
            out = self.kernel.attend(plan, self.cache, *ragged, layer)
        return list(out.split([stop - start for _, start, stop in parts]))

    def _write_twin(self, plan: Any, key: torch.Tensor, value: torch.Tensor) -> None:
        from kernels.triton import cache

        cache._write_twin(self.cache, key, value, plan.batch)

    def attend_in_pieces(self, sequence: Sequence, stops: Listed[int], layer: LayerAttention) -> torch.Tensor:
        """One sequence alone, from its beginning to each of ``stops`` in turn; the outputs together."""
        pieces = zip([0, *stops[:-1]], stops, strict=True)
        return torch.cat([self.attend([(sequence, a, b)], layer)[0] for a, b in pieces])


def poison(cache: LayerCache) -> None:
    """What no kernel that knows which keys are written ever reads."""
    for pages in cache.tensors():
        if pages.dtype.is_floating_point:
            pages.fill_(float("nan"))
        else:
            pages.fill_(0x7F)


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
