"""``--attention-backend`` and ``--batch-invariant``: the kernel that they leave, or why there is none."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kernels import choice
from kernels.contract import AttentionKernel, Geometry, LayerAttention
from shared.lifecycle import StartupError


def attention_kernel(
    geometry: Geometry,
    layers: Sequence[LayerAttention],
    dtype: torch.dtype,
    device: torch.device,
    backend: str = "auto",
    batch_invariant: bool = False,
    kv_dtype: torch.dtype | None = None,
) -> AttentionKernel:
    """:func:`kernels.choice.choose`. ``kv_dtype``: of what pages hold, if not ``dtype``. Raises StartupError."""
    try:
        return choice.choose(geometry, layers, dtype, kv_dtype or dtype, device, backend, batch_invariant)
    except choice.Refused as refused:
        raise StartupError(str(refused)) from None
