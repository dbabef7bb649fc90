"""Where a launcher's kernel runs: on a GPU, or in Triton's interpreter (for tests). Elsewhere its torch twin does."""

from __future__ import annotations

from typing import Any

import torch
import triton.language as tl
from triton.runtime.interpreter import InterpretedFunction

INTERPRETED = isinstance(tl.cdiv, InterpretedFunction)
"""Whether triton was imported with TRITON_INTERPRET=1, and so runs on the CPU."""

FUSED: dict[str, Any] = {"enable_fp_fusion": True}
"""Of a launch: products and sums in one rounding, where the compiler likes. It says so, or Triton's default would say
it, which is another from 3.10 on."""

EXACT: dict[str, Any] = {"enable_fp_fusion": False}
"""Of a launch: products round before anything is added to them."""


def runs_triton(x: torch.Tensor) -> bool:
    """Whether a kernel can be launched on this tensor; the interpreter knows no float64, a GPU no reason for it."""
    return (x.is_cuda or INTERPRETED) and x.dtype != torch.float64


def unit_stride(x: torch.Tensor) -> torch.Tensor:
    """``x``, copied if its last dimension does not lie side by side."""
    return x if x.stride(-1) == 1 else x.contiguous()
