"""Memory for KV pages: zeros that a CPU's operating system hands out as they are written.

Filling a pool at start costs a second or two for each GiB, and memory that a small load never needs. Fresh anonymous
memory is zeros already; in small pages, since a first write into a huge one would stall a step by milliseconds.
"""

from __future__ import annotations

import math
import mmap

import torch


def zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """As ``torch.zeros``; aligned to a page on a CPU. Raises OSError where even the address space is too small."""
    size = math.prod(shape) * dtype.itemsize
    if device.type != "cpu" or not size:
        return torch.zeros(shape, dtype=dtype, device=device)
    memory = mmap.mmap(-1, size)  # the tensor keeps it
    return torch.frombuffer(memory, dtype=dtype).view(shape)
