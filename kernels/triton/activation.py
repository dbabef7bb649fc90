"""The gated activations of MLPs: ``act(gate) * up`` of one matrix that holds both, in one pass over memory.

Rounds as ``transformers``' modules do: the activation to the model's type, then the product.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import torch
import triton
import triton.language as tl

from kernels.triton.launching import FUSED, runs_triton, unit_stride
from kernels.triton.variants import Variant

BLOCK = 1024
"""Columns of a program: 8 for each thread, 16 bytes of bf16."""

ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": torch.nn.functional.silu,
    "gelu_tanh": functools.partial(torch.nn.functional.gelu, approximate="tanh"),
}

_GELU_SCALE = tl.constexpr(2 * math.sqrt(2 / math.pi))
_GELU_CUBE = tl.constexpr(0.044715)


@triton.jit
def _gated(  # type: ignore[no-untyped-def]
    merged, out, inner, stride, BLOCK: tl.constexpr, GELU: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < inner
    gate = tl.load(merged + row * stride + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(merged + row * stride + inner + column, mask=inside, other=0.0).to(tl.float32)
    # GELU: (1 + tanh(u)) / 2 is the sigmoid of 2 u
    slope = _GELU_SCALE * (gate + _GELU_CUBE * gate * gate * gate) if GELU else gate
    active = (gate / (1.0 + tl.exp(-slope))).to(out.dtype.element_ty).to(tl.float32)
    tl.store(out + row * inner + column, (active * up).to(out.dtype.element_ty), mask=inside)


def gated(merged: torch.Tensor, activation: str) -> torch.Tensor:
    """``[T, 2 * inner]``, gates before the rest, to ``act(gate) * rest`` ``[T, inner]`` (Shazeer, "GLU Variants
    Improve Transformer", 2020).

    ``activation``: "silu", or "gelu_tanh" (Hendrycks and Gimpel, "Gaussian Error Linear Units", 2016).
    """
    if activation not in ACTIVATIONS:
        raise ValueError(f"the activation {activation}")
    rows, width = merged.shape
    inner = width // 2
    if not runs_triton(merged):
        gate, up = torch.split(merged, inner, dim=-1)
        return ACTIVATIONS[activation](gate) * up
    merged = unit_stride(merged)
    out = torch.empty((rows, inner), dtype=merged.dtype, device=merged.device)
    if rows:
        _gated[(rows, triton.cdiv(inner, BLOCK))](
            merged, out, inner, merged.stride(0), BLOCK=BLOCK, GELU=activation == "gelu_tanh", **FUSED
        )
    return out


def _variant(dtype: str, activation: str) -> Variant:
    signature = {"merged": f"*{dtype}", "out": f"*{dtype}", "inner": "i32", "stride": "i32"}
    return Variant(
        name=f"{activation}-{dtype}",
        kernel=_gated,
        signature=signature,
        constexprs={"BLOCK": BLOCK, "GELU": activation == "gelu_tanh"},
        max_registers=64,
        max_shared=0,
        divisible=frozenset({"inner", "stride"}),
    )


VARIANTS = [_variant(dtype, activation) for dtype in ("bf16", "fp16", "fp32") for activation in ACTIVATIONS]
