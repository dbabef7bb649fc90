"""Transfers of KV blocks over links of known width, against times worked out by hand."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.simulate.step_time import LinearStepTime
from headrace.simulate.transfers import SCHEME, Fetches, Link, Network
from headrace.simulate.worker import Population, SimulatedWorker
from shared.messages import Capacity, Fetch, Fetched, StepPlan

Flow = tuple[str, str, float, int]  # source, target, bytes, when it is asked for

LINK = Link(1e9, latency_ns=1000)  # a byte a nanosecond


def ends(fetches: list[Flow], link: Link = LINK) -> list[int]:
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
def test_each_ends_once_no_earlier_than_alone_and_no_later_than_one_after_the_other(fetches: list[Flow]) -> None:
    over = ends(fetches)
    last = max(at for *_, at in fetches) + LINK.latency_ns + sum(size for _, _, size, _ in fetches) + len(fetches)
    for (_, _, size, at), end in zip(fetches, over, strict=True):
        assert at + LINK.latency_ns + size - 1 <= end <= last


def test_twice_the_width_takes_half_the_time() -> None:
    fetches: list[Flow] = [("a", "b", 10_000, 0), ("a", "c", 6000, 0)]
    narrow, wide = (ends(fetches, Link(width, latency_ns=0)) for width in (1e9, 2e9))
    assert [2 * at for at in wide] == pytest.approx(narrow, abs=2)


# --- what plans ask for ---------------------------------------------------------------------------------------------


class Clock:
    """Calls at their times, in order."""

    def __init__(self) -> None:
        self.calls: list[tuple[int, int, Callable[[int], None]]] = []

    def at(self, when: int, call: Callable[[int], None]) -> None:
        self.calls.append((when, len(self.calls), call))

    def run(self) -> None:
        while self.calls:
            self.calls.sort(key=lambda one: one[:2])
            when, _, call = self.calls.pop(0)
            call(when)


def asked(number: int, pages: int, source: str = "a") -> Fetch:
    return Fetch(number, source, 1, [f"{SCHEME}://{source}"], [(page, page) for page in range(1, pages + 1)], 0)


def test_a_plans_fetches_are_answered_with_their_bytes_and_times() -> None:
    clock, answers = Clock(), list[Fetched]()
    fetches = Fetches(LINK, clock.at, answers.append)
    capacity = Capacity("m", 400, 16, 50, 997, [], kv_bytes_per_token=100)
    target = SimulatedWorker("b", capacity, LinearStepTime(1e6, 0), Population([]), incarnation=7)
    fetches.begin(target, StepPlan(3, "b", 7, 1, fetches=[asked(1, 2), asked(2, 4, "c")]), 500)
    clock.run()
    first = 2 * 2 * 16 * 100  # the two share b's link
    assert answers == [
        Fetched(3, "b", 7, 1, "", 3200, (1000 + first) // 1000, SCHEME),
        Fetched(3, "b", 7, 2, "", 6400, (1000 + first + 3200) // 1000, SCHEME),
    ]


def test_one_that_a_plan_drops_is_answered_as_failed_and_one_that_is_over_no_more() -> None:
    clock, answers = Clock(), list[Fetched]()
    fetches = Fetches(LINK, clock.at, answers.append)
    capacity = Capacity("m", 400, 16, 50, 997, [], kv_bytes_per_token=100)
    target = SimulatedWorker("b", capacity, LinearStepTime(1e6, 0), Population([]))
    fetches.begin(target, StepPlan(3, "b", 1, 1, fetches=[asked(1, 2)]), 0)
    fetches.begin(target, StepPlan(3, "b", 1, 2, drop_fetches=[1], fetches=[asked(2, 2)]), 2000)
    assert [(one.fetch, one.bytes) for one in answers] == [(1, 0)] and answers[0].reason
    clock.run()
    assert [(one.fetch, one.reason, one.us) for one in answers[1:]] == [(2, "", (1000 + 3200) // 1000)]
    fetches.begin(target, StepPlan(3, "b", 1, 3, drop_fetches=[1, 2]), 9000)
    clock.run()
    assert len(answers) == 2
