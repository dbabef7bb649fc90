"""The scheduler's NATS shell: decode, ask the core, carry out, tick. Every decision is the core's."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from observability.tracing import Tracing
from scheduler.config import SchedulerConfig
from scheduler.core.core import BadResult, ResultGap, SchedulerCore
from scheduler.core.events import CoreEvent, Counters, Ended, Failed, Preempted
from scheduler.core.sequence import Sequence
from scheduler.metrics import SchedulerMetrics
from scheduler.step_time import StepTimePredictor
from shared.bus import Bus
from shared.lifecycle import ServiceFault
from shared.messages import (
    AnyMessage,
    BadMessage,
    Cancel,
    GatewayBeat,
    ModelInfo,
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

BEAT_S = 0.5
TICK_S = 0.25
ROLL_CALL_S = 0.3
ORPHAN_AGE_NS = 3_000_000_000  # a request that its gateway's beats still lack after so long is an orphan
RESEND_AFTER_S = 1.0
LEADER_TIMEOUT_S = 3.0


@dataclass(slots=True)
class _Link:
    """What the shell keeps of a worker: plans whose results are missing, and when the next plan is due."""

    incarnation: int
    seen: float  # monotonic s
    predictor: StepTimePredictor = field(default_factory=StepTimePredictor)
    sent: deque[tuple[int, int, bytes]] = field(default_factory=deque)  # (step, tokens, payload)
    step_began: float = 0.0  # when the oldest plan in flight is thought to have begun
    sent_at: float = 0.0
    timer: asyncio.TimerHandle | None = None


class SchedulerService:
    """``step_bus`` carries plans and results only."""

    def __init__(
        self, config: SchedulerConfig, name: str, step_bus: Bus, bus: Bus, metrics: SchedulerMetrics,
        tracing: Tracing,
    ) -> None:  # fmt: skip
        self._config = config
        self._name = name
        self._step_bus = step_bus
        self._bus = bus
        self._metrics = metrics
        self._tracing = tracing
        self._subjects = Subjects(config.mesh)
        self._step_out = Outbox(step_bus)
        self._out = Outbox(bus)
        self._core = SchedulerCore(config.limits(), config.policy)
        self._links: dict[str, _Link] = {}
        self._gateways: dict[str, float] = {}
        self._seen_epoch = 0
        self._leader_seen = -1e9  # monotonic s of the last beat of another leader
        self._leading = False
        self._deposed = ""
        self._draining = False
        self._counted = Counters()
        self._loop = asyncio.get_running_loop()
        self._unix_offset_ns = time.time_ns() - time.monotonic_ns()

    async def lead(self, stop: asyncio.Event) -> None:
        """Take an epoch above every epoch that anybody has seen, and start to listen under it.

        While another leader beats, stand by: this one takes over when the other has been silent, or drains.
        """
        await self._bus.subscribe(self._subjects.beats(), self._on_beat)
        await self._bus.flush()
        await self._bus.publish(self._subjects.roll_call, encode(RollCall(self._name)))
        await asyncio.sleep(ROLL_CALL_S)  # beats answer the roll call; a lease takes this place with failover
        standing_by = False
        while time.monotonic() - self._leader_seen < LEADER_TIMEOUT_S and not stop.is_set():
            if not standing_by:
                standing_by = True
                log.info("scheduler %s stands by: another one leads", self._name)
            await asyncio.sleep(BEAT_S)
        if stop.is_set():
            return
        epoch = self._core.epoch = self._seen_epoch + 1
        await self._step_bus.subscribe(self._subjects.result(epoch), self._on_result)
        await self._bus.subscribe(self._subjects.submit_all(epoch), self._on_submit)
        await self._bus.subscribe(self._subjects.cancel(epoch), self._on_cancel)
        await self._bus.subscribe(self._subjects.roll_call, self._on_roll_call)
        await self._step_bus.flush()
        await self._bus.flush()
        self._leading = True
        self._beat()
        await self._bus.publish(self._subjects.roll_call, encode(RollCall(self._name)))
        log.info("scheduler %s leads mesh %s in epoch %d", self._name, self._config.mesh, epoch)

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
        for link in self._links.values():
            if link.timer is not None:
                link.timer.cancel()
        await self._out.drain()

    # --- in ---------------------------------------------------------------------------------------------------------

    def _on_submit(self, payload: bytes, reply_to: str) -> None:
        message = self._decode(payload)
        if not isinstance(message, Submit):
            self._metrics.bad_messages.inc()
            return
        if self._draining:
            reply = SubmitReply(Outcome.DRAINING, self._core.epoch, "the scheduler is stopping", retry_after_ms=1000)
        else:
            reply = self._core.submit(message, time.monotonic_ns())
        self._gateways.setdefault(message.gateway, time.monotonic())
        if reply_to:
            self._out.post(reply_to, encode(reply))
        if reply.outcome not in (Outcome.ACCEPTED, Outcome.DUPLICATE):
            self._metrics.refusals.labels(reply.outcome.value).inc()
        self._pump_all()

    def _on_cancel(self, payload: bytes, _: str) -> None:
        message = self._decode(payload)
        if isinstance(message, Cancel):
            now = time.monotonic_ns()
            self._carry_out(self._core.cancel(message.request_id, message.attempt, message.choice, now))
            self._pump_all()

    def _on_result(self, payload: bytes, _: str) -> None:
        message = self._decode(payload)
        if isinstance(message, Need):
            self._resend(message.worker, message.step)
            return
        if isinstance(message, WorkerFault):
            self._on_fault(message)
            return
        if not isinstance(message, StepResult):
            self._metrics.bad_messages.inc()
            return
        link = self._links.get(message.worker)
        if link is None or link.incarnation != message.incarnation:
            return
        now = time.monotonic_ns()
        try:
            self._carry_out(self._core.apply(message, now))
        except ResultGap as gap:
            self._resend(gap.worker, gap.step)
            return
        except BadResult as error:
            self._restart_batch(message.worker, message.incarnation, str(error))
            return
        link.seen = link.sent_at = link.step_began = time.monotonic()
        while link.sent and link.sent[0][0] <= message.step:
            link.sent.popleft()
        if message.rows:
            link.predictor.observe(message.rows, message.forward_us)
        self._pump(message.worker)
        if len(self._links) > 1:
            self._pump_all()

    def _on_beat(self, payload: bytes, _: str) -> None:
        message = self._decode(payload)
        if isinstance(message, WorkerBeat):
            self._seen_epoch = max(self._seen_epoch, message.epoch)
            if self._leading:
                self._meet_worker(message)
        elif isinstance(message, GatewayBeat):
            self._seen_epoch = max(self._seen_epoch, message.epoch)
            self._gateways[message.gateway] = time.monotonic()
            if self._leading and not message.partial:
                now = time.monotonic_ns()
                live = [request_id for request_id, _ in message.live]
                self._carry_out(self._core.reconcile(message.gateway, live, now - ORPHAN_AGE_NS, now))
        elif isinstance(message, SchedulerBeat) and message.scheduler != self._name:
            self._seen_epoch = max(self._seen_epoch, message.epoch)
            self._leader_seen = -1e9 if message.draining else time.monotonic()
            if self._leading and (message.epoch, message.scheduler) > (self._core.epoch, self._name):
                self._deposed = f"scheduler {message.scheduler} leads in epoch {message.epoch}"

    def _meet_worker(self, beat: WorkerBeat) -> None:
        link = self._links.get(beat.worker)
        if link is not None and link.incarnation == beat.incarnation:
            link.seen = time.monotonic()
            if beat.state is WorkerState.DRAINING:
                self._core.worker_draining(beat.worker)
            elif not beat.executing and link.sent and time.monotonic() - link.sent_at > RESEND_AFTER_S:
                link.sent_at = time.monotonic()
                self._resend(beat.worker, link.sent[0][0])  # a plan or its result was lost
            return
        if link is not None and link.incarnation > beat.incarnation:
            return  # a beat of the process before this one
        if beat.state is WorkerState.READY and beat.capacity is not None:
            self._greet(beat)
        elif link is not None:  # it restarted and is loading again
            self._lose(beat.worker, "its worker restarted", "restart")

    def _greet(self, beat: WorkerBeat, first_step: int = 1) -> None:
        assert beat.capacity is not None
        now = time.monotonic_ns()
        self._forget_link(beat.worker)
        self._carry_out(self._core.worker_up(beat.worker, beat.incarnation, beat.capacity, now, first_step))
        self._links[beat.worker] = _Link(beat.incarnation, time.monotonic())
        self._step_out.post(
            self._subjects.step(beat.worker), encode(Reset(self._core.epoch, beat.worker, beat.incarnation, first_step))
        )
        log.info("worker %s is ready: %s, %d blocks", beat.worker, beat.capacity.model, beat.capacity.num_blocks)
        self._beat()
        self._pump(beat.worker)

    def _on_roll_call(self, payload: bytes, _: str) -> None:
        if isinstance(self._decode(payload), RollCall):
            self._beat()

    def _decode(self, payload: bytes) -> AnyMessage | None:
        try:
            return decode(payload)
        except BadMessage:
            self._metrics.bad_messages.inc()
            return None

    # --- plans ------------------------------------------------------------------------------------------------------

    def _pump_all(self) -> None:
        for worker in list(self._links):
            self._pump(worker)

    def _pump(self, worker: str) -> None:
        """Send the worker what it should have now, and set the timer for what it should have later.

        With nothing in flight a plan goes out at once. The plan after the one that runs goes out at the predicted end
        of that step less a margin: earlier would keep a newcomer out of it, later would leave the worker idle.
        """
        link = self._links.get(worker)
        if link is None or self._deposed:
            return
        if not link.sent and not self._send_plan(worker, link):
            self._wake_later(worker, link)
            return
        if link.timer is None and len(link.sent) < self._config.run_ahead:
            tokens = link.sent[0][1]
            predicted_s = link.predictor.predict_us(tokens) / 1e6
            due = link.step_began + predicted_s - max(0.002, 0.2 * predicted_s)
            link.timer = self._loop.call_later(max(0.0, due - time.monotonic()), self._on_timer, worker)

    def _on_timer(self, worker: str) -> None:
        link = self._links.get(worker)
        if link is None:
            return
        link.timer = None
        if len(link.sent) < self._config.run_ahead and self._send_plan(worker, link):
            self._pump(worker)

    def _wake_later(self, worker: str, link: _Link) -> None:
        now = time.monotonic_ns()
        wake = self._core.wake_at(worker, now)
        if wake is not None and link.timer is None:
            link.timer = self._loop.call_later((wake - now) / 1e9, self._on_timer, worker)

    def _send_plan(self, worker: str, link: _Link) -> bool:
        began = time.perf_counter_ns()
        plan, events = self._core.plan(worker, time.monotonic_ns())
        self._metrics.plan_seconds.observe((time.perf_counter_ns() - began) / 1e9)
        self._carry_out(events)
        if plan is None:
            return False
        payload = encode(plan)
        if not link.sent:
            link.step_began = link.sent_at = time.monotonic()
        link.sent.append((plan.step, _rows(plan), payload))
        self._step_out.post(self._subjects.step(worker), payload)
        return True

    def _resend(self, worker: str, step: int) -> None:
        link = self._links.get(worker)
        if link is None:
            return
        kept = [payload for number, _, payload in link.sent if number >= step]
        if not kept or link.sent[0][0] > step:
            self._restart_batch(worker, link.incarnation, f"step {step} can't be sent again")
            return
        for payload in kept:
            self._metrics.resent_plans.inc()
            self._step_out.post(self._subjects.step(worker), payload)

    # --- losses -----------------------------------------------------------------------------------------------------

    def _on_fault(self, fault: WorkerFault) -> None:
        link = self._links.get(fault.worker)
        if link is not None and any(step == fault.step for step, _, _ in link.sent):  # else: of a batch lost before
            self._restart_batch(fault.worker, fault.incarnation, f"step {fault.step} failed: {fault.reason}")

    def _restart_batch(self, worker: str, incarnation: int, reason: str) -> None:
        """The worker lives, but its batch cannot be trusted: lose the batch, reset, go on with an empty one."""
        link = self._links.get(worker)
        if link is None or link.incarnation != incarnation:
            return
        state = self._core.workers[worker]
        self._lose(worker, reason, "fault")
        beat = WorkerBeat(worker, incarnation, self._core.epoch, WorkerState.READY, state.capacity)
        self._greet(beat, state.next_step)

    def _lose(self, worker: str, reason: str, cause: str) -> None:
        log.error("worker %s lost: %s", worker, reason)
        self._metrics.workers_lost.labels(cause).inc()
        self._forget_link(worker)
        self._carry_out(self._core.worker_lost(worker, reason, time.monotonic_ns()))
        self._beat()

    def _forget_link(self, worker: str) -> None:
        link = self._links.pop(worker, None)
        if link is not None and link.timer is not None:
            link.timer.cancel()

    # --- carrying out -----------------------------------------------------------------------------------------------

    def _carry_out(self, events: Iterable[CoreEvent]) -> None:
        for event in events:
            if isinstance(event, Failed):
                submit = event.sequence.submit
                message = RequestEvent(
                    self._core.epoch, event.kind, submit.request_id, submit.attempt, event.sequence.choice, event.reason
                )
                self._out.post(self._subjects.event(submit.gateway), encode(message))
                self._metrics.ended.labels("failed").inc()
                self._trace(event.sequence, event.now_ns)
            elif isinstance(event, Ended):
                self._metrics.ended.labels(event.reason).inc()
                self._trace(event.sequence, event.now_ns)
            elif isinstance(event, Preempted):
                self._metrics.preemptions.inc()
                self._metrics.preemptions_by_cause.labels(event.cause).inc()

    def _trace(self, sequence: Sequence, now: int) -> None:
        admitted = sequence.admitted_ns or now
        self._metrics.queue_seconds.observe((admitted - sequence.submitted_ns) / 1e9)
        self._tracing.record(
            "queue", sequence.submitted_ns + self._unix_offset_ns, admitted + self._unix_offset_ns,
            sequence.submit.traceparent,
            {
                "headrace.request_id": sequence.request_id,
                "headrace.choice": sequence.choice,
                "headrace.preemptions": sequence.preemptions,
            },
        )  # fmt: skip

    # --- time -------------------------------------------------------------------------------------------------------

    async def _ticks(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            if self._deposed:
                raise ServiceFault(f"stands down: {self._deposed}")
            now = time.monotonic()
            for worker, link in list(self._links.items()):
                if now - link.seen > self._config.worker_timeout_s:
                    self._lose(worker, f"its worker was silent for {self._config.worker_timeout_s:g} s", "silence")
            for gateway, seen in list(self._gateways.items()):
                if now - seen > self._config.gateway_timeout_s:
                    log.warning("gateway %s is gone; its requests are cancelled", gateway)
                    del self._gateways[gateway]
                    now_ns = time.monotonic_ns()
                    self._carry_out(self._core.reconcile(gateway, [], now_ns, now_ns))
            self._carry_out(self._core.tick(time.monotonic_ns()))
            self._pump_all()
            self._observe()

    async def _beats(self) -> None:
        while True:
            if self._leading:
                self._beat()
            await asyncio.sleep(BEAT_S)

    def _beat(self) -> None:
        if not self._leading:
            return
        core = self._core
        models: dict[str, ModelInfo] = {}
        for worker in core.workers.values():
            capacity = worker.capacity
            known = models.get(capacity.model)
            pool_tokens = capacity.num_blocks * capacity.block_size + 1
            longest = min(core.max_model_len(capacity), pool_tokens)
            models[capacity.model] = ModelInfo(
                capacity.model,
                max(longest, known.max_model_len if known else 0),
                min(capacity.vocab_size, known.vocab_size if known else capacity.vocab_size),
                (known.workers if known else 0) + (not worker.draining),
            )
        pools = [worker.pool for worker in core.workers.values()]
        beat = SchedulerBeat(
            scheduler=self._name,
            epoch=core.epoch,
            models=[models[name] for name in sorted(models)],
            waiting=core.num_waiting + core.num_preempted,
            running=core.num_running,
            free_blocks=sum(pool.num_free for pool in pools),
            total_blocks=sum(pool.num_blocks for pool in pools),
            draining=self._draining,
        )
        self._out.post(self._subjects.beat("scheduler", self._name), encode(beat))

    def _observe(self) -> None:
        core, metrics = self._core, self._metrics
        metrics.running.set(core.num_running)
        metrics.waiting.set(core.num_waiting)
        metrics.preempted.set(core.num_preempted)
        metrics.workers.set(len(core.workers))
        total = sum(worker.pool.num_blocks for worker in core.workers.values())
        used = sum(worker.pool.num_used for worker in core.workers.values())
        metrics.kv_usage.set(used / total if total else 0.0)
        for counter, name in (
            (metrics.new_tokens, "new_tokens"),
            (metrics.prefill_tokens, "prefill_tokens"),
            (metrics.recomputed_tokens, "recomputed_tokens"),
            (metrics.padding_tokens, "padding_tokens"),
            (metrics.idle_slots, "idle_slot_iterations"),
        ):
            total_now = getattr(core.counters, name)
            counter.inc(total_now - getattr(self._counted, name))
            setattr(self._counted, name, total_now)


def _rows(plan: StepPlan) -> int:
    return len(plan.decodes) + sum(count for _, count in plan.chunks) + sum(count for _, count in plan.padding)
