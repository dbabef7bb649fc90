"""The C++ attention kernel beyond the contract of all kernels: who computes which split, and what is refused."""

from __future__ import annotations

import itertools

import pytest
import torch
from paged_attention import CPU, Kind, Pool, usable_isas

from kernels.contract import Geometry, LayerAttention
from kernels.cpu.attention import CpuAttention, refusal
from kernels.cpu.library import Library

DTYPES = [torch.float32, torch.bfloat16]
LENGTH = 2200  # four splits of 512 keys and a bit


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layer", [LayerAttention(0.2), LayerAttention(0.2, window=1500), LayerAttention(
    0.2, sinks=torch.linspace(-1, 3, 6))], ids=["full", "window", "sinks"])  # fmt: skip
@pytest.mark.parametrize("isa", usable_isas())
def test_bits_do_not_depend_on_who_computes_which_split(
    library: Library, isa: str, layer: LayerAttention, dtype: torch.dtype
) -> None:
    """A long decode alone is cut into its splits, among other long ones it stays whole; in a chunk it was one row."""
    pool = Pool(Geometry(6, 2, 16, 16), Kind(isa, dtype), num_pages=2 * LENGTH // 16 + 400)
    sequence, short = pool.sequence(LENGTH), pool.sequence(5)
    others = [pool.sequence(LENGTH) for _ in range(1)] * 7
    whole = pool.attend([(sequence, 0, LENGTH)], layer)[0][-1:]
    pool.attend([(others[0], 0, LENGTH - 1)], layer)
    last = (sequence, LENGTH - 1, LENGTH)
    for threads in (1, 2, 3):
        library.c.headrace_set_threads(threads)
        assert torch.equal(pool.attend([last], layer)[0], whole)
        assert torch.equal(pool.attend([(short, 0, 5), last], layer)[1], whole)
        company = [(other, LENGTH - 1, LENGTH) for other in others]
        assert torch.equal(pool.attend([*company, last], layer)[-1], whole)


@pytest.mark.parametrize("isa", usable_isas())
def test_ends_of_splits_and_tiles_are_no_ends_of_sums(library: Library, isa: str) -> None:
    """A query sees one key more at a time, across every edge of blocks, tiles and splits, with 1, 2 and 3 threads."""
    pool = Pool(Geometry(4, 2, 16, 16), Kind(isa, torch.bfloat16))
    sequence = pool.sequence(1060)
    layer = LayerAttention(0.3)
    whole = pool.attend([(sequence, 0, 1060)], layer)[0]
    for threads in (1, 2, 3):
        library.c.headrace_set_threads(threads)
        assert torch.equal(pool.attend_in_pieces(sequence, range(1, 1061), layer), whole)


@pytest.mark.parametrize("isa", usable_isas())
def test_instruction_sets_agree_up_to_rounding(library: Library, isa: str) -> None:
    layer = LayerAttention(0.2, softcap=5.0)
    outputs = []
    for kind in (Kind("generic", torch.float32), Kind(isa, torch.float32)):
        pool = Pool(Geometry(6, 2, 48, 32), kind)
        sequence = pool.sequence(700)
        outputs.append(pool.attend([(sequence, 0, 700)], layer)[0])
    torch.testing.assert_close(*outputs, rtol=0, atol=3e-6)


def test_a_batch_of_nothing_is_nothing(library: Library) -> None:
    pool = Pool(Geometry(4, 2, 16, 16), Kind("generic", torch.float32))
    sequence = pool.sequence(3)
    first, second = pool.attend([(sequence, 0, 0), (sequence, 0, 3)], LayerAttention(0.2))
    assert first.shape == (0, 4, 16) and torch.isfinite(second).all()
    nothing = pool.attend([(sequence, 0, 0)], LayerAttention(0.2))
    assert nothing[0].shape == (0, 4, 16)


@pytest.mark.parametrize(
    ("geometry", "dtype", "reason"),
    [
        (Geometry(4, 2, 16, 16), torch.float64, "float32 and bfloat16, not in float64"),
        (Geometry(4, 2, 16, 8), torch.float32, "multiple of 16 tokens, not 8"),
        (Geometry(4, 2, 20, 16), torch.float32, "multiple of 16 dimensions up to 256, not 20"),
        (Geometry(4, 2, 272, 16), torch.float32, "multiple of 16 dimensions up to 256, not 272"),
        (Geometry(49, 1, 16, 16), torch.float32, "at most 48 query heads share a key, not 49"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_what_it_cannot_serve_is_refused_with_the_reason(
    library: Library, geometry: Geometry, dtype: torch.dtype, reason: str
) -> None:
    assert reason in refusal(geometry, dtype, CPU)
    with pytest.raises(ValueError, match=reason):
        CpuAttention(library, geometry, dtype)


@pytest.mark.parametrize("wrong", ["query", "key", "value"])
def test_tensors_that_do_not_fit_are_refused_before_anything_is_read(library: Library, wrong: str) -> None:
    pool = Pool(Geometry(4, 2, 16, 16), Kind("generic", torch.float32))
    good = {name: getattr(pool.sequence(3), name) for name in ("query", "key", "value")}
    for change in (lambda x: x[:2], lambda x: x[..., :8], lambda x: x.to(torch.bfloat16)):
        sequence = pool.sequence(3)
        for name, tensor in good.items():
            setattr(sequence, name, change(tensor) if name == wrong else tensor)
        with pytest.raises(ValueError, match="is not"):
            pool.attend([(sequence, 0, 3)], LayerAttention(0.2))


def test_tensors_that_do_not_lie_in_one_piece_are_read_as_they_are_meant(library: Library) -> None:
    outputs = []
    for strided in (False, True):
        pool = Pool(Geometry(4, 2, 16, 16), Kind("generic", torch.float32))
        sequence = pool.sequence(40)
        if strided:
            for name in ("query", "key", "value"):
                tensor = getattr(sequence, name)
                setattr(sequence, name, tensor.transpose(0, 1).contiguous().transpose(0, 1))
        outputs.append(pool.attend([(sequence, 0, 40)], LayerAttention(0.2))[0])
    assert torch.equal(*outputs)


def test_every_number_of_queries_and_heads_of_a_group(library: Library) -> None:
    """Rows of an item, queries times the heads of a group, from one to more than an item holds."""
    layer = LayerAttention(0.3)
    for heads, isa in itertools.product((1, 5, 7, 11), usable_isas()):
        pool = Pool(Geometry(heads, 1, 16, 16), Kind(isa, torch.float32), num_pages=40)
        sequence = pool.sequence(70)
        whole = pool.attend([(sequence, 0, 70)], layer)[0]
        for count in range(1, 20):
            assert torch.equal(pool.attend([(sequence, 70 - count, 70)], layer)[0], whole[-count:])
