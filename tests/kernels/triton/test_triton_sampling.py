"""The GPU's sampler: the tokens of the torch reference, however the kernels divide a row among them."""

from __future__ import annotations

import os
import random
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from hypothesis import given, settings
from hypothesis import strategies as st
from sampling_rows import SPECIALS, broken_logits, mixed_rows, random_logits, sample_rows
from shaped_rows import CPU, VOCABULARY, check_shapes, params_of, random_shape, upload

from kernels.triton import sampling as kernels
from kernels.triton.sampling_kernel import BLOCK, _output, _weight
from shared.messages import Sampling
from worker import noise
from worker.device.sampling import DeviceSampler, SamplingParams, Wanted
from worker.filters import weights
from worker.sampling import SampleRow, choose_in_torch

ROOT = Path(__file__).parents[3]

COMPILED = """
import triton
from triton.backends.compiler import GPUTarget
from kernels.triton.compiled import source
from kernels.triton.sampling import VARIANTS

variant = next(variant for variant in VARIANTS if variant.name == "gather-fp32")
options = {"num_warps": variant.num_warps, "enable_fp_fusion": variant.fp_fusion}
print(triton.compile(source(variant), target=GPUTarget("cuda", 90, 32), options=options).asm["ptx"])
"""

SIZES = ("CANDIDATES", "TOP_P_CANDIDATES", "MAXIMA_TILE", "DRAW_TILE", "ROW_TILE")
SMALL = (256, 1024, 8, 16, 512)
LEAST = (16, 2, 4, 4, 256)
"""Rows divided among many programs, and hardly any room for candidates."""


@pytest.fixture
def sizes() -> Iterator[None]:
    """The kernels' sizes, put back afterwards."""
    before = [getattr(kernels, name) for name in SIZES]
    set_sizes(SMALL)
    yield
    set_sizes(before)


def set_sizes(values: Sequence[int]) -> None:
    for name, value in zip(SIZES, values, strict=True):
        setattr(kernels, name, value)


def tokens_of(logits: torch.Tensor, params: SamplingParams) -> list[int]:
    how = (params.temperature, params.top_p, params.low, params.top_k, params.key, params.drawn, params.filtered)
    tokens: list[int] = kernels.choose_tokens(logits, *how).tolist()
    return tokens


def assert_like_torch(logits: torch.Tensor, rows: list[SampleRow]) -> None:
    before = logits.clone()
    assert tokens_of(logits, params_of(rows)) == choose_in_torch(before.clone(), rows)
    torch.testing.assert_close(logits, before, rtol=0, atol=0, equal_nan=True)


@pytest.mark.usefixtures("sizes")
@settings(max_examples=15, deadline=None)
@given(
    rows=st.lists(sample_rows, min_size=1, max_size=2),
    vocabulary=st.sampled_from([1, 5, 63, 64, 65, 300, 1000]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    spread=st.sampled_from([0.0, 0.1, 1.0, 3.0, 10.0, 1e30, 1e-40]),
    tied=st.booleans(),
    specials=st.dictionaries(st.sampled_from(SPECIALS), st.sampled_from([0.001, 0.1, 0.9]), max_size=3),
    seed=st.integers(0, 2**32),
    division=st.sampled_from([SMALL, LEAST]),
)
def test_tokens_are_those_of_torch(
    rows: list[SampleRow], vocabulary: int, dtype: torch.dtype, spread: float, tied: bool,
    specials: dict[float, float], seed: int, division: tuple[int, ...],
) -> None:  # fmt: skip
    set_sizes(division)
    assert_like_torch(broken_logits(len(rows), vocabulary, spread, tied, specials, seed).to(dtype), rows)


@pytest.mark.parametrize("division", [SMALL, LEAST])
@pytest.mark.usefixtures("sizes")
def test_all_filters(division: tuple[int, ...]) -> None:
    set_sizes(division)
    rows = mixed_rows(14) if division == SMALL else mixed_rows(12)[5::2]
    assert_like_torch(random_logits(len(rows), 777), rows)


def test_a_real_vocabulary(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where candidates are few, and where thousands of tokens pass and nothing but passes over the row tells."""
    monkeypatch.setattr(kernels, "ROW_TILE", 1 << 17)
    monkeypatch.setattr(kernels, "MAXIMA_TILE", 512)
    hows: list[dict[str, float]] = [
        {"top_k": 50, "top_p": 0.9}, {"top_p": 0.95, "temperature": 0.5}, {}, {"temperature": 0.0}, {"top_p": 0.97}
    ]  # fmt: skip
    rows = [SampleRow(Sampling(n, 4, **how), 0, 0, n) for n, how in enumerate(hows)]  # type: ignore[arg-type]
    logits = random_logits(5, 128_256, 3.0)
    logits[4] /= 3  # flat: its nucleus is most of the row
    assert_like_torch(logits.bfloat16(), rows)


@pytest.mark.parametrize("division", [SMALL, LEAST])
@pytest.mark.usefixtures("sizes")
def test_equals_at_the_edge_stay_by_their_ids(division: tuple[int, ...]) -> None:
    set_sizes(division)
    logits = torch.zeros(9, 200)
    logits[6:, 150:160] = 1.0  # the edge lies among the rest
    ways: list[dict[str, float]] = [{"top_k": 12}, {"top_p": 0.1}, {"top_k": 40, "top_p": 0.4}]
    rows = [
        SampleRow(Sampling(n, 4, **ways[n % 3]), 0, 0, n)  # type: ignore[arg-type]
        for n in range(9)
    ]
    assert_like_torch(logits, rows)
    assert max(choose_in_torch(logits[:6], rows[:6])) < 20


@pytest.mark.usefixtures("sizes")
def test_a_token_depends_on_its_row_alone() -> None:
    rows = [*mixed_rows(2), *mixed_rows(7)[3::3]]
    logits = random_logits(4, 500).bfloat16()
    together = tokens_of(logits, params_of(rows))
    wide = torch.full((4, 600), 99.0, dtype=torch.bfloat16)
    wide[:, :500] = logits.flip(0)
    assert tokens_of(wide[:, :500], params_of(rows[::-1])) == together[::-1]
    assert tokens_of(logits[3:], params_of(rows[3:])) == together[3:]


@pytest.mark.usefixtures("sizes")
def test_what_nobody_asks_is_not_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = random_logits(3, 300)
    greedy = [SampleRow(Sampling(n, 4, temperature=0.0, top_p=0.5), 0, 0, n) for n in range(3)]
    plain = [SampleRow(Sampling(n, 4, min_p=0.1), 0, 0, n) for n in range(3)]
    monkeypatch.setattr(kernels, "gather", None)
    assert_like_torch(logits, plain)
    monkeypatch.setattr(kernels, "draw", None)
    assert_like_torch(logits, greedy)


def test_what_it_cannot_choose_from_is_refused() -> None:
    rows = params_of(mixed_rows(2))
    for logits in (torch.zeros(2, 5).double(), torch.zeros(5, 2).t(), torch.zeros(2, kernels.MAX_VOCABULARY + 1)):
        with pytest.raises(ValueError, match="no tokens can be chosen"):
            tokens_of(logits, rows)
    assert tokens_of(torch.zeros(0, 5), params_of([])) == []


@triton.jit
def weigh(scores, out, SIZE: tl.constexpr):  # type: ignore[no-untyped-def]
    depth = tl.load(scores + tl.arange(0, SIZE)).to(tl.int32, bitcast=True) & 0x7FFFFFFF
    tl.store(out + tl.arange(0, SIZE), _weight(depth))


@triton.jit
def outputs(states, out, SIZE: tl.constexpr):  # type: ignore[no-untyped-def]
    number = tl.arange(0, SIZE)
    state = tl.load(states + number).to(tl.uint64, bitcast=True)
    tl.store(out + number, _output(state, number).to(tl.int64, bitcast=True))


def test_weights_have_the_bits_of_the_filters() -> None:
    size = 1 << 16
    bits = np.random.default_rng(1).integers(0, 0x7F800001, size - 4, dtype=np.int64).astype(np.uint32)
    bits[::2] = np.random.default_rng(2).uniform(0, 26, size // 2 - 2).astype(np.float32).view(np.uint32)
    edges = np.array([0.0, 25.0, float("inf"), 1e-45], dtype=np.float32).view(np.uint32)
    scores = torch.from_numpy((np.concatenate([bits, edges]) | np.uint32(1 << 31)).view(np.float32))
    out = torch.empty(size, dtype=torch.int64)
    weigh[(1,)](scores, out, SIZE=size)
    assert torch.equal(out, (weights(scores).double() * 2**34).long())


def test_compiled_ones_divide_and_add_as_the_filters_do() -> None:
    """In a process of its own, since here Triton interprets: no rounding is saved, and none is coarser."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", COMPILED], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stderr
    assert "div.rn.f32" in done.stdout
    assert not re.search(r"(fma|mad)\S*\.f32|div\.(full|approx)|\.ftz", done.stdout)


def test_the_generator_is_that_of_the_noise() -> None:
    states = torch.from_numpy(np.random.default_rng(3).integers(-(2**63), 2**63, 1024, dtype=np.int64))
    out = torch.empty_like(states)
    outputs[(1,)](states, out, SIZE=1024)
    assert torch.equal(out, noise._split_mix(states, torch.arange(1024)))
    assert noise.BLOCK == BLOCK


def test_shapes_are_those_of_the_processors() -> None:
    check_shapes(True, torch.float32, 6)
    check_shapes(True, torch.bfloat16, 3)


@pytest.mark.usefixtures("sizes")
def test_a_step_tells_what_torch_would() -> None:
    rng = random.Random(8)
    shapes = {row: random_shape(rng) for row in (0, 2)}
    rows = [
        SampleRow(shapes[row].sampling if row in shapes else Sampling(row, 4, top_p=0.8), 0, 0, row, shapes.get(row))
        for row in range(4)
    ]
    told: list[Any] = []
    for use_triton in (False, True):
        sampler = DeviceSampler(CPU, upload, use_triton)
        wanted = Wanted(shapes, {0: 2, 1: 3}, [2])
        pending = sampler.enqueue(random_logits(4, VOCABULARY), params_of(rows), wanted)
        told.append(pending.finish([tensor.numpy() for tensor in pending.tensors]))
    assert told[0] == told[1]
