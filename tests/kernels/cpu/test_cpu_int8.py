"""int8 weights in products: the numbers that they stand for, bit for bit, however many rows share their conversion."""

from __future__ import annotations

import gc

import pytest
import torch
from paged_attention import usable_isas

from kernels.cpu.decoder import PackedMatrix, WeightMemory
from kernels.cpu.library import Library

DTYPES = [torch.float32, torch.bfloat16]


def whole_numbers(n: int, k: int, dtype: torch.dtype) -> torch.Tensor:
    """``[n, k]``, all of -127 to 127 where there is room; the largest of each row is 127, so that its scale is 1."""
    values = (torch.arange(n * k).view(n, k) * 101 + torch.arange(n)[:, None]) % 255 - 127
    values[:, 3] = 127
    return values.to(dtype)


def rows(count: int, k: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return torch.randn((count, k), generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("isa", usable_isas())
def test_every_whole_number_is_itself(library: Library, isa: str, dtype: torch.dtype) -> None:
    """At every place of a panel, whether it is converted for one row or expanded for many."""
    library.select(isa)
    for n, k in [(64, 272), (45, 48)]:
        weight = whole_numbers(n, k, dtype)
        if k > 255:
            assert len(weight.unique()) == 255
        matrix = PackedMatrix(library, weight, None, quantize=True)
        units = torch.eye(k, dtype=dtype)
        assert torch.equal(matrix(units), weight.T)
        assert torch.equal(torch.cat([matrix(unit[None]) for unit in units]), weight.T)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("isa", usable_isas())
def test_products_have_the_bits_of_those_with_the_same_weights_unpacked(
    library: Library, isa: str, dtype: torch.dtype
) -> None:
    """With a scale of 1 nothing is rounded: the same terms, added in the same order, for any number of rows."""
    library.select(isa)
    for n, k in [(96, 576), (70, 16), (33, 80)]:
        weight, bias = whole_numbers(n, k, dtype), rows(1, n, dtype, seed=1)[0]
        plain, int8 = (PackedMatrix(library, weight, bias, quantize) for quantize in (False, True))
        x = rows(50, k, dtype)
        for count in [*range(1, 27), 50]:
            assert torch.equal(int8(x[:count]), plain(x[:count])), (n, k, count)


@pytest.mark.parametrize("isa", usable_isas())
def test_a_scale_multiplies_the_sum_once(library: Library, isa: str) -> None:
    library.select(isa)
    weight, x = whole_numbers(64, 96, torch.float32), rows(20, 96, torch.float32)
    scales = torch.logspace(-6, 6, 64, base=2.0)
    scaled = PackedMatrix(library, weight * scales[:, None], None, quantize=True)(x)
    exact = PackedMatrix(library, weight, None, quantize=True)(x).double() * scales.double()
    assert torch.allclose(scaled.double(), exact, rtol=4 * torch.finfo(torch.float32).eps, atol=0)


def test_a_quarter_of_float32s_and_half_of_bfloat16s_memory(library: Library) -> None:
    for dtype, share in [(torch.float32, 4), (torch.bfloat16, 2)]:
        plain, int8 = (PackedMatrix(library, rows(64, 96, dtype), None, quantize) for quantize in (False, True))
        assert plain.num_bytes == share * int8.num_bytes


def test_matrices_of_one_memory_lie_one_behind_the_other(library: Library) -> None:
    memory = WeightMemory(library)
    weights = [rows(n, 48, torch.bfloat16, seed=n) for n in (32, 70, 64)]
    first, second, third = (PackedMatrix(library, weight, None, True, memory) for weight in weights)
    assert second.struct.panels == first.struct.panels + first.num_bytes
    assert third.struct.panels == second.struct.panels + second.num_bytes
    x = rows(5, 48, torch.bfloat16)
    wanted = PackedMatrix(library, weights[2], None, True)(x)
    del first, second, memory
    gc.collect()
    assert torch.equal(third(x), wanted)


def test_memory_is_taken_anew_where_a_piece_is_full(library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(WeightMemory, "PIECE_BYTES", 4096)
    memory = WeightMemory(library)
    weights = [rows(n, 48, torch.bfloat16, seed=n) for n in (32, 32, 32, 320, 32)]
    x = rows(5, 48, torch.bfloat16)
    matrices = [PackedMatrix(library, weight, None, True, memory) for weight in weights]
    for weight, matrix in zip(weights, matrices, strict=True):
        assert torch.equal(matrix(x), PackedMatrix(library, weight, None, True)(x))
