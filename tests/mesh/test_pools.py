"""Pools of real worker processes: who runs where, what is refused, and what goes on when a pool's worker dies."""

from __future__ import annotations

import asyncio

import pytest
from mesh_stack import BusClient, Stack, stack, until

from shared.messages import Outcome, StepPlan
from worker.simulated import expected_tokens

pytestmark = pytest.mark.mesh

VOCAB = 32000
SIMULATED = ("--simulate", "--model", "sim", "--simulate-base-us", "200", "--simulate-token-us", "1")
RULES = ("--pools", "chat:-8,long:9-", "--pool-overflow", "chat>long", "--pool-lend", "")


def test_each_request_runs_in_its_pool_and_a_pool_that_dies_gives_away_by_rule() -> None:
    async def body(mesh: Stack) -> None:
        client = await BusClient.connect(mesh.nats)
        try:
            await client.spy()
            await client.ready(2)

            def workers(name: str) -> set[str]:
                plans = [message for message in client.seen if isinstance(message, StepPlan)]
                return {plan.worker for plan in plans for start in plan.starts if start.request_id == name}

            async def runs(name: str, length: int, pool: str = "") -> set[str]:
                assert (await client.submit(name, list(range(1, length + 1)), 5, pool=pool)).outcome is Outcome.ACCEPTED
                await client.ended(name)
                assert client.tokens[name, 0] == expected_tokens(list(range(1, length + 1)), 1, 5, VOCAB)
                return workers(name)

            assert await runs("short", 8) == {"chat"}
            assert await runs("longer", 9) == {"long"}
            assert await runs("asks", 3, pool="long") == {"long"}
            assert client.beat is not None
            (model,) = client.beat.models
            assert [(pool.name, pool.workers) for pool in model.pools] == [("chat", 1), ("long", 1)]
            assert (await client.submit("fills", [1] * 9, 5, pool="chat")).outcome is Outcome.TOO_LONG
            unknown = await client.submit("unknown", [1, 2, 3], 5, pool="chta")
            assert unknown.outcome is Outcome.INVALID and "no pool 'chta'" in unknown.reason
            chat.kill()
            await until(lambda: client.beat and client.beat.models[0].workers == 1, "the loss of a worker", 30)
            assert await runs("overflows", 8) == {"long"}
        finally:
            await client.close()

    with stack() as mesh:
        mesh.start("scheduler", *RULES)
        chat = mesh.start("worker", "--worker-id", "chat", "--pool", "chat", *SIMULATED)
        mesh.start("worker", "--worker-id", "long", "--pool", "long", *SIMULATED)
        asyncio.run(body(mesh))
