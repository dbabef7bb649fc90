"""An engine at work: a server that is asked over HTTP, or a driver that has the engine in its own process."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Protocol

from headrace.bench.client import Client
from headrace.bench.taken import Taken
from headrace.bench.workload import Shot

POLL_S = 0.2
TERM_S = 40.0
"""How long an engine may take to stop once it was asked to."""

Done = Callable[[int], None]
"""Told how many requests are over."""


class EngineFailed(RuntimeError):
    """An engine did not start, or ended; the message holds the end of what it logged."""


@dataclass(frozen=True)
class Command:
    """How an engine is started. ``log`` takes what it prints."""

    words: Sequence[str]
    log: Path
    env: dict[str, str] = field(default_factory=dict)


class Running(Protocol):
    """A started engine. ``pid`` is the root of its processes."""

    @property
    def pid(self) -> int: ...

    def run(self, shots: Sequence[Shot], concurrency: int, seconds: float | None, done: Done) -> list[Taken]:
        """A closed loop over ``shots``, or over as many as are sent in ``seconds``. Raises EngineFailed."""


class Server:
    def __init__(self, process: subprocess.Popen[bytes], url: str, model: str, keep_alive: bool) -> None:
        self.pid = process.pid
        self._url, self._model, self._keep_alive = url, model, keep_alive

    def run(self, shots: Sequence[Shot], concurrency: int, seconds: float | None, done: Done) -> list[Taken]:
        client = Client(self._url, self._model, self._keep_alive)

        async def load() -> list[Taken]:
            try:
                return await closed_loop(client, shots, concurrency, seconds, done)
            finally:
                client.close()

        return asyncio.run(load())


async def closed_loop(
    client: Client, shots: Sequence[Shot], concurrency: int, seconds: float | None, done: Done
) -> list[Taken]:
    """``concurrency`` users, each of whom sends the next request as soon as the last answer has ended."""
    waiting = iter(shots)
    taken: list[Taken] = []
    until_s = time.perf_counter() + seconds if seconds is not None else float("inf")
    ended = 0

    async def user() -> None:
        nonlocal ended
        while time.perf_counter() < until_s and (shot := next(waiting, None)) is not None:
            one = Taken(shot.max_tokens, time.perf_counter())
            taken.append(one)
            await client.ask(shot, one)
            ended += 1
            done(ended)

    async with asyncio.TaskGroup() as users:
        for _ in range(concurrency):
            users.create_task(user())
    return taken


class Driven:
    """A driver of ``drivers/``; what it is told and what it says is in ``drivers/driving.py``."""

    def __init__(self, process: subprocess.Popen[bytes], log: Path) -> None:
        self.pid = process.pid
        self._process, self._log = process, log

    def begin(self, settings: dict[str, str]) -> None:
        self._tell(settings)
        self._hear()

    def run(self, shots: Sequence[Shot], concurrency: int, seconds: float | None, done: Done) -> list[Taken]:
        self._tell({
            "shots": [[shot.prompt, shot.max_tokens] for shot in shots], "concurrency": concurrency,
            "seconds": seconds,
        })  # fmt: skip
        while "records" not in (message := self._hear()):
            done(message["done"])
        return [taken_of(record) for record in message["records"]]

    def _tell(self, message: object) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # what it said last is told by _hear
            self._process.stdin.write(json.dumps(message).encode() + b"\n")
            self._process.stdin.flush()

    def _hear(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise EngineFailed(f"the driver ended with {self._process.wait()}: {end_of(self._log)}")
        message: dict[str, Any] = json.loads(line)
        return message


def taken_of(record: dict[str, Any]) -> Taken:
    """A driver's record as the HTTP client's: every token is a piece of its own."""
    return Taken(
        want_tokens=record["want"],
        since_s=record["since"],
        sent_s=record["since"],
        status=200,
        text_s=record["tokens"],
        ended_s=record["ended"],
        completion_tokens=len(record["tokens"]),
        error=record["error"],
    )


@contextlib.contextmanager
def served(
    command: Command, url: str, ready_path: str, model: str, within_s: float, keep_alive: bool = True
) -> Iterator[Server]:
    """A server, once it answers ``ready_path`` with 200. Raises EngineFailed if it ends first, or takes too long."""
    with _process(command, stdin=subprocess.DEVNULL, stdout=None) as process:
        deadline = time.monotonic() + within_s
        while not _answers(url + ready_path):
            if process.poll() is not None:
                raise EngineFailed(f"it ended with {process.returncode}: {end_of(command.log)}")
            if time.monotonic() > deadline:
                raise EngineFailed(f"it was not ready after {within_s:.0f} s: {end_of(command.log)}")
            time.sleep(POLL_S)
        yield Server(process, url, model, keep_alive)


@contextlib.contextmanager
def driven(command: Command, settings: dict[str, str]) -> Iterator[Driven]:
    """A driver, once its engine has loaded the model. Raises EngineFailed."""
    with _process(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        driver = Driven(process, command.log)
        driver.begin(settings)
        yield driver


def end_of(log: Path, lines: int = 8) -> str:
    return "\n".join(log.read_text("utf-8", errors="replace").splitlines()[-lines:])


def _answers(url: str) -> bool:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(url, timeout=5.0):
            return True
    except (urllib.error.URLError, OSError):
        return False


@contextlib.contextmanager
def _process(command: Command, stdin: int, stdout: int | None) -> Iterator[subprocess.Popen[bytes]]:
    """The process in a session of its own, in the log's folder, where no configuration of ours lies."""
    with command.log.open("wb") as log:
        output: int | IO[bytes] = log if stdout is None else stdout
        process = subprocess.Popen(
            command.words, env={**os.environ, **command.env}, cwd=command.log.parent, stdin=stdin, stdout=output,
            stderr=log, start_new_session=True,
        )  # fmt: skip
        try:
            yield process
        finally:
            if process.stdin is not None:
                with contextlib.suppress(BrokenPipeError):
                    process.stdin.close()
            with contextlib.suppress(ProcessLookupError):
                process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(TERM_S)
            with contextlib.suppress(ProcessLookupError, PermissionError):  # children that it left behind
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            if process.stdout is not None:
                process.stdout.close()
