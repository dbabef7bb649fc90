"""The torch reference where it goes beyond the contract of all kernels (``test_attention_contract.py``): float64, pages
of any size, and torch's threads."""

from __future__ import annotations

import pytest
import torch
from paged_attention import TORCH, Kind, Pool, dense
from test_attention_contract import LAYERS

from kernels.contract import Geometry, LayerAttention

FLOAT32 = Kind(TORCH, torch.float32)
FLOAT64 = Kind(TORCH, torch.float64)


@pytest.mark.parametrize("layer", LAYERS.values(), ids=LAYERS.keys())
@pytest.mark.parametrize("block_size", [4, 16, 24])
def test_ragged_batches_equal_dense_attention_in_float64(layer: LayerAttention, block_size: int) -> None:
    pool = Pool(Geometry(6, 2, 16, block_size), FLOAT64)
    long, middle, short = pool.sequence(333), pool.sequence(140), pool.sequence(3)
    wanted = {id(s): dense(s, layer) for s in (long, middle, short)}
    schedule = [
        [(long, 0, 100), (short, 0, 3)],
        [(middle, 0, 1), (long, 100, 101)],
        [(long, 101, 332), (middle, 1, 139)],
        [(middle, 139, 140), (long, 332, 333)],
    ]
    for parts in schedule:
        for (sequence, start, stop), out in zip(parts, pool.attend(parts, layer), strict=True):
            torch.testing.assert_close(out, wanted[id(sequence)][start:stop], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_querys_bits_do_not_depend_on_chunks_in_pages_of_four_tokens(dtype: torch.dtype) -> None:
    pool = Pool(Geometry(4, 2, 16, 4), Kind(TORCH, dtype))
    sequence = pool.sequence(301)
    whole = pool.attend([(sequence, 0, 301)], LAYERS["window"])[0]
    stops = [1, 8, 130, 131, 300, 301]
    assert torch.equal(pool.attend_in_pieces(sequence, stops, LAYERS["window"]), whole)


def test_bits_do_not_depend_on_the_number_of_threads() -> None:
    pool = Pool(Geometry(9, 3, 64, 16), FLOAT32)
    sequence = pool.sequence(400)
    threads = torch.get_num_threads()
    outputs = []
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            outputs.append(pool.attend([(sequence, 0, 400)], LAYERS["full"])[0])
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(*outputs)


def test_small_slabs_and_groups_change_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    outputs = []
    for slab, partial in ((1 << 24, 1 << 25), (1 << 15, 1 << 16)):
        monkeypatch.setattr("kernels.reference.SLAB_BYTES", slab)
        monkeypatch.setattr("kernels.reference.PARTIAL_BYTES", partial)
        pool = Pool(Geometry(6, 2, 16, 16), FLOAT32)
        one, two = pool.sequence(500), pool.sequence(290)
        first = pool.attend([(one, 0, 499), (two, 0, 100)], LAYERS["window"])
        second = pool.attend([(one, 499, 500), (two, 100, 290)], LAYERS["full"])
        outputs.append(torch.cat([*first, *second]))
    assert torch.equal(*outputs)
