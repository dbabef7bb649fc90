"""Child processes kept alive together: started, shown, restarted with backoff, stopped in order, never orphaned.

Until :meth:`Supervisor.settled` is called, a child that ends with exit 2 (it cannot start as configured) ends
everything: ``failure`` is set. Any other end is a crash, and the child is started again after a pause that doubles.
Each child leads its own process group, so that Ctrl-C in a terminal reaches the supervisor only, which stops the
children in the order of their stages.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from headrace.parent_death import die_with_parent

CANNOT_START = 2
"""The exit code of a process that cannot start as it is configured (see shared.lifecycle)."""

CRASHES_AT_START = 5
"""A child that crashes so often before everything has settled will not come up by itself."""

LONGEST_LINE_BYTES = 1 << 20


@dataclass(frozen=True)
class ChildSpec:
    """One child: ``stage`` orders stopping (lower first), ``grace_s`` is from SIGTERM to SIGKILL."""

    name: str
    command: Sequence[str]
    stage: int = 0
    grace_s: float = 10.0
    env: Mapping[str, str] | None = None  # None: this process's own


@dataclass(frozen=True)
class Backoff:
    """Pauses between restarts: ``first_s``, doubled up to ``longest_s``; back to the first after ``calm_s`` alive."""

    first_s: float = 0.5
    longest_s: float = 10.0
    calm_s: float = 30.0


@dataclass(frozen=True)
class ChildFailed:
    """A child that could not be started; ``reason`` is its own last line, or how it ended."""

    name: str
    code: int
    reason: str


@dataclass(eq=False)
class _Child:
    spec: ChildSpec
    process: asyncio.subprocess.Process | None = None
    last_line: str = ""
    restarts: int = 0
    ended: asyncio.Event = field(default_factory=asyncio.Event)  # and will not be started again

    def send(self, signum: int) -> None:
        if self.process is not None and self.process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signum)


class Supervisor:
    """Owns the children. ``show(name, line)`` gets every line they write, and the supervisor's own about them."""

    def __init__(
        self, tasks: asyncio.TaskGroup, show: Callable[[str, str], None], backoff: Backoff | None = None
    ) -> None:
        self._tasks = tasks
        self._show = show
        self._backoff = backoff or Backoff()
        self._children: dict[str, _Child] = {}
        self._settled = False
        self._stopping = asyncio.Event()
        self._killed = False
        self.failed = asyncio.Event()
        self.failure: ChildFailed | None = None

    def start(self, spec: ChildSpec) -> None:
        """Start a child and keep it alive until :meth:`stop`."""
        if spec.name in self._children:
            raise ValueError(f"two children named {spec.name}")
        child = self._children[spec.name] = _Child(spec)
        self._tasks.create_task(self._keep(child), name=f"keep {spec.name}")

    def settled(self) -> None:
        """Everything is up: from now on every end of a child is a crash, and crashes are survived."""
        self._settled = True

    def restarts(self, name: str) -> int:
        return self._children[name].restarts

    def pid(self, name: str) -> int | None:
        """Process id of a running child, else None."""
        process = self._children[name].process
        return process.pid if process is not None and process.returncode is None else None

    async def stop(self) -> None:
        """Stop every child, stage after stage: SIGTERM, and SIGKILL once its grace is over."""
        self._stopping.set()
        for stage in sorted({child.spec.stage for child in self._children.values()}):
            members = [child for child in self._children.values() if child.spec.stage == stage]
            await asyncio.gather(*(self._stop(child) for child in members))

    def kill(self) -> None:
        """SIGKILL every child at once. :meth:`stop` then returns soon."""
        self._killed = True
        self._stopping.set()
        for child in self._children.values():
            child.send(signal.SIGKILL)

    async def _stop(self, child: _Child) -> None:
        child.send(signal.SIGKILL if self._killed else signal.SIGTERM)
        try:
            async with asyncio.timeout(child.spec.grace_s):
                await child.ended.wait()
        except TimeoutError:
            self._show(child.spec.name, f"did not stop within {child.spec.grace_s:g} s and is killed")
            child.send(signal.SIGKILL)
            await child.ended.wait()

    async def _keep(self, child: _Child) -> None:
        try:
            pause_s = self._backoff.first_s
            while not self._stopping.is_set():
                lived_s, code = await self._run(child)
                if self._stopping.is_set():
                    return
                if not self._settled and (code == CANNOT_START or child.restarts + 1 >= CRASHES_AT_START):
                    self._fail(child, code)
                    return
                if lived_s >= self._backoff.calm_s:
                    pause_s = self._backoff.first_s
                self._show(child.spec.name, f"{_how(code)}; starting it again in {pause_s:g} s")
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(pause_s):
                        await self._stopping.wait()
                child.restarts += 1
                pause_s = min(pause_s * 2, self._backoff.longest_s)
        finally:
            child.ended.set()

    async def _run(self, child: _Child) -> tuple[float, int]:
        """One life of the child: (seconds lived, exit code; negative for a signal)."""
        loop = asyncio.get_running_loop()
        started = loop.time()
        try:
            process = await asyncio.create_subprocess_exec(
                *child.spec.command,
                env=child.spec.env,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
                limit=LONGEST_LINE_BYTES,
                start_new_session=True,
                preexec_fn=die_with_parent(),
            )
        except OSError as error:
            child.last_line = f"{child.spec.command[0]}: {error.strerror}"
            self._show(child.spec.name, child.last_line)
            return 0.0, CANNOT_START
        child.process = process
        if self._stopping.is_set():  # stop() came while the process was being made, and could not reach it
            child.send(signal.SIGKILL if self._killed else signal.SIGTERM)
        assert process.stdout is not None
        reader = asyncio.ensure_future(self._read(child, process.stdout))
        try:
            code = await process.wait()
            # Whatever it left behind in its group ends with it, and would otherwise hold the pipe open.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(1):
                    await reader
        finally:
            reader.cancel()
        return loop.time() - started, code

    async def _read(self, child: _Child, stream: asyncio.StreamReader) -> None:
        while True:
            try:
                line = await stream.readline()
            except ValueError:  # longer than the limit: asyncio has thrown the line away
                continue
            if not line:
                return
            text = line.decode("utf-8", "replace").rstrip()
            if text:
                child.last_line = text
                self._show(child.spec.name, text)

    def _fail(self, child: _Child, code: int) -> None:
        if self.failure is None:
            self.failure = ChildFailed(child.spec.name, code, child.last_line or _how(code))
            self.failed.set()


def _how(code: int) -> str:
    if code < 0:
        try:
            return f"was killed by {signal.Signals(-code).name}"
        except ValueError:
            return f"was killed by signal {-code}"
    return f"ended with exit status {code}"
