"""Attention kernels to hold against one contract, and sequences in scattered pages to run them on: those of the check
that runs on GPUs (:mod:`headrace.gpu_check.paged`), for kernels of every kind."""

from __future__ import annotations

import functools
from collections.abc import Sequence as Listed
from dataclasses import dataclass
from typing import Any

import torch

from headrace.gpu_check import paged
from headrace.gpu_check.paged import Part, Sequence
from kernels.contract import AttentionKernel, Geometry, LayerAttention, LayerCache
from kernels.cpu.attention import CpuAttention
from kernels.cpu.build import ISAS
from kernels.cpu.library import Library, find
from kernels.quantized_pages import quantize
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


class Pool(paged.Pool):
    """One layer's cache of a kind's kernel, on the CPU, and sequences whose pages are scattered over it."""

    kernel: Any  # a kernel of a CPU plans and attends in its own way

    def __init__(self, geometry: Geometry, kind: Kind, num_pages: int = 400, host_pages: int = 0) -> None:
        self.kind = kind
        kernel: Any = kind.make(geometry)
        self.pages = KVCache(kernel, 1, num_pages - 1, host_pages)
        super().__init__(kernel, geometry, kind.dtype, CPU, num_pages, 5, self.pages.layers[0])
        self.junk = 0 if kernel.name == TORCH else 2**31 - 1  # it gathers whole tiles, and drops what is hidden
        if kind.interpreted:
            poison(self.cache)

    def held(self, sequence: Sequence) -> Sequence:
        """The sequence with the keys and values that its pages hold of it, where those are rounded."""
        if self.kind.storage is None:
            return sequence
        return Sequence(sequence.query, *self.stored(sequence, sequence.length), sequence.pages)

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

    def attend(self, parts: Listed[Part], layer: LayerAttention) -> list[torch.Tensor]:
        """One pass over tokens ``start .. stop`` of each sequence; the outputs of each."""
        ragged = [torch.cat([getattr(s, name)[a:b] for s, a, b in parts]) for name in ("query", "key", "value")]
        plan = self.kernel.plan(self.batch(parts))
        if self.kind.interpreted:  # a program for each token takes it too long: what does the same to a CPU's tensors
            self._write_twin(plan, *ragged[1:])
            out = self.kernel.read(plan, self.cache, ragged[0], layer)
        else:
            out = self.kernel.attend(plan, self.cache, *ragged, layer)
        return list(out.split([stop - start for _, start, stop in parts]))

    def _write_twin(self, plan: Any, key: torch.Tensor, value: torch.Tensor) -> None:
        from kernels.triton import cache

        cache._write_twin(self.cache, key, value, plan.batch)


def poison(cache: LayerCache) -> None:
    """What no kernel that knows which keys are written ever reads."""
    for pages in cache.tensors():
        if pages.dtype.is_floating_point:
            pages.fill_(float("nan"))
        else:
            pages.fill_(0x7F)


def dense(sequence: Sequence, layer: LayerAttention) -> torch.Tensor:
    """``[length, heads, dim]``: :func:`headrace.gpu_check.paged.dense`, of a whole sequence."""
    return paged.dense(sequence.query, sequence.key, sequence.value, layer)


def around(*edges: int) -> list[int]:
    """Single tokens across each edge: for ``attend_in_pieces``."""
    return [edge + step for edge in edges for step in (-1, 0, 1, 2)]
