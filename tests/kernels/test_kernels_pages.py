"""Pages of zeros that take memory only once they are written."""

from __future__ import annotations

import gc
import re
from pathlib import Path

import pytest
import torch

from kernels.pages import zeros

CPU = torch.device("cpu")


def resident_bytes() -> int:
    found = re.search(r"VmRSS:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) * 1024


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_are_zeros_of_their_shape_and_can_be_written(dtype: torch.dtype) -> None:
    pages = zeros((3, 4, 2, 8), dtype, CPU)
    assert (pages.shape, pages.dtype, pages.is_contiguous()) == ((3, 4, 2, 8), dtype, True)
    assert not pages.any()
    assert pages.data_ptr() % 4096 == 0
    pages[1] = 2
    assert pages.sum() == 2 * 4 * 2 * 8


def test_take_no_memory_before_they_are_written_and_give_it_back() -> None:
    size = 256 << 20
    before = resident_bytes()
    pages = zeros((size,), torch.uint8, CPU)
    assert resident_bytes() - before < size // 8
    pages[: size // 2] = 1
    assert resident_bytes() - before > size // 3
    del pages
    gc.collect()
    assert resident_bytes() - before < size // 8
