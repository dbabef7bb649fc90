"""Workloads are pure functions of their seed."""

from __future__ import annotations

import pytest

from headrace.simulate.workload import LENGTHS, Request, merged, prefixed, stream
from shared.messages import unpack_tokens


@pytest.mark.parametrize("name", sorted(LENGTHS))
def test_a_seed_gives_one_workload(name: str) -> None:
    made = [stream(LENGTHS[name], 50, seed, 3.0, "bursty") for seed in (1, 1, 2)]
    assert made[0] == made[1]
    assert [one.at_ns for one in made[0]] != [one.at_ns for one in made[2]]


@pytest.mark.parametrize("name", sorted(LENGTHS))
@pytest.mark.parametrize("longest", [64, 1 << 30])
def test_prompt_and_output_fit(name: str, longest: int) -> None:
    for one in stream(LENGTHS[name], 200, 5, n=2, longest=longest):
        assert one.prompt_len >= 1 and one.prompt_len + one.max_tokens <= longest
        assert len(one.outputs) == 2 and all(1 <= output <= one.max_tokens for output in one.outputs)


@pytest.mark.parametrize("arrivals", ["poisson", "bursty", "steady"])
def test_arrivals_come_at_their_rate(arrivals: str) -> None:
    times = [one.at_ns for one in stream(LENGTHS["uniform"], 4000, 1, 20.0, arrivals)]
    assert times == sorted(times)
    assert 4000 / (times[-1] / 1e9) == pytest.approx(20, rel=0.15)


def test_equal_segments_are_equal_tokens_and_own_ones_are_not() -> None:
    first, second = Request(0, ((7, 4), (0, 3)), 5, (5,)), Request(0, ((7, 4), (0, 2)), 5, (5,))
    assert unpack_tokens(first.prompt(100)) == [7, 7, 7, 7, 100, 100, 100]
    assert unpack_tokens(second.prompt(101)) == [7, 7, 7, 7, 101, 101]


def test_prefixes_are_shared_by_group() -> None:
    groups = {one.segments[0] for one in stream(prefixed(4, 100, 10, 10), 100, 1)}
    assert groups == {(group, 100) for group in (1, 2, 3, 4)}


def test_streams_merge_by_arrival() -> None:
    both = merged(
        stream(LENGTHS["chat"], 30, 1, 5.0, tenant="a"), stream(LENGTHS["chat"], 30, 1, 5.0, tenant="b")
    )  # fmt: skip
    assert [one.at_ns for one in both] == sorted(one.at_ns for one in both)
    assert {one.tenant for one in both} == {"a", "b"}
