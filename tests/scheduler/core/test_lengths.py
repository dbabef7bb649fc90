"""Expected output lengths: from the prior to what history says, conditional on what is generated already."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from scheduler.core.lengths import OutputLengths


def test_without_history_a_share_of_the_maximum_is_expected() -> None:
    assert OutputLengths(0.5).expected_left(0, 1000) == 500


def test_history_outweighs_the_prior() -> None:
    lengths = OutputLengths(0.7)
    for _ in range(500):
        lengths.observe(50)
    assert 40 <= lengths.expected_left(0, 4000) <= 180


def test_the_expectation_is_conditional_on_being_longer_than_now() -> None:
    lengths = OutputLengths(0.5)
    for index in range(1000):
        lengths.observe(20 if index % 2 else 1000)
    assert lengths.expected_left(0, 4000) < 300
    assert 700 <= lengths.expected_left(100, 4000) <= 1400


def test_old_observations_fade() -> None:
    lengths = OutputLengths(0.5)
    for _ in range(2000):
        lengths.observe(1000)
    for _ in range(20_000):
        lengths.observe(10)
    assert lengths.expected_left(0, 4000) < 30


@given(st.lists(st.integers(1, 1 << 21), max_size=60), st.integers(0, 1 << 21), st.integers(0, 1 << 20))
def test_always_within_bounds(history: list[int], generated: int, max_left: int) -> None:
    lengths = OutputLengths()
    for length in history:
        lengths.observe(length)
    assert min(1, max_left) <= lengths.expected_left(generated, max_left) <= max_left
