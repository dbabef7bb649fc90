"""How the torch reference cuts a ragged batch into work of equal shapes. Pure numpy; knows no tensors.

Queries are grouped into *items* of one shape per class: one token (decodes) or up to ``QUERY_BLOCK`` tokens of one
chunk. Keys are cut into *tiles* of a fixed number of tokens at fixed places. A *pair* is one item against one tile it
sees. All pairs of a class have the same shape, whatever the batch, and an item's pairs are merged in the order of their
tiles: so a query's bits depend on its own keys alone. (Flash-decoding's split along the keys, Dao et
al. 2023, with fixed splits.)
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kernels.contract import RaggedBatch

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

QUERY_BLOCK = 32
"""Query tokens in an item of a chunk."""


@dataclass(frozen=True, slots=True, eq=False)
class Items:
    """``n`` items of one class: ``tokens[i]`` are places in the ragged batch; the last repeats to fill the block."""

    sequence: Ints  # [n]
    tokens: Ints  # [n, queries]
    first: Ints  # [n]: first real token's place
    count: Ints  # [n]: real tokens

    def take(self, order: Ints) -> Items:
        return Items(self.sequence[order], self.tokens[order], self.first[order], self.count[order])


@dataclass(frozen=True, slots=True, eq=False)
class Pairs:
    """The pairs of some items, tile after tile: ``per_tile[t]`` items have over ``t`` tiles, and they come first."""

    items: Items
    item: Ints  # [p]: index into items
    first_key: Ints  # [p]: position of the tile's first key
    pages: Ints  # [p, pages per tile]; 0, the scratch page, where no key is seen
    per_tile: list[int]


def decode_items(batch: RaggedBatch) -> Items:
    sequence = np.flatnonzero(np.diff(batch.query_start) == 1)
    first = batch.query_start[sequence]
    return Items(sequence, first[:, None], first, np.ones_like(first))


def chunk_items(batch: RaggedBatch) -> Items:
    lengths = np.diff(batch.query_start)
    sequences = np.flatnonzero(lengths > 1)
    blocks = -(-lengths[sequences] // QUERY_BLOCK)
    sequence = np.repeat(sequences, blocks)
    block = np.arange(len(sequence)) - np.repeat(np.cumsum(blocks) - blocks, blocks)
    first = batch.query_start[sequence] + block * QUERY_BLOCK
    last = batch.query_start[sequence + 1] - 1
    tokens = np.minimum(first[:, None] + np.arange(QUERY_BLOCK), last[:, None])
    return Items(sequence, tokens, first, np.minimum(QUERY_BLOCK, last - first + 1))


def pair_groups(
    batch: RaggedBatch, items: Items, window: int | None, block_size: int, tile_pages: int, max_pairs: int
) -> Iterator[Pairs]:
    """All pairs of ``items``, in groups of at most ``max_pairs`` (or one item), so that partial results stay small."""
    if not len(items.sequence):
        return
    tile = block_size * tile_pages
    visible = batch.visible[items.tokens]
    end_key = visible.max(axis=1)
    first_key = np.zeros_like(end_key) if window is None else np.maximum(visible.min(axis=1) - window, 0)
    first_tile = first_key // tile
    tiles = (end_key - 1) // tile + 1 - first_tile
    order = np.argsort(-tiles, kind="stable")
    start = 0
    while start < len(order):
        sizes = np.cumsum(tiles[order[start:]])
        stop = start + max(1, int(np.searchsorted(sizes, max_pairs, side="right")))
        part = order[start:stop]
        yield _pairs(batch, items.take(part), tiles[part], first_tile[part], first_key[part], end_key[part],
                     block_size, tile_pages)  # fmt: skip
        start = stop


def _pairs(
    batch: RaggedBatch,
    items: Items,
    tiles: Ints,
    first_tile: Ints,
    first_key: Ints,
    end_key: Ints,
    block_size: int,
    tile_pages: int,
) -> Pairs:
    most = int(tiles[0])
    per_tile = np.searchsorted(-tiles, -np.arange(most), side="left")  # tiles falls: how many exceed t
    step = np.repeat(np.arange(most), per_tile)
    item = np.arange(len(step)) - np.repeat(np.cumsum(per_tile) - per_tile, per_tile)
    tile = first_tile[item] + step
    columns = tile[:, None] * tile_pages + np.arange(tile_pages)
    seen = (columns < -(-end_key[item] // block_size)[:, None]) & (columns >= (first_key[item] // block_size)[:, None])
    table = batch.block_tables[items.sequence[item][:, None], np.minimum(columns, batch.block_tables.shape[1] - 1)]
    pages = np.where(seen, table, 0).astype(np.int64)
    return Pairs(items, item, tile * tile_pages * block_size, pages, per_tile.tolist())


def visible_keys(batch: RaggedBatch, pairs: Pairs, part: slice, window: int | None, tile: int) -> Bools:
    """``[pairs in part, queries, tile]``: True where the query sees the key."""
    seen = batch.visible[pairs.items.tokens[pairs.item[part]]][:, :, None]
    keys = (pairs.first_key[part][:, None] + np.arange(tile))[:, None, :]
    return (keys < seen) if window is None else (keys < seen) & (keys >= seen - window)
