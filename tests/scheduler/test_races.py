"""Races between processes that are easy to get wrong, each by its name: the scheduler's part in them."""

from __future__ import annotations

import asyncio
import contextlib

import pytest
from mesh_stack import until
from service_mesh import CAPACITY, SUBJECTS, ServiceMesh, run

from scheduler import gateways, workers
from shared.messages import (
    Need,
    PageSnapshot,
    Reset,
    SchedulerBeat,
    StepPlan,
    StepResult,
    SubmitReply,
    TokenBatch,
    WorkerBeat,
    WorkerState,
    decode,
    encode,
)
from worker.simulated import SimulatedRunner, StepTime


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "RESEND_AFTER_S", 0.05)
    monkeypatch.setattr(gateways, "UNKNOWN_AGE_NS", 100_000_000)
    monkeypatch.setattr("worker.service.BEAT_S", 0.05)


def slow(step_us: float = 20_000.0) -> SimulatedRunner:
    return SimulatedRunner(CAPACITY, StepTime(step_us))


def test_a_stopped_leader_that_wakes_after_its_lease() -> None:
    async def scenario(mesh: ServiceMesh) -> None:
        a = await mesh.scheduler("a")
        await mesh.worker(runner=slow())
        await until(lambda: a.workers, "the worker")
        b = await mesh.scheduler("b")
        await mesh.submit(a, "r", 60)
        await until(lambda: len(mesh.tokens.get("r", [])) > 3, "some tokens")
        a.client.hold()
        a.store.going.clear()
        await until(lambda: b.workers, "the standby to take over and greet the worker")
        assert not a.service._lease.holds()
        await mesh.resume(b, "r")
        await until(lambda: mesh.sent(StepPlan)[-1].epoch == 2, "its plans")  # type: ignore[union-attr]
        before = len(mesh.bus.published)
        stale = mesh.submits["r"]
        inboxes = []
        for index in range(3):  # what has waited in its socket since
            inboxes.append(asyncio.ensure_future(mesh.bus.request(SUBJECTS.submit("m", 1), encode(stale), 0.3)))
            await mesh.beat(("r", 2), gateway=f"g{index}", epoch=2)
        a.client.let_go()
        assert all(
            isinstance(one, TimeoutError | OSError) for one in await asyncio.gather(*inboxes, return_exceptions=True)
        )
        a.store.going.set()
        await until(lambda: not a.of("leading"), "it to stand down")
        await mesh.ended("r")
        since = [decode(payload) for _, payload in mesh.bus.published[before:]]
        assert not [one for one in since if isinstance(one, StepPlan | Reset | SchedulerBeat) and one.epoch == 1]
        assert not [one for one in since if isinstance(one, SubmitReply) and one.epoch == 1]
        # It is a standby like any other now, and begins with nothing of what it had.
        await b.end()
        await until(lambda: a.of("leading") and a.workers, "it to lead again")
        assert a.service.core.epoch == 3 and not a.service.core.knows("r", 1)
        await mesh.submit(a, "s")
        await mesh.ended("s")

    assert run(scenario).kinds() == []


def test_the_jetstream_store_lost() -> None:
    async def scenario(mesh: ServiceMesh) -> None:
        a, _ = await mesh.both()
        b = await mesh.scheduler("b")
        await mesh.submit(a, "r", 200)
        for _ in range(3):
            mesh.store.lose()
            await until(lambda: mesh.store.value is not None, "the key")
        await mesh.ended("r")
        assert (a.of("takeovers"), b.of("takeovers"), a.service.core.epoch) == (1, 0, 1)

    assert run(scenario).kinds() == []


def test_a_store_that_is_away_stops_the_leader_and_it_goes_on_with_what_it_has() -> None:
    async def scenario(mesh: ServiceMesh) -> None:
        a = await mesh.scheduler()
        await mesh.worker(runner=slow(5000))
        await until(lambda: a.workers, "the worker")
        await mesh.submit(a, "r", 150)
        mesh.store.down = True
        await until(lambda: not a.service._lease.holds(), "the lease to run out")
        await asyncio.sleep(0.1)  # plans that had been sent are executed
        plans = len(mesh.sent(StepPlan))
        await asyncio.sleep(0.5)
        assert len(mesh.sent(StepPlan)) == plans
        mesh.store.down = False
        await mesh.ended("r")
        assert (a.of("takeovers"), a.service.core.epoch) == (1, 1)

    assert run(scenario).kinds() == []


def test_a_restarted_worker_with_the_same_id() -> None:
    async def scenario(mesh: ServiceMesh) -> None:
        a = await mesh.scheduler()
        worker = await mesh.worker(incarnation=7, runner=slow())
        await until(lambda: a.workers, "the worker")
        await mesh.submit(a, "r", 60)
        await until(lambda: len(mesh.tokens.get("r", [])) > 3, "some tokens")
        late = mesh.sent(StepResult)[-1]
        assert isinstance(late, StepResult)
        await worker.kill()
        await mesh.worker(incarnation=8)
        await until(mesh.kinds, "the loss to be told")
        old = WorkerBeat("w", 7, 1, WorkerState.READY, CAPACITY)
        await mesh.bus.publish(SUBJECTS.beat("worker", "w"), encode(old))
        await mesh.bus.publish(SUBJECTS.result(1), encode(late))
        await mesh.resume(a, "r")
        await mesh.ended("r")
        assert a.service.core.workers["w"].incarnation == 8
        assert a.metrics.workers_lost.labels("restart")._value.get() == 1

    assert run(scenario).kinds() == ["lost"]


def test_a_worker_wrongly_declared_dead_that_comes_back() -> None:
    async def scenario(mesh: ServiceMesh) -> None:
        a = await mesh.scheduler()
        await mesh.worker(runner=slow())
        await until(lambda: a.workers, "the worker")
        await mesh.submit(a, "r", 100)
        await until(lambda: len(mesh.tokens.get("r", [])) > 3, "some tokens")
        mesh.bus.lose = lambda _, payload: isinstance(decode(payload), WorkerBeat | StepResult | PageSnapshot)
        await until(mesh.kinds, "the silence to be noticed")
        assert a.metrics.workers_lost.labels("silence")._value.get() == 1
        mesh.bus.lose = lambda subject, payload: False
        await until(lambda: a.workers, "it to be known again")
        await mesh.resume(a, "r")
        await mesh.ended("r")
        resets = [one.step for one in mesh.sent(Reset) if isinstance(one, Reset)]
        assert max(resets) > 1, "no step of the lost batch can be taken for one of the new"

    assert run(scenario).kinds() == ["lost"]


def test_plan_lost_next_one_in() -> None:
    async def scenario(mesh: ServiceMesh) -> None:
        a = await mesh.scheduler()
        await mesh.worker(runner=slow())
        await until(lambda: a.workers, "the worker")
        lost: list[int] = []

        def lose(_: str, payload: bytes) -> bool:
            plan = decode(payload)
            if isinstance(plan, StepPlan) and plan.step == 5 and not lost:
                lost.append(plan.step)
                return True
            return False

        mesh.bus.lose = lose
        await mesh.submit(a, "r")
        await mesh.ended("r")
        assert lost
        needs = [one.step for one in mesh.sent(Need) if isinstance(one, Need)]
        assert a.of("resent_plans") and set(needs) <= {5}

    assert run(scenario).kinds() == []


def test_result_in_tokens_lost_worker_dead() -> None:
    """The scheduler takes the request for ended. That its gateway does not is told by the gateway's beats."""

    async def scenario(mesh: ServiceMesh) -> None:
        a, worker = await mesh.both()
        mesh.bus.lose = lambda _, payload: isinstance(decode(payload), TokenBatch)
        await mesh.submit(a, "r", 5)
        await until(lambda: not a.service.core.knows("r", 1), "the end at the scheduler")
        await worker.kill()
        mesh.bus.lose = lambda subject, payload: False

        async def beats() -> None:
            while not mesh.events:
                await mesh.beat(("r", 1))
                await asyncio.sleep(0.02)

        await asyncio.wait_for(beats(), 20)
        await mesh.worker(incarnation=2)
        await until(lambda: a.workers and a.service.core.workers["w"].incarnation == 2, "the next worker")
        await mesh.resume(a, "r")
        await mesh.ended("r")

    mesh = run(scenario)
    assert set(mesh.kinds()) == {"lost"} and mesh.events[0].choice == -1


def test_cancel_before_submit() -> None:
    async def scenario(mesh: ServiceMesh) -> None:
        a, _ = await mesh.both()
        await mesh.cancel(a, "r")
        await mesh.submit(a, "r")
        await mesh.submit(a, "s")
        await mesh.ended("s")
        started = {start.request_id for plan in mesh.sent(StepPlan) for start in plan.starts}  # type: ignore[union-attr]
        assert started == {"s"} and not a.service.core.knows("r", 1)

    run(scenario)


def test_a_leader_is_asked_to_stop_just_as_a_renewal_is_answered() -> None:
    """asyncio.wait_for drops a cancellation that comes together with its result: whoever renews must end all the same,
    or the lease is held for ever by a scheduler that does nothing."""

    async def scenario(mesh: ServiceMesh) -> None:
        scheduler, _ = await mesh.both()
        write = scheduler.store.write

        async def answered(value: bytes, expected: int) -> int:
            scheduler.store.write = write  # type: ignore[method-assign]
            scheduler.stop.set()
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(60)
            return await write(value, expected)

        scheduler.store.write = answered  # type: ignore[method-assign]
        async with asyncio.timeout(20):
            await scheduler.task
        assert mesh.store.value is not None and b'"released":true' in mesh.store.value

    run(scenario)
