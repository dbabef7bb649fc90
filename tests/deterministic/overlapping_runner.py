"""The simulated runner as one whose steps overlap: a device with a clock of its own works them off one after the
other."""

from __future__ import annotations

import time
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from shared.messages import Capacity
from worker.batch import Batch, Sampled, Step
from worker.simulated import SimulatedRunner, StepTime


class OverlappingRunner(SimulatedRunner):
    """Implements :class:`~worker.runner.PipelinedRunner`."""

    def __init__(self, capacity: Capacity, step_time: StepTime) -> None:
        super().__init__(capacity, StepTime())
        self._lasts = step_time
        self._free_at = 0.0

    def launch(self, batch: Batch, step: Step) -> Flight:
        lasts_s = self._lasts.seconds(step.num_tokens)
        self._free_at = max(self._free_at, time.monotonic()) + lasts_s
        # As it is now: the next step is staged before this one runs.
        seen = SimpleNamespace(
            block_size=batch.block_size, eos_token_ids=batch.eos_token_ids, tables=batch.tables.copy()
        )  # fmt: skip
        return Flight(self, seen, step, self._free_at, lasts_s)


@dataclass
class Flight:
    runner: OverlappingRunner
    batch: Any
    step: Step
    ends_at: float  # monotonic s
    lasts_s: float
    needs_earlier: bool = False
    swap_us: int = 0

    def choose(self) -> None: ...

    def done(self) -> bool:
        return time.monotonic() >= self.ends_at

    def result(self) -> Sampled:
        time.sleep(max(0.0, self.ends_at - time.monotonic()))
        sampled = self.runner.forward(self.batch, self.step)
        self.swap_us = self.runner.swap_us
        return sampled

    def busy_us(self) -> int:
        return int(1e6 * self.lasts_s)
