"""Exit codes of a service process."""

from __future__ import annotations

import asyncio
import os
import signal

import pytest

from shared.lifecycle import ServiceFault, StartupError, end, run


def test_sigterm_sets_stop_and_ends_with_0() -> None:
    async def main(stop: asyncio.Event) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.wait_for(stop.wait(), 30)

    assert run(main) == 0


def test_a_startup_error_is_one_line_and_2(capsys: pytest.CaptureFixture[str]) -> None:
    async def main(_: asyncio.Event) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(fail())

    async def fail() -> None:
        raise StartupError("port 8000 is taken")

    assert run(main) == 2
    assert capsys.readouterr().err == "headrace: port 8000 is taken\n"


@pytest.mark.parametrize("fault", [ServiceFault("the step loop ended"), ValueError("a bug")])
def test_a_fault_is_1(fault: Exception) -> None:
    async def main(_: asyncio.Event) -> None:
        raise fault

    assert run(main) == 1


def test_a_task_that_drops_its_cancellation_ends_all_the_same() -> None:
    dropped = 0

    async def deaf() -> None:
        nonlocal dropped
        while True:
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                dropped += 1
                if dropped == 3:
                    raise

    async def body() -> None:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(deaf()), group.create_task(asyncio.sleep(0))]
            await asyncio.sleep(0.01)
            await end(tasks)
            assert all(task.done() for task in tasks)

    asyncio.run(asyncio.wait_for(body(), 30))
    assert dropped == 3
