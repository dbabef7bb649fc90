"""Several meshes behind one router: who is offered what, what goes on elsewhere, and that nothing runs twice."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable

import pytest
from in_process_bus import InProcessBus
from test_gateway_resume_offers import NothingToDetokenise
from this_thread import patch_here

from gateway import offering
from gateway.choice_text import ChoiceText
from gateway.config import GatewayConfig
from gateway.dispatch import Dispatch
from gateway.errors import ApiError
from gateway.flight import Flight
from gateway.ledger import RequestRecord
from gateway.metrics import GatewayMetrics
from gateway.offering import Part
from gateway.router import Router
from gateway.service import make_dispatch
from observability.tracing import Tracing
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
    unpack_tokens,
)

AWAY_S = 7.5
OFF = Tracing("test", "test", "", 0.0)


class Shard:
    """A scheduler that says what it is told to, and notes what it is asked."""

    def __init__(self, world: World, name: str) -> None:
        self.world, self.name = world, name
        self.answer: Outcome | None = Outcome.ACCEPTED  # None: it does not reply
        self.reason = ""
        self.retry_ms = 0
        self.listens = True
        self.told: dict[str, int] = {}  # of ModelInfo, in its beats
        self.workers = 1
        self.adapters: list[str] = []
        self.offered: list[Submit] = []
        self.running: dict[str, int] = {}  # request -> attempt
        self.cancelled: set[tuple[str, int]] = set()

    async def start(self) -> None:
        await self.world.bus.subscribe(f"headrace.{self.name}.submit.m.1", self._on_submit)
        await self.world.bus.subscribe(f"headrace.{self.name}.cancel.1", self._on_cancel)
        self.beat()

    @property
    def dispatch(self) -> Dispatch:
        return self.world.router._meshes[self.name]

    def beat(self) -> None:
        info = ModelInfo("m", 100, 50, self.workers, adapters=self.adapters, **self.told)
        self.dispatch._on_scheduler_beat(SchedulerBeat("s", 1, [info]))

    def _on_submit(self, payload: bytes, reply: str) -> None:
        submit = decode(payload)
        assert isinstance(submit, Submit)
        self.offered.append(submit)
        if self.answer is Outcome.ACCEPTED and (submit.request_id, submit.attempt) not in self.cancelled:
            self.running[submit.request_id] = submit.attempt
        if self.answer is not None:
            answer = SubmitReply(self.answer, 1, self.reason, retry_after_ms=self.retry_ms)
            with contextlib.suppress(StopIteration):  # a reply goes straight back: it never waits
                self.world.bus.publish(reply, encode(answer)).send(None)

    def _on_cancel(self, payload: bytes, reply: str) -> None:
        cancel = decode(payload)
        assert isinstance(cancel, Cancel)
        self.cancelled.add((cancel.request_id, cancel.attempt))
        if self.running.get(cancel.request_id) == cancel.attempt:
            del self.running[cancel.request_id]

    def send(self, request_id: str, attempt: int, offset: int, tokens: list[int]) -> None:
        entry = TokenEntry(request_id, attempt, 0, offset, tokens)
        self.dispatch._on_tokens(TokenBatch(1, "w", 1, 1, [entry]))


class World:
    """Meshes a and b, of which a is the first one's choice: b has the queue that is longer."""

    def __init__(self) -> None:
        self.bus = InProcessBus()
        self.metrics = GatewayMetrics("m")
        config = GatewayConfig(model="m", mesh="a,b", mesh_away_s=AWAY_S, resume_timeout_s=30.5)
        router = make_dispatch(config, self.bus, "g", self.metrics, lambda: 0, OFF)
        assert isinstance(router, Router)
        self.router = router
        self.a, self.b = Shard(self, "a"), Shard(self, "b")
        self.b.told = {"waiting": 5, "service_rate": 1}

    async def start(self) -> None:
        await self.router.start()
        await self.a.start()
        await self.b.start()

    def submit(self, request_id: str = "r", adapter: str = "", pool: str = "") -> Submit:
        sampling = Sampling(1, 8)
        return Submit(request_id, 1, "g", "m", pack_tokens([1]), sampling, 0, adapter=adapter, pool=pool)

    def open(self, submit: Submit | None = None) -> RequestRecord[Part]:
        flight = Flight(time.monotonic(), self.metrics.of("m"))
        choice = flight.add_choice(ChoiceText(NothingToDetokenise(), (), False, 0))
        return self.router.open(submit or self.submit(), Part(flight, [choice]))

    def tick(self) -> None:
        for shard in (self.a, self.b):
            shard.dispatch.tick(time.monotonic())
            shard.dispatch.ledger.check()

    def where(self, record: RequestRecord[Part]) -> list[str]:
        """In whose books it is."""
        assert [one for one in self.router.records() if one is record]
        return [shard.name for shard in (self.a, self.b) if record in list(shard.dispatch.ledger)]


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110  of what tells nobody when it changes
            await asyncio.sleep(0)


async def turns(count: int = 50) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


def play(scene: Callable[[World], Awaitable[None]]) -> None:
    async def main() -> None:
        world = World()
        await world.start()
        sending = asyncio.create_task(world.router.send_forever())
        await scene(world)
        sending.cancel()

    asyncio.run(main())


@pytest.fixture(autouse=True)
def only_beats_wake(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offering, "RETRY_PAUSE_S", 600.0)
    monkeypatch.setattr(offering, "REPLY_TIMEOUT_S", 600.0)  # a busy machine replies late


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Seconds that this process has been awake for, beside the real ones."""
    real, ahead = time.monotonic, [0.0]
    patch_here(monkeypatch, time, "monotonic", lambda: real() + ahead[0])
    return ahead


@pytest.mark.parametrize(
    "outcome", [Outcome.QUEUE_FULL, Outcome.NO_WORKER, Outcome.DRAINING, Outcome.TOO_LONG, Outcome.DEADLINE]
)
def test_what_one_mesh_refuses_another_is_asked_for_at_once(outcome: Outcome) -> None:
    async def scene(world: World) -> None:
        world.a.answer = outcome
        record = world.open()
        assert world.where(record) == ["a"]
        await world.router.offer(record)
        assert world.where(record) == ["b"] and record.attempt == 1 and record.epoch == 1
        assert len(world.a.offered) == len(world.b.offered) == 1
        world.router.release(record)
        await until(lambda: not world.b.running)
        assert not world.a.cancelled, "it has refused it"
        assert not list(world.router.records())

    play(scene)


def test_a_scheduler_that_nobody_hears_is_not_waited_for_while_there_is_another() -> None:
    async def scene(world: World) -> None:
        world.bus._subscriptions[:] = [entry for entry in world.bus._subscriptions if ".a.submit" not in entry[0]]
        record = world.open()
        await world.router.offer(record)
        assert world.where(record) == ["b"] and world.b.running == {"r": 1}

    play(scene)


def test_what_may_run_where_no_reply_came_is_cancelled_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offering, "REPLY_TIMEOUT_S", 0.01)

    async def scene(world: World) -> None:
        world.a.answer = None
        record = world.open()
        await world.router.offer(record)
        world.a.running["r"] = 1  # as it would
        assert world.where(record) == ["b"]
        await until(lambda: ("r", 1) in world.a.cancelled)
        world.a.send("r", 1, 0, [3])
        assert not record.choices[0].tokens, "from a mesh that it is not in"
        world.b.send("r", 1, 0, [4])
        assert list(record.choices[0].tokens) == [4]

    play(scene)


def test_the_last_refusal_is_the_one_that_has_most_hope(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scene(world: World) -> None:
        world.a.answer, world.a.retry_ms = Outcome.QUEUE_FULL, 9000
        world.b.answer, world.b.retry_ms = Outcome.QUEUE_FULL, 4000
        record = world.open()
        with pytest.raises(ApiError) as refused:
            await world.router.offer(record)
        assert (refused.value.code, refused.value.retry_after_s) == ("queue_full", 4)
        assert len(world.a.offered) == len(world.b.offered) == 1
        world.router.release(record)
        world.a.answer, world.b.answer = Outcome.QUEUE_FULL, Outcome.TOO_LONG
        record = world.open(world.submit("r2"))
        with pytest.raises(ApiError) as refused:
            await world.router.offer(record)
        assert refused.value.code == "queue_full"
        world.router.release(record)
        await turns()
        assert not world.a.cancelled and not world.b.cancelled

    play(scene)


def test_what_is_invalid_is_so_everywhere_but_for_a_pool() -> None:
    async def scene(world: World) -> None:
        world.a.answer = Outcome.INVALID
        record = world.open()
        with pytest.raises(ApiError):
            await world.router.offer(record)
        assert not world.b.offered
        world.router.release(record)
        await world.router.offer(world.open(world.submit("r2", pool="there")))
        assert world.b.running == {"r2": 1}

    play(scene)


def test_a_request_goes_where_its_adapter_is() -> None:
    async def scene(world: World) -> None:
        world.b.adapters = ["x"]
        world.b.beat()
        assert world.router.mesh.adapters("m", time.monotonic()) == ["x"]
        assert world.where(world.open(world.submit(adapter="x"))) == ["b"]

    play(scene)


def test_a_silent_or_full_mesh_is_passed_over(clock: list[float]) -> None:
    async def scene(world: World) -> None:
        world.a.told = {"max_waiting": 1, "waiting": 1, "service_rate": 100}
        world.a.beat()
        assert world.where(world.open()) == ["b"]
        world.router.mesh.check_room("m", time.monotonic(), 1, 0, "")
        world.b.told = world.a.told
        world.b.beat()
        with pytest.raises(ApiError) as full:
            world.router.mesh.check_room("m", time.monotonic(), 1, 0, "")
        assert full.value.code == "queue_full"
        world.a.told = {}
        clock[0] += 3.1
        world.b.beat()
        assert world.where(world.open(world.submit("r2"))) == ["b"], "a is silent"
        world.a.beat()
        assert world.where(world.open(world.submit("r3"))) == ["a"]

    play(scene)


def test_where_no_mesh_is_ready_the_one_that_was_lately_is_waited_for(clock: list[float]) -> None:
    async def scene(world: World) -> None:
        world.a.workers = 0
        world.a.beat()
        clock[0] += 11.0
        world.a.beat()
        world.b.beat()
        world.b.workers = 0
        world.b.beat()
        reason = world.router.mesh.why_not_ready("m", time.monotonic())
        assert reason is not None and "no ready worker" in reason
        assert world.where(world.open()) == ["b"]

    play(scene)


def test_what_was_accepted_goes_on_elsewhere_once_its_mesh_has_been_away_for_too_long(clock: list[float]) -> None:
    async def scene(world: World) -> None:
        record = world.open()
        await world.router.offer(record)
        world.a.send("r", 1, 0, [3, 4])
        for second in range(1, 10):
            clock[0] += 1.0
            world.b.beat()
            world.tick()
            assert world.where(record) == (["a"] if second <= AWAY_S else ["b"])
        await until(lambda: record.epoch == 1)
        (resumed,) = world.b.offered
        assert resumed.attempt == 2 and unpack_tokens(resumed.resumed[0]) == [3, 4]
        await until(lambda: ("r", 1) in world.a.cancelled)
        world.a.send("r", 1, 2, [9])
        world.b.send("r", 2, 2, [5])
        assert list(record.choices[0].tokens) == [3, 4, 5]
        assert world.metrics.registry.get_sample_value("headrace_gateway_resumes_total", {"cause": "mesh"}) == 1

    play(scene)


def test_what_finds_no_worker_in_its_mesh_for_too_long_goes_on_elsewhere(clock: list[float]) -> None:
    async def scene(world: World) -> None:
        record = world.open()
        await world.router.offer(record)
        world.a.answer, world.a.workers = Outcome.NO_WORKER, 0
        world.a.dispatch._on_event(RequestEvent(1, "lost", "r", 1, -1, "its worker died"))
        await until(lambda: len(world.a.offered) == 2)
        for _ in range(8):
            clock[0] += 1.0
            world.a.beat()
            world.b.beat()
            world.tick()
            await turns()
        await until(lambda: record.epoch == 1 and record.owner.resume is None)
        assert world.where(record) == ["b"] and world.b.running == {"r": 3}
        offered = len(world.a.offered)
        world.a.beat()
        await turns()
        assert len(world.a.offered) == offered, "nobody offers it there any more"

    play(scene)


def test_what_cannot_be_resumed_in_its_mesh_is_resumed_in_another_and_each_is_asked_once() -> None:
    async def scene(world: World) -> None:
        for outcome in (Outcome.ACCEPTED, Outcome.NEVER_FITS):
            world.b.answer = outcome
            world.a.answer = Outcome.ACCEPTED
            record = world.open(world.submit(outcome.value))
            await world.router.offer(record)
            world.a.answer = Outcome.NEVER_FITS  # by now: the worker with room for it is gone
            offered = len(world.a.offered), len(world.b.offered)
            world.a.dispatch._on_event(RequestEvent(1, "lost", outcome.value, 1, -1, "its worker died"))
            await until(lambda: record.epoch or record.owner.flight.error)  # noqa: B023
            await turns()
            assert (len(world.a.offered), len(world.b.offered)) == (offered[0] + 1, offered[1] + 1)
            assert (record.owner.flight.error is None) == (outcome is Outcome.ACCEPTED)
            assert world.where(record) == ["b"]

    play(scene)


def test_what_has_moved_is_given_twice_the_time_where_it_came(clock: list[float]) -> None:
    async def scene(world: World) -> None:
        record = world.open()
        await world.router.offer(record)
        world.b.answer = Outcome.NO_WORKER
        for second in range(1, 26):
            clock[0] += 1.0
            world.b.beat()
            if second > 8:
                world.a.beat()
            world.tick()
            await turns()
            assert world.where(record) == ["b" if AWAY_S < second < 8 + 2 * AWAY_S else "a"], second
        assert record.attempt == 3 and world.a.running == {"r": 3}

    play(scene)


def test_nothing_moves_where_nobody_else_could_run_it(clock: list[float]) -> None:
    async def scene(world: World) -> None:
        record = world.open()
        await world.router.offer(record)
        for second in range(1, 32):
            clock[0] += 1.0
            world.tick()
            assert world.where(record) == ["a"]
            assert (record.owner.flight.error is None) == (second <= 30)

    play(scene)


def test_what_is_lost_while_it_is_offered_first_moves_with_whoever_offers_it(clock: list[float]) -> None:
    async def scene(world: World) -> None:
        world.a.answer = None
        record = world.open()
        first = asyncio.create_task(world.router.offer(record))
        await until(lambda: len(world.a.offered) == 1)
        world.a.send("r", 1, 0, [3])
        world.a.dispatch._on_event(RequestEvent(1, "lost", "r", 1, -1, "its worker died"))
        assert record.resuming and record.owner.offered
        for _ in range(8):
            clock[0] += 1.0
            world.b.beat()
            world.tick()
        assert world.where(record) == ["b"]
        for _, inbox in list(world.bus._replies.items()):
            inbox.set_result(encode(SubmitReply(Outcome.ACCEPTED, 1)))  # too late: it is of an older attempt
        await first
        assert world.b.running == {"r": 3} and record.epoch == 1
        await until(lambda: {("r", 1), ("r", 2)} <= world.a.cancelled)

    play(scene)
