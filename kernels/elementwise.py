"""Elementwise functions whose result for a number does not depend on where in the tensor it stands.

On a CPU, torch computes silu, sigmoid, gelu... of contiguous tensors in vectors, and what is left over at the end of
each thread's share by scalar code, which rounds the last bit differently (for 4 % of numbers in float32 silu, 8 % in
tanh-gelu). So shares must be whole numbers of vectors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch

VECTOR = 64
"""Elements that torch's widest loops take at once: two AVX-512 vectors of 16-bit numbers."""

GRAIN = 32768
"""at::internal::GRAIN_SIZE: torch gives a thread no fewer elements than this."""


def is_aligned(count: int, threads: int) -> bool:
    """Whether torch cuts ``count`` elements into whole vectors, in every thread."""
    return count % (VECTOR * _shares(count, threads)) == 0


def aligned_rows(rows: int, multiple: int, widths: Iterable[int], threads: int) -> int:
    """The fewest rows from ``rows`` on, a multiple of ``multiple``, that are aligned at each width."""
    widths = list(widths)
    rows = -(-rows // multiple) * multiple
    for candidate in range(rows, rows + 64 * multiple, multiple):
        if all(is_aligned(candidate * width, threads) for width in widths):
            return candidate
    return rows


def elementwise(function: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """``function(x)`` (perhaps in place), in aligned shares."""
    count = x.numel()
    threads = torch.get_num_threads()
    if x.device.type != "cpu" or (x.is_contiguous() and is_aligned(count, threads)):
        return function(x)
    size = -(-count // VECTOR) * VECTOR
    while not is_aligned(size, threads):
        size += VECTOR
    padded = x.new_zeros(size)
    padded[:count] = x.reshape(-1)
    return function(padded)[:count].view(x.shape)


def _shares(count: int, threads: int) -> int:
    return max(1, min(threads, -(-count // GRAIN)))
