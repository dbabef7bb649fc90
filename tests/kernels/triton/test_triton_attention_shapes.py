from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kernels.contract import Geometry
from kernels.triton.attention_shapes import (
    FIXED_PIECE_KEYS,
    MOST_PARTIAL_BYTES,
    MOST_PROGRAMS_PER_SM,
    RESIDENT,
    Launch,
    chunk_tile,
    decode_tile,
    invariant_tile,
    kinds_of_launch,
    launches,
    power_of_two,
    split_count,
)

LLAMA_8B = Geometry(32, 8, 128, 16)
H200 = 132

GEOMETRIES = st.builds(
    lambda kv_heads, group, sixteenths: Geometry(kv_heads * group, kv_heads, 16 * sixteenths, 16),
    st.integers(1, 16), st.integers(1, 128), st.integers(1, 16),
)  # fmt: skip


def cut(geometry: Geometry = LLAMA_8B, **bounds: Any) -> list[Launch]:
    given = {"tokens": 32, "sequences": 32, "max_query": 1, "max_keys": 1024, "window": None, "num_sms": H200,
             "invariant": False, **bounds}  # fmt: skip
    return launches(geometry, 2, 2, **given)


@given(GEOMETRIES, st.sampled_from([2, 4]), st.sampled_from([1, 2, 4]), st.integers(1, 9000))
def test_tiles_hold_what_they_must(geometry: Geometry, compute: int, stored: int, max_query: int) -> None:
    for tile in (
        decode_tile(geometry, compute),
        chunk_tile(geometry, compute, stored, max_query),
        chunk_tile(geometry, compute, stored, max_query, warpgroups=False),
        invariant_tile(geometry, compute, stored),
    ):
        assert tile.rows >= max(16, geometry.group), "a matrix instruction has 16 rows, and a token's group is together"
        assert tile.queries(geometry.group) >= 1
        assert tile.rows == power_of_two(tile.rows) and tile.keys == power_of_two(tile.keys)
        assert tile.keys < 32 * tile.warps, "pages are read by each thread for its own rows"
        assert FIXED_PIECE_KEYS % tile.keys == 0
        # Keys and values of all stages, and a block's queries or weights: of 99 KiB.
        pages = 2 * tile.stages * tile.keys * power_of_two(geometry.head_dim) * min(stored, compute)
        assert pages <= 96 << 10


@given(GEOMETRIES, st.integers(1, 300), st.integers(1, 3000), st.integers(1, 1 << 17), st.booleans(),
       st.one_of(st.none(), st.integers(1, 5000)), st.integers(1, 200))  # fmt: skip
def test_every_sequence_is_done_once_and_grids_stay_small(
    geometry: Geometry, sequences: int, max_query: int, max_keys: int, invariant: bool, window: int | None, sms: int
) -> None:
    tokens = sequences + max_query - 1  # one long sequence and decodes
    found = cut(geometry, tokens=tokens, sequences=sequences, max_query=max_query, max_keys=max_keys,
                invariant=invariant, window=window, num_sms=sms)  # fmt: skip
    for count in {1, max_query // 2, max_query} - {0}:
        assert sum(one.fewest <= count <= one.most for one in found) == 1
    for one in found:
        programs = one.blocks * geometry.num_kv_heads
        assert one.queries * geometry.group <= one.tile.rows
        assert 1 <= one.splits <= one.slots
        assert one.splits == 1 or programs * one.splits <= MOST_PROGRAMS_PER_SM * sms
        if one.search:  # sequences' blocks begin at query_start // queries + sequence
            assert one.blocks >= (tokens - 1) // one.queries + sequences
        else:
            assert one.most <= one.queries and one.blocks == sequences
        if invariant:
            assert one.tile == invariant_tile(geometry, 2, 2)
            assert one.piece_tiles * one.tile.keys == FIXED_PIECE_KEYS
            keys = max_keys if window is None else min(max_keys, window + one.queries - 1)
            pieces = (
                -(-keys // FIXED_PIECE_KEYS)
                if window is None
                else (keys + FIXED_PIECE_KEYS - 2) // FIXED_PIECE_KEYS + 1
            )
            assert one.slots >= min(pieces, -(-max_keys // FIXED_PIECE_KEYS)), "as many as its keys can touch"


@given(GEOMETRIES, st.sampled_from([2, 4]), st.sampled_from([1, 2, 4]), st.integers(1, 3000), st.integers(1, 1 << 17),
       st.booleans(), st.booleans(), st.integers(1, 200))  # fmt: skip
def test_no_batch_has_a_launch_of_another_sort(
    geometry: Geometry, compute: int, stored: int, max_query: int, keys: int, invariant: bool, warps: bool, sms: int
) -> None:
    def sort(one: Launch) -> tuple[object, ...]:
        return one.tile, one.queries, one.search, one.splits > 1, one.piece_tiles

    known = {
        sort(one) for one in kinds_of_launch(geometry, compute, stored, invariant=invariant, warpgroups=warps)
    }  # fmt: skip
    found = launches(geometry, compute, stored, tokens=2 + max_query, sequences=3, max_query=max_query, max_keys=keys,
                     window=None, num_sms=sms, invariant=invariant, warpgroups=warps)  # fmt: skip
    assert {sort(one) for one in found} <= known
    assert len(known) <= 12, "each is some seconds of a compiler"


def test_a_batch_of_one_kind_is_one_launch() -> None:
    assert [one.search for one in cut()] == [False]
    chunks = {"tokens": 2048, "sequences": 4, "max_query": 512, "max_keys": 2048}
    assert [one.search for one in cut(**chunks, least_query=512)] == [True]
    assert [one.search for one in cut(**chunks)] == [False, True]


@pytest.mark.parametrize(
    "sequences, keys, splits",
    [(32, 1024, 1), (64, 1024, 1), (256, 1024, 1), (16, 1024, 2), (1, 1024, 4), (1, 8192, 28), (40, 2048, 2)],
)
def test_decodes_are_split_where_their_blocks_do_not_fill_the_device(sequences: int, keys: int, splits: int) -> None:
    (one,) = cut(sequences=sequences, tokens=sequences, max_keys=keys)
    assert one.splits == splits


def test_a_prompts_chunk_is_split_where_its_context_is_long_and_it_is_short() -> None:
    (one,) = cut(tokens=64, sequences=1, max_query=64, max_keys=32768, least_query=64)
    assert one.splits > 1
    (one,) = cut(tokens=8192, sequences=1, max_query=8192, max_keys=8192, least_query=8192)
    assert one.splits == 1


def test_pieces_at_fixed_places_take_no_more_memory_than_there_is_for_them() -> None:
    def partial_bytes(sequences: int, keys: int) -> int:
        (one,) = cut(sequences=sequences, tokens=sequences, max_keys=keys, invariant=True)
        rows = one.blocks * LLAMA_8B.num_kv_heads * one.slots * one.queries * LLAMA_8B.group
        return 4 * LLAMA_8B.head_dim * rows if one.splits > 1 else 0

    assert partial_bytes(1, 1 << 17) > 0, "one long sequence is shared"
    assert all(partial_bytes(1 << n, 1 << 17) <= MOST_PARTIAL_BYTES for n in range(9))


def test_a_window_bounds_what_is_split() -> None:
    (wide,) = cut(sequences=1, tokens=1, max_keys=32768)
    (narrow,) = cut(sequences=1, tokens=1, max_keys=32768, window=512)
    assert narrow.splits < wide.splits


@given(st.integers(1, 5000), st.integers(1, 64), st.integers(1, 1 << 17), st.integers(1, 200))
def test_splits_use_the_device_nearly_as_well_as_any_number_of_them(
    programs: int, most: int, keys: int, sms: int
) -> None:
    def idle(splits: int) -> float:
        waves = programs * splits / (RESIDENT * sms)
        return 1 - waves / -(-programs * splits // (RESIDENT * sms))

    found = split_count(programs, most, keys, sms)
    allowed = [
        splits for splits in range(1, most + 1) if splits == 1 or programs * splits <= MOST_PROGRAMS_PER_SM * sms
    ]
    assert found in allowed
    if keys <= 4096:
        assert 1 - idle(found) >= 0.84 * max(1 - idle(splits) for splits in allowed)
