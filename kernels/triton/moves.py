"""Moving whole pages of all layers in one launch: among themselves, and between them and a buffer for host memory."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from kernels.triton.launching import FUSED
from kernels.triton.variants import Variant

BLOCK = 1024
"""Words of a program: of 8 bytes, two 16-byte accesses for each thread."""


@triton.jit(do_not_specialize=["sources", "targets"])
def _move_pages(  # type: ignore[no-untyped-def]
    sources, targets, source_bases, source_steps, target_bases, target_steps, sizes,
    WORD: tl.constexpr, ALIGNED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    pool = tl.program_id(1)
    source = tl.load(source_bases + pool) + tl.load(sources + tl.program_id(0)) * tl.load(source_steps + pool)
    target = tl.load(target_bases + pool) + tl.load(targets + tl.program_id(0)) * tl.load(target_steps + pool)
    word = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    inside = word < tl.load(sizes + pool)
    here = tl.multiple_of(source.to(tl.pointer_type(WORD)), ALIGNED)
    there = tl.multiple_of(target.to(tl.pointer_type(WORD)), ALIGNED)
    tl.store(there + word, tl.load(here + word, mask=inside), mask=inside)


_WORDS = {8: tl.int64, 4: tl.int32, 2: tl.int16, 1: tl.int8}


@dataclass(frozen=True, slots=True, eq=False)
class _Rows:
    """Where row ``i`` of each pool is: int64 ``[pools]``, in bytes."""

    bases: torch.Tensor
    steps: torch.Tensor


class PageMoves:
    """Of ``pools`` ``[num_pages, ...]`` of any types, each page of which lies side by side in memory. They stay where
    they are. In a buffer, uint8 ``[rows, page_bytes]``, a page of all pools is one row, pool after pool."""

    def __init__(self, pools: Sequence[torch.Tensor]) -> None:
        self._pools = list(pools)  # kept, since only their addresses are used
        device = pools[0].device
        sizes = [pool[0].numel() * pool.element_size() for pool in pools]
        starts = [sum(sizes[:index]) for index in range(len(sizes))]
        self.page_bytes = sum(sizes)
        common = math.gcd(*sizes, *(pool.data_ptr() for pool in pools))
        self._word = math.gcd(common, 8)
        self._aligned = math.gcd(common, 16)
        self._chunks = triton.cdiv(max(sizes) // self._word, BLOCK)
        self._sizes = torch.tensor([size // self._word for size in sizes], device=device)
        self._starts = torch.tensor(starts, device=device)
        self._rows = _Rows(
            torch.tensor([pool.data_ptr() for pool in pools], device=device),
            torch.tensor([pool.stride(0) * pool.element_size() for pool in pools], device=device),
        )

    def copy(self, sources: torch.Tensor, targets: torch.Tensor) -> None:
        """Pages ``sources`` to ``targets`` (int64 ``[n]``), all at once: no target may be a source."""
        self._move(self._rows, sources, self._rows, targets)

    def gather(self, pages: torch.Tensor, buffer: torch.Tensor) -> None:
        """``pages`` (int64 ``[n]``) to the first rows of ``buffer``."""
        self._move(self._rows, pages, self._in_buffer(buffer), torch.arange(len(pages), device=pages.device))

    def scatter(self, buffer: torch.Tensor, pages: torch.Tensor) -> None:
        """The first rows of ``buffer`` to ``pages``."""
        self._move(self._in_buffer(buffer), torch.arange(len(pages), device=pages.device), self._rows, pages)

    def _in_buffer(self, buffer: torch.Tensor) -> _Rows:
        if buffer.data_ptr() % self._aligned or buffer.stride(0) % self._aligned:
            raise ValueError(f"a buffer whose rows are not aligned to {self._aligned} bytes")
        return _Rows(self._starts + buffer.data_ptr(), torch.full_like(self._starts, buffer.stride(0)))

    def _move(self, source: _Rows, sources: torch.Tensor, target: _Rows, targets: torch.Tensor) -> None:
        if len(sources):
            _move_pages[(len(sources), len(self._pools), self._chunks)](
                sources, targets, source.bases, source.steps, target.bases, target.steps, self._sizes,
                WORD=_WORDS[self._word], ALIGNED=self._aligned, BLOCK=BLOCK, **FUSED,
            )  # fmt: skip


VARIANTS = [
    Variant(
        name=f"move_pages-{aligned}",
        kernel=_move_pages,
        signature=dict.fromkeys(
            ("sources", "targets", "source_bases", "source_steps", "target_bases", "target_steps", "sizes"), "*i64"
        ),
        constexprs={"WORD": _WORDS[min(aligned, 8)], "ALIGNED": aligned, "BLOCK": BLOCK},
        max_registers=64,
        max_shared=0,
    )
    for aligned in (16, 8, 4)
]
