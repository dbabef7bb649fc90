"""When a scheduler beats, and what of its queue gateways are told."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest
from in_process_bus import InProcessBus
from memory_store import MemoryStore
from mesh_stack import until
from prometheus_client import CollectorRegistry

from observability.tracing import Tracing
from scheduler import presence
from scheduler.config import SchedulerConfig
from scheduler.core.core import SchedulerCore
from scheduler.core.limits import Limits
from scheduler.metrics import SchedulerMetrics
from scheduler.reporting import Reporter
from scheduler.service import SchedulerService
from shared.messages import (
    Cancel,
    Capacity,
    Outcome,
    PageSnapshot,
    Reset,
    Sampling,
    SchedulerBeat,
    Submit,
    SubmitReply,
    WorkerBeat,
    WorkerState,
    decode,
    encode,
    pack_tokens,
)
from shared.subjects import Subjects

SUBJECTS = Subjects()
NEVER_S = 1000.0


class Beating:
    """A scheduler with a worker of one slot that never answers: what is submitted first runs, the rest waits."""

    def __init__(self, bus: InProcessBus) -> None:
        self.bus = bus
        self.answers: list[asyncio.Future[None]] = []

    @property
    def beats(self) -> list[SchedulerBeat]:
        messages = [decode(payload) for subject, payload in self.bus.published if ".beat.scheduler." in subject]
        return [message for message in messages if isinstance(message, SchedulerBeat)]

    async def answer_resets(self) -> None:
        """As the worker does, which has nothing in its pages."""

        def answer(payload: bytes, _: str) -> None:
            reset = decode(payload)
            if isinstance(reset, Reset):
                snapshot = PageSnapshot(reset.epoch, reset.worker, reset.incarnation, reset.step)
                self.answers.append(asyncio.ensure_future(self.bus.publish(SUBJECTS.result(1), encode(snapshot))))

        await self.bus.subscribe(SUBJECTS.step("w"), answer)

    async def worker(self, state: WorkerState = WorkerState.READY) -> None:
        beat = WorkerBeat("w", 7, 0, state, Capacity("m", 128, 4, 60, 997, []))
        await self.bus.publish(SUBJECTS.beat("worker", "w"), encode(beat))

    async def submit(self, name: str, n: int = 1) -> SubmitReply:
        submit = Submit(name, 1, "g", "m", pack_tokens([3, 5, 7]), Sampling(1, 10), 1, n=n)
        reply = decode(await self.bus.request(SUBJECTS.submit("m", 1), encode(submit), 5))
        assert isinstance(reply, SubmitReply)
        return reply

    async def cancel(self, name: str) -> None:
        await self.bus.publish(SUBJECTS.cancel(1), encode(Cancel(name, 1)))


def run(scenario: Callable[[Beating], Awaitable[None]], **options: int) -> None:
    async def body() -> None:
        bus = InProcessBus()
        config = SchedulerConfig(max_num_seqs=1, **options)  # type: ignore[arg-type]
        metrics = SchedulerMetrics(CollectorRegistry())
        scheduler = SchedulerService(config, "s", bus, bus, MemoryStore(), metrics, Tracing("test", "test", "", 0.0))
        stop = asyncio.Event()
        async with asyncio.TaskGroup() as group:
            group.create_task(scheduler.run(stop))
            mesh = Beating(bus)
            try:
                await until(lambda: len(mesh.beats) > 0, "the first beat")
                await mesh.answer_resets()
                await mesh.worker()
                await until(lambda: bool(mesh.beats[-1].models), "the worker's beat")
                await scenario(mesh)
            finally:
                stop.set()

    asyncio.run(asyncio.wait_for(body(), 30))


@pytest.fixture
def only_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """No beat comes of itself."""
    monkeypatch.setattr(presence, "BEAT_S", NEVER_S)


@pytest.mark.usefixtures("only_at_once")
def test_a_queue_that_fills_or_has_room_again_is_told_at_once() -> None:
    async def scenario(mesh: Beating) -> None:
        for name in "abc":
            assert (await mesh.submit(name)).outcome is Outcome.ACCEPTED
        await until(lambda: mesh.beats[-1].models[0].waiting == 2, "the full queue")
        info = mesh.beats[-1].models[0]
        assert (info.max_waiting, info.max_waiting_tokens, info.waiting_tokens) == (2, 0, 26)
        assert info.queue_size == 2
        assert mesh.beats[-1].free_blocks < mesh.beats[-1].total_blocks
        refused = await mesh.submit("d")
        assert refused.outcome is Outcome.QUEUE_FULL and refused.retry_after_ms >= 1000
        await mesh.cancel("b")
        await until(lambda: mesh.beats[-1].models[0].waiting == 1, "room again")

    run(scenario, max_num_queued_reqs=2)


@pytest.mark.parametrize("takes", [True, False])
def test_one_worker_that_takes_no_grammars_is_told_of(takes: bool) -> None:
    core = SchedulerCore(Limits())
    for number, grammars in enumerate((True, takes, True)):
        core.worker_up(f"w{number}", 1, Capacity("m", 128, 4, 60, 997, [], grammars=grammars), 0)
    metrics = SchedulerMetrics(CollectorRegistry())
    reporter = Reporter(core, SUBJECTS, lambda subject, payload: None, metrics, Tracing("scheduler", "s", "", 0.0), 0)
    assert [info.grammars for info in reporter.beat("s", False).models] == [takes]


@pytest.mark.usefixtures("only_at_once")
def test_a_queue_that_is_full_of_tokens_is_told_at_once() -> None:
    async def scenario(mesh: Beating) -> None:
        for name in "abc":
            assert (await mesh.submit(name)).outcome is Outcome.ACCEPTED
        await until(lambda: mesh.beats[-1].models[0].waiting_tokens == 26, "the full queue")
        assert mesh.beats[-1].models[0].max_waiting_tokens == 26
        assert (await mesh.submit("d")).outcome is Outcome.QUEUE_FULL

    run(scenario, max_num_queued_tokens=26)


@pytest.mark.usefixtures("only_at_once")
def test_a_worker_that_drains_is_told_at_once() -> None:
    async def scenario(mesh: Beating) -> None:
        assert mesh.beats[-1].models[0].workers == 1
        await mesh.worker(WorkerState.DRAINING)
        await until(lambda: mesh.beats[-1].models[0].workers == 0, "the drain")

    run(scenario)


@pytest.mark.usefixtures("only_at_once")
def test_a_queue_that_flips_at_every_step_does_not_beat_at_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(presence, "FLIP_BEAT_S", 0.2)

    async def scenario(mesh: Beating) -> None:
        await mesh.submit("a")
        before = len(mesh.beats)
        for index in range(40):
            await mesh.submit(f"b{index}")
            await mesh.cancel(f"b{index}")
        await mesh.submit("last")
        await until(lambda: mesh.beats[-1].models[0].waiting == 1, "the state that lasts")
        assert len(mesh.beats) - before < 20

    run(scenario, max_num_queued_reqs=1)


def test_a_beat_comes_of_itself_only_with_news_or_after_a_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(presence, "BEAT_S", 0.005)
    monkeypatch.setattr(presence, "REST_BEAT_S", NEVER_S)

    async def scenario(mesh: Beating) -> None:
        await mesh.submit("a")
        await mesh.submit("b", n=3)
        await until(lambda: mesh.beats[-1].models[0].waiting == 3, "what changed")
        before = len(mesh.beats)
        await asyncio.sleep(0.1)
        assert len(mesh.beats) == before
        monkeypatch.setattr(presence, "REST_BEAT_S", 0.0)
        await until(lambda: len(mesh.beats) > before + 1, "beats without news")

    run(scenario)
