"""Where a launcher's kernel runs: on a GPU, or in Triton's interpreter (for tests). Elsewhere its torch twin does."""

from __future__ import annotations

import torch
import triton.language as tl
from triton.runtime.interpreter import InterpretedFunction

INTERPRETED = isinstance(tl.cdiv, InterpretedFunction)
"""Whether triton was imported with TRITON_INTERPRET=1, and so runs on the CPU."""


def runs_triton(x: torch.Tensor) -> bool:
    """Whether a kernel can be launched on this tensor; the interpreter knows no float64, a GPU no reason for it."""
    return (x.is_cuda or INTERPRETED) and x.dtype != torch.float64


def unit_stride(x: torch.Tensor) -> torch.Tensor:
    """``x``, copied if its last dimension does not lie side by side."""
    return x if x.stride(-1) == 1 else x.contiguous()
