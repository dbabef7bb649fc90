"""The torch reference against attention written out densely, and its bits against themselves."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch

from kernels.contract import Geometry, LayerAttention, LayerCache, RaggedBatch
from kernels.reference import ReferenceAttention

CPU = torch.device("cpu")


@dataclass(eq=False)
class Sequence:
    """One sequence's queries, keys and values for its whole length, and the pages that it owns."""

    query: torch.Tensor  # [length, heads, dim]
    key: torch.Tensor  # [length, kv heads, dim]
    value: torch.Tensor
    pages: list[int]

    @property
    def length(self) -> int:
        return len(self.query)


class Pool:
    """One layer's cache, and sequences whose pages are scattered over it."""

    def __init__(self, geometry: Geometry, dtype: torch.dtype, num_pages: int = 400) -> None:
        self.geometry = geometry
        self.kernel = ReferenceAttention(geometry, dtype, CPU)
        self.dtype = dtype
        self.cache: LayerCache = self.kernel.allocate(num_pages)
        self.generator = torch.Generator().manual_seed(5)
        self.free = (torch.randperm(num_pages - 1, generator=self.generator) + 1).tolist()

    def sequence(self, length: int) -> Sequence:
        g = self.geometry
        heads = (g.num_heads, g.num_kv_heads, g.num_kv_heads)
        query, key, value = (torch.randn((length, h, g.head_dim), generator=self.generator).to(self.dtype)
                             for h in heads)  # fmt: skip
        pages = [self.free.pop() for _ in range(-(-length // g.block_size))]
        return Sequence(query, key, value, pages)

    def attend(self, parts: list[tuple[Sequence, int, int]], layer: LayerAttention) -> list[torch.Tensor]:
        """One pass over tokens ``start .. stop`` of each sequence; the outputs of each."""
        size = self.geometry.block_size
        table = np.zeros((len(parts), max(len(s.pages) for s, _, _ in parts)), dtype=np.int32)
        for number, (sequence, _, _) in enumerate(parts):
            table[number, : len(sequence.pages)] = sequence.pages
        positions = np.concatenate([np.arange(start, stop) for _, start, stop in parts])
        owner = np.repeat(np.arange(len(parts)), [stop - start for _, start, stop in parts])
        start_of = np.concatenate([[0], np.cumsum([stop - start for _, start, stop in parts])])
        slots = table[owner, positions // size].astype(np.int64) * size + positions % size
        batch = RaggedBatch(start_of, positions + 1, table, slots)
        ragged = [torch.cat([getattr(s, name)[a:b] for s, a, b in parts]) for name in ("query", "key", "value")]
        out = self.kernel.attend(self.kernel.plan(batch), self.cache, *ragged, layer)
        return list(out.split([stop - start for _, start, stop in parts]))


def dense(sequence: Sequence, layer: LayerAttention) -> torch.Tensor:
    """``[length, heads, dim]`` causal attention, with nothing clever in it."""
    group = sequence.query.shape[1] // sequence.key.shape[1]
    key, value = (x.repeat_interleave(group, dim=1) for x in (sequence.key, sequence.value))
    scores = torch.einsum("qhd,khd->hqk", sequence.query, key) * layer.scaling
    if layer.softcap is not None:
        scores = layer.softcap * torch.tanh(scores / layer.softcap)
    place = torch.arange(sequence.length)
    hidden = place[None, :] > place[:, None]
    if layer.window is not None:
        hidden |= place[None, :] <= place[:, None] - layer.window
    scores = scores.masked_fill(hidden, float("-inf"))
    if layer.sinks is not None:
        sinks = layer.sinks[:, None, None].expand(-1, sequence.length, 1)
        scores = torch.cat([scores, sinks], dim=-1)
    weights = scores.softmax(dim=-1)[..., : sequence.length]
    return torch.einsum("hqk,khd->qhd", weights, value)


LAYERS = {
    "full": LayerAttention(0.3),
    "window": LayerAttention(0.3, window=37),
    "softcap": LayerAttention(0.3, softcap=4.0),
    "window and softcap": LayerAttention(0.3, window=150, softcap=4.0),
    "sinks": LayerAttention(0.3, sinks=torch.linspace(-1, 3, 6)),
    "sinks and window": LayerAttention(0.3, window=20, sinks=torch.linspace(-1, 3, 6)),
}


@pytest.mark.parametrize("layer", LAYERS.values(), ids=LAYERS.keys())
@pytest.mark.parametrize("block_size", [4, 16, 24])
def test_ragged_batches_equal_dense_attention(layer: LayerAttention, block_size: int) -> None:
    pool = Pool(Geometry(6, 2, 16, block_size), torch.float64)
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


@pytest.mark.parametrize("heads", [(4, 4), (8, 1), (9, 3)], ids=["MHA", "MQA", "GQA"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_every_float_type_is_close_to_dense_attention(heads: tuple[int, int], dtype: torch.dtype) -> None:
    pool = Pool(Geometry(*heads, 32, 16), dtype)
    sequence = pool.sequence(300)
    exact = Sequence(*(x.double() for x in (sequence.query, sequence.key, sequence.value)), sequence.pages)
    layer = LayerAttention(0.2)
    out = torch.cat([pool.attend([(sequence, a, b)], layer)[0] for a, b in ((0, 200), (200, 299), (299, 300))])
    torch.testing.assert_close(out.double(), dense(exact, layer), rtol=0, atol=16 * torch.finfo(dtype).eps)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(9, 3, 64, 16), (4, 1, 128, 16), (4, 2, 16, 4)], ids=str)
@pytest.mark.parametrize("layer", [LAYERS["full"], LAYERS["window"], LAYERS["softcap"]], ids=["full", "window", "cap"])
def test_a_querys_bits_do_not_depend_on_company_or_chunks(
    dtype: torch.dtype, shape: tuple[int, int, int, int], layer: LayerAttention
) -> None:
    pool = Pool(Geometry(*shape), dtype)
    assert pool.kernel.batch_invariant
    sequence, other = pool.sequence(301), pool.sequence(290)
    whole = pool.attend([(sequence, 0, 301)], layer)[0]
    schedule = [(0, 1), (1, 8), (8, 130), (130, 131), (131, 300), (300, 301)]
    alone = torch.cat([pool.attend([(sequence, a, b)], layer)[0] for a, b in schedule])
    assert torch.equal(alone, whole)
    pool.attend([(other, 0, 200)], layer)
    mixed = []
    for number, (a, b) in enumerate(schedule):
        company = [(other, 200 + 7 * number, 201 + 7 * number + 5 * (number % 2))]
        parts = [*company, (sequence, a, b)] if number % 2 else [(sequence, a, b), *company]
        mixed.append(pool.attend(parts, layer)[number % 2])
    assert torch.equal(torch.cat(mixed), whole)


def test_bits_do_not_depend_on_the_number_of_threads() -> None:
    pool = Pool(Geometry(9, 3, 64, 16), torch.float32)
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


def test_what_one_sequence_left_in_a_page_cannot_reach_the_next() -> None:
    pool = Pool(Geometry(4, 2, 16, 16), torch.float32)
    broken = pool.sequence(20)
    broken.key[:] = float("nan")
    broken.value[:] = float("inf")
    pool.attend([(broken, 0, 20)], LAYERS["full"])
    healthy = pool.sequence(18)
    healthy.pages = broken.pages  # the last page keeps stale entries behind the healthy sequence's
    wanted = dense(healthy, LAYERS["full"])
    torch.testing.assert_close(pool.attend([(healthy, 0, 18)], LAYERS["full"])[0], wanted, rtol=1e-4, atol=1e-5)


def test_small_slabs_and_groups_change_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    outputs = []
    for slab, partial in ((1 << 24, 1 << 25), (1 << 15, 1 << 16)):
        monkeypatch.setattr("kernels.reference.SLAB_BYTES", slab)
        monkeypatch.setattr("kernels.reference.PARTIAL_BYTES", partial)
        pool = Pool(Geometry(6, 2, 16, 16), torch.float32)
        one, two = pool.sequence(500), pool.sequence(290)
        first = pool.attend([(one, 0, 499), (two, 0, 100)], LAYERS["window"])
        second = pool.attend([(one, 499, 500), (two, 100, 290)], LAYERS["full"])
        outputs.append(torch.cat([*first, *second]))
    assert torch.equal(*outputs)
