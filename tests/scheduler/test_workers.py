"""How a leading scheduler meets workers, tells who is gone, and lets go of those that stop."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

import msgspec
import pytest
from in_process_bus import LoseFirst
from mesh_stack import until
from service_mesh import CAPACITY, SUBJECTS, SchedulerNode, ServiceMesh, prompt, run

from scheduler import term, workers
from scheduler.core.core import SchedulerCore
from shared.messages import (
    PageSnapshot,
    Reset,
    StepPlan,
    StepResult,
    WorkerBeat,
    WorkerFault,
    WorkerState,
    decode,
    encode,
    pack_tokens,
)
from shared.page_hash import DIGEST_BYTES
from worker.batch import Batch
from worker.simulated import Sampled, SimulatedRunner, Step, StepTime


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "RESEND_AFTER_S", 0.05)
    monkeypatch.setattr(workers, "GREET_AGAIN_S", 0.0)
    monkeypatch.setattr("worker.service.BEAT_S", 0.05)
    monkeypatch.setattr(term, "TICK_S", 0.05)


@pytest.fixture
def losses(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, bool]]:
    """(reason, suspect) of each worker that the core was told to be lost."""
    told: list[tuple[str, bool]] = []
    worker_lost = SchedulerCore.worker_lost

    def note(self: SchedulerCore, name: str, reason: str, now: int, suspect: bool = True):  # type: ignore[no-untyped-def]
        told.append((reason, suspect))
        return worker_lost(self, name, reason, now, suspect)

    monkeypatch.setattr(SchedulerCore, "worker_lost", note)
    return told


def slow(step_us: float = 20_000.0) -> SimulatedRunner:
    return SimulatedRunner(CAPACITY, StepTime(step_us))


def lost_by(node: SchedulerNode, cause: str) -> float:
    return float(node.metrics.workers_lost.labels(cause)._value.get())


# --- greeting -------------------------------------------------------------------------------------------------------


def test_no_plan_is_made_before_the_pages_are_told() -> None:
    async def scenario(mesh: ServiceMesh) -> None:
        mesh.bus.lose = lambda _, payload: isinstance(decode(payload), PageSnapshot)
        a = await mesh.scheduler()
        await mesh.worker()
        await until(lambda: len(mesh.sent(PageSnapshot)) > 2, "answers that are lost: beats bring the reset again")
        assert not a.workers
        mesh.bus.lose = lambda subject, payload: False
        await until(lambda: a.workers, "an answer that comes")
        await mesh.submit(a, "r")
        await mesh.ended("r")

    run(scenario)


def test_workers_with_other_weights_under_one_name_are_told_of(caplog: pytest.LogCaptureFixture) -> None:
    """As when a model or an adapter is rolled out worker by worker: what differs is said once for each that comes."""

    async def scenario(mesh: ServiceMesh) -> None:
        a = await mesh.scheduler()
        kinds = {
            "w0": {"weights": "x", "adapters": ["p"], "adapter_weights": ["1"]},
            "w1": {"weights": "x", "adapters": ["q", "p"], "adapter_weights": ["0", "1"]},
            "w2": {"weights": "x", "adapters": ["p"], "adapter_weights": ["2"]},
            "w3": {"weights": "y"},
            "w4": {},
        }
        for count, (name, told) in enumerate(kinds.items(), 1):
            await mesh.worker(name, runner=SimulatedRunner(msgspec.structs.replace(CAPACITY, **told), StepTime(300.0)))
            await until(lambda count=count: len(a.workers) == count, name)  # type: ignore[misc]

    with caplog.at_level(logging.WARNING, "headrace.scheduler"):
        run(scenario)
    said = [record.getMessage() for record in caplog.records if "other weights" in record.getMessage()]
    assert len(said) == 2
    assert "worker w2 has other weights than worker w0 for adapter 'p'" in said[0]
    assert "worker w3 has other weights than worker w0 for model 'm'" in said[1]


def test_a_reset_that_was_lost_comes_again() -> None:
    lose = LoseFirst(Reset, 3)

    async def scenario(mesh: ServiceMesh) -> None:
        mesh.bus.lose = lose
        await mesh.both()
        assert len(lose.lost) == 3 and set(lose.lost) == {lose.lost[0]}

    run(scenario)


class Played:
    """A worker that a test plays: it answers a reset with what it is told to."""

    def __init__(self, mesh: ServiceMesh, snapshot: Callable[[Reset], PageSnapshot]) -> None:
        self.mesh = mesh
        self._snapshot = snapshot
        self._sending: list[asyncio.Future[None]] = []

    async def up(self) -> None:
        await self.mesh.bus.subscribe(SUBJECTS.step("p"), self._on_step)
        beat = WorkerBeat("p", 1, 0, WorkerState.READY, CAPACITY)
        await self.mesh.bus.publish(SUBJECTS.beat("worker", "p"), encode(beat))

    def _on_step(self, payload: bytes, _: str) -> None:
        reset = decode(payload)
        if isinstance(reset, Reset):
            answer = self.mesh.bus.publish(SUBJECTS.result(reset.epoch), encode(self._snapshot(reset)))
            self._sending.append(asyncio.ensure_future(answer))


DIGEST = b"d" * DIGEST_BYTES


@pytest.mark.parametrize(
    ("pages", "hashes", "kept"),
    [
        (pack_tokens([3, 4]), DIGEST + b"e" * DIGEST_BYTES, 2),
        (b"", b"", 0),
        (pack_tokens([3]), b"short", 0),
        (pack_tokens([3]), DIGEST * 2, 0),
        (b"odd", b"", 0),
        (b"odd", DIGEST, 0),
        (pack_tokens([0, 3, 61, 2**32 - 1]), b"".join(bytes([one]) * DIGEST_BYTES for one in range(4)), 1),
        (pack_tokens([3, 3]), DIGEST + b"e" * DIGEST_BYTES, 1),
        (pack_tokens([3, 4]), DIGEST * 2, 1),
    ],
)
def test_a_snapshot_of_whatever_kind_is_harmless(pages: bytes, hashes: bytes, kept: int) -> None:
    async def scenario(mesh: ServiceMesh) -> None:
        a = await mesh.scheduler()
        await until(lambda: a.of("leading"), "a leader")
        await Played(mesh, lambda reset: PageSnapshot(reset.epoch, "p", 1, reset.step, pages, hashes)).up()
        await until(lambda: a.workers, "the worker to be known")
        pool = a.service.core.workers["p"].pool
        assert pool.num_cached == kept and pool.num_free == CAPACITY.num_blocks
        pool.check([])

    run(scenario)


def test_a_snapshot_for_another_reset_is_ignored() -> None:
    others = [
        lambda reset: PageSnapshot(reset.epoch, "p", 1, reset.step + 1),
        lambda reset: PageSnapshot(reset.epoch, "p", 2, reset.step),
        lambda reset: PageSnapshot(reset.epoch + 1, "p", 1, reset.step),
        lambda reset: PageSnapshot(reset.epoch, "q", 1, reset.step),
    ]

    async def scenario(mesh: ServiceMesh) -> None:
        a = await mesh.scheduler()
        await until(lambda: a.of("leading"), "a leader")
        for other in others:
            await Played(mesh, other).up()
        await until(lambda: len(mesh.sent(PageSnapshot)) >= len(others), "the answers")
        await asyncio.sleep(0)
        assert not a.workers

    run(scenario)


def test_what_the_pages_hold_outlives_the_scheduler() -> None:
    async def scenario(mesh: ServiceMesh) -> None:
        a = await mesh.scheduler("a")
        await mesh.worker(runner=slow())
        await until(lambda: a.workers, "the worker")
        b = await mesh.scheduler("b")
        await mesh.submit(a, "r", 60, length=40)
        await until(lambda: len(mesh.tokens.get("r", [])) > 20, "some tokens")
        await a.kill()
        await until(lambda: b.workers, "the standby to take over")
        had = len(mesh.tokens["r"])
        await mesh.resume(b, "r")
        await mesh.ended("r")
        starts = [start for plan in mesh.sent(StepPlan) if plan.epoch == 2 for start in plan.starts]  # type: ignore[union-attr]
        assert starts[0].computed >= (len(prompt("r", 40)) + had) // 4 * 4 - 8, "most of it was a prefix hit"
        assert b.service.core.epoch == 2

    assert run(scenario).kinds() == []


# --- who is gone ----------------------------------------------------------------------------------------------------


def test_a_dead_worker_is_known_long_before_its_silence_times_out(losses: list[tuple[str, bool]]) -> None:
    async def scenario(mesh: ServiceMesh) -> None:
        a = await mesh.scheduler()
        worker = await mesh.worker(runner=slow())
        await until(lambda: a.workers, "the worker")
        await mesh.submit(a, "r", 200)
        await until(lambda: mesh.tokens, "some tokens")
        await worker.kill()
        await until(mesh.kinds, "the loss")
        assert lost_by(a, "gone") == 1 and a.metrics.probes["gone"]._value.get() == 2

    assert run(scenario, worker_timeout_s=1000.0).kinds() == ["lost"]
    assert [suspect for _, suspect in losses] == [True], "what ran when it died may be the cause"


def test_a_worker_that_listens_is_not_gone_however_silent(losses: list[tuple[str, bool]]) -> None:
    async def scenario(mesh: ServiceMesh) -> None:
        a = await mesh.scheduler()
        await mesh.worker(runner=slow())
        await until(lambda: a.workers, "the worker")
        await mesh.submit(a, "r", 200)
        await until(lambda: mesh.tokens, "some tokens")
        mesh.bus.lose = lambda _, payload: isinstance(decode(payload), WorkerBeat | StepResult)
        await until(lambda: a.metrics.probes["there"]._value.get() > 1, "probes")
        assert not losses
        await until(mesh.kinds, "the silence")
        assert lost_by(a, "silence") == 1

    run(scenario, worker_timeout_s=3.0)
    assert [suspect for _, suspect in losses] == [False], "a hang and a cut leave the requests alone"


class Faulty(SimulatedRunner):
    steps = 0

    def forward(self, batch: Batch, step: Step) -> Sampled:
        self.steps += 1
        if self.steps == 3:
            raise RuntimeError("out of memory")
        return super().forward(batch, step)


def test_a_fault_makes_its_batch_suspect(losses: list[tuple[str, bool]]) -> None:
    async def scenario(mesh: ServiceMesh) -> None:
        a = await mesh.scheduler()
        await mesh.worker(runner=Faulty(CAPACITY, StepTime()))
        await until(lambda: a.workers, "the worker")
        await mesh.submit(a, "r")
        await until(mesh.kinds, "the loss")
        await mesh.resume(a, "r")
        await mesh.ended("r")
        assert lost_by(a, "fault") == 1 and mesh.sent(WorkerFault)

    run(scenario)
    assert [suspect for _, suspect in losses] == [True]


def test_nobody_is_lost_while_the_bus_is_down(losses: list[tuple[str, bool]]) -> None:
    """And what was on its way is sent again once it is back."""

    async def scenario(mesh: ServiceMesh) -> None:
        a = await mesh.scheduler()
        await mesh.worker(runner=slow())
        await until(lambda: a.workers, "the worker")
        await mesh.submit(a, "r", 100)
        await until(lambda: mesh.tokens, "some tokens")
        mesh.bus.lose = lambda subject, payload: ".tokens." not in subject
        a.client.alive = False
        await asyncio.sleep(2.5)  # the silence is the point
        assert not losses
        mesh.bus.lose = lambda subject, payload: False
        a.client.alive, a.client.reconnects = True, 1
        await until(lambda: "r" in mesh.ends, "the end", 30)
        await mesh.ended("r")
        assert a.of("resent_plans") > 0

    mesh = run(scenario, worker_timeout_s=1.0, lease_s=30.0)
    assert not losses and mesh.kinds() == []


# --- stopping -------------------------------------------------------------------------------------------------------


def test_a_worker_that_stops_hands_over_and_leaves(losses: list[tuple[str, bool]]) -> None:
    async def scenario(mesh: ServiceMesh) -> None:
        a = await mesh.scheduler()
        one = await mesh.worker("one", runner=slow())
        await until(lambda: a.workers, "a worker")
        await mesh.submit(a, "r", 200)
        await until(lambda: mesh.tokens, "some tokens")
        await mesh.worker("two")
        await until(lambda: len(a.workers) == 2, "both")
        await asyncio.wait_for(one.end(), 20)
        await one.client.kill()
        await until(mesh.kinds, "the handover")
        await mesh.resume(a, "r")
        await mesh.ended("r")
        await until(lambda: a.workers == ["two"], "it to be taken for gone")
        assert all(lost_by(a, cause) == 0 for cause in ("silence", "gone", "restart", "fault"))

    assert run(scenario, worker_timeout_s=1000.0).kinds() == ["moved"]
    assert [suspect for _, suspect in losses] == [False]


def test_a_sole_worker_that_stops_finishes_what_it_has() -> None:
    async def scenario(mesh: ServiceMesh) -> None:
        a = await mesh.scheduler()
        worker = await mesh.worker(runner=slow(5000.0))
        await until(lambda: a.workers, "the worker")
        await mesh.submit(a, "r", 80)
        await until(lambda: mesh.tokens, "some tokens")
        await asyncio.wait_for(worker.end(), 20)
        await mesh.ended("r")

    assert run(scenario).kinds() == []


def test_a_worker_that_stops_under_a_new_scheduler_does_not_wait_for_what_nobody_will_end() -> None:
    async def scenario(mesh: ServiceMesh) -> None:
        a = await mesh.scheduler("a")
        worker = await mesh.worker(runner=slow())
        await until(lambda: a.workers, "the worker")
        await mesh.submit(a, "r", 200)
        await until(lambda: mesh.tokens, "some tokens")
        await a.kill()
        worker.stop.set()
        await asyncio.sleep(0.1)
        assert not worker.task.done()
        await mesh.scheduler("b")
        await asyncio.wait_for(worker.task, 20)

    run(scenario)
