"""A live mesh records its scheduler; the trace replays to the same plans; the tap hears the same mesh."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from mesh_stack import BusClient, stack

from headrace.trace.recorded import feed, header
from headrace.trace.stream import message, records
from headrace.trace.tap import Tap, TapConfig
from scheduler.core.core import SchedulerCore
from shared.bus import NatsBus
from shared.messages import StepPlan, StepResult

pytestmark = pytest.mark.mesh


def test_what_a_mesh_did_is_replayed_byte_for_byte(tmp_path: Path) -> None:
    trace, heard = tmp_path / "run.trace", tmp_path / "tap.trace"
    lines: list[str] = []

    async def body() -> None:
        client = await BusClient.connect(mesh.nats)
        bus = await NatsBus.connect(mesh.nats.url, "tap", mesh.nats.token)
        await client.ready(1)
        with heard.open("wb") as file:
            await Tap(TapConfig(), lines.append, file).attach(bus)
            for index in range(24):
                await client.submit(f"r{index}", list(range(1, 30 + index)), 40, seed=index)
            await client.cancel("r3")
            await client.ended(*(f"r{index}" for index in range(24) if index != 3))
            await bus.close()
        await client.close()

    with stack() as mesh:
        scheduler = mesh.start("scheduler", "--record", str(trace), "--max-num-seqs", "8")
        mesh.start(
            "worker", "--worker-id", "w0", "--simulate", "--model", "sim", "--simulate-base-us", "500",
            "--block-size", "4", "--simulate-blocks", "120",
        )  # fmt: skip
        asyncio.run(body())
        assert scheduler.stop() == 0

    found = header(trace)
    assert found.limits.max_num_seqs == 8
    outcome = feed(trace, SchedulerCore(found.limits, found.policy, found.epoch))
    assert outcome.difference == ""
    assert outcome.plans > 40

    messages = [message(record[2]) for record in records(heard)]
    assert sum(isinstance(one, StepPlan) for one in messages) > 40
    assert {one.step for one in messages if isinstance(one, StepResult)} >= set(range(2, 40))
    assert len(lines) == len(messages)


def test_a_trace_that_cannot_be_written_is_said_at_the_start() -> None:
    with stack() as mesh:
        scheduler = mesh.start("scheduler", "--record", "/no/such/folder/t")
        assert scheduler.popen.wait(30) == 2
        assert "--record /no/such/folder/t: No such file or directory" in scheduler.output()
