"""Copies of pages in runs that one launch may do in any order."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from worker.device.pages import groups

PAGES = 6


@given(st.lists(st.tuples(st.integers(0, PAGES - 1), st.integers(0, PAGES - 1)), max_size=12))
def test_runs_leave_what_copies_one_by_one_leave(moves: list[tuple[int, int]]) -> None:
    expected = list(range(PAGES))
    for source, target in moves:
        expected[target] = expected[source]
    for backwards in (False, True):
        pages = list(range(PAGES))
        for run in groups(moves):
            for source, target in reversed(run) if backwards else run:
                pages[target] = pages[source]
        assert pages == expected


def test_copies_of_fresh_targets_are_one_run() -> None:
    assert groups([(1, 5), (1, 6), (2, 7)]) == [[(1, 5), (1, 6), (2, 7)]]
    assert groups([]) == []
