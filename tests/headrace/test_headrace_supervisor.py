"""The supervisor, with small real programs as children."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

from headrace.supervisor import CRASHES_AT_START, Backoff, ChildSpec, Supervisor

FAST = Backoff(first_s=0.01, longest_s=0.02)

# Says that it is there; on SIGTERM writes its name to the file given, then ends.
POLITE = """
import signal, sys, threading
name, log = sys.argv[1:]
gone = threading.Event()
signal.signal(signal.SIGTERM, lambda *_: gone.set())
signal.signal(signal.SIGINT, lambda *_: None)
print("up", flush=True)
while not gone.wait(0.05): pass
open(log, "a").write(name + "\\n")
"""
DEAF = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(60)"


class Shown:
    """What the children said, and a way to wait for a line."""

    def __init__(self) -> None:
        self.lines: list[tuple[str, str]] = []
        self._changed = asyncio.Event()

    def __call__(self, name: str, line: str) -> None:
        self.lines.append((name, line))
        self._changed.set()

    async def wait_for(self, name: str, line: str, count: int = 1) -> None:
        async with asyncio.timeout(20):
            while self.lines.count((name, line)) < count:
                self._changed.clear()
                await self._changed.wait()


def python(name: str, program: str, *args: str, stage: int = 0, grace_s: float = 10.0) -> ChildSpec:
    return ChildSpec(name, [sys.executable, "-c", program, *args], stage, grace_s)


def supervised(scenario: Callable[[Supervisor, Shown], Awaitable[None]]) -> Shown:
    async def body() -> Shown:
        shown = Shown()
        async with asyncio.TaskGroup() as tasks:
            supervisor = Supervisor(tasks, shown, FAST)
            try:
                await scenario(supervisor, shown)
            finally:
                await supervisor.stop()
        return shown

    return asyncio.run(body())


def test_stops_stage_after_stage(tmp_path: Path) -> None:
    log = tmp_path / "log"

    async def scenario(supervisor: Supervisor, shown: Shown) -> None:
        for name, stage in (("last", 2), ("first", 0), ("middle", 1)):
            supervisor.start(python(name, POLITE, name, str(log), stage=stage))
            await shown.wait_for(name, "up")
        supervisor.settled()

    supervised(scenario)
    assert log.read_text().split() == ["first", "middle", "last"]


def test_a_crash_is_followed_by_a_restart() -> None:
    async def scenario(supervisor: Supervisor, shown: Shown) -> None:
        supervisor.start(python("child", "import time; print('up', flush=True); time.sleep(60)"))
        await shown.wait_for("child", "up")
        supervisor.settled()
        pid = supervisor.pid("child")
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        await shown.wait_for("child", "up", 2)
        assert supervisor.pid("child") not in (None, pid)
        assert supervisor.restarts("child") == 1

    shown = supervised(scenario)
    assert ("child", "was killed by SIGKILL; starting it again in 0.01 s") in shown.lines


def test_exit_2_before_settled_is_final_and_keeps_the_childs_own_words() -> None:
    async def scenario(supervisor: Supervisor, shown: Shown) -> None:
        supervisor.start(python("child", "import sys; print('headrace: no such model', file=sys.stderr); sys.exit(2)"))
        async with asyncio.timeout(20):
            await supervisor.failed.wait()
        assert supervisor.failure is not None
        assert (supervisor.failure.name, supervisor.failure.code) == ("child", 2)
        assert supervisor.failure.reason == "headrace: no such model"
        assert supervisor.restarts("child") == 0

    assert supervised(scenario).lines == [], "whoever starts the children says it, once"


def test_a_refusal_that_is_nobodys_last_word_is_shown() -> None:
    said = "print('headrace: a note', flush=True)"

    async def scenario(supervisor: Supervisor, shown: Shown) -> None:
        supervisor.start(python("talks", f"{said}; print('more', flush=True); import time; time.sleep(60)"))
        supervisor.start(python("waits", f"{said}; import time; time.sleep(60)"))
        supervisor.start(python("crashes", f"{said}; import sys; sys.exit(1)"))
        await shown.wait_for("talks", "more")
        assert shown.lines.index(("talks", "headrace: a note")) < shown.lines.index(("talks", "more"))
        await shown.wait_for("crashes", "headrace: a note")
        supervisor.settled()
        await shown.wait_for("waits", "headrace: a note")

    supervised(scenario)


def test_exit_2_after_settled_is_a_crash(tmp_path: Path) -> None:
    go, marker = tmp_path / "go", tmp_path / "second"
    program = (
        "import pathlib, sys, time\n"
        "go, marker = map(pathlib.Path, sys.argv[1:])\n"
        "if marker.exists(): print('back', flush=True); time.sleep(60)\n"
        "marker.touch(); print('up', flush=True)\n"
        "while not go.exists(): time.sleep(0.01)\n"
        "sys.exit(2)\n"
    )

    async def scenario(supervisor: Supervisor, shown: Shown) -> None:
        supervisor.start(python("child", program, str(go), str(marker)))
        await shown.wait_for("child", "up")
        supervisor.settled()
        go.touch()
        await shown.wait_for("child", "back")
        assert not supervisor.failed.is_set()

    supervised(scenario)


def test_a_child_that_only_crashes_at_start_is_given_up() -> None:
    async def scenario(supervisor: Supervisor, shown: Shown) -> None:
        supervisor.start(python("child", "import sys; sys.exit(1)"))
        async with asyncio.timeout(20):
            await supervisor.failed.wait()
        assert supervisor.failure is not None
        assert supervisor.failure.reason == "ended with exit status 1"
        assert supervisor.restarts("child") == CRASHES_AT_START - 1

    supervised(scenario)


def test_a_missing_program_is_a_failure_to_start() -> None:
    async def scenario(supervisor: Supervisor, shown: Shown) -> None:
        supervisor.start(ChildSpec("child", ["/nonexistent/program"]))
        async with asyncio.timeout(20):
            await supervisor.failed.wait()
        assert supervisor.failure is not None
        assert "/nonexistent/program" in supervisor.failure.reason

    supervised(scenario)


def test_a_child_deaf_to_sigterm_is_killed_after_its_grace() -> None:
    async def scenario(supervisor: Supervisor, shown: Shown) -> None:
        supervisor.start(python("deaf", DEAF, grace_s=0.1))
        await shown.wait_for("deaf", "up")

    shown = supervised(scenario)
    assert ("deaf", "did not stop within 0.1 s and is killed") in shown.lines


def test_kill_does_not_wait_for_graces() -> None:
    async def scenario(supervisor: Supervisor, shown: Shown) -> None:
        for stage in (0, 1):
            supervisor.start(python(f"deaf-{stage}", DEAF, stage=stage, grace_s=60))
            await shown.wait_for(f"deaf-{stage}", "up")
        stopping = asyncio.ensure_future(supervisor.stop())
        await asyncio.sleep(0)  # let it send its SIGTERMs
        started = time.monotonic()
        supervisor.kill()
        await stopping
        assert time.monotonic() - started < 10

    supervised(scenario)


def test_a_line_without_end_does_not_stop_the_reading() -> None:
    async def scenario(supervisor: Supervisor, shown: Shown) -> None:
        program = "import time; print('x' * (3 << 20), flush=True); print('after', flush=True); time.sleep(60)"
        supervisor.start(python("child", program))
        await shown.wait_for("child", "after")

    supervised(scenario)


def test_children_die_with_a_supervisor_that_is_killed(tmp_path: Path) -> None:
    program = (
        "import asyncio, sys\n"
        "from headrace.supervisor import ChildSpec, Supervisor\n"
        "async def main():\n"
        "    async with asyncio.TaskGroup() as tasks:\n"
        "        supervisor = Supervisor(tasks, lambda name, line: print(line, flush=True))\n"
        "        program = 'import os, time; print(os.getpid(), flush=True); time.sleep(60)'\n"
        "        supervisor.start(ChildSpec('child', [sys.executable, '-c', program]))\n"
        "asyncio.run(main())\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE)
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    os.kill(parent.pid, signal.SIGKILL)
    parent.communicate()
    deadline = time.monotonic() + 10
    while _runs(child):
        assert time.monotonic() < deadline, "the child outlived its supervisor"


def _runs(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"
