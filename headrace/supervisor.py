"""Child processes kept alive together: started, shown, restarted with backoff, replaced, stopped in order, never
orphaned.

Until :meth:`Supervisor.settled` is called, a child that ends with exit 2 (it cannot start as configured) ends
everything: ``failure`` is set. Any other end is a crash, and the child is started again after a pause that doubles.
A child is replaced by another of its name, which runs beside it until it has told that it is up (:meth:`replace`), or
takes its place after it (:meth:`restart`).
Each child leads its own process group, so that Ctrl-C in a terminal reaches the supervisor only, which stops the
children in the order of their stages.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

from headrace.inheritance import descriptors, environ_without_protocol, listen_environ, placing
from headrace.notices import Notices
from headrace.parent_death import die_with_parent
from shared.supervision import NOTIFY_VARIABLE

CANNOT_START = 2
"""The exit code of a process that cannot start as it is configured (see shared.lifecycle)."""

CRASHES_AT_START = 5
"""A child that crashes so often before everything has settled will not come up by itself."""

REFUSAL = "headrace: "
"""How the line begins in which a child says why it can't start (see shared.lifecycle)."""

LONGEST_LINE_BYTES = 1 << 20
POLL_S = 0.02


@dataclass(frozen=True)
class ChildSpec:
    """One child: ``stage`` orders stopping (lower first), ``grace_s`` is from SIGTERM to SIGKILL."""

    name: str
    command: Sequence[str]
    stage: int = 0
    grace_s: float = 10.0
    env: Mapping[str, str] | None = None  # None: this process's own
    sockets: Mapping[str, socket.socket] = field(default_factory=dict)  # listening ones that it inherits, by name


@dataclass(frozen=True)
class Backoff:
    """Pauses between restarts: ``first_s``, doubled up to ``longest_s``; ``at_once_s`` after ``calm_s`` alive."""

    at_once_s: float = 0.05
    first_s: float = 0.5
    longest_s: float = 10.0
    calm_s: float = 10.0


@dataclass(frozen=True)
class ChildFailed:
    """A child that could not be started; ``reason`` is its own last line, or how it ended."""

    name: str
    code: int
    reason: str


class ReplacementFailed(RuntimeError):
    """A child could not be replaced; the message is one line that says why."""


@dataclass(eq=False)
class _Child:
    spec: ChildSpec
    proven: bool = True  # else it is a replacement that has still to come up, and ends with its first process
    process: asyncio.subprocess.Process | None = None
    last_line: str = ""
    held_line: str = ""  # the last one, if it is not shown yet: it may become the reason of a failure, and is said once
    restarts: int = 0
    leaving: asyncio.Event = field(default_factory=asyncio.Event)  # its process's end is no crash
    ended: asyncio.Event = field(default_factory=asyncio.Event)  # and will not be started again

    def send(self, signum: int) -> None:
        if self.process is not None and self.process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signum)


class Supervisor:
    """Owns the children. ``show(name, line)`` gets every line they write, and the supervisor's own about them."""

    def __init__(
        self, tasks: asyncio.TaskGroup, show: Callable[[str, str], None], backoff: Backoff | None = None,
        notices: Notices | None = None,
    ) -> None:  # fmt: skip
        self._tasks = tasks
        self._show = show
        self._backoff = backoff or Backoff()
        self._notices = notices
        self._children: dict[str, _Child] = {}
        self._alive: set[_Child] = set()  # these, those they have replaced, and those that are to replace them
        self._settled = False
        self._stopping = asyncio.Event()
        self._killed = False
        self.failed = asyncio.Event()
        self.failure: ChildFailed | None = None

    def start(self, spec: ChildSpec) -> None:
        """Start a child and keep it alive until :meth:`stop`."""
        if spec.name in self._children:
            raise ValueError(f"two children named {spec.name}")
        self._children[spec.name] = self._kept(_Child(spec))

    def settled(self) -> None:
        """Everything is up: from now on every end of a child is a crash, and crashes are survived."""
        self._settled = True
        for child in self._alive:
            self._show_held(child)

    def restarts(self, name: str) -> int:
        return self._children[name].restarts

    def pid(self, name: str) -> int | None:
        """Process id of a running child, else None."""
        process = self._children[name].process
        return process.pid if process is not None and process.returncode is None else None

    def status(self, name: str) -> str:
        """The latest that child ``name`` has told of itself, or nothing."""
        pid = self.pid(name)
        return self._notices.told(pid) if pid is not None and self._notices is not None else ""

    async def replace(
        self, spec: ChildSpec, told: Collection[str], wanted: Callable[[], bool], within_s: float
    ) -> Callable[[int, float], Awaitable[None]]:
        """Start another child of ``spec.name`` beside the one that runs; it has the name once it tells one of ``told``.

        Returns how to end the old one: ``await retire(signum, grace_s)``. Raises :class:`ReplacementFailed` if it does
        not come up, or is not ``wanted`` any more before it has: then it is killed, and the old one stays.
        """
        child = self._kept(_Child(spec, proven=False))
        try:
            await self._until(child, told, wanted, within_s)
        except BaseException:
            child.leaving.set()
            child.send(signal.SIGKILL)
            raise
        child.proven = True
        old, self._children[spec.name] = self._children[spec.name], child
        old.leaving.set()
        return lambda signum, grace_s: self._stop(old, signum, grace_s)

    async def restart(self, name: str, grace_s: float) -> None:
        """Stop a child and start it again. Raises :class:`ReplacementFailed` if everything is being stopped."""
        old = self._children[name]
        old.leaving.set()
        await self._stop(old, grace_s=grace_s)
        if self._stopping.is_set():
            raise ReplacementFailed("everything is being stopped")
        self._children[name] = self._kept(_Child(old.spec))

    async def until(self, name: str, told: Collection[str], within_s: float) -> None:
        """Return once child ``name`` tells one of ``told``. Raises :class:`ReplacementFailed` if it does not."""
        await self._until(self._children[name], told, lambda: True, within_s)

    async def until_some(self, names: Collection[str], told: Collection[str], within_s: float) -> None:
        """Return once some child of ``names`` tells one of ``told``; those that crash meanwhile are started again.
        Raises :class:`ReplacementFailed` if none does.
        """
        deadline = asyncio.get_running_loop().time() + within_s
        while not any(self.status(name) in told for name in names):
            if self._stopping.is_set():
                raise ReplacementFailed("everything is being stopped")
            if asyncio.get_running_loop().time() >= deadline:
                raise ReplacementFailed(f"nobody told within {within_s:g} s that it {' or '.join(told)}")
            await asyncio.sleep(POLL_S)

    async def stop(self) -> None:
        """Stop every child, stage after stage: SIGTERM, and SIGKILL once its grace is over."""
        self._stopping.set()
        for child in self._alive:
            child.leaving.set()
        while self._alive:
            stage = min(child.spec.stage for child in self._alive)
            members = [child for child in self._alive if child.spec.stage == stage]
            await asyncio.gather(*(self._stop(child) for child in members))

    def kill(self) -> None:
        """SIGKILL every child at once. :meth:`stop` then returns soon."""
        self._killed = True
        self._stopping.set()
        for child in self._alive:
            child.leaving.set()
            child.send(signal.SIGKILL)

    def _kept(self, child: _Child) -> _Child:
        if self._stopping.is_set():
            child.leaving.set()
        self._alive.add(child)
        self._tasks.create_task(self._keep(child), name=f"keep {child.spec.name}")
        return child

    async def _until(self, child: _Child, told: Collection[str], wanted: Callable[[], bool], within_s: float) -> None:
        if self._notices is None:
            raise ReplacementFailed("nobody could be told that it is up")
        deadline = asyncio.get_running_loop().time() + within_s
        while child.process is None or self._notices.told(child.process.pid) not in told:
            if child.leaving.is_set():
                raise ReplacementFailed("everything is being stopped")
            if child.ended.is_set():
                raise ReplacementFailed(child.last_line.removeprefix("headrace: ") or "it ended at once")
            if not wanted():
                raise ReplacementFailed("nobody waits for it any more")
            if asyncio.get_running_loop().time() >= deadline:
                raise ReplacementFailed(f"it was not up within {within_s:g} s")
            await asyncio.sleep(POLL_S)

    async def _stop(self, child: _Child, signum: int = signal.SIGTERM, grace_s: float | None = None) -> None:
        grace_s = child.spec.grace_s if grace_s is None else grace_s
        child.send(signal.SIGKILL if self._killed else signum)
        try:
            async with asyncio.timeout(grace_s):
                await child.ended.wait()
        except TimeoutError:
            self._show(child.spec.name, f"did not stop within {grace_s:g} s and is killed")
            child.send(signal.SIGKILL)
            await child.ended.wait()

    async def _keep(self, child: _Child) -> None:
        try:
            pause_s = self._backoff.first_s
            while not child.leaving.is_set():
                lived_s, code = await self._run(child)
                refused = code == CANNOT_START and child.proven and not self._settled and self.failure is None
                if not refused or child.leaving.is_set():
                    self._show_held(child)
                if child.leaving.is_set():
                    return
                if not child.proven:
                    child.last_line = child.last_line or _how(code)
                    return
                if not self._settled and (code == CANNOT_START or child.restarts + 1 >= CRASHES_AT_START):
                    self._fail(child, code)
                    return
                if calm := lived_s >= self._backoff.calm_s:
                    pause_s = self._backoff.at_once_s
                self._show(child.spec.name, f"{_how(code)}; starting it again in {pause_s:g} s")
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(pause_s):
                        await child.leaving.wait()
                child.restarts += 1
                pause_s = self._backoff.first_s if calm else min(pause_s * 2, self._backoff.longest_s)
        finally:
            self._alive.discard(child)
            child.ended.set()

    def _show_held(self, child: _Child) -> None:
        line, child.held_line = child.held_line, ""
        if line:
            self._show(child.spec.name, line)

    async def _run(self, child: _Child) -> tuple[float, int]:
        """One life of the child: (seconds lived, exit code; negative for a signal)."""
        loop = asyncio.get_running_loop()
        started = loop.time()
        try:
            process = await asyncio.create_subprocess_exec(
                *child.spec.command,
                env=self._environ(child.spec),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
                limit=LONGEST_LINE_BYTES,
                start_new_session=True,
                preexec_fn=placing(child.spec.sockets, die_with_parent()),
                pass_fds=descriptors(child.spec.sockets),
            )
        except OSError as error:
            child.last_line = f"{child.spec.command[0]}: {error.strerror}"
            self._show(child.spec.name, child.last_line)
            return 0.0, CANNOT_START
        child.process = process
        if child.leaving.is_set():  # that came while the process was being made, and could not reach it
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
            if self._notices is not None:
                self._notices.forget(process.pid)
        return loop.time() - started, code

    def _environ(self, spec: ChildSpec) -> dict[str, str]:
        given = environ_without_protocol(os.environ if spec.env is None else spec.env)
        notify = {NOTIFY_VARIABLE: str(self._notices.path)} if self._notices is not None else {}
        return given | listen_environ(spec.sockets) | notify

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
                self._show_held(child)
                child.last_line = text
                if text.startswith(REFUSAL) and not self._settled:
                    child.held_line = text
                else:
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
