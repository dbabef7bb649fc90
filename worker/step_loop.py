"""The step loop: a thread that takes plans, runs forward passes and hands results to the event loop.

It never waits for the bus while a plan is queued: plan k+1 is there before step k ends (run-ahead), and results leave
through ``deliver``, which must not block. How long it was blocked for want of a plan is measured here: that is the
idle gap (DESIGN 3).

With a runner whose steps overlap (:class:`~worker.runner.PipelinedRunner`), step k+1 is launched before the tokens of
step k are fetched, if its plan is there by then; the device goes from one to the next without a host between them.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from shared.messages import Reset, StepPlan, StepResult, TokenEntry
from worker.batch import Batch, Row, Sampled, Settled, Slot, Step
from worker.page_book import PageBook
from worker.runner import Flight, Landed, OnDevice, PipelinedRunner, Runner

log = logging.getLogger("headrace.worker")

MOST_IN_FLIGHT = 2
"""Steps that are launched and not settled. A scheduler plans no further ahead."""

POLL_S = 0.0001
"""How often a step in flight is asked whether it is done, while the loop waits for a plan: what a result may come late
by. No device waits for it."""

THREAD = "step-loop"
"""The name of its thread."""

MOST_CHUNKS = 128
"""Chunks of one prompt that are remembered for its span."""


@dataclass(slots=True, frozen=True)
class _Call:
    work: Callable[[], None]


_Item = StepPlan | Reset | _Call


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


class Fetching(Protocol):
    """Carries out what plans say of pages that come from other workers, on threads of its own."""

    def begin(self, plan: StepPlan) -> None:
        """Drop what ``plan`` drops and begin what it orders. Returns at once."""
        ...

    def end(self) -> None:
        """End and forget all of it: nothing writes to a page any more once this returns. Raises if that can't be."""
        ...


@dataclass(slots=True)
class _InFlight:
    plan: StepPlan
    step: Step
    flight: Flight
    dropped: list[Slot]
    waited_us: int
    taken_ns: int  # perf_counter_ns, as all times here but began_ns
    began_ns: int  # unix
    staging_us: int  # while the device was idle; 0: it was not
    fetching: bool  # what the plan says of fetches has begun


class StepLoop:
    """``is_current`` is asked before a plan runs (fencing). ``deliver`` gets every executed step, ``answer`` each reset
    that was carried out with what the pages still hold; both on this thread. Without ``fetching``, what plans say of
    fetches is somebody else's."""

    def __init__(
        self, runner: Runner, batch: Batch, is_current: Callable[[StepPlan], bool], deliver: Callable[[Executed], None],
        answer: Callable[[Reset, PageBook], None], fetching: Fetching | None = None,
    ) -> None:  # fmt: skip
        self._runner = runner
        self._batch = batch
        self._is_current = is_current
        self._deliver = deliver
        self._answer = answer
        self._fetching = fetching
        self._pages = PageBook(batch.block_size, batch.num_blocks)
        self._queue: queue.SimpleQueue[_Item | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=THREAD, daemon=True)
        self.executing = 0  # step being executed, 0 if none
        self.executing_since_ns = 0
        self.last_step = 0
        self.num_slots = 0  # sequences that have not ended
        self._broken = False  # a step failed: no plan runs until a reset
        self._lost = False  # the device is: after some faults CUDA answers nothing more that this process asks
        self._free_since = 0  # on the clock of perf_counter_ns
        self._in_flight: deque[_InFlight] = deque()

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

    def call(self, work: Callable[[], None]) -> None:
        """Have this thread do it, between steps: it alone gives work to a device. From any thread."""
        self._queue.put(_Call(work))

    def stop(self, timeout_s: float = 5.0) -> None:
        self._queue.put(None)
        self._thread.join(timeout_s)

    def _run(self) -> None:
        self._free_since = time.perf_counter_ns()
        while not self._lost and (item := self._next()) is not None:
            self._take(item)
        self._land_all()

    def _next(self) -> _Item | None:
        """What comes next from the bus. Meanwhile results leave as soon as they are there."""
        while self._in_flight:
            with contextlib.suppress(queue.Empty):
                return self._queue.get_nowait()
            if _is_done(self._in_flight[0].flight):
                self._land()
                if self._lost:
                    return None
                continue
            with contextlib.suppress(queue.Empty):
                return self._queue.get(timeout=POLL_S)
        return self._queue.get()

    def _take(self, item: _Item) -> None:
        if isinstance(item, _Call):
            item.work()
            return
        if isinstance(item, Reset):
            self._land_all()
            if self._fetching is not None:
                self._fetching.end()
            self._batch.clear()
            self.num_slots = 0
            self._broken = False
            self._answer(item, self._pages)
            return
        if not self._is_current(item):
            return
        if self._in_flight and self._batch.must_settle(item):
            self._land_all()
        if self._broken:
            self._skip(item)
            return
        self._launch(item)
        if not isinstance(self._runner, PipelinedRunner):
            self._land_all()
        while len(self._in_flight) >= MOST_IN_FLIGHT:
            self._land()

    def _launch(self, plan: StepPlan) -> None:
        now = time.perf_counter_ns()
        idle = not self._in_flight
        if idle:
            self.executing_since_ns = time.monotonic_ns()
            self.executing = plan.step
        batch = self._batch
        slots = batch.slots
        dropped = [slots[index] for index in plan.drops if index in slots]
        began_ns = time.time_ns()
        try:
            self._pages.begin(plan)
            step = batch.stage(plan)
            for row in step.rows:
                if not row.slot.first_row_ns:
                    row.slot.first_row_ns = began_ns
            staged = time.perf_counter_ns()
            fetching = idle and not _moves_pages(step)
            if fetching:
                self._fetch(plan)
            flight = self._fly(step)
            if flight.needs_earlier:
                self._land_all()
            if self._broken:  # by the step that it had to wait for
                self._skip(plan)
                return
            flight.choose()
        except Exception as error:  # noqa: BLE001  any fault of model or plan loses this batch, not the process
            self._land_all()  # what was launched before it is whole
            if self._broken:
                self._skip(plan)
            else:
                self._lose(plan, error)
            return
        waited_us = (now - self._free_since) // 1000 if idle else 0
        staging_us = (staged - now) // 1000 if idle else 0
        self._in_flight.append(_InFlight(plan, step, flight, dropped, waited_us, now, began_ns, staging_us, fetching))

    def _fetch(self, plan: StepPlan) -> None:
        """Begin the plan's fetches. They write where earlier steps may have read and written, and where its own moves
        of pages may: those are over by now."""
        if self._fetching is not None and (plan.fetches or plan.drop_fetches):
            self._fetching.begin(plan)

    def _fly(self, step: Step) -> Flight:
        runner = self._runner
        if not (step.rows or _moves_pages(step)):
            return Landed(Sampled([]))
        if isinstance(runner, PipelinedRunner):
            return runner.launch(self._batch, step)
        return Landed(runner.forward(self._batch, step), runner.swap_us)

    def _land_all(self) -> None:
        while self._in_flight:
            self._land()

    def _land(self) -> None:
        """Settle the oldest step in flight and deliver it, waiting for it if need be."""
        landing = self._in_flight.popleft()
        plan = landing.plan
        try:
            sampled = landing.flight.result()
            settled = self._batch.settle(landing.step, sampled)
        except Exception as error:  # noqa: BLE001  as above
            lost, self._in_flight = self._in_flight, deque()
            self._lose(plan, error)
            for later in lost:
                with contextlib.suppress(Exception):
                    later.flight.result()  # what it uses is free once the device has done with it
                self._skip(later.plan)
            return
        self._pages.end(plan)
        if not landing.fetching:
            self._fetch(plan)
        if self._in_flight and not self._in_flight[0].fetching and not _moves_pages(self._in_flight[0].step):
            self._in_flight[0].fetching = True
            self._fetch(self._in_flight[0].plan)
        for later in self._in_flight:  # it was staged before this one's pages were trusted
            self._pages.begin(later.plan)
        ended = time.perf_counter_ns()
        self._deliver(self._executed(landing, settled, ended))
        self._free_since = time.perf_counter_ns()

    def _executed(self, landing: _InFlight, settled: Settled, ended: int) -> Executed:
        plan, step = landing.plan, landing.step
        ended_ns = time.time_ns()
        chunks = dict(plan.chunks)
        for row in step.rows:
            slot = row.slot
            if slot.traced and slot.index in chunks and not row.padding and len(slot.chunks) < MOST_CHUNKS:
                slot.chunks.append((ended_ns, plan.step, row.count))
        grouped: dict[str, list[TokenEntry]] = {}
        finished: list[Slot] = []
        for slot, entry in settled.entries:
            grouped.setdefault(slot.gateway, []).append(entry)
            if not slot.first_token_ns and not entry.prompt_logprobs:
                slot.first_token_ns = ended_ns
            if entry.end:
                finished.append(slot)
        self.last_step = plan.step
        self.executing = self._in_flight[0].plan.step if self._in_flight else 0
        self.executing_since_ns = time.monotonic_ns()
        self.num_slots = sum(not slot.ended for slot in self._batch.slots.values())
        began = max(landing.taken_ns, self._free_since)  # it waited for the step before it
        busy_us = landing.flight.busy_us()
        busy_us = (ended - began) // 1000 if busy_us is None else busy_us + landing.staging_us
        result = StepResult(
            epoch=plan.epoch,
            worker=plan.worker,
            incarnation=plan.incarnation,
            step=plan.step,
            tokens=settled.tokens,
            ended=settled.ended,
            forward_us=busy_us,
            gap_us=landing.waited_us if plan.backlog else 0,
            rows=step.num_tokens,
            padding_rows=sum(rows for _, rows in plan.padding),
            kv_bytes_copied=self._runner.kv_bytes_copied,
            wait_us=landing.waited_us,
            candidates=settled.candidates,
            swap_us=landing.flight.swap_us if _moves_pages(step) else 0,
        )
        dropped = [slot for slot in landing.dropped if not slot.ended]  # one may have ended in the step before
        began_ns = landing.began_ns + began - landing.taken_ns
        return Executed(plan, result, grouped, finished, dropped, step.rows, began_ns)

    def _lose(self, plan: StepPlan, error: Exception) -> None:
        """A step failed: the batch is gone, and no plan runs until a reset."""
        log.error("step %d failed", plan.step, exc_info=error)
        self._batch.clear()
        self.executing = self.num_slots = 0
        self._broken = True
        self._deliver(_failed(plan, f"{type(error).__name__}: {error}"))
        self._free_since = time.perf_counter_ns()
        if isinstance(self._runner, OnDevice) and not self._runner.answers():
            log.error("the device answers nothing more: the step loop ends")
            self._lost = True

    def _skip(self, plan: StepPlan) -> None:
        self.executing = 0
        self._deliver(_failed(plan, "the batch was lost in an earlier step; a reset must come first", skipped=True))


def _moves_pages(step: Step) -> bool:
    return bool(step.copies or step.swap_outs or step.swap_ins)


def _is_done(flight: Flight) -> bool:
    try:
        return flight.done()
    except Exception:  # noqa: BLE001  its result says the same, where a fault is dealt with
        return True


def _failed(plan: StepPlan, reason: str, skipped: bool = False) -> Executed:
    nothing = StepResult(plan.epoch, plan.worker, plan.incarnation, plan.step, [])
    return Executed(plan, nothing, {}, fault=reason, skipped=skipped)
