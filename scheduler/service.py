"""The scheduler's NATS shell: decode, ask the core, carry out, tick. Every decision is the core's."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence

import msgspec

from observability.tracing import Tracing
from scheduler.config import SchedulerConfig
from scheduler.core.core import BadResult, ResultGap, SchedulerCore
from scheduler.core.events import CoreEvent
from scheduler.metrics import SchedulerMetrics
from scheduler.pacing import PlanSender, WorkerLink
from scheduler.recorder import FlightRecorder, Queue
from scheduler.recording import RecordingCore, TraceWriter
from scheduler.reporting import Reporter
from shared.bus import Bus
from shared.flight_record import Report
from shared.lifecycle import ServiceFault
from shared.messages import (
    MAX_EPOCH,
    Answered,
    AnyMessage,
    BadMessage,
    Cancel,
    Capacity,
    GatewayBeat,
    Need,
    Outcome,
    RequestEvent,
    Reset,
    RollCall,
    SchedulerBeat,
    StepPlan,
    StepResult,
    Submit,
    SubmitReply,
    WorkerBeat,
    WorkerFault,
    WorkerState,
    decode,
    encode,
)
from shared.outbox import Outbox
from shared.subjects import Subjects

log = logging.getLogger("headrace.scheduler")

BEAT_S = 0.25  # between beats that tell something new
REST_BEAT_S = 1.0  # between beats that do not
FLIP_BEAT_S = 0.02  # least time from any beat to one that tells that the queue is full, or no longer
TICK_S = 0.25
ROLL_CALL_S = 0.3
ORPHAN_AGE_NS = 3_000_000_000  # a request that its gateway's beats still lack after so long is an orphan
RESEND_AFTER_S = 1.0
MOST_RESENDS = 5  # of one plan, before its batch counts as lost
LEADER_TIMEOUT_S = 3.0


class SchedulerService:
    """``step_bus`` carries plans and results only."""

    def __init__(
        self, config: SchedulerConfig, name: str, step_bus: Bus, bus: Bus, metrics: SchedulerMetrics,
        tracing: Tracing, trace: TraceWriter | None = None,
    ) -> None:  # fmt: skip
        self._config = config
        self.name = name
        self.mesh = config.mesh
        self._step_bus = step_bus
        self._bus = bus
        self._metrics = metrics
        self._subjects = Subjects(config.mesh)
        self._step_out = Outbox(step_bus)
        self._out = Outbox(bus)
        if trace is None:
            self._core = SchedulerCore(config.limits(), config.policy)
        else:
            self._core = RecordingCore(config.limits(), config.policy, trace)
        self._gateways: dict[str, float] = {}
        # Per gateway: requests that it waits for and nobody here knows -> since when (monotonic ns).
        self._unknown: dict[str, dict[tuple[str, int], int]] = {}
        self._refused_workers: dict[str, int] = {}  # worker -> incarnation whose refusal was logged
        self._next_steps: dict[str, tuple[int, int]] = {}  # lost worker -> (incarnation, first step it has not seen)
        self._seen_epoch = 0
        self._leader_seen = -1e9  # monotonic s of the last beat of another leader
        self._leading = False
        self._deposed = ""
        self._told: SchedulerBeat | None = None  # the last beat
        self._told_s = -1e9  # when, monotonic s
        self._told_full = False
        self._flip_timer: asyncio.TimerHandle | None = None
        self._draining = False
        self._unix_offset_ns = time.time_ns() - time.monotonic_ns()
        self.recorder = FlightRecorder(config.recorded_requests, config.recorded_steps)
        self._report = Reporter(
            self._core, self._subjects, self._out.post, metrics, tracing, self._unix_offset_ns, self.recorder.choice_of
        )
        self._plans = PlanSender(
            self._core, config.run_ahead, self._subjects, self._step_out.post, metrics, self._planned
        )

    async def lead(self, stop: asyncio.Event) -> None:
        """Take an epoch above every epoch that anybody has seen, and start to listen under it.

        While another leader beats, stand by: this one takes over when the other has been silent, or drains.
        """
        await self._bus.subscribe(self._subjects.beats(), self._on_beat)
        await self._bus.flush()
        await self._bus.publish(self._subjects.roll_call, encode(RollCall(self.name)))
        await asyncio.sleep(ROLL_CALL_S)  # beats answer the roll call; a lease takes this place with failover
        standing_by = False
        while time.monotonic() - self._leader_seen < LEADER_TIMEOUT_S and not stop.is_set():
            if not standing_by:
                standing_by = True
                log.info("scheduler %s stands by: another one leads", self.name)
            await asyncio.sleep(BEAT_S)
        if stop.is_set():
            return
        epoch = self._core.epoch = self._seen_epoch + 1
        await self._step_bus.subscribe(self._subjects.result(epoch), self._on_result)
        await self._bus.subscribe(self._subjects.submit_all(epoch), self._on_submit)
        await self._bus.subscribe(self._subjects.cancel(epoch), self._on_cancel)
        await self._bus.subscribe(self._subjects.roll_call, self._on_roll_call)
        await self._bus.subscribe(self._subjects.answered, self._on_answered)
        await self._step_bus.flush()
        await self._bus.flush()
        self._leading = True
        self._metrics.leading.set(1)
        self._beat()
        await self._bus.publish(self._subjects.roll_call, encode(RollCall(self.name)))
        log.info("scheduler %s leads mesh %s in epoch %d", self.name, self._config.mesh, epoch)

    async def run(self, stop: asyncio.Event) -> None:
        async with asyncio.TaskGroup() as group:
            tasks = [
                group.create_task(self._step_out.run()),
                group.create_task(self._out.run()),
                group.create_task(self._beats()),
                group.create_task(self._ticks()),
            ]
            await self.lead(stop)
            await stop.wait()
            self._draining = True
            self._beat()
            for task in tasks:
                task.cancel()
        if self._flip_timer is not None:
            self._flip_timer.cancel()
        self._plans.close()
        await self._out.drain()

    def _carry_out(self, events: Sequence[CoreEvent]) -> None:
        self.recorder.told(events)
        self._report.carry_out(events)

    def _planned(self, plan: StepPlan | None, events: Sequence[CoreEvent], now: int) -> None:
        """The core was asked for a plan."""
        if plan is not None:
            lack = self._core.workers[plan.worker].lack
            self.recorder.planned(plan, events, Queue(self._core.num_waiting, *lack), now)
        self._carry_out(events)

    # --- in ---------------------------------------------------------------------------------------------------------

    def _on_submit(self, payload: bytes, reply_to: str) -> None:
        message = self._decode(payload)
        if not isinstance(message, Submit):
            self._metrics.bad_messages.inc()
            return
        if self._draining:
            reply = SubmitReply(Outcome.DRAINING, self._core.epoch, "the scheduler is stopping", retry_after_ms=1000)
        else:
            if message.deadline_ns:  # unix time on the wire, the core's own clock inside
                message = msgspec.structs.replace(message, deadline_ns=message.deadline_ns - self._unix_offset_ns)
            now = time.monotonic_ns()
            reply = self._core.submit(message, now)
            if reply.outcome is Outcome.ACCEPTED:
                sequences = self._core.sequences_of(message.request_id)
                self.recorder.submitted(message, sequences, reply.queue_position, now)
            elif reply.outcome is not Outcome.DUPLICATE:
                self.recorder.refused(message, f"{reply.outcome.value}: {reply.reason}", now)
        self._gateways.setdefault(message.gateway, time.monotonic())
        if reply_to:
            self._out.post(reply_to, encode(reply))
        if reply.outcome not in (Outcome.ACCEPTED, Outcome.DUPLICATE):
            self._metrics.refusals.labels(reply.outcome.value).inc()
        self._plans.pump_all()
        self._tell_if_full()

    def _on_cancel(self, payload: bytes, _: str) -> None:
        message = self._decode(payload)
        if isinstance(message, Cancel):
            now = time.monotonic_ns()
            self._carry_out(self._core.cancel(message.request_id, message.attempt, message.choice, now))
            self._plans.pump_all()
            self._tell_if_full()

    def _on_result(self, payload: bytes, _: str) -> None:
        message = self._decode(payload)
        if isinstance(message, Need):
            asking = self._plans.links.get(message.worker)
            if asking is not None and asking.incarnation == message.incarnation:
                self._plans.resend(message.worker, message.step)
            return
        if isinstance(message, WorkerFault):
            self._on_fault(message)
            return
        if not isinstance(message, StepResult):
            self._metrics.bad_messages.inc()
            return
        link = self._plans.links.get(message.worker)
        if link is None or link.incarnation != message.incarnation:
            return
        now = time.monotonic_ns()
        try:
            events = self._core.apply(message, now)
            self._metrics.apply_seconds.observe((time.monotonic_ns() - now) / 1e9)
            self._carry_out(events)
            self.recorder.settled(message, now)
        except ResultGap as gap:
            self._plans.resend(gap.worker, gap.step)
            return
        except BadResult as error:
            self._restart_batch(message.worker, message.incarnation, str(error))
            return
        self._plans.settle(link, message)
        self._plans.pump(message.worker)
        if len(self._plans.links) > 1:
            self._plans.pump_all()
        self._tell_if_full()

    @property
    def core(self) -> SchedulerCore:
        """To look at, on the event loop."""
        return self._core

    def report(self, request_id: str) -> Report:
        """What is remembered of a request."""
        now = time.monotonic_ns()
        return self.recorder.report(self.name, self._core.epoch, self._unix_offset_ns, request_id, now)

    def _on_answered(self, payload: bytes, _: str) -> None:
        message = self._decode(payload)
        if isinstance(message, Answered):
            self.recorder.answered(message.answer)

    def _on_beat(self, payload: bytes, _: str) -> None:
        message = self._decode(payload)
        if not isinstance(message, WorkerBeat | GatewayBeat | SchedulerBeat) or not 0 <= message.epoch < MAX_EPOCH:
            self._metrics.bad_messages.inc()
            return
        if isinstance(message, SchedulerBeat):
            if message.scheduler == self.name:
                return
            self._leader_seen = -1e9 if message.draining else time.monotonic()
            if self._leading and (message.epoch, message.scheduler) > (self._core.epoch, self.name):
                self._stand_down(f"scheduler {message.scheduler} leads in epoch {message.epoch}")
        elif self._leading and message.epoch > self._core.epoch:
            # It was silent while this one took its epoch. It obeys nobody below what it has seen: lead again, above.
            self._stand_down(f"epoch {message.epoch} has been seen, above {self._core.epoch}")
        self._seen_epoch = max(self._seen_epoch, message.epoch)
        if not self._leading:
            return
        if isinstance(message, WorkerBeat):
            self._meet_worker(message)
        elif isinstance(message, GatewayBeat):
            self._meet_gateway(message)

    def _stand_down(self, why: str) -> None:
        self._plans.closed = True
        self._metrics.leading.set(0)
        self._deposed = why

    def _meet_gateway(self, beat: GatewayBeat) -> None:
        """Reconcile both ways: end what the gateway no longer waits for, and tell it what nobody here will ever end."""
        now = time.monotonic_ns()
        self._gateways[beat.gateway] = time.monotonic()
        if not beat.partial:
            live = [request_id for request_id, _ in beat.live]
            self._carry_out(self._core.reconcile(beat.gateway, live, now - ORPHAN_AGE_NS, now))
        unknown = {key for key in beat.live if not self._core.knows(*key)}
        since = self._unknown.get(beat.gateway, {})
        self._unknown[beat.gateway] = since = {key: since.get(key, now) for key in unknown}
        for (request_id, attempt), first in since.items():
            if now - first > ORPHAN_AGE_NS:
                reason = "the scheduler does not know it any more"
                event = RequestEvent(self._core.epoch, "lost", request_id, attempt, -1, reason)
                self._out.post(self._subjects.event(beat.gateway), encode(event))

    def _meet_worker(self, beat: WorkerBeat) -> None:
        link = self._plans.links.get(beat.worker)
        if link is not None and link.incarnation == beat.incarnation:
            link.seen = time.monotonic()
            if beat.state is WorkerState.DRAINING:
                self._drain_worker(beat.worker)
            elif beat.executing_us > self._config.step_timeout_s * 1e6:
                self._lose(beat.worker, f"a step has run for {beat.executing_us / 1e6:.0f} s", "stuck")
            elif not beat.executing and link.sent and time.monotonic() - link.sent_at > RESEND_AFTER_S:
                link.sent_at = time.monotonic()
                link.resends += 1
                if link.resends > MOST_RESENDS:
                    self._restart_batch(beat.worker, beat.incarnation, "its plans get no results")
                else:
                    self._plans.resend(beat.worker, link.sent[0][0])  # a plan or its result was lost
            return
        if link is not None and link.incarnation > beat.incarnation:
            return  # a beat of the process before this one
        if beat.state is WorkerState.READY and beat.capacity is not None:
            if not beat.executing:  # else a step of a batch that was lost still runs
                self._greet(beat)
        elif link is not None:  # it restarted and is loading again
            self._lose(beat.worker, "its worker restarted", "restart")

    def _drain_worker(self, worker: str) -> None:
        state = self._core.workers.get(worker)
        if state is not None and not state.draining:
            self._core.worker_draining(worker)
            self._beat()

    def _greet(self, beat: WorkerBeat) -> None:
        assert beat.capacity is not None
        clash = self._clash(beat.capacity)
        if clash:
            if self._refused_workers.get(beat.worker) != beat.incarnation:
                self._refused_workers[beat.worker] = beat.incarnation
                log.error("worker %s is refused: %s", beat.worker, clash)
            return
        first_step = 1
        now = time.monotonic_ns()
        known = self._next_steps.get(beat.worker)
        if known is not None and known[0] == beat.incarnation:
            # A late result of its lost batch must fit no plan of the new one; and should the reset be lost, the worker
            # must miss a step rather than take the plan for the next of the old batch.
            first_step = max(first_step, known[1] + 1)
        self._plans.forget(beat.worker)
        self._carry_out(self._core.worker_up(beat.worker, beat.incarnation, beat.capacity, now, first_step))
        reset = encode(Reset(self._core.epoch, beat.worker, beat.incarnation, first_step))
        self._plans.links[beat.worker] = WorkerLink(beat.incarnation, time.monotonic(), first_step, reset)
        self._step_out.post(self._subjects.step(beat.worker), reset)
        log.info("worker %s is ready: %s, %d blocks", beat.worker, beat.capacity.model, beat.capacity.num_blocks)
        self._beat()
        self._plans.pump(beat.worker)

    def _clash(self, capacity: Capacity) -> str:
        """Why a worker cannot serve beside those of its model, or nothing: answers must not depend on the worker."""
        for other in self._core.workers.values():
            known = other.capacity
            if known.model != capacity.model:
                continue
            if (known.device == "simulated") != (capacity.device == "simulated"):
                return f"{capacity.model} is served by {known.device} workers; a simulated one gives random tokens"
            if (known.vocab_size, sorted(known.eos_token_ids)) != (capacity.vocab_size, sorted(capacity.eos_token_ids)):
                return f"{capacity.model} is served by workers with another vocabulary or other end tokens"
        return ""

    def _on_roll_call(self, payload: bytes, _: str) -> None:
        if isinstance(self._decode(payload), RollCall):
            self._beat()

    def _decode(self, payload: bytes) -> AnyMessage | None:
        try:
            return decode(payload)
        except BadMessage:
            self._metrics.bad_messages.inc()
            return None

    # --- losses -----------------------------------------------------------------------------------------------------

    def _on_fault(self, fault: WorkerFault) -> None:
        link = self._plans.links.get(fault.worker)
        if link is not None and link.awaits(fault.step):  # else: of a batch lost before
            self._restart_batch(fault.worker, fault.incarnation, f"step {fault.step} failed: {fault.reason}")

    def _restart_batch(self, worker: str, incarnation: int, reason: str) -> None:
        """The worker lives, but its batch cannot be trusted: lose the batch, reset, go on with an empty one."""
        link = self._plans.links.get(worker)
        if link is None or link.incarnation != incarnation:
            return
        capacity = self._core.workers[worker].capacity
        self._lose(worker, reason, "fault")
        self._greet(WorkerBeat(worker, incarnation, self._core.epoch, WorkerState.READY, capacity))

    def _lose(self, worker: str, reason: str, cause: str) -> None:
        log.error("worker %s lost: %s", worker, reason)
        self._metrics.workers_lost.labels(cause).inc()
        if worker in self._core.workers:
            state = self._core.workers[worker]
            self._next_steps[worker] = (state.incarnation, state.next_step)
        self._plans.forget(worker)
        self.recorder.worker_lost(worker)
        self._carry_out(self._core.worker_lost(worker, reason, time.monotonic_ns()))
        self._beat()

    # --- time -------------------------------------------------------------------------------------------------------

    async def _ticks(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            if self._deposed:
                raise ServiceFault(f"stands down: {self._deposed}")
            now = time.monotonic()
            for worker, link in list(self._plans.links.items()):
                if now - link.seen > self._config.worker_timeout_s:
                    self._lose(worker, f"its worker was silent for {self._config.worker_timeout_s:g} s", "silence")
            for gateway, seen in list(self._gateways.items()):
                if now - seen > self._config.gateway_timeout_s:
                    log.warning("gateway %s is gone; its requests are cancelled", gateway)
                    del self._gateways[gateway]
                    self._unknown.pop(gateway, None)
                    now_ns = time.monotonic_ns()
                    self._carry_out(self._core.reconcile(gateway, [], now_ns, now_ns))
            self._carry_out(self._core.tick(time.monotonic_ns()))
            self._plans.pump_all()
            self._report.observe()

    async def _beats(self) -> None:
        """Four beats a second while anything changes, else one."""
        while True:
            if self._leading and (
                time.monotonic() - self._told_s >= REST_BEAT_S
                or self._told != self._report.beat(self.name, self._draining)
            ):
                self._beat()
            await asyncio.sleep(BEAT_S)

    def _beat(self) -> None:
        if self._leading:
            self._told = self._report.beat(self.name, self._draining)
            self._told_s = time.monotonic()
            self._told_full = self._core.queue_full
            self._out.post(self._subjects.beat("scheduler", self.name), encode(self._told))

    def _tell_if_full(self) -> None:
        """Tell gateways at once that the queue has become full, or no longer is: they refuse by what they were told."""
        if self._core.queue_full == self._told_full or self._flip_timer is not None:
            return
        wait_s = self._told_s + FLIP_BEAT_S - time.monotonic()
        if wait_s <= 0:
            self._beat()
        else:  # a queue that is full half of the time must not beat at every step
            self._flip_timer = asyncio.get_running_loop().call_later(wait_s, self._flip)

    def _flip(self) -> None:
        self._flip_timer = None
        self._tell_if_full()
