"""The residual's addition and the RMS norm: transformers' bits where sums are exact, and close to them elsewhere."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from kernels.triton import norm
from kernels.triton.norm import MAX_WIDTH, add_rms_norm, rms_norm

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def by_transformers(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    module = LlamaRMSNorm(len(weight), eps).to(weight.dtype)
    module.weight.data.copy_(weight)
    with torch.no_grad():
        out: torch.Tensor = module(x)
    return out


@settings(deadline=None, max_examples=40)
@given(
    rows=st.integers(0, 5),
    width=st.integers(1, 200),
    dtype=st.sampled_from(DTYPES),
    with_residual=st.booleans(),
    apart=st.booleans(),
    seed=st.integers(0, 1 << 30),
)
def test_same_bits_as_transformers(
    rows: int, width: int, dtype: torch.dtype, with_residual: bool, apart: bool, seed: int
) -> None:
    # Small whole numbers: their squares add up exactly in any order.
    generator = torch.Generator().manual_seed(seed)
    x, residual = (torch.randint(-8, 9, (rows, width), generator=generator).to(dtype) for _ in range(2))
    weight = torch.randn(width, generator=generator).to(dtype)
    if apart:
        x = torch.cat([x, torch.full_like(x, torch.nan)], dim=1)[:, :width]
        residual = residual.t().contiguous().t()
    before = residual if with_residual else None
    out, total = add_rms_norm(x, before, weight, 1e-5)
    expected = x + residual if with_residual else x
    assert torch.equal(total, expected)
    assert torch.equal(out, by_transformers(expected, weight, 1e-5))


@pytest.mark.parametrize("dtype", DTYPES)
def test_close_to_exact_and_the_same_alone(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    x, residual = (torch.randn((7, 1000), generator=generator).to(dtype) for _ in range(2))
    weight = torch.randn(1000, generator=generator).to(dtype)
    out, total = add_rms_norm(x, residual, weight, 1e-6)
    wide = (x + residual).double()
    exact = wide / (wide.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt() * weight.double()
    assert torch.equal(total, x + residual)
    assert (out.double() - exact).abs().max() <= exact.abs().max() * 2 * torch.finfo(dtype).eps
    for row in (0, 3, 6):
        alone = add_rms_norm(x[row : row + 1], residual[row : row + 1], weight, 1e-6)
        assert torch.equal(alone[0], out[row : row + 1]) and torch.equal(alone[1], total[row : row + 1])


def test_a_row_gone_wrong_stays_alone() -> None:
    x, weight = torch.ones(3, 16), torch.ones(16)
    x[1] = torch.nan
    assert torch.equal(rms_norm(x, weight, 0.0)[[0, 2]], torch.ones(2, 16))


def test_dimensions_before_the_last() -> None:
    x, weight = torch.randn((2, 3, 24), generator=torch.Generator().manual_seed(2)), torch.ones(24)
    assert torch.equal(rms_norm(x, weight, 1e-6), rms_norm(x.view(6, 24), weight, 1e-6).view(2, 3, 24))


def test_too_wide_a_row_is_refused() -> None:
    with pytest.raises(ValueError, match="32769"):
        rms_norm(torch.zeros(1, MAX_WIDTH + 1), torch.zeros(MAX_WIDTH + 1), 0.0)


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64])
def test_the_twin_is_transformers_own(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    monkeypatch.setattr(norm, "runs_triton", lambda _: False)
    generator = torch.Generator().manual_seed(3)
    x, residual = (torch.randn((4, 48), generator=generator).to(dtype) for _ in range(2))
    weight = torch.randn(48, generator=generator).to(dtype)
    out, total = add_rms_norm(x, residual, weight, 1e-5)
    assert torch.equal(total, x + residual)
    assert torch.equal(out, by_transformers(total, weight, 1e-5))
