"""What the drivers of in-process engines share: the lines on stdin and stdout, and the closed loop.

On stdin comes a JSON line of settings, then one for each run: ``{"shots": [[ids, tokens], ...], "concurrency": n,
"seconds": null or s}``. On stdout go JSON lines: ``{"ready": true}``, ``{"done": n}`` while a run goes on, and
``{"records": [...]}`` at its end. Times are of time.perf_counter, which on Linux all processes share.

Standard library only: the peer's environment has whatever the peer needs.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Protocol

REPORT_EVERY_S = 0.5


@dataclass
class Request:
    number: int
    prompt: list[int]
    want: int


@dataclass
class Record:
    """Of one request: when it was sent, when each output token was there, when it ended; seconds."""

    want: int
    since: float
    tokens: list[float] = field(default_factory=list)
    ended: float = 0.0
    error: str = ""


@dataclass
class Run:
    """One line of stdin. ``done`` is told how many requests are over."""

    requests: list[Request]
    concurrency: int
    seconds: float | None
    done: Callable[[int], None]

    def open_until(self, began: float) -> float:
        """When the last request may be sent."""
        return began + self.seconds if self.seconds is not None else float("inf")


class Engine(Protocol):
    """An engine that is driven step by step, by one thread."""

    def add(self, request: Request) -> None: ...

    def step(self) -> Iterable[tuple[int, int, bool]]:
        """Let it work, and return (request's number, new tokens, it has ended) of all that got some. May block."""


def closed_loop(engine: Engine, run: Run) -> list[Record]:
    """``concurrency`` users, each of whom sends the next request as soon as its last has ended."""
    records: dict[int, Record] = {}
    waiting: Iterator[Request] = iter(run.requests)
    open_now = ended = 0
    until = run.open_until(time.perf_counter())
    while True:
        while open_now < run.concurrency and time.perf_counter() < until:
            request = next(waiting, None)
            if request is None:
                break
            records[request.number] = Record(request.want, time.perf_counter())
            engine.add(request)
            open_now += 1
        if not open_now:
            return list(records.values())
        stepped = list(engine.step())
        now = time.perf_counter()
        for number, new_tokens, over in stepped:
            record = records[number]
            record.tokens += [now] * new_tokens
            if over:
                record.ended = now
                open_now -= 1
                ended += 1
        run.done(ended)


def stepped(make: Callable[[dict[str, str]], Engine]) -> Callable[[dict[str, str]], Callable[[Run], list[Record]]]:
    """For :func:`serve`: closed loops over the engine that ``make`` makes of the settings."""

    def start(settings: dict[str, str]) -> Callable[[Run], list[Record]]:
        engine = make(settings)
        return lambda run: closed_loop(engine, run)

    return start


def serve(start: Callable[[dict[str, str]], Callable[[Run], list[Record]]]) -> None:
    """Answer stdin until it ends. ``start`` makes of the settings what runs a load."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # whatever a library prints is no answer
    perform = start(json.loads(sys.stdin.readline()))
    _say(answers, ready=True)
    for line in sys.stdin:
        asked = json.loads(line)
        reported = 0.0

        def done(count: int) -> None:
            nonlocal reported
            if time.perf_counter() - reported >= REPORT_EVERY_S:
                reported = time.perf_counter()
                _say(answers, done=count)

        requests = [Request(number, prompt, want) for number, (prompt, want) in enumerate(asked["shots"])]
        records = perform(Run(requests, asked["concurrency"], asked["seconds"], done))
        _say(answers, records=[asdict(record) for record in records])


def _say(answers: object, **message: object) -> None:
    print(json.dumps(message), file=answers)  # type: ignore[call-overload]
