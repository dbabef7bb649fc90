"""The batch-invariant linear layer: right, and each row the same bits alone and in any company."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.triton.matmul import linear

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def random(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@settings(deadline=None, max_examples=25)
@given(
    rows=st.integers(0, 70),
    columns=st.integers(1, 140),
    inner=st.integers(1, 150),
    dtype=st.sampled_from(DTYPES),
    bias=st.booleans(),
    apart=st.booleans(),
)
def test_any_shape(rows: int, columns: int, inner: int, dtype: torch.dtype, bias: bool, apart: bool) -> None:
    x, weight = random(rows, inner, dtype=dtype), random(columns, inner, dtype=dtype, seed=1)
    if apart:  # rows further apart, or columns not side by side
        x = torch.cat([x, torch.full_like(x, torch.nan)], dim=1)[:, :inner]
        weight = weight.t().contiguous().t()
    b = random(columns, dtype=dtype, seed=2) if bias else None
    exact = x.double() @ weight.double().t() + (0 if b is None else b.double())
    out = linear(x, weight, b)
    assert out.dtype == dtype and out.shape == (rows, columns)
    size = x.double().abs() @ weight.double().abs().t() + 1
    unit = torch.finfo(dtype).eps
    assert ((out.double() - exact).abs() <= exact.abs() * unit + size * inner * torch.finfo(torch.float32).eps).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_rows_bits_do_not_depend_on_its_company(dtype: torch.dtype) -> None:
    x, weight = random(70, 40, dtype=dtype), random(20, 40, dtype=dtype, seed=1)
    whole = linear(x, weight)
    for rows in range(1, 71, 1 if dtype == torch.float32 else 13):
        assert torch.equal(linear(x[:rows], weight), whole[:rows]), rows
    for first in (1, 17, 33, 64, 69):
        assert torch.equal(linear(x[first:], weight), whole[first:]), first


def test_a_row_gone_wrong_stays_alone() -> None:
    x, weight = random(66, 40, dtype=torch.bfloat16), random(20, 40, dtype=torch.bfloat16, seed=1)
    clean = linear(x, weight)
    x[0], x[65] = torch.nan, torch.inf
    assert torch.equal(linear(x, weight)[1:65], clean[1:65])


def test_dimensions_before_the_last() -> None:
    x, weight = random(2, 3, 32, dtype=torch.float32), random(8, 32, dtype=torch.float32, seed=1)
    assert torch.equal(linear(x, weight), linear(x.view(6, 32), weight).view(2, 3, 8))
