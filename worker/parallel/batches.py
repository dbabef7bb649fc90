"""The batch of each rank: the same plans, the same rows, the same tokens, or the worker ends.

What a plan comes to depends on when it is staged: a sequence that has ended by then has no row in it, one that is about
to end has (:class:`worker.batch.Batch`). Rank 0 says which it was; a follower that is ahead or behind stages the same.
"""

from __future__ import annotations

import threading
from collections import OrderedDict, deque
from collections.abc import Callable
from typing import Protocol

from shared.messages import Capacity, EndReason, StepPlan
from worker.batch import Batch, Sampled, Settled, Slot, Step
from worker.parallel.channel import Clear, Order, Outcome

KEPT_OUTCOMES = 64
"""Of steps that only one side has settled: those lost in a fault never meet."""


class Crew(Protocol):
    """Rank 0's followers."""

    def check(self) -> None:
        """Raises RuntimeError if one is lost."""
        ...

    def tell(self, message: Order | Clear) -> None:
        """Hand a message on to every one; one that can't be told is lost."""
        ...


class LeadingBatch(Batch):
    """Rank 0's. Hands on every plan that it has staged: nothing that is out of date comes so far."""

    def __init__(self, capacity: Capacity, crew: Crew) -> None:
        super().__init__(*_sizes(capacity))
        self._crew = crew
        self._staged: deque[tuple[int, int]] = deque()  # (epoch, step)
        self._outcomes: list[Outcome] = []
        self.handed_on: deque[tuple[int, int]] = deque(maxlen=8)  # (epoch, step) of the last plans

    def stage(self, plan: StepPlan) -> Step:
        self._crew.check()
        step = super().stage(plan)
        self._staged.append((plan.epoch, plan.step))
        outcomes, self._outcomes = self._outcomes, []
        skipped = [run.slot.index for run in step.runs if not run.staged]
        self.handed_on.append((plan.epoch, plan.step))
        self._crew.tell(Order(plan, skipped, outcomes))
        self._crew.check()
        return step

    def settle(self, step: Step, sampled: Sampled) -> Settled:
        settled = super().settle(step, sampled)
        self._outcomes.append(outcome_of(self._staged.popleft(), settled))
        return settled

    def clear(self) -> None:
        super().clear()
        self._staged.clear()
        self._outcomes.clear()
        self._crew.tell(Clear())


class FollowingBatch(Batch):
    """A follower's. ``differs`` gets the reason, once what it sampled is not what rank 0 did."""

    def __init__(self, capacity: Capacity, differs: Callable[[str], None]) -> None:
        super().__init__(*_sizes(capacity))
        self._differs = differs
        self._staged: deque[tuple[int, int]] = deque()
        self._skipped: dict[tuple[int, int], list[int]] = {}
        self._comparing = threading.Lock()
        self._own: OrderedDict[tuple[int, int], tuple[Outcome, dict[int, Slot]]] = OrderedDict()
        self._led: OrderedDict[tuple[int, int], Outcome] = OrderedDict()

    def expect(self, order: Order) -> None:
        """Take in what comes with a plan, before it is staged. On any thread."""
        self._skipped[order.plan.epoch, order.plan.step] = order.skipped
        for outcome in order.outcomes:
            with self._comparing:
                self._led[outcome.epoch, outcome.step] = outcome
                self._compare(outcome.epoch, outcome.step)

    def stage(self, plan: StepPlan) -> Step:
        skipped = set(self._skipped.pop((plan.epoch, plan.step)))
        before = []
        for index in {*plan.decodes, *(index for index, _ in plan.chunks)} - {start.slot for start in plan.starts}:
            slot = self.slots.get(index)
            if slot is not None and bool(slot.ended) != (index in skipped):
                before.append((slot, slot.ended))
                slot.ended = EndReason.STOP.value if index in skipped else ""
        try:
            step = super().stage(plan)
        finally:
            for slot, ended in before:
                slot.ended = ended
        self._staged.append((plan.epoch, plan.step))
        return step

    def settle(self, step: Step, sampled: Sampled) -> Settled:
        settled = super().settle(step, sampled)
        which = self._staged.popleft()
        with self._comparing:
            self._own[which] = outcome_of(which, settled), {run.slot.index: run.slot for run in step.runs}
            self._compare(*which)
        return settled

    def clear(self) -> None:
        super().clear()
        self._staged.clear()
        with self._comparing:
            self._own.clear()
            self._led.clear()

    def _compare(self, epoch: int, step: int) -> None:
        for kept in (self._own, self._led):
            while len(kept) > KEPT_OUTCOMES:
                kept.popitem(last=False)
        if (epoch, step) not in self._own or (epoch, step) not in self._led:
            return
        own, slots = self._own.pop((epoch, step))
        led = self._led.pop((epoch, step))
        # How long a grammar takes to compile is each rank's own; rank 0's patience decides.
        failed = [index for index in led.failed if index not in own.failed]
        for index in failed:
            slots[index].ended = EndReason.FAILED.value
        apart = sum(mine != other for mine, other in zip(own.tokens, led.tokens, strict=False))
        alike = len(own.tokens) == len(led.tokens) and set(own.failed) <= set(led.failed)
        if not alike or apart > len(failed) or own.candidates != led.candidates:
            self._differs(f"it chose other tokens than rank 0 in step {step} ({apart} of {len(led.tokens)})")


def outcome_of(which: tuple[int, int], settled: Settled) -> Outcome:
    """What ranks compare of step ``which`` (epoch, step)."""
    candidates = [(index, ids) for index, ids, _ in settled.candidates]
    failed = [index for index, reason in settled.ended if reason == EndReason.FAILED.value]
    return Outcome(*which, settled.tokens, candidates, failed)


def _sizes(capacity: Capacity) -> tuple[int, int, int, frozenset[int]]:
    return (
        capacity.block_size, capacity.num_blocks, capacity.max_model_len, frozenset(capacity.eos_token_ids)
    )  # fmt: skip
