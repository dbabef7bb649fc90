"""How long a gateway waits: over the time in which it was awake. With a clock of the test's own."""

from __future__ import annotations

import time
from collections.abc import Iterable

import pytest
from in_process_bus import InProcessBus
from this_thread import patch_here

from gateway.choice_text import NoText
from gateway.config import GatewayConfig
from gateway.dispatch import Dispatch
from gateway.flight import Flight
from gateway.metrics import GatewayMetrics
from gateway.offering import Part
from shared.messages import ModelInfo, RequestEvent, Sampling, SchedulerBeat, Submit, pack_tokens

RESUME_S = 7.0


class NothingToDetokenise:
    def feed(self, tokens: Iterable[int]) -> str:
        return ""

    def finish(self) -> str:
        return ""


class Listening:
    """A gateway's dispatch with one request that was accepted; the scheduler was last heard at second 100."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 100.0
        patch_here(monkeypatch, time, "monotonic", lambda: self.now_s)
        self.metrics = GatewayMetrics("m")
        config = GatewayConfig(model="m", resume_timeout_s=RESUME_S)
        self.losses = 0
        self.dispatch = Dispatch(config, InProcessBus(), "g", self.metrics, lambda: self.losses)
        self.resumed: list[str] = []
        monkeypatch.setattr(
            self.dispatch.offers, "resume", lambda record: self.resumed.append(record.submit.request_id)
        )
        self.hear()
        self.dispatch.tick(100.0)
        self.flight = self.open("r")

    def open(self, request_id: str) -> Flight:
        flight = Flight(100.0, self.metrics.of("m"))
        choice = flight.add_choice(NoText(NothingToDetokenise(), (), False, 0))
        submit = Submit(request_id, 1, "g", "m", pack_tokens([1]), Sampling(1, 8), 0)
        self.dispatch.open(submit, Part(flight, [choice])).accept(1)
        return flight

    def hear(self, epoch: int = 1) -> None:
        self.dispatch._on_scheduler_beat(SchedulerBeat("s", epoch, [ModelInfo("m", 10, 10, 1)]))

    def lose(self) -> None:
        (record,) = [record for record in self.dispatch.ledger if record.owner.flight is self.flight]
        self.dispatch._on_event(RequestEvent(1, "lost", "r", record.attempt, -1, "its worker died"))

    def tick(self, *times_s: float) -> bool:
        """Whether the request is still open after these."""
        for now_s in times_s:
            self.now_s = now_s
            self.dispatch.tick(now_s)
        return self.flight.error is None


@pytest.fixture
def listening(monkeypatch: pytest.MonkeyPatch) -> Listening:
    return Listening(monkeypatch)


def test_a_silence_is_judged_as_soon_as_it_is_too_long(listening: Listening) -> None:
    assert listening.tick(101, 102, 103, 104, 105, 106, 107)
    assert not listening.tick(107.5)
    assert "could not be resumed within 7 s: the scheduler is silent" in str(listening.flight.error)
    assert not listening.resumed, "there is nobody to resume it"


def test_a_gateway_that_stood_still_has_waited_for_nobody(listening: Listening) -> None:
    assert listening.tick(101, 110, 110.01), "a roll call makes it tick at once"
    listening.hear()
    assert listening.tick(111, 112, 113, 114, 115, 116, 117)
    assert not listening.tick(118)


def test_a_gateway_that_is_always_late_still_judges(listening: Listening) -> None:
    assert not listening.tick(*range(102, 114, 2))


def test_a_request_that_was_lost_is_given_so_much_time_from_its_first_loss(listening: Listening) -> None:
    listening.lose()
    for now_s in range(101, 108):
        assert listening.tick(now_s)
        listening.hear()
    listening.lose()
    assert listening.resumed == ["r"] * 2
    assert not listening.tick(107.5)
    assert "within 7 s: the request was lost: its worker died" in str(listening.flight.error)
    assert listening.metrics.registry.get_sample_value("headrace_gateway_resume_failures_total") == 1


def test_one_that_is_accepted_again_may_wait_for_its_turn_but_not_be_lost_again(listening: Listening) -> None:
    (record,) = listening.dispatch.ledger
    listening.lose()
    record.accept(1)
    for now_s in range(101, 120):
        assert listening.tick(now_s)
        listening.hear()
    listening.lose()
    assert listening.flight.error is not None and listening.resumed == ["r"]


def test_time_in_which_it_stood_still_is_not_counted_for_a_lost_one(listening: Listening) -> None:
    listening.lose()
    assert listening.tick(101, 160, 160.01, 161)


def test_a_new_scheduler_has_everything_resumed_that_was_accepted_before(listening: Listening) -> None:
    later = listening.open("offered")
    (_, offered) = listening.dispatch.ledger
    offered.epoch = 0
    listening.hear(epoch=2)
    assert listening.resumed == ["r"] and later.error is None
    assert listening.dispatch.beat().live == [("r", 0), ("offered", 0)]
    assert listening.metrics.registry.get_sample_value("headrace_gateway_resumes_total", {"cause": "epoch"}) == 1


def test_a_reconnect_has_resumed_what_was_open_and_not_what_begins_after_it(listening: Listening) -> None:
    listening.losses += 1
    listening.open("later")
    assert listening.resumed == ["r"]
    assert listening.tick(101)
    assert listening.resumed == ["r"]
    listening.losses += 1
    listening.tick(102)
    assert listening.resumed == ["r", "later"], "the first one is not accepted again yet"


def test_one_line_tells_of_many(listening: Listening, caplog: pytest.LogCaptureFixture) -> None:
    for number in range(50):
        listening.open(f"more-{number}")
    listening.hear(epoch=2)
    listening.tick(101, 102)
    (line,) = [record.message for record in caplog.records if "interrupted" in record.message]
    assert line == "51 interrupted requests are resumed: the scheduler has changed (51)"


def test_what_was_never_accepted_is_no_interrupted_request(listening: Listening) -> None:
    """Whoever offers it says in time that there is no scheduler."""
    flight = Flight(100.0, listening.metrics.of("m"))
    choice = flight.add_choice(NoText(NothingToDetokenise(), (), False, 0))
    submit = Submit("new", 1, "g", "m", pack_tokens([1]), Sampling(1, 8), 0)
    listening.dispatch.open(submit, Part(flight, [choice]))
    assert not listening.tick(101, 102, 103, 104, 105, 106, 107, 107.5)
    assert flight.error is None
    assert listening.metrics.resume_failures._value.get() == 1
