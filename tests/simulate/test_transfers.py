"""Transfers of KV blocks over links of known width, against times worked out by hand."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.simulate.transfers import Link, Network

Fetch = tuple[str, str, float, int]  # source, target, bytes, when it is asked for

LINK = Link(1e9, latency_ns=1000)  # a byte a nanosecond


def ends(fetches: list[Fetch], link: Link = LINK) -> list[int]:
    """When each is over."""
    network = Network(link)
    over = [0] * len(fetches)
    waiting = sorted(range(len(fetches)), key=lambda number: fetches[number][3])
    while waiting or network.next_ns() is not None:
        due = network.next_ns()
        begins = fetches[waiting[0]][3] if waiting else None
        now = min(at for at in (due, begins) if at is not None)
        for number in network.ended(now):
            over[number] = now
        while waiting and fetches[waiting[0]][3] <= now:
            number = waiting.pop(0)
            source, target, size, _ = fetches[number]
            network.start(number, source, target, size, now)
    return over


def test_one_alone_has_the_link() -> None:
    assert ends([("a", "b", 5000, 200)]) == [200 + 1000 + 5000]


def test_two_that_share_a_link_have_half_each() -> None:
    """Two sources, one target: the shorter one ends after twice its time, then the other has the link alone."""
    assert ends([("a", "c", 1000, 0), ("b", "c", 3000, 0)]) == [1000 + 2000, 1000 + 4000]
    assert ends([("a", "b", 1000, 0), ("a", "c", 3000, 0)]) == [1000 + 2000, 1000 + 4000]


def test_directions_and_other_links_do_not_meet() -> None:
    assert ends([("a", "b", 1000, 0), ("b", "a", 1000, 0), ("c", "d", 1000, 0)]) == [2000] * 3


def test_one_that_comes_later_slows_down_what_goes_on() -> None:
    """Half of the first is over when the second one's bytes begin."""
    assert ends([("a", "c", 2000, 0), ("b", "c", 5000, 1000)]) == [1000 + 1000 + 2000, 2000 + 2000 + 4000]


def test_one_that_is_stopped_leaves_the_link_to_the_other() -> None:
    network = Network(LINK)
    network.start(1, "a", "c", 4000, 0)
    network.start(2, "b", "c", 4000, 0)
    assert network.ended(1000) == [] and network.next_ns() == 1000 + 8000
    assert network.stop(1, 3000) and not network.stop(1, 3000)
    assert network.next_ns() == 3000 + 3000
    assert network.ended(6000) == [2] and network.next_ns() is None
    network.start(3, "a", "c", 4000, 6000)
    assert network.stop(3, 6500) and network.next_ns() is None, "before its first byte"


def test_a_fetch_of_nothing_takes_the_latency() -> None:
    (over,) = ends([("a", "b", 0, 0)])
    assert 1000 <= over <= 1001


@given(
    st.lists(
        st.tuples(st.sampled_from("abcd"), st.sampled_from("efgh"), st.integers(1, 10**7), st.integers(0, 10**7)),
        min_size=1, max_size=12,
    )
)  # fmt: skip
def test_each_ends_once_no_earlier_than_alone_and_no_later_than_one_after_the_other(fetches: list[Fetch]) -> None:
    over = ends(fetches)
    last = max(at for *_, at in fetches) + LINK.latency_ns + sum(size for _, _, size, _ in fetches) + len(fetches)
    for (_, _, size, at), end in zip(fetches, over, strict=True):
        assert at + LINK.latency_ns + size - 1 <= end <= last


def test_twice_the_width_takes_half_the_time() -> None:
    fetches: list[Fetch] = [("a", "b", 10_000, 0), ("a", "c", 6000, 0)]
    narrow, wide = (ends(fetches, Link(width, latency_ns=0)) for width in (1e9, 2e9))
    assert [2 * at for at in wide] == pytest.approx(narrow, abs=2)
