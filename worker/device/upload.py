"""Many small host arrays on their way to a device as one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

Upload = Callable[[npt.NDArray[np.uint8]], torch.Tensor]
"""Takes bytes to the device without waiting for it; they may be overwritten once it returns."""

ALIGNMENT = 16
"""Bytes. What Triton's kernels load in one piece begins at a multiple of it."""

_TYPES = {
    np.dtype(np.int32): torch.int32,
    np.dtype(np.int64): torch.int64,
    np.dtype(np.float32): torch.float32,
    np.dtype(np.float64): torch.float64,
}


class Packing:
    """Arrays that :meth:`add` takes come back from :meth:`send` in the same places."""

    def __init__(self) -> None:
        self._arrays: list[npt.NDArray[Any]] = []

    def add(self, array: npt.NDArray[Any]) -> int:
        """int32, int64, float32 or float64; returns its place."""
        self._arrays.append(np.ascontiguousarray(array))
        return len(self._arrays) - 1

    def send(self, upload: Upload) -> list[torch.Tensor]:
        """On the device: views of one piece of memory. Where there is nothing to send, nothing is."""
        starts = [0]
        for array in self._arrays:
            starts.append(starts[-1] + -(-array.nbytes // ALIGNMENT) * ALIGNMENT)
        if not starts[-1]:
            return [torch.empty(array.shape, dtype=_TYPES[array.dtype]) for array in self._arrays]
        packed = np.empty(starts[-1], dtype=np.uint8)
        for start, array in zip(starts, self._arrays, strict=False):
            packed[start : start + array.nbytes] = array.reshape(-1).view(np.uint8)
        there = upload(packed)
        return [
            there[start : start + array.nbytes].view(_TYPES[array.dtype]).view(array.shape)
            for start, array in zip(starts, self._arrays, strict=False)
        ]
