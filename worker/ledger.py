"""Which plans a worker runs: each step once, in order, of the newest epoch. Pure: no I/O, clock or tensors.

Plans ride on core NATS, which is at most once; step numbers detect loss, and resends are idempotent (DESIGN 4):
a plan that was executed already is answered with the kept result, a gap with ``need(n)``. A batch begins with a reset,
without which no plan of a new epoch runs: its leader must have heard first what the pages hold.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import NamedTuple

from shared.messages import MAX_EPOCH, Need, Reset, StepPlan

KEPT_RESULTS = 8


@dataclass(slots=True)
class Verdict:
    """What to do about a message. At most one of ``execute``, ``resend`` and ``need`` is set."""

    execute: StepPlan | None = None  # queue it for the step loop
    resend: bytes | None = None  # the encoded result of a step that was executed already
    need: Need | None = None
    reset: bool = False  # forget every slot before anything that follows, and say what the pages hold
    stale: bool = False  # of an older epoch or another incarnation: ignored and counted


class Standing(NamedTuple):
    """Where a worker stands."""

    epoch: int  # highest seen
    began: int  # first step since the last reset; 0: no reset has come in this epoch
    executed: int  # last step since then whose result is known; 0: none


NOWHERE = Standing(0, 0, 0)


@dataclass(slots=True)
class StepLedger:
    worker: str
    incarnation: int
    epoch: int = 0  # highest seen
    expected: int = 0  # next step to accept; 0: none, a reset must come first
    standing: Standing = NOWHERE  # replaced as a whole: other threads look at it
    _began: int = 0  # first step of the batch: of one epoch, no two batches share it
    _results: OrderedDict[int, bytes] = field(default_factory=OrderedDict)

    def offer(self, message: StepPlan | Reset) -> Verdict:
        if message.worker != self.worker or message.incarnation != self.incarnation:
            return Verdict(stale=True)
        if not self.epoch <= message.epoch < MAX_EPOCH:
            return Verdict(stale=True)
        if isinstance(message, Reset):
            if message.epoch == self.epoch and message.step <= self._began:
                if message.step < self._began or message.step < 1:
                    return Verdict(stale=True)  # it began an earlier batch
                # Sent again, or late. If a plan has followed, the answer was heard, and must not be given any more.
                return Verdict(reset=self.expected == self._began)
            self._restart(message.epoch, message.step)
            return Verdict(reset=True)
        if message.epoch > self.epoch:  # a new leader, whose reset was lost: nothing of older ones runs any more
            self._restart(message.epoch, 0)
        if self.expected and message.step == self.expected:
            self.expected += 1
            return Verdict(execute=message)
        if message.step < self.expected:
            return Verdict(resend=self._results.get(message.step))
        return Verdict(need=Need(self.epoch, self.worker, self.incarnation, self.expected))

    def current(self, plan: StepPlan) -> bool:
        """Asked again at execution: a plan queued before a newer epoch or a reset came must not run."""
        return plan.epoch == self.epoch and plan.step < self.expected

    def record(self, plan: StepPlan, result: bytes) -> None:
        """Keep the encoded result of an executed plan for resends."""
        if plan.epoch != self.epoch:
            return
        self._results[plan.step] = result
        if plan.step >= self._began > 0:
            self.standing = Standing(self.epoch, self._began, plan.step)
        while len(self._results) > KEPT_RESULTS:
            self._results.popitem(last=False)

    def _restart(self, epoch: int, step: int) -> None:
        self.epoch = epoch
        self.expected = step
        self._began = step
        self.standing = Standing(epoch, step, 0)
        self._results.clear()
