"""Choosing tokens from rows of logits in C++ (``sampling.h``): filters, counter-based noise and argmax, row by row."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from kernels.cpu.library import Library, Sample

DTYPES = {torch.float32: 0, torch.bfloat16: 1}

MAX_VOCABULARY = 1 << 19
"""Up to here, sums of tokens' weights are exact."""


class RowChoice(NamedTuple):
    """How one row's token is chosen, and the counters of its noise."""

    temperature: float  # 0: greedy, and nothing below counts
    top_p: float  # 1: off
    min_p: float  # 0: off
    top_k: int  # 0: off
    place: tuple[int, int, int, int]  # seed, prompt index, choice, position


def can_choose(logits: torch.Tensor) -> bool:
    """Whether the library takes such logits."""
    return (
        logits.device.type == "cpu"
        and logits.dtype in DTYPES
        and logits.shape[1] <= MAX_VOCABULARY
        and logits.stride(1) == 1
    )


def choose_tokens(library: Library, logits: torch.Tensor, rows: Sequence[RowChoice]) -> npt.NDArray[np.int64]:
    """One token id for each row of ``logits`` ``[rows, vocabulary]``; -1 for a row in which nothing is finite.

    ``logits`` are left as they are. A NaN counts as impossible, +inf as the largest finite number.
    """
    if not can_choose(logits) or len(rows) != logits.shape[0]:
        raise ValueError(f"no tokens for {len(rows)} rows can be chosen from {logits.dtype} logits {logits.shape}")
    count, vocabulary = logits.shape
    tokens = np.empty(count, dtype=np.int64)
    temperature, top_p, min_p, top_k, place = zip(*rows, strict=True) if rows else ((),) * 5
    settings = np.array((temperature, top_p, min_p), dtype=np.float64)
    largest = np.array(top_k, dtype=np.int64)
    places = np.array(place, dtype=np.uint64)
    call = Sample(
        logits=logits.data_ptr(),
        logits_stride=logits.stride(0),
        temperature=settings[0].ctypes.data,
        top_p=settings[1].ctypes.data,
        min_p=settings[2].ctypes.data,
        top_k=largest.ctypes.data,
        place=places.ctypes.data,
        tokens=tokens.ctypes.data,
        dtype=DTYPES[logits.dtype],
        rows=count,
        vocabulary=vocabulary,
    )
    library.c.headrace_sample(ctypes.byref(call))
    return tokens
