"""``headrace bench --loads``: open-loop load at multiples of what a mesh can do, one after the other on the same mesh.

An open loop keeps sending whatever becomes of what it sent, as crowds do (Schroeder, Wierman, Harchol-Balter, "Open
versus closed: a cautionary tale", NSDI 2006). What a mesh delivers should rise to its capacity and stay there.

Each load has a window of arrivals, of which the first fifth only fills the batch and is not measured. Then every open
request is given up by closing its connection, and the next window begins once the mesh is idle.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace

import httpx

from headrace.bench.client import Client, client_of, fire
from headrace.bench.goodput import LoadFigures, Window, load_figures
from headrace.bench.mesh import MeshFailed, running_mesh
from headrace.bench.probe import Probe, Sample
from headrace.bench.taken import Taken
from headrace.bench.workload import Shot, Workload, endless_shots, mean_output_tokens, shots

FILLING_SHARE = 1 / 5
DRAIN_S = 120.0
WARM_UP_REQUESTS = 4
PAUSE_S = 0.5
"""Of the closed loop, after an answer that was none."""


@dataclass(frozen=True)
class Plan:
    """What to offer. ``capacity_per_s``: requests per second that 1x stands for; 0: measured in a closed loop."""

    workload: Workload
    loads: list[float]
    seconds: float
    capacity_per_s: float
    concurrency: int  # of the closed loop
    seed: int


async def measure(plan: Plan, flags: list[str]) -> tuple[LoadFigures | None, float, list[LoadFigures]]:
    """(figures of the closed loop or None, requests per second that 1x stands for, figures of each load).

    Raises MeshFailed if the mesh does not come up, or does not become idle between two windows.
    """
    async with running_mesh(flags) as mesh, httpx.AsyncClient(trust_env=False) as http:
        probe = Probe(mesh, http)
        model = await mesh.model()
        longest = model.max_model_len
        with client_of(mesh.url, model.name) as client:
            few = shots(plan.workload, WARM_UP_REQUESTS, plan.seed + 1, model.vocab_size, 0, min(64, longest))
            await fire(mesh.url, model.name, few, WARM_UP_REQUESTS, lambda _: None)
            closed = None
            capacity = plan.capacity_per_s
            if not capacity:
                load = endless_shots(plan.workload, plan.seed, model.vocab_size, 0, longest)
                window = await _window(client, probe, load, plan.seconds, plan.concurrency, _Progress("closed loop"))
                closed = load_figures(window)
                # Not the requests that ended: in a window shorter than the longest outputs, the short ones end first.
                capacity = closed.tokens_per_s / mean_output_tokens(plan.workload, plan.seed, longest)
                if not capacity:
                    raise MeshFailed("the closed loop delivered no token; try more --seconds, or give --capacity")
                await _drained(probe)
            found = []
            for variation, multiple in enumerate(plan.loads, 1):
                rate = multiple * capacity
                load = endless_shots(plan.workload, plan.seed, model.vocab_size, rate, longest, variation)
                window = await _window(client, probe, load, plan.seconds, 0, _Progress(f"{multiple:g}x"))
                found.append(load_figures(replace(window, load=multiple, offered_per_s=rate)))
                await _drained(probe)
    return closed, capacity, found


async def _window(
    client: Client, probe: Probe, load: Iterator[Shot], seconds: float, concurrency: int, show: _Progress
) -> Window:
    """Send for ``seconds``: at the shots' own times, or ``concurrency`` > 0 at a time; then give up what is open."""
    taken: list[Taken] = []
    open_now: set[asyncio.Task[None]] = set()
    began = time.perf_counter()
    fatal: MeshFailed | None = None
    async with asyncio.TaskGroup() as group:

        def send(shot: Shot, one: Taken) -> asyncio.Task[None]:
            taken.append(one)
            task = group.create_task(client.ask(shot, one))
            open_now.add(task)
            task.add_done_callback(open_now.discard)
            return task

        async def at_their_times() -> None:
            for shot in load:
                due_s = began + shot.at_s
                await asyncio.sleep(max(0.0, due_s - time.perf_counter()))
                send(shot, Taken(shot.max_tokens, due_s))

        async def one_after_another() -> None:
            for shot in load:
                one = Taken(shot.max_tokens, time.perf_counter())
                await send(shot, one)
                if one.error:  # a queue shorter than the loop, most likely: do not hammer at it
                    await asyncio.sleep(PAUSE_S)

        senders = [group.create_task(one_after_another()) for _ in range(concurrency)] or [
            group.create_task(at_their_times())
        ]
        samples: list[Sample] = []
        try:
            async for sample in probe.watch(began + seconds):
                samples.append(sample)
                show(sample.at_s - began, seconds, len(taken), len(open_now))
        except MeshFailed as error:  # not out of here: a task group wraps it
            fatal = error
        for task in [*senders, *open_now]:
            task.cancel()
    show.end()
    if fatal is not None:
        raise fatal
    measured = [sample for sample in samples if sample.at_s >= began + FILLING_SHARE * seconds]
    return Window(0.0, 0.0, taken, samples[0], measured)


async def _drained(probe: Probe) -> None:
    """Wait until the scheduler has nothing in hand."""
    deadline = time.perf_counter() + DRAIN_S
    while left := (await probe.sample()).at_work:
        if time.perf_counter() > deadline:
            raise MeshFailed(f"{left:.0f} sequences were still there {DRAIN_S:g} s after their clients had gone")
        await asyncio.sleep(0.25)


class _Progress:
    """How far a window is: one line that changes on a terminal, two lines elsewhere."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._on_terminal = sys.stderr.isatty()
        print(f"headrace: {name}", end="" if self._on_terminal else "\n", file=sys.stderr, flush=True)

    def __call__(self, passed_s: float, seconds: float, sent: int, open_now: int) -> None:
        if self._on_terminal:
            text = f"\rheadrace: {self._name}: {passed_s:.0f} of {seconds:g} s, {sent} sent, {open_now} open"
            print(f"{text:<78}", end="", file=sys.stderr, flush=True)

    def end(self) -> None:
        print("" if self._on_terminal else f"headrace: {self._name} done", file=sys.stderr, flush=True)
