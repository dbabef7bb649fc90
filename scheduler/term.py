"""One time of leading, from taking the lease to its end: a core of its own, and whatever reaches it over the bus.

Messages are decoded, the core is asked, and what it says is carried out. Every decision is the core's. Whoever no
longer holds the lease, or cannot know, takes nothing in, answers nothing and plans nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Coroutine, Iterable, Sequence
from typing import Any

import msgspec

from scheduler.context import LeadContext, Means
from scheduler.core.core import BadResult, ResultGap, SchedulerCore
from scheduler.core.events import CoreEvent
from scheduler.gateways import Gateways
from scheduler.pacing import PlanSender
from scheduler.patience import Patience
from scheduler.presence import Presence
from scheduler.recorder import Queue
from scheduler.reporting import Reporter
from scheduler.roles import Roles
from scheduler.scaling import Autoscaling
from scheduler.workers import Workers
from shared.bus import Unsubscribe
from shared.messages import (
    AnyMessage,
    BadMessage,
    Cancel,
    Fetched,
    GatewayBeat,
    Need,
    Outcome,
    PageSnapshot,
    RollCall,
    SchedulerBeat,
    StepPlan,
    StepResult,
    Submit,
    SubmitReply,
    WorkerBeat,
    WorkerFault,
    decode,
    encode,
)

TICK_S = 0.25
GREETING_S = 0.5  # how long gateways are kept waiting for the workers of a leader before this one


class Term:
    """``core`` is empty and has the epoch of the lease."""

    def __init__(self, means: Means, core: SchedulerCore, spawn: Callable[[Coroutine[Any, Any, None]], None]) -> None:
        self.core = core
        self.epoch = core.epoch
        self._means = means
        self._draining = False
        self._subscriptions: list[Unsubscribe] = []
        self._report = Reporter(
            core, means.subjects, means.post, means.metrics, means.tracing, means.unix_offset_ns,
            means.recorder.choice_of,
        )  # fmt: skip
        self._scaling = Autoscaling(core, means.metrics, means.config.scaling())
        policy = means.config.roles()
        self._roles = None if policy is None else Roles(core, means.metrics, policy)
        self._plans = PlanSender(
            core, means.config.run_ahead, means.subjects, means.post_step, means.metrics, self._planned, means.leads
        )
        self.presence = Presence(self._state, lambda: core.full_queues, self._send_beat)
        self._greeted = asyncio.Event()
        context = LeadContext(means, core, self._plans, self._carry_out, self._beat, spawn)
        self._workers = Workers(context)
        self._gateways = Gateways(context)
        self._patience = Patience(TICK_S)

    async def begin(self, known: Iterable[WorkerBeat], wait: bool) -> None:
        """Listen, greet the workers that are ``known`` and call for everybody else; then let gateways know.

        ``wait``: gateways have lost a leader. They hold their requests back until they hear of this one, which is
        better than to be refused them for want of a worker. Raises BusUnavailable.
        """
        means, epoch = self._means, self.epoch
        for bus, subject, handler in (
            (means.step_bus, means.subjects.result(epoch), self._on_result),
            (means.bus, means.subjects.submit_all(epoch), self._on_submit),
            (means.bus, means.subjects.cancel(epoch), self._on_cancel),
            (means.bus, means.subjects.roll_call, self._on_roll_call),
        ):
            self._subscriptions.append(await bus.subscribe(subject, self._reader(handler)))
        await means.step_bus.flush()
        await means.bus.flush()
        for beat in known:
            self._workers.meet(beat)
        await means.bus.publish(means.subjects.roll_call, encode(RollCall(means.name)))
        if wait:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(GREETING_S):
                    await self._greeted.wait()
        self.presence.begin()

    async def end(self) -> None:
        """Plan and hear nothing any more."""
        self._plans.close()
        self.presence.close()
        self._means.recorder.leads_no_more(time.monotonic_ns())
        for subscription in self._subscriptions:
            await subscription.unsubscribe()

    def drain(self) -> None:
        """Plan nothing more, refuse what comes, and say so."""
        self._draining = True
        self._plans.close()
        self.presence.beat()

    def regained(self) -> None:
        """The lease had run out for a while, in which nothing was taken in."""
        self._excuse(time.monotonic())
        self._repair()

    async def ticks(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            if self._means.leads() and not self._draining:
                self._tick(time.monotonic())

    def _tick(self, now_s: float) -> None:
        step_bus, bus = self._means.step_bus, self._means.bus
        connected = step_bus.connected and bus.connected
        since_s = self._patience.excused(now_s, connected, step_bus.reconnects + bus.reconnects)
        if since_s is not None:
            self._excuse(since_s)
        if self._patience.reconnected:
            self._repair()
        self._workers.tick(now_s)
        self._gateways.tick(now_s)
        self._carry_out(self.core.tick(time.monotonic_ns()))
        if self._roles is not None:
            self._carry_out(self._roles.tick(time.monotonic_ns()))
        self._plans.pump_all()
        self._report.observe()
        self._scaling.tick(now_s)

    def _excuse(self, since_s: float) -> None:
        self._workers.excuse(since_s)
        self._gateways.excuse(since_s)

    def _repair(self) -> None:
        """Messages may have been lost, of this scheduler and to it."""
        self._plans.resend_all()
        self._plans.pump_all()
        self.presence.beat()
        self._means.post(self._means.subjects.roll_call, encode(RollCall(self._means.name)))

    # --- out --------------------------------------------------------------------------------------------------------

    def _carry_out(self, events: Sequence[CoreEvent]) -> None:
        self._means.recorder.told(events)
        self._report.carry_out(events)

    def _planned(self, plan: StepPlan | None, events: Sequence[CoreEvent], now: int) -> None:
        """The core was asked for a plan."""
        if plan is not None:
            lack = self.core.workers[plan.worker].lack
            self._means.recorder.planned(plan, events, Queue(self.core.num_waiting, *lack), now)
        self._carry_out(events)

    def _beat(self) -> None:
        if self.core.workers and not self._workers.greeting:
            self._greeted.set()
        self.presence.beat()

    def _state(self) -> SchedulerBeat:
        return self._report.beat(self._means.name, self._draining)

    def _send_beat(self, beat: SchedulerBeat) -> None:
        if self._means.leads():
            self._means.post(self._means.subjects.beat("scheduler", self._means.name), encode(beat))

    # --- in ---------------------------------------------------------------------------------------------------------

    def _reader(self, handler: Callable[[AnyMessage, str], None]) -> Callable[[bytes, str], None]:
        def read(payload: bytes, reply_to: str) -> None:
            if not self._means.leads():
                return
            try:
                handler(decode(payload), reply_to)
            except BadMessage:
                self._means.metrics.bad_messages.inc()

        return read

    def knows_too_much(self, beat: WorkerBeat | GatewayBeat) -> bool:
        """Whether somebody else has led in this epoch: a worker that has heard nothing of this leader knows it.

        It happens where the lease was lost with its store, and a scheduler started before anybody was heard again.
        """
        return isinstance(beat, WorkerBeat) and beat.epoch == self.epoch and not self._workers.told(beat)

    def on_beat(self, beat: WorkerBeat | GatewayBeat) -> None:
        if self._draining or not self._means.leads():
            return
        if isinstance(beat, WorkerBeat):
            self._workers.meet(beat)
        else:
            self._gateways.meet(beat)

    def _on_submit(self, message: AnyMessage, reply_to: str) -> None:
        if not isinstance(message, Submit):
            raise BadMessage("no request")
        means = self._means
        if self._draining:
            reply = SubmitReply(Outcome.DRAINING, self.epoch, "the scheduler is stopping", retry_after_ms=1000)
        else:
            if message.deadline_ns:  # unix time on the wire, the core's own clock inside
                message = msgspec.structs.replace(message, deadline_ns=message.deadline_ns - means.unix_offset_ns)
            now = time.monotonic_ns()
            reply = self.core.submit(message, now)
            if reply.outcome is Outcome.ACCEPTED:
                sequences = self.core.sequences_of(message.request_id)
                means.recorder.submitted(message, sequences, reply.queue_position, now)
            elif reply.outcome is not Outcome.DUPLICATE:
                means.recorder.refused(message, f"{reply.outcome.value}: {reply.reason}", now)
        self._gateways.submitted(message.gateway)
        if reply_to:
            means.post(reply_to, encode(reply))
        if reply.outcome not in (Outcome.ACCEPTED, Outcome.DUPLICATE):
            means.metrics.refusals.labels(reply.outcome.value).inc()
        self._plans.pump_all()
        self.presence.tell_if_full()

    def _on_cancel(self, message: AnyMessage, _: str) -> None:
        if isinstance(message, Cancel):
            now = time.monotonic_ns()
            self._carry_out(self.core.cancel(message.request_id, message.attempt, message.choice, now))
            self._plans.pump_all()
            self.presence.tell_if_full()

    def _on_roll_call(self, message: AnyMessage, _: str) -> None:
        if isinstance(message, RollCall) and message.scheduler != self._means.name:
            self.presence.beat()

    def _on_result(self, message: AnyMessage, _: str) -> None:
        if self._draining:
            return
        if isinstance(message, StepResult):
            self._on_step_result(message)
        elif isinstance(message, Need):
            asking = self._plans.links.get(message.worker)
            if asking is not None and asking.incarnation == message.incarnation:
                self._plans.resend(message.worker, message.step)
        elif isinstance(message, WorkerFault):
            self._workers.on_fault(message)
        elif isinstance(message, Fetched):
            self._workers.on_fetched(message)
        elif isinstance(message, PageSnapshot) and message.epoch == self.epoch:
            self._workers.on_snapshot(message)
        else:
            raise BadMessage(f"{type(message).__name__} where results come")

    def _on_step_result(self, result: StepResult) -> None:
        link = self._plans.links.get(result.worker)
        if link is None or link.incarnation != result.incarnation:
            return
        now = time.monotonic_ns()
        try:
            events = self.core.apply(result, now)
            self._means.metrics.apply_seconds.observe((time.monotonic_ns() - now) / 1e9)
            self._carry_out(events)
            self._means.recorder.settled(result, now)
        except ResultGap as gap:
            self._plans.resend(gap.worker, gap.step)
            return
        except BadResult as error:
            self._workers.restart_batch(result.worker, result.incarnation, str(error))
            return
        self._plans.settle(link, result)
        self._plans.pump(result.worker)
        if len(self._plans.links) > 1:
            self._plans.pump_all()
        self.presence.tell_if_full()
