"""Scheduler processes around a real NATS server: killed, stopped, asked to stop, and without their store."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from mesh_stack import BusClient, Process, Stack, stack, until

from headrace.nats_server import find_nats_server
from shared.jetstream import KeyStore
from shared.messages import SchedulerBeat, StepPlan, StepResult
from shared.subjects import LEASE_BUCKET

WORKER = ("--simulate", "--simulate-base-us", "5000", "--worker-id", "w")


def run(scenario: Callable[[Stack, BusClient], Awaitable[None]]) -> None:
    async def body() -> None:
        client = await BusClient.connect(mesh.nats)
        await client.spy()
        try:
            await scenario(mesh, client)
        finally:
            await client.close()

    with stack() as mesh:
        asyncio.run(asyncio.wait_for(body(), 120))


def scheduler(mesh: Stack, name: str) -> Process:
    return mesh.start("scheduler", "--scheduler-id", name, "--lease-s", "1.0")


async def leads(client: BusClient, name: str, epoch: int) -> None:
    def there() -> bool:
        beat = client.beat
        return beat is not None and (beat.scheduler, beat.epoch) == (name, epoch) and bool(beat.models)

    await until(there, f"{name} to lead in epoch {epoch}, with a worker")


async def there(key: KeyStore) -> tuple[bytes, int]:
    for _ in range(2000):
        found = await key.read()
        if found is not None:
            return found
        await asyncio.sleep(0.02)
    raise AssertionError("the key was not made again")


async def serves(client: BusClient, request: str) -> None:
    await client.submit(request, [1, 2, 3], 20)
    await client.ended(request)


def test_a_killed_leader_is_followed_by_its_standby_and_comes_back_as_one() -> None:
    async def scenario(mesh: Stack, client: BusClient) -> None:
        a = scheduler(mesh, "a")
        mesh.start("worker", *WORKER)
        await leads(client, "a", 1)
        scheduler(mesh, "b")
        await serves(client, "r1")
        a.kill()
        await leads(client, "b", 2)
        await serves(client, "r2")
        scheduler(mesh, "a")
        await serves(client, "r3")
        assert client.beat is not None and client.beat.scheduler == "b"

    run(scenario)


def test_a_lease_is_handed_over_by_whoever_is_asked_to_stop() -> None:
    async def scenario(mesh: Stack, client: BusClient) -> None:
        a = mesh.start("scheduler", "--scheduler-id", "a", "--lease-s", "50")
        mesh.start("worker", *WORKER)
        await leads(client, "a", 1)
        b = mesh.start("scheduler", "--scheduler-id", "b", "--lease-s", "50")
        await until(lambda: "stands by" in b.output(), "the standby")
        assert await asyncio.to_thread(a.stop) == 0
        await leads(client, "b", 2)  # long before the lease would run out
        await serves(client, "r")

    run(scenario)


def test_a_sole_scheduler_that_is_started_again_under_its_name_leads_at_once() -> None:
    async def scenario(mesh: Stack, client: BusClient) -> None:
        a = mesh.start("scheduler", "--scheduler-id", "a", "--lease-s", "50")
        mesh.start("worker", *WORKER)
        await leads(client, "a", 1)
        a.kill()
        mesh.start("scheduler", "--scheduler-id", "a", "--lease-s", "50")
        await leads(client, "a", 2)
        await serves(client, "r")

    run(scenario)


def test_a_stopped_leader_that_wakes_after_its_lease_stands_by() -> None:
    async def scenario(mesh: Stack, client: BusClient) -> None:
        a = scheduler(mesh, "a")
        mesh.start("worker", *WORKER)
        await leads(client, "a", 1)
        b = scheduler(mesh, "b")
        await until(lambda: "stands by" in b.output(), "the standby")
        await client.submit("r1", [1, 2, 3], 2000)  # it has plans to make at the moment
        await until(lambda: client.tokens, "some tokens")
        a.popen.send_signal(signal.SIGSTOP)
        await leads(client, "b", 2)
        client.tokens.clear()
        begun = len(client.seen)
        a.popen.send_signal(signal.SIGCONT)
        await until(lambda: "stands down" in a.output(), "it to notice")
        await serves(client, "r2")
        since = client.seen[begun:]
        stale = [one for one in since if isinstance(one, StepPlan | SchedulerBeat) and one.epoch == 1]
        assert len(stale) <= 2, "no more than what was on its way when it was stopped"
        assert not [one for one in since if isinstance(one, StepResult) and one.epoch == 1], "and nobody obeys that"
        assert a.popen.poll() is None, "it stands by in the same process"
        await asyncio.to_thread(b.stop)
        await leads(client, "a", 3)

    run(scenario)


def test_the_jetstream_store_lost_while_it_is_used() -> None:
    async def scenario(mesh: Stack, client: BusClient) -> None:
        scheduler(mesh, "a")
        mesh.start("worker", *WORKER)
        await leads(client, "a", 1)
        b = scheduler(mesh, "b")
        await until(lambda: "stands by" in b.output(), "the standby")
        jetstream, key = client.bus._client.jetstream(), client.bus.key(LEASE_BUCKET, "default", 5.0)
        for index in range(3):
            await jetstream.delete_key_value(LEASE_BUCKET)
            await serves(client, f"r{index}")
            found = await there(key)
            assert json.loads(found[0]) == {"holder": "a", "epoch": 1, "released": False}

    run(scenario)


def test_nats_without_jetstream_is_one_line(tmp_path: Path) -> None:
    command = [find_nats_server(), "--addr", "127.0.0.1", "--port", "-1", "--ports_file_dir", tmp_path]
    nats = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        asyncio.run(until(lambda: [path for path in tmp_path.glob("*.ports") if path.stat().st_size], "the port"))
        url = json.loads(next(tmp_path.glob("*.ports")).read_text())["nats"][0]
        with stack() as mesh:
            process = mesh.start("scheduler", "--nats", url)
            assert process.popen.wait(60) == 2
            (line,) = [line for line in process.output().splitlines() if line.startswith("headrace: ")]
            assert line.endswith("has no JetStream, which keeps the scheduler's lease: start it with --jetstream")
    finally:
        nats.terminate()
        nats.wait(10)


@pytest.mark.parametrize("lease", ["0", "0.1", "1e9", "soon"])
def test_a_lease_of_no_use_is_refused(lease: str) -> None:
    with stack() as mesh:
        process = mesh.start("scheduler", "--lease-s", lease)
        assert process.popen.wait(60) == 2 and "lease-s" in process.output()
