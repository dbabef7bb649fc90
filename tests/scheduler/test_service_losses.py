"""The scheduler's and worker's shells in one event loop, over a bus that loses messages: numbers repair it."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable

import pytest
from in_process_bus import InProcessBus, LoseFirst
from memory_store import MemoryStore
from mesh_stack import until
from prometheus_client import CollectorRegistry

from observability.tracing import Tracing
from scheduler import gateways, workers
from scheduler.config import SchedulerConfig
from scheduler.metrics import SchedulerMetrics
from scheduler.service import SchedulerService
from shared.messages import (
    MAX_EPOCH,
    Capacity,
    GatewayBeat,
    Outcome,
    RequestEvent,
    Reset,
    Sampling,
    StepPlan,
    StepResult,
    Submit,
    SubmitReply,
    TokenBatch,
    WorkerBeat,
    WorkerFault,
    decode,
    encode,
    pack_tokens,
)
from shared.subjects import Subjects
from worker.batch import Batch, Sampled, Step
from worker.config import WorkerConfig
from worker.metrics import WorkerMetrics
from worker.service import WorkerService
from worker.simulated import SimulatedRunner, StepTime, expected_tokens

VOCAB = 997
CAPACITY = Capacity("m", 4096, 4, 60, VOCAB, [])
OFF = Tracing("test", "test", "", 0.0)


class OneProcessMesh:
    """A scheduler and a worker; tokens are collected as a gateway would, by offset."""

    def __init__(self, bus: InProcessBus, runner: SimulatedRunner) -> None:
        self.bus = bus
        self.runner = runner
        self.scheduler: SchedulerService
        self.tokens: dict[str, list[int]] = {}
        self.ends: dict[str, str] = {}
        self.events: list[str] = []
        self.metrics = SchedulerMetrics(CollectorRegistry())
        self.worker_metrics = WorkerMetrics(CollectorRegistry(), "m")

    def on_tokens(self, payload: bytes, _: str) -> None:
        message = decode(payload)
        assert isinstance(message, TokenBatch)
        for entry in message.entries:
            got = self.tokens.setdefault(entry.request_id, [])
            got[entry.offset :] = entry.tokens
            if entry.end:
                self.ends[entry.request_id] = entry.end

    def on_event(self, payload: bytes, _: str) -> None:
        message = decode(payload)
        assert isinstance(message, RequestEvent)
        self.events.append(message.kind)

    async def submit(self, name: str, max_tokens: int, seed: int) -> None:
        """As a gateway does: again while the worker is being greeted."""
        submit = Submit(name, 1, "g", "m", pack_tokens(prompt(name)), Sampling(seed, max_tokens), seed)
        while True:
            subject = Subjects().submit("m", self.scheduler.core.epoch)
            reply = decode(await self.bus.request(subject, encode(submit), 5))
            assert isinstance(reply, SubmitReply)
            if reply.outcome not in (Outcome.NO_WORKER, Outcome.UNKNOWN_MODEL):
                break
            await asyncio.sleep(0.01)
        assert reply.outcome is Outcome.ACCEPTED


def prompt(name: str) -> list[int]:
    return [sum(name.encode()) % VOCAB, 3, 5]


def is_beat(_: str, payload: bytes) -> bool:
    return isinstance(decode(payload), WorkerBeat)


def run(
    scenario: Callable[[OneProcessMesh], object], lose: Callable[[str, bytes], bool] = lambda subject, payload: False,
    runner: SimulatedRunner | None = None,
) -> OneProcessMesh:  # fmt: skip
    async def body() -> OneProcessMesh:
        bus = InProcessBus()
        mesh = OneProcessMesh(bus, runner or SimulatedRunner(CAPACITY, StepTime(300.0)))
        await bus.subscribe(Subjects().tokens("g"), mesh.on_tokens)
        await bus.subscribe(Subjects().event("g"), mesh.on_event)
        stop = asyncio.Event()
        worker = WorkerService(WorkerConfig(), "w", 7, bus, bus, mesh.worker_metrics, OFF)
        scheduler = mesh.scheduler = SchedulerService(
            SchedulerConfig(max_num_seqs=4, worker_timeout_s=1.0), "s", bus, bus, MemoryStore(), mesh.metrics, OFF
        )
        async with asyncio.TaskGroup() as group:
            await worker.listen()
            group.create_task(worker.run(stop))
            group.create_task(scheduler.run(stop))
            worker.attach(mesh.runner)
            await until(lambda: scheduler.core.workers, "the worker to be known")
            bus.lose = lose
            try:
                await scenario(mesh)  # type: ignore[misc]
            finally:
                bus.lose = lambda subject, payload: False
                stop.set()
        return mesh

    return asyncio.run(asyncio.wait_for(body(), 60))


@pytest.fixture(autouse=True)
def quick_resends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "RESEND_AFTER_S", 0.05)
    monkeypatch.setattr("worker.service.BEAT_S", 0.05)


async def ten_requests(mesh: OneProcessMesh) -> None:
    for index in range(10):
        await mesh.submit(f"r{index}", 20 + index, index)
    await until(lambda: len(mesh.ends) == 10, "every end", 30)
    for index in range(10):
        name = f"r{index}"
        assert mesh.tokens[name] == expected_tokens(prompt(name), index, 20 + index, VOCAB)


def test_nothing_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "RESEND_AFTER_S", 30.0)
    mesh = run(ten_requests)
    assert mesh.metrics.resent_plans._value.get() == 0 and not mesh.events


@pytest.mark.parametrize("kind", [StepPlan, StepResult])
@pytest.mark.parametrize("every", [3, 7])
def test_lost_plans_and_results_are_repaired(kind: type, every: int) -> None:
    rng = random.Random(every)

    def lose(subject: str, payload: bytes) -> bool:
        return isinstance(decode(payload), kind) and rng.randrange(every) == 0

    mesh = run(ten_requests, lose)
    assert mesh.metrics.resent_plans._value.get() > 0 and not mesh.events


def test_duplicates_change_nothing() -> None:
    async def scenario(mesh: OneProcessMesh) -> None:
        publish = mesh.bus.publish

        async def twice(subject: str, payload: bytes) -> None:
            await publish(subject, payload)
            if ".step." in subject or ".result." in subject:
                await publish(subject, payload)

        mesh.bus.publish = twice  # type: ignore[method-assign]
        await ten_requests(mesh)

    assert not run(scenario).events


class Faulty(SimulatedRunner):
    """Fails its third step."""

    steps = 0

    def forward(self, batch: Batch, step: Step) -> Sampled:
        self.steps += 1
        if self.steps == 3:
            raise RuntimeError("out of memory")
        return super().forward(batch, step)


def test_a_failed_step_loses_its_batch_and_the_worker_serves_on() -> None:
    async def scenario(mesh: OneProcessMesh) -> None:
        await mesh.submit("a", 20, 1)
        await until(lambda: mesh.events, "the loss to be told")
        await mesh.submit("b", 20, 2)
        await until(lambda: "b" in mesh.ends, "the next request's end")
        assert mesh.tokens["b"] == expected_tokens(prompt("b"), 2, 20, VOCAB)

    mesh = run(scenario, runner=Faulty(CAPACITY, StepTime()))
    assert mesh.events == ["lost"]
    assert mesh.worker_metrics.faults._value.get() == 1
    assert any(isinstance(decode(payload), WorkerFault) for _, payload in mesh.bus.published)


def test_a_lost_fault_is_told_again() -> None:
    async def scenario(mesh: OneProcessMesh) -> None:
        await mesh.submit("a", 20, 1)
        await until(lambda: mesh.events, "the loss to be told")

    assert run(scenario, LoseFirst(WorkerFault, 2), Faulty(CAPACITY, StepTime())).events == ["lost"]


def test_a_lost_reset_after_a_fault_does_not_mix_batches() -> None:
    async def scenario(mesh: OneProcessMesh) -> None:
        for index in range(3):
            await mesh.submit(f"a{index}", 20, 1)
        await until(lambda: len(mesh.events) >= 3, "the losses to be told")
        await mesh.submit("b", 20, 2)
        await until(lambda: "b" in mesh.ends or len(mesh.events) > 3, "the next request's end")
        if "b" in mesh.ends:
            assert mesh.tokens["b"] == expected_tokens(prompt("b"), 2, 20, VOCAB)
        await mesh.submit("c", 20, 3)
        await until(lambda: "c" in mesh.ends, "service to resume")
        assert mesh.tokens["c"] == expected_tokens(prompt("c"), 3, 20, VOCAB)

    lose = LoseFirst(Reset, 1)
    run(scenario, lose, Faulty(CAPACITY, StepTime()))
    assert lose.lost


def test_a_late_result_of_a_lost_batch_is_not_taken_for_one_of_the_new_batch() -> None:
    """A worker that was silent while its step ran is lost, comes back as it was, and then its old result arrives."""

    async def scenario(mesh: OneProcessMesh) -> None:
        await mesh.submit("a", 1, 1)
        mesh.bus.lose = is_beat
        await until(lambda: mesh.events, "the silence to be noticed")
        mesh.bus.lose = lambda subject, payload: False
        steps_before = sum(isinstance(decode(payload), StepResult) for _, payload in mesh.bus.published)
        await until(lambda: worker_greeted_again(mesh.bus), "the worker to be known again")
        assert steps_before == 0, "the old step ended too soon for this test"
        await mesh.submit("b", 3, 2)
        await until(lambda: "b" in mesh.ends, "the next request's end")
        assert mesh.tokens["b"] == expected_tokens(prompt("b"), 2, 3, VOCAB)

    run(scenario, runner=SimulatedRunner(CAPACITY, StepTime(2_500_000.0)))


def worker_greeted_again(bus: InProcessBus) -> bool:
    return sum(isinstance(decode(payload), Reset) for subject, payload in bus.published if ".step." in subject) > 1


def test_a_gateway_is_told_of_requests_that_nobody_will_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gateways, "UNKNOWN_AGE_NS", 100_000_000)

    async def scenario(mesh: OneProcessMesh) -> None:
        beat = GatewayBeat("g", 1, [("ghost", 1)])

        async def beats() -> None:
            while not mesh.events:
                await mesh.bus.publish(Subjects().beat("gateway", "g"), encode(beat))
                await asyncio.sleep(0.02)

        await asyncio.wait_for(beats(), 20)

    assert run(scenario).events == ["lost"]


def test_plans_that_never_get_a_result_cost_their_batch_not_the_mesh() -> None:
    """Every result is lost for a while: after some resends the batch counts as lost, and service resumes."""

    async def scenario(mesh: OneProcessMesh) -> None:
        await mesh.submit("a", 20, 1)
        await until(lambda: mesh.events, "the batch to be given up")
        mesh.bus.lose = lambda subject, payload: False
        await mesh.submit("b", 20, 2)
        await until(lambda: "b" in mesh.ends, "the next request's end")
        assert mesh.tokens["b"] == expected_tokens(prompt("b"), 2, 20, VOCAB)

    run(scenario, lose=lambda _, payload: isinstance(decode(payload), StepResult))


def test_a_leader_below_an_epoch_that_was_seen_leads_again_above_it() -> None:
    async def scenario(mesh: OneProcessMesh) -> None:
        await mesh.bus.publish(Subjects().beat("gateway", "old"), encode(GatewayBeat("old", MAX_EPOCH + 5)))
        await mesh.submit("a", 3, 1)
        await until(lambda: "a" in mesh.ends, "noise to be ignored")
        await mesh.bus.publish(Subjects().beat("gateway", "old"), encode(GatewayBeat("old", 7)))
        await until(lambda: mesh.metrics.epoch._value.get() == 8, "an epoch above")
        await until(lambda: mesh.scheduler.core.workers, "the worker")
        await mesh.submit("b", 20, 2)
        await until(lambda: "b" in mesh.ends, "service in that epoch")
        assert mesh.tokens["b"] == expected_tokens(prompt("b"), 2, 20, VOCAB)

    mesh = run(scenario)
    assert mesh.metrics.takeovers._value.get() == 2
