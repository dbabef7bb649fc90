"""How long a silence is: over the time in which the gateway listened. With a clock of the test's own."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from in_process_bus import InProcessBus

from gateway.choice_text import NoText
from gateway.config import GatewayConfig
from gateway.dispatch import Dispatch, Part
from gateway.flight import Flight
from gateway.metrics import GatewayMetrics
from shared.messages import ModelInfo, Sampling, SchedulerBeat, Submit, pack_tokens

STALL_S = 7.0


class NothingToDetokenise:
    def feed(self, tokens: Iterable[int]) -> str:
        return ""

    def finish(self) -> str:
        return ""


class Listening:
    """A gateway's dispatch with one open request; the scheduler was last heard at second 100."""

    def __init__(self) -> None:
        metrics = GatewayMetrics("m")
        config = GatewayConfig(model="m", stall_timeout_s=STALL_S)
        self.metrics = metrics
        self.losses = 0
        self.dispatch = Dispatch(config, InProcessBus(), "g", metrics, lambda: self.losses)
        self.flight = self.open("r")
        self.hear(100.0)
        self.dispatch.tick(100.0)

    def open(self, request_id: str) -> Flight:
        flight = Flight(100.0, self.metrics)
        choice = flight.add_choice(NoText(NothingToDetokenise(), (), False, 0))
        submit = Submit(request_id, 1, "g", "m", pack_tokens([1]), Sampling(1, 8), 0)
        self.dispatch.open(submit, Part(flight, [choice]))
        return flight

    def hear(self, now_s: float) -> None:
        self.dispatch.mesh.observe(SchedulerBeat("s", 1, [ModelInfo("m", 10, 10, 1)]), now_s)

    def tick(self, *times_s: float) -> bool:
        """Whether the request is still open after these."""
        for now_s in times_s:
            self.dispatch.tick(now_s)
        return self.flight.error is None


@pytest.fixture
def listening() -> Listening:
    return Listening()


def test_a_silence_is_judged_as_soon_as_it_is_too_long(listening: Listening) -> None:
    assert listening.tick(101, 102, 103, 104, 105, 106, 107)
    assert not listening.tick(107.5)
    assert "silent for 7 s" in str(listening.flight.error)


def test_a_gateway_that_stood_still_reads_its_beats_first(listening: Listening) -> None:
    assert listening.tick(101, 110, 110.01), "a roll call makes it tick at once"
    listening.hear(110.1)
    assert listening.tick(111, 112, 113)


def test_a_scheduler_that_is_silent_after_that_too_is_not_waited_for(listening: Listening) -> None:
    assert listening.tick(101, 110)
    assert not listening.tick(111)


def test_a_gateway_that_is_always_late_still_judges(listening: Listening) -> None:
    assert not listening.tick(*range(102, 114, 2))


def test_a_reconnect_ends_what_was_open_and_not_what_begins_after_it(listening: Listening) -> None:
    listening.losses += 1
    later = listening.open("later")
    assert "interrupted" in str(listening.flight.error)
    assert listening.tick(101) is False and later.error is None
    listening.losses += 1
    listening.tick(102)
    assert "interrupted" in str(later.error)
