"""Adding to the residual stream, and RMS normalisation of the sum, in one pass over memory.

Rounds as ``transformers``' LlamaRMSNorm does (Zhang and Sennrich, "Root Mean Square Layer Normalization", 2019): the
sum to the model's type, the normalised row to the model's type, and the product with the weight once more. A row is
reduced in one order, which depends on its width alone.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.triton.launching import FUSED, runs_triton, unit_stride
from kernels.triton.variants import Variant

MAX_WIDTH = 32768
"""Elements of a row, which one block of threads holds in registers."""


@triton.jit
def _add_rms_norm(  # type: ignore[no-untyped-def]
    x, residual, weight, out, total, width, eps, x_stride, residual_stride, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < width
    value = tl.load(x + row * x_stride + column, mask=inside, other=0.0).to(tl.float32)
    if residual is not None:
        before = tl.load(residual + row * residual_stride + column, mask=inside, other=0.0).to(tl.float32)
        rounded = (value + before).to(total.dtype.element_ty)
        tl.store(total + row * width + column, rounded, mask=inside)
        value = rounded.to(tl.float32)
    scale = tl.rsqrt(tl.sum(value * value, axis=0) / width + eps)
    normal = (value * scale).to(out.dtype.element_ty).to(tl.float32)
    gain = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * width + column, (gain * normal).to(out.dtype.element_ty), mask=inside)


def num_warps(width: int) -> int:
    """Of a row's block: 16 elements for each thread, or more in the widest."""
    return max(1, min(16, int(triton.next_power_of_2(width)) // 512))


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """``x + residual`` of ``[T, width]``, normalised and times ``weight`` ``[width]``; and the sum itself.

    Without ``residual`` the sum is ``x``. Rows may lie apart.
    """
    if not runs_triton(x):
        total = x if residual is None else x + residual
        return _twin(total, weight, eps), total
    rows, width = x.shape
    if width > MAX_WIDTH:
        raise ValueError(f"rows of {width} elements, at most {MAX_WIDTH}")
    x = unit_stride(x)
    residual = None if residual is None else unit_stride(residual)
    out = torch.empty((rows, width), dtype=x.dtype, device=x.device)
    total = x if residual is None else torch.empty_like(out)
    if rows:
        _add_rms_norm[(rows,)](
            x, residual, weight.contiguous(), out, total, width, eps, x.stride(0),
            0 if residual is None else residual.stride(0),
            BLOCK=triton.next_power_of_2(width), num_warps=num_warps(width), **FUSED,
        )  # fmt: skip
    return out, total


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """``x`` ``[..., width]``, normalised and times ``weight`` ``[width]``."""
    return add_rms_norm(x.reshape(-1, x.shape[-1]), None, weight, eps)[0].view(x.shape)


def _twin(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    value = x.float()
    normal = value * torch.rsqrt(value.pow(2).mean(-1, keepdim=True) + eps)
    return weight * normal.to(x.dtype)


def _variant(dtype: str, width: int, residual: bool) -> Variant:
    pointers = ["x", "weight", "out", "total", *(["residual"] if residual else [])]
    scalars = {"width": "i32", "eps": "fp32", "x_stride": "i32", "residual_stride": "i32"}
    return Variant(
        name=f"{'add_' if residual else ''}rms_norm-{dtype}-{width}",
        kernel=_add_rms_norm,
        signature={**dict.fromkeys(pointers, f"*{dtype}"), **scalars},
        constexprs={"BLOCK": triton.next_power_of_2(width), **({} if residual else {"residual": None})},
        num_warps=num_warps(width),
        max_registers=128,
        max_shared=1 << 10,
        divisible=frozenset({"width", "x_stride", "residual_stride"}),
    )


VARIANTS = [
    *(_variant(dtype, width, True) for dtype in ("bf16", "fp16", "fp32") for width in (2048, 4096, 8192)),
    _variant("bf16", 576, True),
    _variant("bf16", 5120, True),
    _variant("bf16", 16384, True),
    _variant("bf16", 4096, False),
]
