"""Pages of the kernels that run on a device: one layout, so that several of them can serve the same cache."""

from __future__ import annotations

import torch

from kernels.contract import Geometry, LayerCache
from kernels.pages import zeros
from kernels.quantized_pages import has_scales


def allocate(geometry: Geometry, storage: torch.dtype, num_pages: int, device: torch.device) -> LayerCache:
    """Zeros: ``[num_pages, block_size, num_kv_heads, head_dim]``, contiguous; scales for each token and head where
    ``storage`` is fp8 (e4m3) or int8."""
    rows = (num_pages, geometry.block_size, geometry.num_kv_heads)
    key, value = (zeros((*rows, geometry.head_dim), storage, device) for _ in range(2))
    if not has_scales(storage):
        return LayerCache(key, value)
    return LayerCache(key, value, *(zeros(rows, torch.float32, device) for _ in range(2)))
