"""Copies of pages in runs that one launch may do in any order, and the host memory that pages go to."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rehearsal_port import RehearsalPort

from worker.device.pages import HostPlaces, groups

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


def test_host_memory_is_pinned_in_pieces_that_are_rounded_up_by_little(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, int]] = []

    class Port(RehearsalPort):
        def pinned(self, shape: list[int], dtype: torch.dtype) -> torch.Tensor:  # type: ignore[override]
            asked.append((shape[0], shape[1]))
            return super().pinned(shape, dtype)

    monkeypatch.setattr("worker.device.pages.PIECE_BYTES", 1 << 10)
    places = HostPlaces(Port(), 70, 48)  # 21 of them are 1008 bytes
    assert asked == [(21, 48)] * 3 + [(7, 48)]
    for place in range(70):
        places[place].fill_(place)
    assert [set(places[place].tolist()) for place in range(70)] == [{place} for place in range(70)]
    HostPlaces(Port(), 2, 3000)
    assert asked[4:] == [(1, 3000), (1, 3000)]
