"""Gated activations of a merged matrix: what transformers' MLPs compute, in one kernel."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.triton import activation
from kernels.triton.activation import ACTIVATIONS, BLOCK, gated

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@settings(deadline=None, max_examples=40)
@given(
    rows=st.integers(0, 3),
    inner=st.one_of(st.integers(1, 40), st.integers(BLOCK - 1, BLOCK + 2)),
    dtype=st.sampled_from(DTYPES),
    name=st.sampled_from(sorted(ACTIVATIONS)),
    apart=st.booleans(),
    scale=st.sampled_from([0.1, 1.0, 30.0]),
)
def test_any_shape(rows: int, inner: int, dtype: torch.dtype, name: str, apart: bool, scale: float) -> None:
    generator = torch.Generator().manual_seed(inner)
    merged = (torch.randn((rows, 2 * inner), generator=generator) * scale).to(dtype)
    if apart:
        merged = torch.cat([merged, torch.full_like(merged, torch.nan)], dim=1)[:, : 2 * inner]
    out = gated(merged, name)
    gate, up = merged.split(inner, dim=-1)
    exact = ACTIVATIONS[name](gate.double()) * up.double()
    assert out.dtype == dtype and out.shape == (rows, inner)
    # Rounded twice, by half a unit each; and what the activation in float32 is off (much of it, far below zero).
    tiny = torch.finfo(dtype).smallest_normal * (1 + up.double().abs())
    allowed = exact.abs() * 1.01 * torch.finfo(dtype).eps + (gate.double() * up.double()).abs() * 1e-6 + tiny
    assert ((out.double() - exact).abs() <= allowed).all()


@pytest.mark.parametrize("name", sorted(ACTIVATIONS))
def test_the_ends_of_the_range(name: str) -> None:
    gate = torch.tensor([[-3e38, -1e4, -100.0, -0.0, 0.0, 100.0, 1e4, torch.inf, torch.nan]])
    out = gated(torch.cat([gate, torch.ones_like(gate)], dim=1), name)
    assert out[0, :5].abs().max() < 1e-30
    assert torch.equal(out[0, 5:8], gate[0, 5:8]) and out[0, 8].isnan()


def test_another_activation_is_refused() -> None:
    with pytest.raises(ValueError, match="relu"):
        gated(torch.zeros(1, 4), "relu")


@pytest.mark.parametrize("name", sorted(ACTIVATIONS))
@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64])
def test_the_twin(monkeypatch: pytest.MonkeyPatch, name: str, dtype: torch.dtype) -> None:
    monkeypatch.setattr(activation, "runs_triton", lambda _: False)
    merged = torch.randn((3, 32), generator=torch.Generator().manual_seed(4)).to(dtype)
    gate, up = merged[:, :16], merged[:, 16:]
    assert torch.equal(gated(merged, name), ACTIVATIONS[name](gate) * up)
