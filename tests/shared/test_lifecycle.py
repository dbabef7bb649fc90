"""Exit codes of a service process."""

from __future__ import annotations

import asyncio
import os
import signal

import pytest

from shared.lifecycle import ServiceFault, StartupError, run


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
