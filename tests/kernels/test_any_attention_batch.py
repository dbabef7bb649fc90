"""Ragged batches of every make: random heads, pages, contexts, windows, types and sizes of the device, each against
attention in float64. What is not written is NaN, in pages (but for the C++ kernel's) and in outputs."""

from __future__ import annotations

import contextlib
import math
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from paged_attention import INTERPRETED_KINDS, KINDS, TORCH, Kind, Pool, dense
from test_attention_contract import ERROR, uninitialized_memory_filled

from kernels.contract import Geometry, LayerAttention
from kernels.cpu.library import Library, find

SHARPER = 3
"""Times the error of the contract's tests: with a scale of 0.3 scores reach 30, where float32 has as much less after
the point, and the reference in torch is as far off."""

FAMILIES = {
    "torch": [kind for kind in KINDS if kind.isa == TORCH],
    "cpu": [kind for kind in KINDS if kind.isa != TORCH and not kind.interpreted],
    "triton": INTERPRETED_KINDS,
}


@dataclass(frozen=True)
class Case:
    geometry: Geometry
    layer: LayerAttention
    parts: list[tuple[int, int]]  # (tokens written before, query tokens) of each sequence
    piece_keys: int
    sms: int


@st.composite
def cases(draw: st.DrawFn, family: str) -> Case:
    head_dim = draw(st.sampled_from([16, 32, 48, 80]))
    kv_heads, group = draw(st.integers(1, 2)), draw(st.sampled_from([1, 2, 3, 5, 17]))
    block_size = draw(st.sampled_from([16, 48] if family == "cpu" else [1, 4, 16, 24, 48]))
    few = st.integers(1, 3)
    parts = draw(st.lists(st.tuples(st.integers(0, 150), st.one_of(few, st.just(1), st.integers(4, 40))), min_size=1,
                          max_size=3 if family == "triton" else 6))  # fmt: skip
    layer = LayerAttention(
        draw(st.sampled_from([0.1, 0.3])),
        draw(st.one_of(st.none(), st.integers(1, 100))),
        draw(st.sampled_from([None, 3.0, 30.0])),
        torch.linspace(-2, 3, kv_heads * group) if draw(st.booleans()) else None,
    )
    piece_keys = draw(st.sampled_from([64, 128]))
    return Case(Geometry(kv_heads * group, kv_heads, head_dim, block_size), layer, parts, piece_keys,
                draw(st.sampled_from([1, 8, 132])))  # fmt: skip


@pytest.mark.parametrize("family", FAMILIES)
def test_any_batch_equals_dense_attention(family: str) -> None:
    if not FAMILIES[family]:
        pytest.skip("the C++ kernels are not built or turned off")

    @settings(max_examples=15 if family == "triton" else 40)
    @given(st.sampled_from(FAMILIES[family]), cases(family))
    def check(kind: Kind, case: Case) -> None:
        library = find()
        before = library.isa if isinstance(library, Library) else ""
        try:
            with quiet_interpreter(case.piece_keys, case.sms), uninitialized_memory_filled():
                assert worst_error(kind, case) < SHARPER * ERROR[kind.dtype]
        finally:
            if isinstance(library, Library):
                library.select(before)

    check()


def worst_error(kind: Kind, case: Case) -> float:
    pool = Pool(case.geometry, kind, num_pages=1200 if case.geometry.block_size == 1 else 400)
    parts = []
    for written, count in case.parts:
        sequence = pool.sequence(written + count)
        if written:
            pool.put(sequence, written)
        parts.append((sequence, written, written + count))
    worst = 0.0
    for (sequence, start, _), out in zip(parts, pool.attend(parts, case.layer), strict=True):
        wanted = dense(pool.held(sequence), case.layer)[start:]
        error = float((out.double() - wanted).abs().max())
        worst = max(worst, error) if error == error else math.inf
    return worst


@contextlib.contextmanager
def quiet_interpreter(piece_keys: int, sms: int) -> Iterator[None]:
    """With short pieces of keys, so that few keys make several, on a device of ``sms`` multiprocessors."""
    with (
        mock.patch("kernels.triton.attention_shapes.FIXED_PIECE_KEYS", piece_keys),
        mock.patch("kernels.triton.attention_shapes.LEAST_PIECE_KEYS", piece_keys),
        mock.patch("paged_attention.INTERPRETED_SMS", sms),
        np.errstate(all="ignore"),
        warnings.catch_warnings(),
    ):
        warnings.filterwarnings("ignore", "All-NaN slice", RuntimeWarning)
        yield
