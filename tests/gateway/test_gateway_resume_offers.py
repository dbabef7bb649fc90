"""How requests are offered, first and again: few at once, one coroutine each, and whatever may come in between."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable

import pytest
from in_process_bus import InProcessBus
from this_thread import patch_here

from gateway import offering
from gateway.choice_text import NoText
from gateway.config import GatewayConfig
from gateway.dispatch import Dispatch
from gateway.errors import ApiError
from gateway.flight import Flight
from gateway.ledger import RequestRecord
from gateway.metrics import GatewayMetrics
from gateway.offering import RESUMES_AT_ONCE, Part
from shared.messages import (
    Cancel,
    ModelInfo,
    Outcome,
    RequestEvent,
    Sampling,
    SchedulerBeat,
    Submit,
    SubmitReply,
    TokenBatch,
    TokenEntry,
    decode,
    encode,
    pack_tokens,
)

MANY = 2000
Record = RequestRecord[Part]


class NothingToDetokenise:
    def feed(self, tokens: Iterable[int]) -> str:
        return ""

    def finish(self) -> str:
        return ""


class Mesh:
    """A gateway's dispatch, and a scheduler of epoch 1 that replies when it is told to."""

    def __init__(self) -> None:
        self.bus = InProcessBus()
        self.metrics = GatewayMetrics("m")
        self.dispatch = Dispatch(GatewayConfig(model="m"), self.bus, "g", self.metrics)
        self.offered: list[tuple[Submit, str]] = []  # with the subject of its reply
        self.answer: Outcome | None = Outcome.ACCEPTED  # None: replies wait
        self.unanswered = self.most_unanswered = 0
        self.cancels: list[Cancel] = []

    async def start(self) -> None:
        await self.dispatch.start()
        await self.bus.subscribe("headrace.default.submit.*.*", self._on_submit)
        await self.bus.subscribe("headrace.default.cancel.*", self._on_cancel)
        self.beat()

    def beat(self, epoch: int = 1) -> None:
        self.dispatch._on_scheduler_beat(SchedulerBeat("s", epoch, [ModelInfo("m", 100, 50, 1)]))

    def _on_submit(self, payload: bytes, reply: str) -> None:
        submit = decode(payload)
        assert isinstance(submit, Submit)
        self.offered.append((submit, reply))
        self.unanswered += 1
        self.most_unanswered = max(self.most_unanswered, self.unanswered)
        if self.answer is not None:
            asyncio.get_running_loop().call_soon(self._reply, reply, self.answer)

    def _reply(self, inbox: str, outcome: Outcome) -> None:
        future = self.bus._replies.pop(inbox, None)
        if future is not None and not future.done():  # else nobody waits any more
            self.unanswered -= 1
            future.set_result(encode(SubmitReply(outcome, 1)))

    def reply(self, outcome: Outcome) -> None:
        """To the last one."""
        self._reply(self.offered[-1][1], outcome)

    def reply_to_all(self, outcome: Outcome) -> None:
        for _, inbox in self.offered:
            self._reply(inbox, outcome)

    def _on_cancel(self, payload: bytes, reply: str) -> None:
        cancel = decode(payload)
        assert isinstance(cancel, Cancel)
        self.cancels.append(cancel)

    def open(self, request_id: str, n: int = 1) -> Record:
        flight = Flight(time.monotonic(), self.metrics.of("m"))
        choices = [flight.add_choice(NoText(NothingToDetokenise(), (), False, 0)) for _ in range(n)]
        submit = Submit(request_id, 1, "g", "m", pack_tokens([1]), Sampling(1, 8), 0, n=n)
        return self.dispatch.open(submit, Part(flight, choices))

    def lose(self, record: Record, attempt: int | None = None) -> None:
        event = RequestEvent(1, "lost", record.submit.request_id, attempt or record.attempt, -1, "its worker died")
        self.dispatch._on_event(event)

    def tokens(self, record: Record, attempt: int, offset: int = 0) -> None:
        entry = TokenEntry(record.submit.request_id, attempt, 0, offset, [7])
        self.dispatch._on_tokens(TokenBatch(1, "w", 1, 1, [entry]))

    @property
    def attempts(self) -> list[int]:
        return [submit.attempt for submit, _ in self.offered]


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110  of what tells nobody when it changes
            await asyncio.sleep(0)


async def turns(count: int = 50) -> None:
    """Let everything happen that needs no time."""
    for _ in range(count):
        await asyncio.sleep(0)


def play(scene: Callable[[Mesh], Awaitable[None]]) -> None:
    async def main() -> None:
        mesh = Mesh()
        await mesh.start()
        await scene(mesh)

    asyncio.run(main())


@pytest.fixture(autouse=True)
def only_beats_wake(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offering, "RETRY_PAUSE_S", 600.0)
    monkeypatch.setattr(offering, "REPLY_TIMEOUT_S", 600.0)  # a busy machine replies late


def test_two_thousand_streams_resume_into_a_full_queue() -> None:
    async def scene(mesh: Mesh) -> None:
        records = [mesh.open(f"r{number}") for number in range(MANY)]
        for record in records:
            record.accept(1)
        mesh.answer = Outcome.QUEUE_FULL
        for record in records:
            mesh.lose(record)
        await until(lambda: len(mesh.offered) == RESUMES_AT_ONCE)
        await turns()
        assert len(mesh.offered) == RESUMES_AT_ONCE, "the others wait in line, and these for a beat"
        mesh.beat()
        await until(lambda: len(mesh.offered) == 2 * RESUMES_AT_ONCE)
        await turns()
        assert len(mesh.offered) == 2 * RESUMES_AT_ONCE
        assert len({submit.request_id for submit, _ in mesh.offered}) == RESUMES_AT_ONCE
        mesh.answer = None
        mesh.beat()
        await turns()
        assert mesh.unanswered == RESUMES_AT_ONCE
        mesh.answer = Outcome.ACCEPTED
        mesh.reply_to_all(Outcome.ACCEPTED)
        await until(lambda: all(record.epoch for record in records))
        assert mesh.most_unanswered == RESUMES_AT_ONCE
        assert {record.attempt for record in records} == {2}
        assert len(mesh.offered) == 2 * RESUMES_AT_ONCE + MANY
        assert not any(record.owner.offered for record in records)

    play(scene)


def test_a_scheduler_that_changes_has_each_resumed_once() -> None:
    async def scene(mesh: Mesh) -> None:
        records = [mesh.open(f"r{number}") for number in range(200)]
        for record in records:
            record.accept(1)
        mesh.beat(epoch=2)
        mesh.beat(epoch=2)
        await until(lambda: all(record.epoch == 2 for record in records))
        assert mesh.attempts == [2] * 200
        await turns()
        assert len(mesh.offered) == 200

    play(scene)


def test_an_acceptance_of_an_older_attempt_is_none() -> None:
    async def scene(mesh: Mesh) -> None:
        mesh.answer = None
        record = mesh.open("r")
        first = asyncio.create_task(mesh.dispatch.offer(record))
        await until(lambda: mesh.attempts == [1])
        mesh.lose(record)
        await turns()
        assert mesh.attempts == [1], "the coroutine that offers it is waiting for a reply"
        mesh.reply(Outcome.ACCEPTED)
        await until(lambda: mesh.attempts == [1, 2])
        assert record.epoch == 0 and mesh.dispatch.beat().live == [("r", 0)]
        mesh.reply(Outcome.ACCEPTED)
        await first
        assert mesh.dispatch.beat().live == [("r", 2)]

    play(scene)


def test_a_refusal_that_its_tokens_have_overtaken_is_none() -> None:
    async def scene(mesh: Mesh) -> None:
        mesh.answer = None
        record = mesh.open("r")
        first = asyncio.create_task(mesh.dispatch.offer(record))
        await until(lambda: mesh.attempts == [1])
        mesh.tokens(record, 1)
        mesh.reply(Outcome.STALE_EPOCH)
        await first
        assert record.epoch == 1 and mesh.attempts == [1]

    play(scene)


def test_what_is_lost_again_while_it_waits_in_line_is_offered_once() -> None:
    async def scene(mesh: Mesh) -> None:
        mesh.answer = None
        records = [mesh.open(f"r{number}") for number in range(RESUMES_AT_ONCE + 1)]
        for record in records:
            record.accept(1)
            mesh.lose(record)
        last = records[-1]
        await until(lambda: len(mesh.offered) == RESUMES_AT_ONCE)
        mesh.lose(last, attempt=1)
        assert last.attempt == 2, "of an older attempt"
        mesh.lose(last, attempt=2)
        mesh.answer = Outcome.ACCEPTED
        mesh.reply_to_all(Outcome.ACCEPTED)
        await until(lambda: all(record.epoch for record in records))
        assert [submit.attempt for submit, _ in mesh.offered if submit.request_id == last.submit.request_id] == [3]

    play(scene)


@pytest.mark.parametrize("when", ["in line", "offered", "refused", "accepted"])
def test_a_request_that_is_released_is_offered_no_more_and_cancelled_in_every_attempt(when: str) -> None:
    async def scene(mesh: Mesh) -> None:
        sending = asyncio.create_task(mesh.dispatch.send_forever())
        mesh.answer = None
        others = [mesh.open(f"r{number}") for number in range(RESUMES_AT_ONCE if when == "in line" else 0)]
        record = mesh.open("mine")
        for one in (*others, record):
            one.accept(1)
            mesh.lose(one)
        await until(lambda: len(mesh.offered) == max(1, len(others)))
        if when in ("refused", "accepted"):
            mesh.reply(Outcome.NO_WORKER if when == "refused" else Outcome.ACCEPTED)
            await turns()
        record.owner.flight.abandon()
        mesh.dispatch.release(record)
        mesh.dispatch.release(record)
        await turns()
        wanted = [2] if when == "accepted" else [1, 2]
        assert [(cancel.request_id, cancel.attempt, cancel.choice) for cancel in mesh.cancels] == [
            ("mine", attempt, -1) for attempt in wanted
        ]
        offered = len(mesh.offered)
        mesh.beat()
        mesh.answer = Outcome.ACCEPTED
        mesh.reply_to_all(Outcome.ACCEPTED)
        await until(lambda: all(one.epoch for one in others))
        await turns()
        assert len(mesh.offered) == offered
        assert not any(request_id == "mine" for request_id, _ in mesh.dispatch.beat().live)
        sending.cancel()

    play(scene)


def test_what_is_lost_without_progress_is_not_offered_as_fast_as_can_be(monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []
    sleep = asyncio.sleep

    async def no_sleep(pause_s: float) -> None:
        if pause_s:
            pauses.append(pause_s)
        await sleep(0)

    patch_here(monkeypatch, asyncio, "sleep", no_sleep)

    async def scene(mesh: Mesh) -> None:
        record = mesh.open("r")
        record.accept(1)
        for attempt in range(1, 8):
            mesh.lose(record, attempt)
            await until(lambda: record.epoch == 1)
        assert pauses == [0.1, 0.2, 0.4, 0.8, 1.0, 1.0]
        mesh.tokens(record, 8)
        mesh.lose(record)
        await until(lambda: record.epoch == 1)
        assert len(pauses) == 6, "it has made progress"

    play(scene)


def test_an_offer_that_stood_still_is_not_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stop of this process, however long, is not the scheduler's: who waited for a reply asks again."""
    clock = time.monotonic
    stood_s = 0.0
    patch_here(monkeypatch, time, "monotonic", lambda: clock() + stood_s)

    async def scene(mesh: Mesh) -> None:
        nonlocal stood_s
        mesh.answer = None
        record = mesh.open("r")
        first = asyncio.create_task(mesh.dispatch.offer(record))
        await until(lambda: mesh.attempts == [1])
        stood_s = 600.0
        mesh.bus._replies.pop(mesh.offered[0][1]).set_exception(offering.BusUnavailable("no reply"))
        await turns()
        assert not first.done()
        mesh.answer = Outcome.ACCEPTED
        mesh.beat()
        await first
        assert mesh.attempts == [1, 1]

    play(scene)


def test_a_first_offer_is_refused_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offering, "RETRY_PAUSE_S", 0.01)
    monkeypatch.setattr(offering, "PATIENCE_S", 0.1)

    async def scene(mesh: Mesh) -> None:
        sending = asyncio.create_task(mesh.dispatch.send_forever())
        for outcome, code in ((Outcome.NO_WORKER, "no_worker"), (Outcome.QUEUE_FULL, "queue_full")):
            mesh.answer = outcome
            record = mesh.open(code)
            offers = len(mesh.offered)
            with pytest.raises(ApiError) as refused:
                await mesh.dispatch.offer(record)
            assert refused.value.code == code
            assert (len(mesh.offered) > offers + 1) == (outcome is Outcome.NO_WORKER), "a full queue is not asked twice"
            mesh.dispatch.release(record)
        await turns()
        assert not mesh.cancels, "nobody runs what was refused"
        sending.cancel()

    play(scene)
