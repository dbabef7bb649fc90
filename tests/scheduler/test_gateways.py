"""What a leading scheduler and the gateways' beats make of each other's requests."""

from __future__ import annotations

import asyncio

import pytest
from mesh_stack import until
from service_mesh import CAPACITY, SchedulerNode, ServiceMesh, run

from scheduler import gateways, term
from worker.simulated import SimulatedRunner, StepTime


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gateways, "UNKNOWN_AGE_NS", 300_000_000)
    monkeypatch.setattr(gateways, "ORPHAN_AGE_NS", 100_000_000)
    monkeypatch.setattr(term, "TICK_S", 0.05)


async def under_load(mesh: ServiceMesh) -> SchedulerNode:
    a = await mesh.scheduler()
    await mesh.worker(runner=SimulatedRunner(CAPACITY, StepTime(20_000.0)))
    await until(lambda: a.workers, "the worker")
    await mesh.submit(a, "r", 150)
    await until(lambda: mesh.tokens, "some tokens")
    return a


async def beats(mesh: ServiceMesh, *live: tuple[str, int], seconds: float = 0.6) -> None:
    for _ in range(int(seconds / 0.05)):
        await mesh.beat(*live)
        await asyncio.sleep(0.05)


def test_what_nobody_knows_is_lost_after_two_beats_some_time_apart() -> None:
    async def scenario(mesh: ServiceMesh) -> None:
        await under_load(mesh)
        for _ in range(5):  # a roll call may bring many at once
            await mesh.beat(("r", 1), ("ghost", 3))
        await asyncio.sleep(0.4)
        assert not mesh.events
        await mesh.beat(("r", 1), ("ghost", 3))
        await until(lambda: mesh.events, "the loss")
        assert [(one.kind, one.request_id, one.attempt, one.choice) for one in mesh.events] == [
            ("lost", "ghost", 3, -1)
        ]

    run(scenario)


def test_a_request_between_two_beats_is_not_judged_by_the_second() -> None:
    async def scenario(mesh: ServiceMesh) -> None:
        await under_load(mesh)
        await mesh.beat(("ghost", 3))
        await mesh.beat()  # it has ended meanwhile
        await asyncio.sleep(0.4)
        await mesh.beat(("ghost", 3))
        await asyncio.sleep(0.1)
        assert not mesh.events

    run(scenario)


def test_what_is_being_submitted_is_not_judged_and_is_alive() -> None:
    async def scenario(mesh: ServiceMesh) -> None:
        a = await under_load(mesh)
        await beats(mesh, ("r", 0), ("on its way", 0))
        assert not mesh.events and a.service.core.knows("r", 1)
        await beats(mesh)
        assert not a.service.core.knows("r", 1), "nobody waits for it"

    run(scenario)


def test_a_gateway_declared_gone_that_beats_again_is_told_what_it_lost() -> None:
    async def scenario(mesh: ServiceMesh) -> None:
        a = await under_load(mesh)
        await until(lambda: not a.service.core.knows("r", 1), "its silence to cost it its requests")
        assert not mesh.events
        await beats(mesh, ("r", 1))
        assert {(one.kind, one.request_id, one.attempt) for one in mesh.events} == {("lost", "r", 1)}
        await mesh.resume(a, "r")
        keeping = asyncio.create_task(beats(mesh, ("r", 2), seconds=30))
        await mesh.ended("r")
        keeping.cancel()

    run(scenario, gateway_timeout_s=1.0)


def test_a_gateways_silence_does_not_count_while_the_bus_was_down() -> None:
    async def scenario(mesh: ServiceMesh) -> None:
        a = await under_load(mesh)
        await mesh.beat(("r", 1))
        a.client.alive = False
        await asyncio.sleep(2.0)  # the silence is the point
        a.client.alive, a.client.reconnects = True, 1
        await asyncio.sleep(0.3)
        assert a.service.core.knows("r", 1)
        keeping = asyncio.create_task(beats(mesh, ("r", 1), seconds=30))
        await mesh.ended("r")
        keeping.cancel()

    run(scenario, gateway_timeout_s=1.0, lease_s=30.0, worker_timeout_s=1000.0)


def test_a_report_of_what_runs_tells_the_tokens_so_far() -> None:
    async def scenario(mesh: ServiceMesh) -> None:
        a = await under_load(mesh)
        (sequence,) = a.service.core.sequences_of("r")
        await until(lambda: sequence.generated, "a result")
        request = a.service.report("r").request
        assert request is not None and request.live
        assert request.choices[0].generated == sequence.generated
        assert a.service.report("nobody").request is None

    run(scenario)
