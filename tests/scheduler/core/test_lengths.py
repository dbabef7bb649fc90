"""Expected output lengths: from the prior to what history says, conditional on what is generated already."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from scheduler.core.lengths import OutputLengths, rank_of


def test_without_history_a_share_of_the_maximum_is_expected() -> None:
    assert OutputLengths(0.5).expected_left(0.5, 0, 1000) == 500
    assert OutputLengths(0.5).expected_left(0.9, 0, 1000) == 900


def test_history_outweighs_the_prior() -> None:
    lengths = OutputLengths()
    for _ in range(500):
        lengths.observe(50)
    assert 40 <= lengths.left_at(0.7, 0, 4000) <= 180


def test_the_expectation_is_conditional_on_being_longer_than_now() -> None:
    lengths = OutputLengths()
    for index in range(1000):
        lengths.observe(20 if index % 2 else 1000)
    assert lengths.left_at(0.4, 0, 4000) < 300
    assert 700 <= lengths.left_at(0.5, 100, 4000) <= 1400


def test_old_observations_fade() -> None:
    lengths = OutputLengths()
    for _ in range(2000):
        lengths.observe(1000)
    for _ in range(20_000):
        lengths.observe(10)
    assert lengths.left_at(0.5, 0, 4000) < 30


def test_all_together_are_expected_to_be_as_long_as_what_was_observed() -> None:
    """Each sequence at a quantile of its own: among any hundred in a row, ends are spread as lengths are."""
    observed = [round(1.004 ** (index * 677 % 1500)) for index in range(1500)]  # 1 to 400, heavy-tailed, mixed
    mean = sum(observed) / len(observed)
    for caution, low, high in ((0.5, 0.85, 1.25), (0.55, 1.0, 1.45), (0.8, 1.8, 3.3)):
        lengths = OutputLengths(caution)
        for length in observed:
            lengths.observe(length)
        for start in (0, 777, 123_456):
            expected = [lengths.expected_left(rank_of(start + index), 0, 500) for index in range(100)]
            assert low < sum(expected) / 100 / mean < high
            assert min(expected) < mean / 5 and max(expected) > 3 * mean


@given(st.integers(0, 1 << 40))
def test_consecutive_ranks_are_spread_evenly(start: int) -> None:
    ranks = sorted(rank_of(start + index) for index in range(34))
    assert ranks[0] >= 0 and ranks[-1] < 1
    assert max(b - a for a, b in pairwise(ranks)) < 2.5 / 34


@given(
    st.lists(st.integers(1, 1 << 21), max_size=60),
    st.floats(0, 1, exclude_max=True),
    st.integers(0, 1 << 21),
    st.integers(0, 1 << 20),
)
def test_always_within_bounds(history: list[int], rank: float, generated: int, max_left: int) -> None:
    lengths = OutputLengths()
    for length in history:
        lengths.observe(length)
    assert min(1, max_left) <= lengths.expected_left(rank, generated, max_left) <= max_left
