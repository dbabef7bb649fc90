"""Free, referenced, cached: each block is in one state, and content is found again as long as it lasts."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler.core.blocks import BlockPool


def test_blocks_are_handed_out_once() -> None:
    pool = BlockPool(4)
    taken = pool.allocate(4)
    assert taken is not None and sorted(taken) == [1, 2, 3, 4]
    assert pool.allocate(1) is None and pool.num_used == 4
    assert pool.release(taken[:2]) == 2
    with pytest.raises(ValueError, match="free already"):
        pool.release(taken[:1])
    with pytest.raises(ValueError, match="is free"):
        pool.share(taken[:1])


def test_released_content_is_found_and_used_again() -> None:
    pool = BlockPool(4)
    table = pool.allocate(2) or []
    pool.register(table[0], b"a")
    pool.register(table[1], b"b")
    pool.release(table)
    assert pool.num_free == 4 and pool.num_cached == 2
    assert pool.match([b"a", b"b", b"c"]) == table
    assert pool.num_unreferenced(table) == 2
    pool.share(table)
    assert pool.num_free == 2 and pool.num_cached == 0
    pool.check([table])


def test_a_match_ends_at_the_first_miss() -> None:
    pool = BlockPool(4)
    table = pool.allocate(3) or []
    for block, content in zip(table, (b"a", b"x", b"c"), strict=True):
        pool.register(block, content)
    assert pool.match([b"a", b"b", b"c"]) == table[:1]


def test_free_blocks_go_before_cached_ones_and_leaves_before_parents() -> None:
    pool = BlockPool(3)
    table = pool.allocate(2) or []
    pool.register(table[0], b"parent")
    pool.register(table[1], b"leaf")
    pool.release(table)
    pool.allocate(1)
    assert pool.evictions == 0
    pool.allocate(1)
    assert pool.evictions == 1 and pool.match([b"parent"]) and not pool.match([b"leaf"])


def test_use_refreshes_what_is_cached() -> None:
    pool = BlockPool(2)
    first, second = (pool.allocate(1) or [])[0], (pool.allocate(1) or [])[0]
    pool.register(first, b"1")
    pool.register(second, b"2")
    pool.release([first])
    pool.release([second])
    pool.share([first])
    pool.release([first])
    assert pool.allocate(1) == [second]


def test_equal_content_is_indexed_once() -> None:
    pool = BlockPool(2)
    first, second = pool.allocate(2) or []
    pool.register(first, b"same")
    pool.register(second, b"same")
    assert pool.match([b"same"]) == [first]
    pool.release([second])
    assert pool.num_cached == 0
    pool.check([[first]])


@given(st.lists(st.tuples(st.sampled_from(["take", "share", "drop", "index"]), st.integers(0, 9)), max_size=80))
def test_the_states_never_mix(ops: list[tuple[str, int]]) -> None:
    pool = BlockPool(6)
    tables: list[list[int]] = []
    for kind, number in ops:
        if kind == "take":
            got = pool.allocate(number % 4)
            if got:
                tables.append(got)
        elif kind == "share" and tables:
            chosen = list(tables[number % len(tables)])
            pool.share(chosen)
            tables.append(chosen)
        elif kind == "drop" and tables:
            pool.release(tables.pop(number % len(tables)))
        elif kind == "index" and tables:
            for place, block in enumerate(tables[number % len(tables)]):
                pool.register(block, bytes([number, place]))
        pool.check(tables)


def test_news_are_what_was_indexed_and_still_is() -> None:
    pool = BlockPool(2)
    first, second = pool.allocate(2) or []
    pool.register(first, b"1")
    pool.register(second, b"2")
    pool.release([first])
    assert pool.allocate(1) == [first]  # before anybody was told
    assert pool.take_news() == [(second, b"2")] and pool.take_news() == []
    pool.register(first, b"3")
    pool.adopt([])
    assert pool.take_news() == [(first, b"3")]


digests = st.integers(0, 7).map(lambda number: bytes([number]))


@given(st.lists(st.tuples(st.integers(-1, 9), digests), max_size=20), st.lists(st.integers(0, 4), max_size=12))
def test_a_pool_that_takes_blocks_over_hits_just_those(cached: list[tuple[int, bytes]], counts: list[int]) -> None:
    """Whatever a worker says: blocks that there are not, twice the same one, content that two have."""
    pool = BlockPool(6)
    pool.adopt(cached)
    pool.check([])
    assert pool.num_free == 6 and pool.take_news() == []
    holds: dict[int, bytes] = {}
    for block, content in cached:
        if 1 <= block <= 6 and block not in holds and content not in holds.values():
            holds[block] = content
    tables: list[list[int]] = []
    for content in (bytes([number]) for number in range(8)):
        assert pool.match([content]) == [block for block, held in holds.items() if held == content]
    for place, count in enumerate(counts):  # use: some are hit again, the others are given out, oldest first
        hits = pool.match([bytes([place % 8])])
        pool.share(hits)
        fresh = pool.allocate(count) or []
        assert not set(fresh) & set(hits)
        for block in fresh:
            holds.pop(block, None)
        tables.append(hits + fresh)
        pool.check(tables)
        for content in (bytes([number]) for number in range(8)):
            assert pool.match([content]) == [block for block, held in holds.items() if held == content]
        if place % 3 == 2:
            pool.release(tables.pop(0))
    for table in tables:
        pool.release(table)
    pool.check([])


def test_the_oldest_of_what_was_taken_over_goes_first() -> None:
    pool = BlockPool(3)
    pool.adopt([(2, b"old"), (1, b"new")])
    assert pool.allocate(2) == [3, 2] and pool.match([b"new"]) == [1]
