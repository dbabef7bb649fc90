"""What every attention kernel must do (:class:`kernels.contract.AttentionKernel`): the torch reference, the C++ one in
each instruction set that this processor has, and the Triton one in its interpreter."""

from __future__ import annotations

import contextlib
import dataclasses
import warnings
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from paged_attention import KINDS, TRITON, Kind, Pool, around, dense

from headrace.gpu_check.paged import Sequence
from kernels.contract import Geometry, LayerAttention
from kernels.cpu.library import Library, find

LAYERS = {
    "full": LayerAttention(0.3),
    "window": LayerAttention(0.3, window=37),
    "softcap": LayerAttention(0.3, softcap=4.0),
    "window and softcap": LayerAttention(0.3, window=530, softcap=4.0),
    "sinks": LayerAttention(0.3, sinks=torch.linspace(-1, 3, 6)),
    "sinks and window": LayerAttention(0.3, window=20, sinks=torch.linspace(-1, 3, 6)),
}

SHAPES = [  # heads, key/value heads, head size, block size
    (4, 4, 32, 16),
    (8, 1, 64, 16),
    (9, 3, 64, 16),
    (48, 1, 16, 48),
    (6, 2, 48, 32),
    (5, 5, 80, 16),
    (4, 2, 112, 32),
    (14, 2, 128, 48),
    (2, 1, 256, 16),
]

ERROR = {torch.float32: 3e-6, torch.bfloat16: 2.5e-2, torch.float16: 3e-3}
"""The largest, of outputs of a size of about 1: a few roundings of the type."""


@pytest.fixture(params=KINDS, ids=str)
def kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Kind]:
    """The choice of an instruction set is the process's: it is put back. Triton's pieces of keys are short ones here,
    so that few keys make several; and numpy says nothing of its NaN, as a GPU says nothing."""
    library = find()
    before = library.isa if isinstance(library, Library) else ""
    if request.param.interpreted:
        monkeypatch.setattr("kernels.triton.attention_shapes.FIXED_PIECE_KEYS", 64)
        monkeypatch.setattr("kernels.triton.attention_shapes.LEAST_PIECE_KEYS", 64)
    with uninitialized_memory_filled(), np.errstate(all="ignore"), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "All-NaN slice", RuntimeWarning)
        yield request.param
    if isinstance(library, Library):
        library.select(before)


@contextlib.contextmanager
def uninitialized_memory_filled() -> Iterator[None]:
    """With NaN, so that a kernel that leaves a part of its output alone is found out."""
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def error_of(out: torch.Tensor, pool: Pool, sequence: Sequence, layer: LayerAttention, start: int) -> float:
    """The largest, of the outputs from token ``start`` on; NaN if there is one."""
    wanted = dense(pool.held(sequence), layer)[start : start + len(out)]
    return float((out.double() - wanted).abs().max())


def assert_same(pool: Pool, got: torch.Tensor, wanted: torch.Tensor) -> None:
    """The same bits, or where the kernel does not promise that, the same numbers."""
    if pool.kernel.batch_invariant:
        assert torch.equal(got, wanted)
    else:
        assert (got.double() - wanted.double()).abs().max() < ERROR[got.dtype]


@pytest.mark.parametrize("layer", LAYERS.values(), ids=LAYERS.keys())
def test_ragged_batches_equal_dense_attention(kind: Kind, layer: LayerAttention) -> None:
    pool = Pool(Geometry(6, 2, 16, 16), kind)
    lengths, cut = ((75, 20, 3), 30) if kind.interpreted else ((603, 140, 3), 100)
    long, middle, short = (pool.sequence(length) for length in lengths)
    schedule = [
        [(long, 0, cut), (short, 0, 3)],
        [(middle, 0, 1), (long, cut, cut + 1)],
        [(long, cut + 1, long.length - 1), (middle, 1, middle.length - 1)],
        [(middle, middle.length - 1, middle.length), (long, long.length - 1, long.length)],
    ]
    results = [(part, out) for parts in schedule for part, out in zip(parts, pool.attend(parts, layer), strict=True)]
    for (sequence, start, _), out in results:
        assert error_of(out, pool, sequence, layer, start) < ERROR[kind.dtype]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_heads_and_blocks_of_every_shape(kind: Kind, shape: tuple[int, int, int, int]) -> None:
    pool = Pool(Geometry(*shape), kind, num_pages=40)
    length = 70 if kind.interpreted else 150
    sequence = pool.sequence(length)
    layer = LayerAttention(shape[2] ** -0.5)
    out = pool.attend_in_pieces(sequence, [length - 50, length - 1, length], layer)
    assert error_of(out, pool, sequence, layer, 0) < ERROR[kind.dtype]


BITS = {
    "full": ((9, 3, 64, 16), LayerAttention(0.2)),
    "window": ((4, 1, 128, 32), LayerAttention(0.2, window=700)),
    "window and softcap": ((2, 2, 16, 48), LayerAttention(0.2, window=530, softcap=9.0)),
}


@pytest.mark.parametrize("case", BITS)
def test_a_querys_bits_do_not_depend_on_company_or_chunks(kind: Kind, case: str) -> None:
    shape, layer = BITS[case]
    pool = Pool(Geometry(*shape), kind)
    if kind.isa == TRITON:
        assert not pool.kernel.batch_invariant
        return
    assert pool.kernel.batch_invariant
    if kind.interpreted:  # tiles of 32 or 64 keys, pieces of 64
        length, stops = 134, [1, 64, 65, 100, *around(128)[1:], 134]
        layer = dataclasses.replace(layer, window=layer.window and layer.window // 8)
    else:  # tiles of 64 or 128 keys, splits of 512
        length, stops = 1100, [1, 8, *around(64, 128), 200, *around(512), 900, *around(1024), 1100]
    sequence, other = pool.sequence(length), pool.sequence(length - 10)
    whole = pool.attend([(sequence, 0, length)], layer)[0]
    assert torch.equal(pool.attend_in_pieces(sequence, stops, layer), whole)
    before = length - 10 - 8 * (len(stops) + 1)
    pool.attend([(other, 0, before)], layer)
    mixed = []
    for number, (a, b) in enumerate(zip([0, *stops[:-1]], stops, strict=True)):
        company = [(other, before + 7 * number, before + 1 + 7 * number + 5 * (number % 2))]
        parts = [*company, (sequence, a, b)] if number % 2 else [(sequence, a, b), *company]
        mixed.append(pool.attend(parts, layer)[number % 2])
    assert torch.equal(torch.cat(mixed), whole)


def test_sinks_take_part_once_however_the_keys_are_cut(kind: Kind) -> None:
    pool = Pool(Geometry(6, 2, 16, 16), kind)
    edges, length = ([64], 132) if kind.interpreted else ([512, 1024], 1050)
    sequence = pool.sequence(length)
    layer = LAYERS["sinks"]
    whole = pool.attend([(sequence, 0, length)], layer)[0]
    assert_same(pool, pool.attend_in_pieces(sequence, [30, *around(*edges), length], layer), whole)


def test_what_one_sequence_left_in_a_page_cannot_reach_the_next(kind: Kind) -> None:
    """Neither numbers that are not finite, nor the largest ones: a score of an unwritten key overflows."""
    pool = Pool(Geometry(4, 2, 16, 16), kind)
    healthy = pool.sequence(82)
    alone = pool.attend([(healthy, 0, 82)], LAYERS["full"])[0]
    largest = torch.finfo(kind.dtype).max
    for key, value in ((float("nan"), float("inf")), (float("-inf"), float("nan")), (largest, -largest)):
        broken = pool.sequence(96)
        broken.key[:], broken.value[:] = key, value
        pool.attend([(broken, 0, 96)], LAYERS["full"])
        healthy.pages = broken.pages  # the last page keeps the other's entries behind its own
        assert torch.equal(pool.attend([(healthy, 0, 82)], LAYERS["full"])[0], alone)


def test_a_sequence_gone_wrong_stays_alone_in_its_batch(kind: Kind) -> None:
    pool = Pool(Geometry(4, 2, 16, 16), kind)
    healthy, broken = pool.sequence(70), pool.sequence(70)
    alone = pool.attend([(healthy, 0, 70)], LAYERS["full"])[0]
    for part in (broken.query, broken.key, broken.value):
        part[5:9] = float("nan")
    for parts in ([(broken, 0, 70), (healthy, 0, 70)], [(healthy, 0, 70), (broken, 0, 70)]):
        outputs = pool.attend(parts, LAYERS["full"])
        assert_same(pool, outputs[[s for s, _, _ in parts].index(healthy)], alone)


@pytest.mark.parametrize("block_size", [16, 48])
def test_a_page_that_is_copied_when_half_full_belongs_to_a_sequence_of_its_own(kind: Kind, block_size: int) -> None:
    """Copy-on-write: two sequences share all pages up to token 90, then go apart in copies of the last."""
    pool = Pool(Geometry(6, 2, 32, block_size), kind)
    first, second = pool.sequence(130), pool.sequence(130)
    for name in ("query", "key", "value"):
        getattr(second, name)[:90] = getattr(first, name)[:90]
    wanted = [pool.attend([(s, 0, 130)], LAYERS["full"])[0][90:] for s in (first, second)]
    forked = Sequence(second.query, second.key, second.value, pool.sequence(130).pages)
    source = Sequence(first.query, first.key, first.value, pool.sequence(130).pages)
    pool.attend([(source, 0, 90)], LAYERS["full"])
    shared = 90 // block_size
    forked.pages[:shared] = source.pages[:shared]
    assert pool.pages.copy([(source.pages[shared], forked.pages[shared])]) > 0
    got = pool.attend([(forked, 90, 91), (source, 90, 120)], LAYERS["full"])
    more = pool.attend([(source, 120, 130), (forked, 91, 130)], LAYERS["full"])
    assert_same(pool, torch.cat([got[1], more[0]]), wanted[0])
    assert_same(pool, torch.cat([got[0], more[1]]), wanted[1])


def test_pages_that_were_swapped_out_come_back_elsewhere(kind: Kind) -> None:
    pool = Pool(Geometry(6, 2, 32, 16), kind, host_pages=8)
    sequence, intruder = pool.sequence(75), pool.sequence(75)
    wanted = pool.attend([(sequence, 0, 75)], LAYERS["full"])[0]
    pool.attend([(sequence, 0, 60)], LAYERS["full"])
    held = sequence.pages[:4]
    pool.pages.swap_out([(page, place) for place, page in enumerate(held, 2)])
    intruder.pages = list(sequence.pages)
    pool.attend([(intruder, 0, 75)], LAYERS["full"])
    sequence.pages = pool.sequence(75).pages
    pool.pages.swap_in(list(enumerate(sequence.pages[:4], 2)))
    assert_same(pool, pool.attend([(sequence, 60, 75)], LAYERS["full"])[0], wanted[60:])


def test_rounded_pages_hold_numbers_to_their_precision(kind: Kind) -> None:
    if kind.storage is None:
        return
    pool = Pool(Geometry(4, 2, 32, 16), kind)
    sequence = pool.sequence(20)
    sequence.key[3] = 0
    sequence.value[4] *= 1000
    pool.attend([(sequence, 0, 20)], LAYERS["full"])
    stored = pool.held(sequence)
    for kept, given in ((stored.key, sequence.key.float()), (stored.value, sequence.value.float())):
        most = given.abs().amax(dim=-1, keepdim=True)
        bound = most * 0.501 / 127 if kind.storage == torch.int8 else (given.abs() / 16).maximum(most / 448 / 512)
        assert ((kept - given).abs() <= bound + 1e-30).all()
        assert (kept - given).abs().max() > 0
