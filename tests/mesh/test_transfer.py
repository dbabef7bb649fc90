"""Sequences that go on at another process by their KV blocks: split roles, workers that stop, and losses meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from mesh_stack import BusClient, Process, Stack, stack, until
from tiny_models import make_tiny_model, make_tokenizer
from whole_mesh import BYTES_PER_BLOCK, FLOAT32, SIMULATED, Mesh, Nats, eventually

from headrace.trace.recorded import feed, header
from scheduler.core.core import SchedulerCore
from shared.messages import Fetched, Outcome, StepPlan
from worker.simulated import expected_tokens

pytestmark = pytest.mark.mesh

VOCAB = 32000
SIM = ("--simulate", "--model", "sim", "--simulate-base-us", "2000", "--simulate-token-us", "5")
PREFILL = ("--worker-id", "prefill", "--role", "prefill", "--transfer-host", "127.0.0.1")
DECODE = ("--worker-id", "decode", "--role", "decode", "--transfer-host", "127.0.0.1")
PROMPTS = {f"r{index}": [(index * 37 + place) % 300 for place in range(20 + index * 13)] for index in range(8)}


def on_a_mesh(
    body: Callable[[Stack, BusClient], Awaitable[Any]], *workers: tuple[str, ...], scheduler: tuple[str, ...] = ()
) -> Any:
    """Run a coroutine function beside a scheduler and workers with those flags."""

    async def whole(mesh: Stack) -> Any:
        client = await BusClient.connect(mesh.nats)
        try:
            await client.spy()
            await client.ready(len(workers))
            return await body(mesh, client)
        finally:
            await client.close()

    with stack() as mesh:
        mesh.start("scheduler", *scheduler)
        for flags in workers:
            mesh.start("worker", *flags)
        return asyncio.run(whole(mesh))


async def ask_all(client: BusClient, max_tokens: int) -> None:
    for seed, (name, prompt) in enumerate(PROMPTS.items()):
        reply = await client.submit(name, prompt, max_tokens, seed=seed, temperature=(seed % 3) / 2)
        assert reply.outcome is Outcome.ACCEPTED


def fetched(client: BusClient) -> list[Fetched]:
    return [one for one in client.seen if isinstance(one, Fetched)]


def test_prompts_at_one_worker_and_decodes_at_another_give_the_tokens_of_a_single_one(tmp_path: Path) -> None:
    """With a real model, in float32, greedy and sampled."""
    model = ("--model", str(make_tiny_model(tmp_path / "model")), *FLOAT32, "--kv-cache-memory", "64MiB")

    async def body(mesh: Stack, client: BusClient) -> tuple[dict[tuple[str, int], list[int]], list[Any], list[Fetched]]:
        await ask_all(client, 24)
        await client.ended(*PROMPTS)
        assert not client.events
        starts = [(plan.worker, start) for plan in client.seen if isinstance(plan, StepPlan) for start in plan.starts]
        return client.tokens, starts, fetched(client)

    alone, _, nothing = on_a_mesh(body, model)
    split, starts, answers = on_a_mesh(body, (*model, *PREFILL), (*model, *DECODE))
    assert split == alone and not nothing
    first: dict[str, str] = {}
    for worker, start in starts:
        first.setdefault(start.request_id, worker)
    assert set(first.values()) == {"prefill"}
    went_on = {start.request_id for worker, start in starts if worker == "decode"}
    assert went_on == set(PROMPTS), "each was handed over"
    assert {start.attempt for _, start in starts} == {1}
    assert all(start.computed == len(start.tokens) // 4 - 1 for worker, start in starts if worker == "decode")
    assert answers and all(not one.reason and one.us > 0 and one.transport for one in answers)
    blocks = sum(-(-len(prompt) // 16) for prompt in PROMPTS.values())
    assert sum(one.bytes for one in answers) >= 0.8 * blocks * BYTES_PER_BLOCK


def test_a_worker_that_stops_hands_over_what_it_runs(tmp_path: Path) -> None:
    """In the same attempt: no gateway resumes anything. And all of it replays."""
    trace = tmp_path / "run.trace"

    async def body(mesh: Stack, client: BusClient) -> None:
        await ask_all(client, 400)
        await until(lambda: len(client.tokens) == len(PROMPTS), "first tokens of all")
        scheduler, stops, _ = mesh.processes
        assert await asyncio.to_thread(stops.stop) == 0
        await until(lambda: client.beat and client.beat.models[0].workers == 1, "one worker less")
        await client.ended(*PROMPTS)
        assert not client.events, "somebody was told to resume"
        plans = [one for one in client.seen if isinstance(one, StepPlan) and one.worker == "b"]
        moved = [start for plan in plans for start in plan.starts if len(start.tokens) // 4 > start.prompt_len]
        assert moved and all(start.computed == len(start.tokens) // 4 - 1 for start in moved)
        assert all(not one.reason for one in fetched(client))
        for seed, (name, prompt) in enumerate(PROMPTS.items()):
            assert client.tokens[name, 0] == expected_tokens(prompt, seed, 400, VOCAB)
        assert await asyncio.to_thread(scheduler.stop) == 0

    ways = ("--transfer-host", "127.0.0.1")
    on_a_mesh(
        body, ("--worker-id", "a", *SIM, *ways), ("--worker-id", "b", *SIM, *ways), scheduler=("--record", str(trace))
    )
    found = header(trace)
    outcome = feed(trace, SchedulerCore(found.limits, found.policy, found.epoch))
    assert outcome.difference == "" and outcome.plans > 100


@contextlib.contextmanager
def split_mesh(folder: Path) -> Iterator[tuple[Mesh, Callable[[str], Process]]]:
    """A gateway, a scheduler, and simulated workers with roles; and what starts one of a role anew."""
    with contextlib.ExitStack() as closing:
        nats = Nats()
        closing.callback(nats.close)
        mesh = Mesh(nats, folder, workers=0, scheduler=("--worker-timeout-s", "2"))
        closing.callback(mesh.close)
        flags = ("--model", str(folder), "--served-model-name", "m", *SIMULATED, "--simulate-base-us", "4000")

        def start(role: str) -> Process:
            return mesh.stack.start(
                "worker", *flags, *(PREFILL if role == "prefill" else DECODE), "--transfer-by", "tcp"
            )

        try:
            yield mesh, start
        except BaseException:
            print(mesh.stack.logs())
            raise


def test_workers_that_are_killed_while_blocks_go_over_cost_no_token(tmp_path: Path) -> None:
    """First the one that they come from, then the one where they go."""
    folder = tmp_path / "model"
    make_tokenizer().save_pretrained(folder)
    bodies = [{"prompt": prompt, "max_tokens": 60, "seed": seed} for seed, prompt in enumerate(PROMPTS.values())]
    with split_mesh(folder) as (mesh, start):
        workers = {role: start(role) for role in ("prefill", "decode")}

        def both() -> bool:
            return mesh.metrics(mesh.scheduler)["headrace_workers"] == 2

        def disturbed(victim: str) -> list[list[str]]:
            async def kill_in_the_middle(client: BusClient) -> list[list[str]]:
                await client.spy()
                asked = asyncio.ensure_future(asyncio.to_thread(mesh.together, bodies))
                await until(lambda: any(isinstance(one, StepPlan) and one.fetches for one in client.seen), "a fetch")
                workers[victim].popen.send_signal(signal.SIGKILL)
                workers[victim] = start(victim)
                return await asked

            texts: list[list[str]] = mesh.on_the_bus(kill_in_the_middle)
            return texts

        mesh.wait_ready()
        eventually(both, "two workers")
        calm = mesh.together(bodies)
        moves = mesh.metrics(mesh.scheduler)["headrace_moves_total"]
        assert moves > 0
        for victim in ("prefill", "decode"):
            bodies = [
                {**body, "cache_salt": victim} for body in bodies
            ]  # nothing of it is cached: all is fetched again
            assert disturbed(victim) == calm
            eventually(both, f"another {victim} worker")
        mesh.quiescence()
        moves = mesh.metrics(mesh.scheduler)["headrace_moves_total"]
        assert mesh.together([{**body, "cache_salt": "after"} for body in bodies]) == calm
        assert mesh.metrics(mesh.scheduler)["headrace_moves_total"] > moves, "those that came since take moves"
