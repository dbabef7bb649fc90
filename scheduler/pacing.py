"""When plans are sent: the next one at the predicted end of the running step, and again if its result stays out."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from scheduler.core.core import SchedulerCore
from scheduler.core.events import CoreEvent
from scheduler.metrics import SchedulerMetrics
from shared.messages import StepPlan, StepResult, encode
from shared.subjects import Subjects

MARGIN_S = 0.002
MARGIN_SHARE = 0.2
"""How long before a step's predicted end the next plan leaves: the larger of the two."""


@dataclass(slots=True)
class WorkerLink:
    """What the shell keeps of a worker: plans whose results are missing, and when the next plan is due."""

    incarnation: int
    seen: float  # monotonic s
    first_step: int = 1  # of its batch
    reset: bytes = b""  # what began it
    sent: deque[tuple[int, bytes]] = field(default_factory=deque)  # (step, payload)
    step_began: float = 0.0  # when the oldest plan in flight is thought to have begun
    sent_at: float = 0.0
    resends: int = 0  # of the oldest plan
    alone: bool = False  # the oldest plan went to an idle worker, at ``sent_at``: what it takes tells the bus's way
    timer: asyncio.TimerHandle | None = None

    def close(self) -> None:
        if self.timer is not None:
            self.timer.cancel()

    def awaits(self, step: int) -> bool:
        """True if the result of ``step`` is still out."""
        return any(number == step for number, _ in self.sent)


class PlanSender:
    """Owns the links to the workers. ``planned`` is told of each plan, of the events that came with it, and when.

    ``may_plan`` is asked before each plan.
    """

    def __init__(
        self, core: SchedulerCore, run_ahead: int, subjects: Subjects, post: Callable[[str, bytes], None],
        metrics: SchedulerMetrics, planned: Callable[[StepPlan | None, Sequence[CoreEvent], int], None],
        may_plan: Callable[[], bool],
    ) -> None:  # fmt: skip
        self._may_plan = may_plan
        self._core = core
        self._run_ahead = run_ahead
        self._subjects = subjects
        self._post = post
        self._metrics = metrics
        self._planned = planned
        self._loop = asyncio.get_running_loop()
        self.links: dict[str, WorkerLink] = {}
        self._open: dict[str, None] = {}  # workers that a plan may go to now: none is due at a time of its own
        self.closed = False

    def close(self) -> None:
        """Send nothing more."""
        self.closed = True
        for link in self.links.values():
            link.close()

    def add(self, worker: str, link: WorkerLink) -> None:
        self.links[worker] = link
        self._open[worker] = None

    def forget(self, worker: str) -> None:
        self._open.pop(worker, None)
        link = self.links.pop(worker, None)
        if link is not None:
            link.close()

    def settle(self, link: WorkerLink, result: StepResult) -> None:
        """A result was applied: its plan need not be kept, and the next step begins about now."""
        if link.alone and link.sent and link.sent[0][0] == result.step and not link.resends:
            way_s = time.monotonic() - link.sent_at - result.forward_us / 1e6
            self._metrics.round_trip_seconds.observe(max(0.0, way_s))
        link.alone = False
        link.seen = link.sent_at = link.step_began = time.monotonic()
        link.resends = 0
        while link.sent and link.sent[0][0] <= result.step:
            link.sent.popleft()
        self._note(result.worker, link)

    def pump_all(self) -> None:
        """Something may have come: every worker that may have something to plan is asked, as long as any has.

        What one takes can turn what waits behind it to another that was asked before.
        """
        asked = list(self._open)
        while asked:
            idle = sum(not self.links[worker].sent for worker in asked)
            for worker in self._core.whom_to_ask(asked, time.monotonic_ns()):
                self.pump(worker)
            left = [worker for worker in asked if worker in self.links and not self.links[worker].sent]
            asked = left if len(self.links) > 1 and len(left) < idle else []

    def pump(self, worker: str) -> None:
        """Send the worker what it should have now, and set the timer for what it should have later.

        With nothing in flight a plan goes out at once. The plan after the one that runs goes out at the predicted end
        of that step less a margin: earlier would keep a newcomer out of it, later would leave the worker idle.
        """
        link = self.links.get(worker)
        if link is None or self.closed or not self._may_plan():
            return
        if not link.sent and not self._send_plan(worker, link):
            self._wake_later(worker, link)
            return
        if link.timer is None and len(link.sent) < self._run_ahead:
            predicted_s = self._core.workers[worker].predicted_us / 1e6
            due = link.step_began + predicted_s - max(MARGIN_S, MARGIN_SHARE * predicted_s)
            link.timer = self._loop.call_later(max(0.0, due - time.monotonic()), self._on_timer, worker)
        self._note(worker, link)

    def _note(self, worker: str, link: WorkerLink) -> None:
        if self.links.get(worker) is not link:
            return
        if not link.sent or (link.timer is None and len(link.sent) < self._run_ahead):
            self._open[worker] = None
        else:
            self._open.pop(worker, None)

    def _on_timer(self, worker: str) -> None:
        link = self.links.get(worker)
        if link is None:
            return
        link.timer = None
        if len(link.sent) < self._run_ahead and self._send_plan(worker, link):
            self.pump(worker)
        else:
            self._note(worker, link)

    def _wake_later(self, worker: str, link: WorkerLink) -> None:
        now = time.monotonic_ns()
        wake = self._core.wake_at(worker, now)
        if wake is not None and link.timer is None:
            link.timer = self._loop.call_later((wake - now) / 1e9, self._on_timer, worker)

    def _send_plan(self, worker: str, link: WorkerLink) -> bool:
        if self.closed or not self._may_plan():
            return False
        began = time.perf_counter_ns()
        now = time.monotonic_ns()
        plan, events = self._core.plan(worker, now)
        self._metrics.plan_seconds.observe((time.perf_counter_ns() - began) / 1e9)
        self._planned(plan, events, now)
        if plan is None:
            return False
        payload = encode(plan)
        if not link.sent:
            link.step_began = link.sent_at = time.monotonic()
            link.alone = True
        link.sent.append((plan.step, payload))
        self._post(self._subjects.step(worker), payload)
        return True

    def resend_all(self) -> None:
        """Messages may have been lost on either way: every plan that is out goes out again, and brings its result."""
        for worker, link in self.links.items():
            if link.sent:
                link.sent_at = time.monotonic()
                self.resend(worker, link.sent[0][0])

    def resend(self, worker: str, step: int) -> None:
        """Send the plans from ``step`` on again. A request for what has been answered already is stale: ignored.

        A worker that asks for a step before the first of its batch has not had the reset that began it.
        """
        link = self.links.get(worker)
        if link is None:
            return
        if step < link.first_step and link.awaits(link.first_step):
            self._post(self._subjects.step(worker), link.reset)
        elif not link.awaits(step):
            return
        for number, payload in link.sent:
            if number >= step:
                self._metrics.resent_plans.inc()
                self._post(self._subjects.step(worker), payload)
