"""When refused clients are told to come back."""

from __future__ import annotations

from shared.retry import MAX_RETRY_S, MIN_RETRY_S, UNKNOWN_RATE_S, retry_after_s


def test_it_is_the_time_in_which_what_waits_is_served() -> None:
    times = [retry_after_s(waiting, 10.0, "req-a") for waiting in (100, 200, 400)]
    assert times == sorted(times)
    for waiting, seconds in zip((100, 200, 400), times, strict=True):
        assert waiting / 10 <= seconds <= 1.25 * waiting / 10 + 1


def test_it_stays_within_a_second_and_a_minute_whatever_the_figures() -> None:
    for waiting, rate in ((0, 5.0), (1, 1e9), (10**9, 1e-9), (1000, 0.0), (0, 0.0)):
        for key in ("", "req-a", "req-b", "\ud800"):
            assert MIN_RETRY_S <= retry_after_s(waiting, rate, key) <= MAX_RETRY_S


def test_clients_are_spread_and_each_is_told_the_same_again() -> None:
    keys = [f"req-{index}" for index in range(200)]
    told = [retry_after_s(200, 10.0, key) for key in keys]
    assert told == [retry_after_s(200, 10.0, key) for key in keys]
    assert set(told) == set(range(20, 26))
    assert max(told.count(seconds) for seconds in set(told)) < 80
    assert {retry_after_s(1, 10.0, key) for key in keys} == {1, 2}


def test_without_a_measured_rate_it_is_a_few_seconds() -> None:
    assert UNKNOWN_RATE_S <= retry_after_s(1000, 0.0, "req-a") <= UNKNOWN_RATE_S + 1
