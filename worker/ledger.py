"""Which plans a worker runs: each step once, in order, of the newest epoch. Pure: no I/O, clock or tensors.

Plans ride on core NATS, which is at most once; step numbers detect loss, and resends are idempotent (DESIGN 4):
a plan that was executed already is answered with the kept result, a gap with ``need(n)``.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

from shared.messages import MAX_EPOCH, Need, Reset, StepPlan

KEPT_RESULTS = 8


@dataclass(slots=True)
class Verdict:
    """What to do about a message. At most one of ``execute``, ``resend`` and ``need`` is set."""

    execute: StepPlan | None = None  # queue it for the step loop
    resend: bytes | None = None  # the encoded result of a step that was executed already
    need: Need | None = None
    reset: bool = False  # forget every slot before anything that follows
    stale: bool = False  # of an older epoch or another incarnation: ignored and counted


@dataclass(slots=True)
class StepLedger:
    worker: str
    incarnation: int
    epoch: int = 0  # highest seen
    expected: int = 1  # next step to accept
    _began: tuple[int, int] = (0, 0)  # (epoch, first step) of the batch: no two batches share both
    _results: OrderedDict[int, bytes] = field(default_factory=OrderedDict)

    def offer(self, message: StepPlan | Reset) -> Verdict:
        if message.worker != self.worker or message.incarnation != self.incarnation:
            return Verdict(stale=True)
        if not self.epoch <= message.epoch < MAX_EPOCH:
            return Verdict(stale=True)
        if isinstance(message, Reset):
            if (message.epoch, message.step) == self._began:
                return Verdict()  # sent again, or late: this very batch has begun
            self._restart(message.epoch, message.step)
            return Verdict(reset=True)
        fresh = message.epoch > self.epoch
        if fresh:  # a new leader whose reset was lost
            self._restart(message.epoch, 1)
        if message.step == self.expected:
            self.expected += 1
            return Verdict(execute=message, reset=fresh)
        if message.step < self.expected:
            return Verdict(resend=self._results.get(message.step), reset=fresh)
        return Verdict(need=Need(self.epoch, self.worker, self.incarnation, self.expected), reset=fresh)

    def current(self, plan: StepPlan) -> bool:
        """Asked again at execution: a plan queued before a newer epoch or a reset came must not run."""
        return plan.epoch == self.epoch and plan.step < self.expected

    def record(self, plan: StepPlan, result: bytes) -> None:
        """Keep the encoded result of an executed plan for resends."""
        if plan.epoch != self.epoch:
            return
        self._results[plan.step] = result
        while len(self._results) > KEPT_RESULTS:
            self._results.popitem(last=False)

    def _restart(self, epoch: int, step: int) -> None:
        self.epoch = epoch
        self.expected = step
        self._began = (epoch, step)
        self._results.clear()
