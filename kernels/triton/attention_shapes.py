"""How attention is cut into programs: the tile of a shape, and the grid of a batch. Pure, so that what a GPU will be
given can be tested without one."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from kernels.contract import Geometry

FIXED_PIECE_KEYS = 512
"""Keys of a piece where pieces lie at fixed places: a batch-invariant kernel's unit of work."""

LEAST_PIECE_KEYS = 256
"""Keys of a piece elsewhere, at least: fewer, and writing and merging pieces costs more than it hides."""

RESIDENT = 2
"""Programs that a multiprocessor holds at once: what their tiles leave room for."""

ENOUGH = 0.85
"""Of the best use of the device that any number of splits gives: the fewest splits that reach it are taken."""

LONGEST_PIECE_KEYS = 4096
"""Where blocks alone fill the device: a longer sequence is shared, so that none runs on long after the others."""

MOST_PROGRAMS_PER_SM = 6
"""Of a grid that is split: its bounds may be far above what there is to do, and a program that finds nothing to do
still waits for its place and for two reads."""

MOST_PARTIAL_BYTES = 128 << 20
"""Of a launch's pieces that lie at fixed places, which long keys have many of: with more, blocks are not split, which
changes no bit. (Other pieces are few, since programs are.)"""

LARGEST_ROWS = 128
"""Of a tile: longer queries make no other one."""

MERGED_ROWS, MERGING_WARPS = 16, 4
"""Of a program of the second pass."""


def power_of_two(least: int) -> int:
    """The smallest power of two that is not less."""
    return 1 << max(0, least - 1).bit_length()


@dataclass(frozen=True, slots=True)
class Tile:
    """The compile-time sizes of a program."""

    rows: int  # query rows of a block: tokens times heads of a group
    keys: int  # of a tile; fewer than threads, so that each thread reads the pages of its own rows
    warps: int
    stages: int  # depth of the software pipeline: tiles on their way, and the one that is computed with

    def queries(self, group: int) -> int:
        """Query tokens of a block."""
        return self.rows // group


def decode_tile(geometry: Geometry, compute_bytes: int) -> Tile:
    """For a token or a few of each sequence: bound by memory, so few rows and as many bytes under way as fit."""
    width = power_of_two(geometry.head_dim)
    rows = max(16, power_of_two(geometry.group))
    if compute_bytes == 4:
        return Tile(rows, 32 if width <= 128 else 16, 4, 2)
    many = rows >= 64  # rows take what memory has to do without
    return Tile(rows, 64 if width <= 128 else 32, 8 if many else 4, 2 if many else 3)


def chunk_tile(
    geometry: Geometry, compute_bytes: int, stored_bytes: int, max_query: int, warpgroups: bool = True
) -> Tile:
    """For a prompt's chunk: bound by arithmetic, so as many rows as registers hold, but no more than there are.

    ``warpgroups``: the card multiplies by warpgroups (Hopper), out of shared memory. Others hold queries in registers.
    Where pages hold fewer bits, so do all what those become.
    """
    width = power_of_two(geometry.head_dim)
    most = (32 if compute_bytes == 4 else LARGEST_ROWS) // (1 if width <= 128 else 2)
    rows = max(16, power_of_two(geometry.group), min(most, power_of_two(max_query * geometry.group)))
    if compute_bytes == 4:
        return Tile(rows, 32 if width <= 128 else 16, 8, 2)
    narrow = stored_bytes < compute_bytes
    if narrow and (width > 128 or not warpgroups):
        rows = max(rows // 2, 16, power_of_two(geometry.group))
    if not warpgroups:
        spread = rows >= 128 or width > 128 or narrow
        return Tile(rows, 64 if width <= 64 else 32, 8 if spread else 4, 2)
    spread = rows >= 128 or (width > 128 and (rows >= 64 or narrow))
    return Tile(rows, 64 if width <= (64 if narrow else 128) else 32, 8 if spread else 4, 2)


def invariant_tile(geometry: Geometry, compute_bytes: int, stored_bytes: int) -> Tile:
    """For everything, so that a query's sums are made in one order in whatever batch it is. Registers hold the sums of
    a piece beside those of all pieces before it."""
    width = power_of_two(geometry.head_dim)
    if compute_bytes == 4:
        return chunk_tile(geometry, compute_bytes, compute_bytes, 1)
    rows = max(power_of_two(geometry.group), 64 if width <= 128 else 32)
    spread = rows >= 128 or width > 128 or stored_bytes < compute_bytes
    return Tile(rows, 64 if width <= 64 else 32, 8 if spread else 4, 3)


@dataclass(frozen=True, slots=True)
class Launch:
    """One launch of the kernel: the sequences of ``fewest .. most`` query tokens."""

    tile: Tile
    queries: int  # query tokens of a block
    search: bool  # whether sequences can have several blocks
    blocks: int
    fewest: int
    most: int
    splits: int  # programs that share a block's pieces; 1: no second pass
    piece_tiles: int
    slots: int  # pieces that a block can have, where they are merged in a second pass


def launches(
    geometry: Geometry,
    compute_bytes: int,
    stored_bytes: int,
    *,
    tokens: int,
    sequences: int,
    max_query: int,
    max_keys: int,
    window: int | None,
    num_sms: int,
    invariant: bool,
    least_query: int = 1,
    warpgroups: bool = True,
) -> list[Launch]:
    """What a batch of these bounds takes. ``least_query``: no sequence that has queries has fewer.

    A batch of decodes is one launch, with a block for each sequence; so are chunks alone. A batch of both is two, each
    with tiles of its own (the same ones if ``invariant``), which pass over each other's sequences.
    """
    few = max(1, 16 // geometry.group)
    if invariant:
        small = large = invariant_tile(geometry, compute_bytes, stored_bytes)
    else:
        small = decode_tile(geometry, compute_bytes)
        large = chunk_tile(geometry, compute_bytes, stored_bytes, max_query, warpgroups)
    keys = max_keys if window is None else min(max_keys, window + large.queries(geometry.group))
    wants = []
    if least_query <= few:
        wants.append((small, few, False, sequences, 1, few))
    if max_query > few:
        queries = large.queries(geometry.group)
        wants.append((large, queries, True, tokens // queries + sequences, few + 1, max_query))
    found = []
    for tile, queries, search, blocks, fewest, most in wants:
        piece_keys = FIXED_PIECE_KEYS if invariant else LEAST_PIECE_KEYS
        # A window may begin inside a piece at a fixed place.
        pieces = max(1, -(-keys // piece_keys)) + (invariant and window is not None)
        programs = max(1, blocks * geometry.num_kv_heads)
        splits = split_count(programs, pieces, keys, num_sms)
        slots = pieces if invariant else splits
        row_bytes = 4 * power_of_two(geometry.head_dim)
        if invariant and programs * slots * queries * geometry.group * row_bytes > MOST_PARTIAL_BYTES:
            splits = 1
        found.append(Launch(tile, queries, search, blocks, fewest, most, splits, piece_keys // tile.keys, slots))
    return found


def kinds_of_launch(
    geometry: Geometry, compute_bytes: int, stored_bytes: int, *, invariant: bool, warpgroups: bool = True
) -> list[Launch]:
    """One of each sort that :func:`launches` may ask for, whole and in pieces: what there is to compile for a layer."""
    few = max(1, 16 // geometry.group)
    found: dict[tuple[Tile, int, bool], Launch] = {}
    for max_query in (1, few + 1, *(1 << power for power in range(1, LARGEST_ROWS.bit_length()))):
        for one in launches(
            geometry, compute_bytes, stored_bytes, tokens=max_query, sequences=1, max_query=max_query, max_keys=1,
            window=None, num_sms=1, invariant=invariant, least_query=max_query, warpgroups=warpgroups,
        ):  # fmt: skip
            found.setdefault((one.tile, one.queries, one.search), one)
    return [again for one in found.values() for again in (one, replace(one, splits=2, slots=max(2, one.slots)))]


def split_count(programs: int, most: int, keys: int, num_sms: int) -> int:
    """Programs to share a block's keys, at most ``most``, where ``programs`` is what there is unsplit.

    After FlashAttention's ``num_splits_heuristic``: the last wave of programs should not leave much of the device idle.
    """
    most = max(1, min(most, MOST_PROGRAMS_PER_SM * num_sms // programs))

    def use(splits: int) -> float:
        waves = programs * splits / (RESIDENT * num_sms)
        return waves / math.ceil(waves)

    best = max(use(splits) for splits in range(1, most + 1))
    enough = next(splits for splits in range(1, most + 1) if use(splits) >= ENOUGH * best)
    return min(most, max(enough, -(-keys // LONGEST_PIECE_KEYS)))
