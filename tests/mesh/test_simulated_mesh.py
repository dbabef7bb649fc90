"""Scheduler and simulated worker as processes around a real NATS server."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest
from mesh_stack import BusClient, Stack, stack, until

from shared.messages import Outcome, Reset, StepPlan, StepResult
from worker.simulated import expected_tokens

pytestmark = pytest.mark.mesh

VOCAB = 32000
SIMULATED = ("--simulate", "--model", "sim", "--simulate-base-us", "200", "--simulate-token-us", "1")


def run(
    scenario: Callable[[Stack, BusClient], Awaitable[None]], *worker_flags: str, scheduler_flags: tuple[str, ...] = (),
    workers: int = 1,
) -> None:  # fmt: skip
    async def body(mesh: Stack) -> None:
        client = await BusClient.connect(mesh.nats)
        try:
            await client.spy()
            await client.ready(workers)
            await scenario(mesh, client)
        finally:
            await client.close()

    with stack() as mesh:
        mesh.start("scheduler", *scheduler_flags)
        for index in range(workers):
            mesh.start("worker", "--worker-id", f"w{index}", *SIMULATED, *worker_flags)
        asyncio.run(body(mesh))


def test_many_requests_get_exactly_their_tokens() -> None:
    async def scenario(_: Stack, client: BusClient) -> None:
        prompts = {f"r{i}": [(i * 37 + j) % VOCAB for j in range(1 + i * 3)] for i in range(40)}
        for i, (name, prompt) in enumerate(prompts.items()):
            assert (await client.submit(name, prompt, 5 + i, seed=i)).outcome is Outcome.ACCEPTED
        await client.ended(*prompts)
        for i, (name, prompt) in enumerate(prompts.items()):
            assert client.tokens[name, 0] == expected_tokens(prompt, i, 5 + i, VOCAB)
        assert not client.events

    run(scenario, scheduler_flags=("--max-num-seqs", "8", "--max-num-batched-tokens", "64"))


def test_preemptions_change_nothing_and_copy_nothing() -> None:
    async def scenario(_: Stack, client: BusClient) -> None:
        for i in range(12):
            await client.submit(f"r{i}", list(range(1, 20)), 60, seed=i)
        await client.ended(*(f"r{i}" for i in range(12)))
        for i in range(12):
            assert client.tokens[f"r{i}", 0] == expected_tokens(list(range(1, 20)), i, 60, VOCAB)
        plans = [m for m in client.seen if isinstance(m, StepPlan)]
        assert sum(len(plan.starts) for plan in plans) > 12, "nothing was preempted: the pool is too large for the test"
        results = [m for m in client.seen if isinstance(m, StepResult)]
        assert results and all(result.kv_bytes_copied == 0 for result in results)
        beat = client.beat
        await until(lambda: client.beat is not beat and client.beat and not client.beat.running, "an idle beat")
        assert client.beat and client.beat.free_blocks == client.beat.total_blocks == 20

    run(scenario, "--simulate-blocks", "20")


def test_a_cancel_frees_the_memory_and_stops_the_steps() -> None:
    async def scenario(_: Stack, client: BusClient) -> None:
        for i in range(5):
            await client.submit(f"r{i}", [1, 2, 3], 10_000)
        await until(lambda: len(client.tokens) == 5, "first tokens of all")
        for i in range(5):
            await client.cancel(f"r{i}")
        await until(lambda: client.beat and client.beat.running == 0 and client.beat.free_blocks == 4096, "all freed")

    run(scenario)


def test_a_gateway_that_forgets_a_request_has_it_cancelled() -> None:
    async def scenario(_: Stack, client: BusClient) -> None:
        await client.submit("r", [1, 2, 3], 60_000)
        await until(lambda: client.tokens, "a first token")
        client.live.clear()  # as if its cancel had been lost
        await until(lambda: client.beat and client.beat.running == 0, "the orphan's end")

    run(scenario)


def test_a_killed_worker_fails_its_requests_and_its_successor_serves() -> None:
    async def scenario(mesh: Stack, client: BusClient) -> None:
        await client.submit("lost", [1, 2, 3], 60_000)
        await until(lambda: client.tokens, "a first token")
        mesh.processes[1].kill()
        await until(lambda: client.events, "the loss to be told")
        assert client.events[0].kind == "lost" and client.events[0].request_id == "lost"
        mesh.start("worker", "--worker-id", "w0", *SIMULATED)
        await client.ready()
        assert (await client.submit("next", [4, 5], 7)).outcome is Outcome.ACCEPTED
        await client.ended("next")
        assert client.tokens["next", 0] == expected_tokens([4, 5], 1, 7, VOCAB)

    run(scenario, scheduler_flags=("--worker-timeout-s", "1.5"))


def test_a_restarted_scheduler_takes_a_higher_epoch_and_the_worker_starts_over() -> None:
    async def scenario(mesh: Stack, client: BusClient) -> None:
        first = await client.ready()
        await client.submit("old", [1, 2, 3], 60_000)
        await until(lambda: client.tokens, "a first token")
        mesh.processes[0].kill()
        mesh.start("scheduler")
        await until(lambda: client.beat and client.beat.epoch > first.epoch and client.beat.models, "a new leader")
        client.live.clear()
        assert (await client.submit("new", [4, 5], 7)).outcome is Outcome.ACCEPTED
        await client.ended("new")
        assert client.tokens["new", 0] == expected_tokens([4, 5], 1, 7, VOCAB)
        resets = [m for m in client.seen if isinstance(m, Reset)]
        assert resets[-1].epoch > first.epoch

    run(scenario)


def test_a_second_scheduler_stands_by() -> None:
    async def scenario(mesh: Stack, client: BusClient) -> None:
        first = await client.ready()
        standby = mesh.start("scheduler")
        await until(lambda: "stands by" in standby.output(), "the standby's log line")
        assert client.beat and client.beat.scheduler == first.scheduler
        assert mesh.processes[0].stop() == 0
        await until(lambda: client.beat and client.beat.scheduler != first.scheduler and client.beat.models, "takeover")

    run(scenario)


def test_two_workers_serve_one_queue() -> None:
    async def scenario(_: Stack, client: BusClient) -> None:
        for i in range(16):
            await client.submit(f"r{i}", [i, i + 1], 40, seed=i)
        await client.ended(*(f"r{i}" for i in range(16)))
        for i in range(16):
            assert client.tokens[f"r{i}", 0] == expected_tokens([i, i + 1], i, 40, VOCAB)
        used = {m.worker for m in client.seen if isinstance(m, StepPlan) and m.starts}
        assert used == {"w0", "w1"}

    run(scenario, workers=2)


def test_noise_on_every_subject_is_dropped() -> None:
    async def scenario(mesh: Stack, client: BusClient) -> None:
        assert client.beat is not None
        epoch = client.beat.epoch
        subjects = client.subjects
        client.seen.clear()
        noise = [b"", b"\x00", b"\xff" * 40, b"null", b"\x80\x04\x95", b"\x93\xa4plan\x01\x02", b"\x91" * 5000]
        targets = [
            subjects.step("w0"), subjects.result(epoch), subjects.cancel(epoch), subjects.roll_call,
            subjects.submit("sim", epoch),
        ]  # fmt: skip
        quiet = await BusClient.connect(mesh.nats)
        for target in targets:
            for payload in noise:
                await quiet.bus.publish(target, payload)
        await quiet.bus.flush()
        await quiet.ready()
        assert (await quiet.submit("after", [4, 5], 7)).outcome is Outcome.ACCEPTED
        await quiet.ended("after")
        assert quiet.tokens["after", 0] == expected_tokens([4, 5], 1, 7, VOCAB)
        await quiet.close()
        assert all(process.popen.poll() is None for process in mesh.processes)

    run(scenario)


def test_sigterm_lets_a_worker_finish_its_sequences() -> None:
    async def scenario(mesh: Stack, client: BusClient) -> None:
        await client.submit("r", [1, 2, 3], 400)
        await until(lambda: client.tokens, "a first token")
        code = await asyncio.to_thread(mesh.processes[1].stop)
        assert code == 0
        await client.ended("r")
        assert client.tokens["r", 0] == expected_tokens([1, 2, 3], 1, 400, VOCAB)

    run(scenario)


def test_a_worker_whose_answers_would_differ_is_kept_apart() -> None:
    async def scenario(mesh: Stack, client: BusClient) -> None:
        other = mesh.start("worker", "--worker-id", "odd", *SIMULATED, "--simulate-vocab-size", "1000")
        await until(lambda: "is refused" in mesh.processes[0].output(), "the refusal to be logged")
        for index in range(6):
            await client.submit(f"r{index}", [4, 5], 7, seed=index)
        await client.ended(*(f"r{index}" for index in range(6)))
        assert client.beat is not None and client.beat.models[0].workers == 1
        assert {m.worker for m in client.seen if isinstance(m, StepPlan)} == {"w0"}
        assert other.popen.poll() is None

    run(scenario)
