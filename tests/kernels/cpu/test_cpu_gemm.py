"""Packed matrix products: every shape against torch, bits of a row whatever stands beside it, int8's error."""

from __future__ import annotations

import pytest
import torch
from paged_attention import usable_isas

from kernels.cpu.decoder import PackedMatrix, interleave
from kernels.cpu.library import Library

DTYPES = [torch.float32, torch.bfloat16]
SHAPES = [(1, 16), (16, 16), (31, 48), (32, 32), (33, 16), (80, 272), (100, 96), (192, 64), (320, 576)]
"""Rows and columns of weights: whole panels of 32 and parts of one, units of two and of odd numbers of blocks."""


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("isa", usable_isas())
def test_products_of_every_shape(library: Library, isa: str, dtype: torch.dtype) -> None:
    library.select(isa)
    for n, k in SHAPES:
        weight, bias = random(n, k, dtype=dtype), random(n, dtype=dtype, seed=1)
        x = random(13, k, dtype=dtype, seed=2)
        exact = x.double() @ weight.double().T
        for added in (None, bias):
            wanted = exact if added is None else exact + added.double()
            got = PackedMatrix(library, weight, added)(x)
            assert got.shape == (13, n)
            error = (got.double() - wanted).abs() / wanted.abs().clamp_min(k**0.5)
            roundings = 1 if dtype == torch.bfloat16 else 4 + k / 16  # of the result; of each term of a sum
            assert error.max() < roundings * torch.finfo(dtype).eps, (n, k)


@pytest.mark.parametrize("quantize", [False, True], ids=["plain", "int8"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("isa", usable_isas())
def test_a_rows_bits_are_its_own(library: Library, isa: str, dtype: torch.dtype, quantize: bool) -> None:
    """In any number of rows from 1 to 70, at any place among them, and on any number of threads."""
    library.select(isa)
    matrix = PackedMatrix(library, random(70, 80, dtype=dtype), random(70, dtype=dtype), quantize)
    x = random(70, 80, dtype=dtype, seed=3)
    alone = torch.cat([matrix(row[None]) for row in x])
    for rows in range(1, 71):
        library.c.headrace_set_threads(1 + rows % 3)
        assert torch.equal(matrix(x[:rows]), alone[:rows])
        assert torch.equal(matrix(x[70 - rows :]), alone[70 - rows :])


def test_no_row_reaches_another(library: Library) -> None:
    for isa in usable_isas():
        library.select(isa)
        matrix = PackedMatrix(library, random(40, 32), None)
        x = random(20, 32, seed=4)
        clean = matrix(x)
        x[7] = float("nan")
        x[11] = float("inf")
        kept = [row for row in range(20) if row not in (7, 11)]
        assert torch.equal(matrix(x)[kept], clean[kept])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("isa", usable_isas())
def test_int8_is_within_half_a_step_of_each_weight(library: Library, isa: str, dtype: torch.dtype) -> None:
    """Products with unit vectors are the weights themselves: whole numbers up to 127 times a row's largest / 127."""
    library.select(isa)
    n, k = 45, 64
    weight = random(n, k, dtype=dtype) * torch.logspace(-3, 3, n)[:, None].to(dtype)
    weight[5] = 0
    seen = PackedMatrix(library, weight, None, quantize=True)(torch.eye(k, dtype=dtype)).T.double()
    step = weight.double().abs().amax(dim=1, keepdim=True) / 127
    rounding = weight.double().abs() * torch.finfo(dtype).eps
    assert ((seen - weight.double()).abs() <= step / 2 + rounding + 1e-12).all()
    assert (seen[5] == 0).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_int8_products_err_by_less_than_a_percent_of_the_rows_size(library: Library, dtype: torch.dtype) -> None:
    weight, x = random(96, 512, dtype=dtype), random(40, 512, dtype=dtype, seed=5)
    exact = x.double() @ weight.double().T
    for isa in usable_isas():
        library.select(isa)
        got = PackedMatrix(library, weight, None, quantize=True)(x).double()
        assert (got - exact).norm() / exact.norm() < 0.01


def test_instruction_sets_pack_what_each_other_reads(library: Library) -> None:
    weight, x = random(50, 48), random(9, 48, seed=6)
    for quantize in (False, True):
        outputs = []
        for isa in usable_isas():
            library.select(isa)
            matrix = PackedMatrix(library, weight, None, quantize)
            library.select("generic")
            outputs.append(matrix(x))
        assert all(torch.equal(out, outputs[0]) for out in outputs)


def test_a_weight_that_is_a_view_is_read_as_it_is_meant(library: Library) -> None:
    wide, x = random(64, 200), random(5, 32, seed=7)
    for weight in (wide[10:40, 16:48], wide[:, 100:132], wide.T[:32].T, random(32, 64).T):
        assert torch.equal(PackedMatrix(library, weight)(x), PackedMatrix(library, weight.clone().contiguous())(x))


def test_no_rows_give_no_rows(library: Library) -> None:
    for quantize in (False, True):
        assert PackedMatrix(library, random(33, 16), None, quantize)(random(0, 16)).shape == (0, 33)


@pytest.mark.parametrize(
    "weight", [random(8, 24), random(8, 16).double(), random(0, 16), random(8, 0)], ids=lambda w: str(tuple(w.shape))
)
def test_weights_that_do_not_fit_are_refused(library: Library, weight: torch.Tensor) -> None:
    with pytest.raises(ValueError, match="does not fit"):
        PackedMatrix(library, weight)


def test_biases_and_rows_that_do_not_fit_are_refused(library: Library) -> None:
    with pytest.raises(ValueError, match="a bias of"):
        PackedMatrix(library, random(8, 16), random(7))
    matrix = PackedMatrix(library, random(8, 16))
    for x in (random(3, 32), random(16), random(3, 16).to(torch.bfloat16), random(3, 16).double()):
        with pytest.raises(ValueError, match="do not fit"):
            matrix(x)


def test_gate_and_up_lie_sixteen_by_sixteen() -> None:
    both = interleave(torch.arange(48), 100 + torch.arange(48))
    assert both.tolist() == [
        *range(16), *range(100, 116), *range(16, 32), *range(116, 132), *range(32, 48), *range(132, 148),
    ]  # fmt: skip
