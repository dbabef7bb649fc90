"""Counter-based Gumbel noise: a pure function of who samples what where, the same on every device and in every batch.

A row's key absorbs (seed, prompt index, choice, position in the sequence) with SplitMix64's finaliser (Steele, Lea and
Flood, "Fast splittable pseudorandom number generators", 2014; Stafford's variant 13).

The noise of a vocabulary is drawn top-down, in blocks of :data:`BLOCK` consecutive token ids, as in A* sampling
(Maddison, Tarlow and Minka, 2014): the largest of ``n`` independent Gumbel(0) variables is a Gumbel(log n), where it
falls is uniform, and the others are independent Gumbel(0) variables truncated at it. So the noise of every token is an
independent Gumbel(0) as it should be, yet the sampler need only look into the few blocks that can hold the winner.

Block ``b`` takes outputs ``2b + 1`` (its largest noise) and ``2b + 2`` (where it falls) of the SplitMix64 generator
whose state is the row's key; token ``i`` takes output ``i + 1`` of the one whose state is the key xor :data:`_TOKENS`.
The upper 32 bits ``r`` of an output give ``u = (r + 1/2) / 2**32``.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

BLOCK = 64

_GOLDEN = 0x9E3779B97F4A7C15
_MIX1 = 0xBF58476D1CE4E5B9
_MIX2 = 0x94D049BB133111EB
_TOKENS = 0x5851F42D4C957F2D


def row_keys(rows: list[tuple[int, int, int, int]]) -> npt.NDArray[np.int64]:
    """``[rows]`` keys, as int64 bit patterns, of (seed, prompt index, choice, position)."""
    fields = np.array(rows, dtype=np.uint64).reshape(-1, 4)
    keys = np.zeros(len(fields), dtype=np.int64)
    for column in range(4):
        keys = absorb(keys, fields[:, column])
    return keys


def absorb(keys: npt.NDArray[np.int64], fields: npt.NDArray[np.integer[Any]]) -> npt.NDArray[np.int64]:
    """``[rows]`` keys that have taken in one more number each; those of 0 numbers are 0."""
    mixed = _mix_uint64((keys.view(np.uint64) ^ fields.astype(np.uint64)) + np.uint64(_GOLDEN))
    return mixed.view(np.int64)


def block_noise(keys: torch.Tensor, num_blocks: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(largest noise, float64; place in the block, int64) of every block of every row: ``[rows, num_blocks]``."""
    output = 2 * torch.arange(num_blocks, device=keys.device)
    largest = _gumbel(_uniform(_split_mix(keys[:, None], output + 1))).add_(math.log(BLOCK))
    place = _shift(_split_mix(keys[:, None], output + 2), 64 - int(math.log2(BLOCK)))
    return largest, place


def token_noise(keys: torch.Tensor, blocks: torch.Tensor, largest: torch.Tensor, place: torch.Tensor) -> torch.Tensor:
    """``[n, BLOCK]`` noise of the tokens in ``n`` blocks, given each one's row key, number, largest noise and place."""
    within = torch.arange(BLOCK, device=keys.device)
    tokens = blocks[:, None] * BLOCK + within
    exponential = _uniform(_split_mix(keys[:, None] ^ _signed(_TOKENS), tokens + 1)).log_().neg_()
    truncated = (torch.exp(-largest)[:, None] + exponential).log_().neg_()
    return torch.where(within == place[:, None], largest[:, None], truncated)


def _gumbel(uniform: torch.Tensor) -> torch.Tensor:
    return uniform.log_().neg_().log_().neg_()


def _uniform(output: torch.Tensor) -> torch.Tensor:
    return _shift(output, 32).to(torch.float64).add_(0.5).mul_(2.0**-32)


def _split_mix(state: torch.Tensor, output: torch.Tensor) -> torch.Tensor:
    """The ``output``-th number (from 1) of a SplitMix64 generator, as an int64 bit pattern."""
    x = state + output * _signed(_GOLDEN)
    x = (x ^ _shift(x, 30)) * _signed(_MIX1)
    x = (x ^ _shift(x, 27)) * _signed(_MIX2)
    return x ^ _shift(x, 31)


def _mix_uint64(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(_MIX1)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(_MIX2)
    return x ^ (x >> np.uint64(31))


def _shift(x: torch.Tensor, bits: int) -> torch.Tensor:
    """Logical right shift (torch's is arithmetic)."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _signed(x: int) -> int:
    return x - (1 << 64) if x >= 1 << 63 else x
