"""The step loop: a thread that takes plans, runs forward passes and hands results to the event loop.

It never waits for the bus while a plan is queued: plan k+1 is there before step k ends (run-ahead), and results leave
through ``deliver``, which must not block. How long it was blocked for want of a plan is measured here: that is the
idle gap (DESIGN 3).
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from shared.messages import Reset, StepPlan, StepResult, TokenEntry
from worker.batch import Batch, Row, Sampled, Slot
from worker.page_book import PageBook
from worker.runner import Runner

log = logging.getLogger("headrace.worker")

MOST_CHUNKS = 128
"""Chunks of one prompt that are remembered for its span."""


@dataclass(slots=True)
class Executed:
    """One executed step. ``entries`` are grouped by gateway; ``finished`` slots ended in this step; ``dropped`` ones
    left before it without an end of their own (preempted or cancelled)."""

    plan: StepPlan
    result: StepResult
    entries: dict[str, list[TokenEntry]]
    finished: list[Slot] = field(default_factory=list)
    dropped: list[Slot] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)
    began_ns: int = 0  # unix
    fault: str = ""
    skipped: bool = False  # with ``fault``: it did not run, since an earlier step had failed


class StepLoop:
    """``is_current`` is asked before a plan runs (fencing). ``deliver`` gets every executed step, ``answer`` each reset
    that was carried out with what the pages still hold; both on this thread."""

    def __init__(
        self, runner: Runner, batch: Batch, is_current: Callable[[StepPlan], bool], deliver: Callable[[Executed], None],
        answer: Callable[[Reset, PageBook], None],
    ) -> None:  # fmt: skip
        self._runner = runner
        self._batch = batch
        self._is_current = is_current
        self._deliver = deliver
        self._answer = answer
        self._pages = PageBook(batch.block_size, batch.num_blocks)
        self._queue: queue.SimpleQueue[StepPlan | Reset | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="step-loop", daemon=True)
        self.executing = 0  # step being executed, 0 if none
        self.executing_since_ns = 0
        self.last_step = 0
        self.num_slots = 0  # sequences that have not ended
        self._broken = False  # a step failed: no plan runs until a reset
        self._free_since = 0  # on the clock of perf_counter_ns

    def start(self) -> None:
        self._thread.start()

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    def put(self, plan: StepPlan) -> None:
        self._queue.put(plan)

    def reset(self, reset: Reset) -> None:
        """Forget every slot before any plan put after this, and answer."""
        self._queue.put(reset)

    def stop(self, timeout_s: float = 5.0) -> None:
        self._queue.put(None)
        self._thread.join(timeout_s)

    def _run(self) -> None:
        self._free_since = time.perf_counter_ns()
        while (item := self._queue.get()) is not None:
            self._take(item)

    def _take(self, item: StepPlan | Reset) -> None:
        if isinstance(item, Reset):
            self._batch.clear()
            self.num_slots = 0
            self._broken = False
            self._answer(item, self._pages)
            return
        if not self._is_current(item):
            return
        if self._broken:
            self._deliver(_failed(item, "the batch was lost in an earlier step; a reset must come first", skipped=True))
            return
        waited_us = (time.perf_counter_ns() - self._free_since) // 1000
        self._deliver(self._execute(item, waited_us))
        self._free_since = time.perf_counter_ns()

    def _execute(self, plan: StepPlan, waited_us: int) -> Executed:
        self.executing_since_ns = time.monotonic_ns()
        self.executing = plan.step
        started = time.perf_counter_ns()
        batch = self._batch
        began_ns = time.time_ns()
        slots = batch.slots
        dropped = [slots[index] for index in plan.drops if index in slots and not slots[index].ended]
        try:
            self._pages.begin(plan)
            step = batch.stage(plan)
            for row in step.rows:
                if not row.slot.first_row_ns:
                    row.slot.first_row_ns = began_ns
            moves = step.copies or step.swap_outs or step.swap_ins
            sampled = self._runner.forward(batch, step) if step.rows or moves else Sampled([])
            settled = batch.settle(plan, sampled)
            self._pages.end(plan)
        except Exception as error:  # any fault of the model or the plan loses this batch, not the process
            log.exception("step %d failed", plan.step)
            batch.clear()
            self.executing = self.num_slots = 0
            self._broken = True
            return _failed(plan, f"{type(error).__name__}: {error}")
        ended_ns = time.time_ns()
        for index, tokens in plan.chunks:
            if slots[index].traced and len(slots[index].chunks) < MOST_CHUNKS:
                slots[index].chunks.append((ended_ns, plan.step, tokens))
        grouped: dict[str, list[TokenEntry]] = {}
        finished: list[Slot] = []
        for slot, entry in settled.entries:
            grouped.setdefault(slot.gateway, []).append(entry)
            if not slot.first_token_ns and not entry.prompt_logprobs:
                slot.first_token_ns = ended_ns
            if entry.end:
                finished.append(slot)
        self.last_step = plan.step
        self.executing = 0
        self.num_slots = sum(not slot.ended for slot in batch.slots.values())
        result = StepResult(
            epoch=plan.epoch,
            worker=plan.worker,
            incarnation=plan.incarnation,
            step=plan.step,
            tokens=settled.tokens,
            ended=settled.ended,
            forward_us=(time.perf_counter_ns() - started) // 1000,
            gap_us=waited_us if plan.backlog else 0,
            rows=step.num_tokens,
            padding_rows=sum(rows for _, rows in plan.padding),
            kv_bytes_copied=self._runner.kv_bytes_copied,
            wait_us=waited_us,
            candidates=settled.candidates,
            swap_us=self._runner.swap_us if moves else 0,
        )
        return Executed(plan, result, grouped, finished, dropped, step.rows, began_ns)


def _failed(plan: StepPlan, reason: str, skipped: bool = False) -> Executed:
    nothing = StepResult(plan.epoch, plan.worker, plan.incarnation, plan.step, [])
    return Executed(plan, nothing, {}, fault=reason, skipped=skipped)
