"""Seconds that count: those in which the process ran."""

from __future__ import annotations

from gateway.awake_clock import AwakeClock


def test_a_gap_counts_no_more_than_a_reading_may_be_late() -> None:
    clock = AwakeClock(1.5)
    assert clock.read(100.0) == 0.0
    assert clock.read(101.0) == 1.0
    assert clock.read(161.0) == 2.5
    assert clock.read(160.0) == 2.5, "time does not run backwards"
    assert clock.read(162.0) == 3.5
