"""Numbers of pages in fp8 (e4m3) and int8: each token's head has one scale, so that a token can be written without
touching those before it. Every kernel that writes pages stores these very bits."""

from __future__ import annotations

import torch

LARGEST_STORED = {torch.float8_e4m3fn: 448.0, torch.int8: 127.0}
"""What the largest number of a head is stored as."""


def has_scales(storage: torch.dtype) -> bool:
    """Whether pages of this type have a scale for each token and head."""
    return storage in LARGEST_STORED


def quantize(x: torch.Tensor, storage: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """``[..., head_dim]`` finite numbers -> (what is stored, float32 scales ``[...]``).

    The scale is the largest magnitude over :data:`LARGEST_STORED`, but at least the smallest normal float32; stored is
    ``x / scale`` (both in float32, IEEE divisions), rounded to nearest even.
    """
    largest = LARGEST_STORED[storage]
    exact = x.float()
    scale = (exact.abs().amax(dim=-1) / largest).clamp_min(torch.finfo(torch.float32).tiny)
    stored = (exact / scale.unsqueeze(-1)).clamp(-largest, largest)
    return (stored.round() if storage == torch.int8 else stored).to(storage), scale


def dequantize(stored: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """``[..., head_dim]`` in ``dtype``, rounded once; finite, as what was stored was."""
    largest = torch.finfo(torch.float32).max  # a scale that was rounded up may lead beyond
    return (stored.float() * scale.unsqueeze(-1)).clamp_(-largest, largest).to(dtype)
