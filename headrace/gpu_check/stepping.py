"""Steps of a runner that decodes a batch, without a scheduler: plans made here, launched one ahead, settled in order.

Contexts are not computed: their pages hold random numbers, as if a prefix cache had had them.
"""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from shared.messages import Sampling, SlotStart, StepPlan, pack_tokens
from worker.batch import Batch, Step
from worker.runner import Flight, Landed, PipelinedRunner, Runner

WORKER, GATEWAY = "worker-0", "gateway-0"
DEPTH = 2
"""Steps in flight, where they can overlap."""


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Of one step, in seconds of the host's clock; ``busy_s`` is the device's, where it keeps one."""

    host_s: float  # staging, settling
    launch_s: float  # until the device has its work
    busy_s: float | None


@dataclass(frozen=True)
class Run:
    steps: list[StepTimes]
    seconds: float  # of all of them, first launch to last token
    tokens: list[list[int]]  # of each sequence

    @property
    def step_s(self) -> float:
        return self.seconds / len(self.steps)

    def median(self, name: str) -> float | None:
        values = [value for step in self.steps if (value := getattr(step, name)) is not None]
        return statistics.median(values) if values else None


class Stepping:
    """``batch`` sequences behind ``context`` tokens each, in the pool's first pages."""

    def __init__(self, runner: Runner, batch: int, context: int, most_steps: int, temperature: float = 0.0) -> None:
        capacity = runner.capacity
        self._runner = runner
        self._slots = range(batch)
        self._batch = Batch(capacity.block_size, capacity.num_blocks, capacity.max_model_len, frozenset())
        self._number = 0
        self._in_flight: deque[tuple[Step, Flight, float, float]] = deque()
        pages = pages_for(context, most_steps, capacity.block_size)
        sampling = [
            Sampling(seed=slot, max_tokens=1 << 20, temperature=temperature, ignore_eos=True) for slot in self._slots
        ]
        self._starts = [
            SlotStart(
                slot, f"check-{slot}", 0, 0, GATEWAY, pack_tokens(prompt(slot, context + 1, capacity.vocab_size)),
                context + 1, list(range(1 + slot * pages, 1 + (slot + 1) * pages)), sampling[slot], computed=context,
            )
            for slot in self._slots
        ]  # fmt: skip

    def run(self, steps: int) -> Run:
        """So many steps, the first of which takes the sequences in if it is the first ever."""
        taken: list[StepTimes] = []
        tokens: list[list[int]] = [[] for _ in self._slots]
        began = time.perf_counter()
        for _ in range(steps):
            self._launch()
            while len(self._in_flight) >= DEPTH or (self._in_flight and not self._overlaps):
                taken.append(self._land(tokens))
        while self._in_flight:
            taken.append(self._land(tokens))
        return Run(taken, time.perf_counter() - began, tokens)

    @property
    def _overlaps(self) -> bool:
        return isinstance(self._runner, PipelinedRunner)

    def _plan(self) -> StepPlan:
        self._number += 1
        if self._number == 1:
            return StepPlan(1, WORKER, 1, 1, starts=self._starts, chunks=[(slot, 1) for slot in self._slots])
        return StepPlan(1, WORKER, 1, self._number, decodes=list(self._slots))

    def _launch(self) -> None:
        began = time.perf_counter()
        step = self._batch.stage(self._plan())
        staged = time.perf_counter()
        runner = self._runner
        if isinstance(runner, PipelinedRunner):
            flight = runner.launch(self._batch, step)
            flight.choose()
        else:
            flight = Landed(runner.forward(self._batch, step))
        self._in_flight.append((step, flight, staged - began, time.perf_counter() - staged))

    def _land(self, tokens: list[list[int]]) -> StepTimes:
        step, flight, staging_s, launch_s = self._in_flight.popleft()
        sampled = flight.result()
        began = time.perf_counter()
        settled = self._batch.settle(step, sampled)
        for sequence, token in zip(tokens, settled.tokens, strict=True):
            sequence.append(token)
        busy_us = flight.busy_us()
        host_s = staging_s + time.perf_counter() - began
        return StepTimes(host_s, launch_s, None if busy_us is None else busy_us / 1e6)


def pages_for(context: int, most_steps: int, block_size: int) -> int:
    """Of one sequence: its context, the token that follows, and those that are sampled."""
    return -(-(context + most_steps + 2) // block_size)


def prompt(number: int, length: int, vocabulary: int) -> list[int]:
    """Token ids that differ from sequence to sequence."""
    return [(7 + 31 * number + 97 * index) % vocabulary for index in range(length)]


def cells_that_fit(
    batches: Sequence[int], contexts: Sequence[int], most_steps: int, num_blocks: int, block_size: int, longest: int
) -> list[tuple[int, int]]:
    """(batch, context) of those for which there are pages, and positions."""
    return [
        (batch, context)
        for context in contexts
        for batch in batches
        if batch * pages_for(context, most_steps, block_size) <= num_blocks and context + most_steps + 2 <= longest
    ]
