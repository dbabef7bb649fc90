from __future__ import annotations

import pytest
import torch

from kernels.elementwise import aligned_rows, elementwise, is_aligned


def gelu_tanh(x: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.gelu(x, approximate="tanh")


@pytest.mark.parametrize("function", [torch.exp, torch.tanh, torch.cos, torch.nn.functional.silu, gelu_tanh])
def test_a_numbers_result_does_not_depend_on_its_place(function) -> None:  # type: ignore[no-untyped-def]
    x = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    whole = elementwise(function, x)
    for start, stop in ((0, 1), (3, 40), (7, 999), (500, 1000), *((n, n + 7) for n in range(0, 993, 7))):
        assert torch.equal(elementwise(function, x[start:stop]), whole[start:stop])


def test_strided_tensors_keep_their_shape() -> None:
    x = torch.randn(6, 10).t()[1:]
    assert torch.allclose(elementwise(torch.exp, x), x.exp())


@pytest.mark.parametrize("threads", [1, 2, 3, 5, 6, 7, 12, 16])
@pytest.mark.parametrize("rows", [1, 5, 101, 512, 777])
def test_rows_are_filled_up_until_every_width_is_cut_into_whole_vectors(threads: int, rows: int) -> None:
    filled = aligned_rows(rows, 4, [64, 1536], threads)
    assert filled >= rows and filled % 4 == 0
    assert is_aligned(filled * 64, threads) and is_aligned(filled * 1536, threads)
    assert filled - rows < 4 * 64
