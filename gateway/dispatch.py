"""The gateway's side of one mesh: routes tokens to flights, has what was lost resumed, cancels what is unwanted.

Owns the ledger and the view of the mesh. Handlers of bus messages are plain calls; two tasks belong to it, one that
publishes cancels and one that publishes beats and watches over what does not go on.

A request is resumed when the scheduler says so, when tokens are missing, when a new scheduler leads, and when this
process's connection to the bus was interrupted: a lost last entry would never show as a gap. A silent scheduler alone
is waited for.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable

from gateway.awake_clock import AwakeClock
from gateway.config import GatewayConfig
from gateway.errors import interrupted, invalid, late
from gateway.ledger import Broken, Ledger, Lost, Progress, RequestRecord, Unwanted, Update
from gateway.mesh_view import MeshView
from gateway.metrics import GatewayMetrics
from gateway.offering import Offers, Part
from observability import conventions as names
from observability.tracing import Tracing
from shared.bus import Bus, BusUnavailable, PayloadTooLarge
from shared.flight_record import AnswerTrace
from shared.messages import (
    MAX_EPOCH,
    Answered,
    AnyMessage,
    BadMessage,
    Cancel,
    GatewayBeat,
    RequestEvent,
    RollCall,
    SchedulerBeat,
    Submit,
    TokenBatch,
    decode,
    encode,
)
from shared.outbox import Outbox
from shared.subjects import Subjects

log = logging.getLogger("headrace.gateway")

BEAT_INTERVAL_S = 1.0
LATE_S = 0.5  # a tick that comes so much later tells that this process stood still, e.g. stopped or starved
CANCEL_AGAIN_S = 1.0  # tokens of a choice that come for longer than that were not on their way when it was cancelled
MESSAGE_MARGIN_BYTES = 4096  # of what carries a Submit's parts on: a plan with its pages, ids
LIVE_ENTRY_BYTES = 48  # of one (request, attempt) in a beat, rounded up


def awake_clock() -> AwakeClock:
    """One that is read as often as beats are due."""
    return AwakeClock(BEAT_INTERVAL_S + LATE_S)


class Dispatch:
    """Requests out, tokens in, through ``config.mesh``."""

    def __init__(
        self,
        config: GatewayConfig,
        bus: Bus,
        gateway_id: str,
        metrics: GatewayMetrics,
        losses: Callable[[], int] = lambda: 0,
        tracing: Tracing | None = None,
        clock: AwakeClock | None = None,
    ) -> None:
        """``losses`` counts the occasions on which the bus may have lost messages (reconnects, slow consumer).

        ``clock``: of this process, where requests pass from one of these to another.
        """
        self.gateway_id = gateway_id
        self.name = config.mesh
        self.mesh = MeshView(config.scheduler_stale_s)
        self.ledger: Ledger[Part] = Ledger()
        self._config = config
        self._bus = bus
        self._subjects = Subjects(config.mesh)
        self._metrics = metrics
        self._losses = losses
        self._losses_seen = losses()
        self._outbox = Outbox(bus)
        self._tracing = tracing
        self._clock = clock or awake_clock()
        self.offers = Offers(config, bus, self.mesh, metrics, self._clock)
        self._beat_now = asyncio.Event()
        self._heard_s = 0.0  # when the leading scheduler was heard last, by the clock
        self._interruptions: Counter[str] = Counter()  # by their reason, since the last tick
        self._served: tuple[str, ...] = ()  # by the workers, as last told

    async def start(self) -> None:
        """Subscribe. Beats of a live scheduler come within a second."""
        subscriptions: tuple[tuple[str, Callable[[AnyMessage], None]], ...] = (
            (self._subjects.tokens(self.gateway_id), self._on_tokens),
            (self._subjects.event(self.gateway_id), self._on_event),
            (self._subjects.beats("scheduler"), self._on_scheduler_beat),
            (self._subjects.roll_call, self._on_roll_call),
        )
        for subject, handler in subscriptions:
            await self._bus.subscribe(subject, self._reader(handler))
        await self._bus.flush()

    # --- requests out ---------------------------------------------------------------------------------------------

    def check_size(self, submit: Submit) -> None:
        """Refuse what no bus message could carry; a resume carries the prompt and all tokens generated so far."""
        sampling = submit.sampling
        need_bytes = len(encode(submit)) + 4 * sampling.max_tokens * submit.n + MESSAGE_MARGIN_BYTES
        if need_bytes > self._bus.max_payload:
            raise invalid(
                f"the prompt of {len(submit.prompt) // 4} tokens and n * max_tokens of "
                f"{sampling.max_tokens * submit.n} tokens exceed what one message carries "
                f"({self._bus.max_payload} bytes)"
            )

    def open(self, submit: Submit, part: Part) -> RequestRecord[Part]:
        self.look_for_losses()  # they did not reach what begins after them
        record = self.ledger.open(submit, part)
        self._own(record)
        return record

    def _own(self, record: RequestRecord[Part]) -> None:
        record.owner.mesh = self.name
        record.owner.flight.on_gone[record.submit.request_id] = functools.partial(self.release, record)

    def records(self) -> Iterable[RequestRecord[Part]]:
        """All that are open."""
        return self.ledger

    async def offer(self, record: RequestRecord[Part]) -> None:
        """Submit a request and return once a scheduler has accepted it; an ``ApiError`` says why it will not run."""
        await self.offers.first(record)

    async def next_beat(self, within_s: float) -> None:
        """Return at a scheduler's next beat, or after so long."""
        await self.offers.next_beat(within_s)

    async def hear(self, within_s: float) -> None:
        """Return once a scheduler is heard, or after so long."""
        until_s = time.monotonic() + within_s
        while (now_s := time.monotonic()) < until_s and not self.mesh.has_scheduler(now_s):
            await self.next_beat(until_s - now_s)

    def release(self, record: RequestRecord[Part]) -> None:
        """Nobody wants more of this request: forget it, and cancel what may still run. Idempotent."""
        self._let_go(record)
        record.settle()
        record.owner.flight.on_gone.pop(record.submit.request_id, None)

    def _let_go(self, record: RequestRecord[Part]) -> None:
        """Nothing more of it is wanted from here."""
        if record.owner.resume is not None:
            record.owner.resume.cancel()
        if record.running:
            for attempt in record.attempts_to_cancel():
                self._cancel(Cancel(record.submit.request_id, attempt))
        self.ledger.close(record.submit.request_id)

    def hand_over(self, record: RequestRecord[Part], other: Dispatch) -> None:
        """Have another mesh run a request from now on: what was accepted is resumed there, anything else offered by
        whoever offers it.
        """
        self._let_go(record)
        if record.epoch or record.resuming:
            self._metrics.resumes.labels("mesh").inc()
            reason = f"the mesh {self.name!r} stayed away"
            self._interruptions[reason] += 1
            record.suspend("mesh", reason, self._clock.read(time.monotonic()))
        record.begin_elsewhere()
        record.owner.resume = None
        other.adopt(record)

    def adopt(self, record: RequestRecord[Part]) -> None:
        """Take over a request that another mesh had."""
        self.look_for_losses()
        self.ledger.take(record)
        self._own(record)
        record.owner.came_s = self._clock.read(time.monotonic())
        record.owner.moves += record.resuming
        if record.resuming:
            self.offers.resume(record)

    # --- interruptions --------------------------------------------------------------------------------------------

    def _lose(self, record: RequestRecord[Part], cause: str, reason: str, now_s: float) -> None:
        """Have a request resumed, unless it has been interrupted for too long. ``now_s``: by the clock."""
        flight = record.owner.flight
        if flight.over:
            return
        if self._overdue(record, now_s):
            self._give_up(record, reason)
            return
        self._metrics.resumes.labels(cause).inc()
        self._interruptions[reason] += 1
        record.suspend(cause, reason, now_s)
        self.offers.resume(record)

    def _overdue(self, record: RequestRecord[Part], now_s: float) -> bool:
        return record.interrupted_s is not None and now_s - record.interrupted_s > self._config.resume_timeout_s

    def _give_up(self, record: RequestRecord[Part], reason: str) -> None:
        within = f"{self._config.resume_timeout_s:g} s"
        error = interrupted(f"the request was interrupted and could not be resumed within {within}: {reason}")
        self.offers.give_up(record.owner.flight, error)

    def _goes_on(self, record: RequestRecord[Part], now_s: float) -> None:
        """A request that had been interrupted has new tokens."""
        paused_s = record.go_on(self._clock.read(now_s))
        if paused_s is None:
            return
        record.owner.moves = 0
        self._metrics.interruption_seconds.observe(paused_s)
        if self._tracing is not None:
            now_ns = time.time_ns()
            self._tracing.record(
                names.RESUME, now_ns - int(paused_s * 1e9), now_ns, record.submit.traceparent,
                {
                    names.REQUEST_ID: record.submit.request_id,
                    names.CAUSE: record.cause,
                    names.ATTEMPT: record.attempt,
                },
            )  # fmt: skip

    def look_for_losses(self) -> None:
        """A reconnect, or a message that was dropped here, may have lost something of whatever was open then."""
        losses = self._losses()
        if losses != self._losses_seen:
            self._losses_seen = losses
            self._lose_all("reconnect", "the connection to the mesh was interrupted", MAX_EPOCH)

    def _lose_all(self, cause: str, reason: str, below_epoch: int) -> None:
        """Have everything resumed that a scheduler of a lower epoch has accepted."""
        now_s = self._clock.read(time.monotonic())
        for record in self.ledger:
            if 0 < record.epoch < below_epoch and record.open:
                self._lose(record, cause, reason, now_s)

    # --- tokens in ------------------------------------------------------------------------------------------------

    def _on_tokens(self, message: AnyMessage) -> None:
        if not isinstance(message, TokenBatch):
            raise BadMessage(f"{type(message).__name__} where tokens come")
        now_s = time.monotonic()
        before = self.ledger.dropped_entries
        for record, update in self.ledger.apply_tokens(message):
            self._deliver(record, update, now_s)
        self._metrics.dropped_entries.inc(self.ledger.dropped_entries - before)

    def _deliver(self, record: RequestRecord[Part], update: Update, now_s: float) -> None:
        flight = record.owner.flight
        if not isinstance(update, Progress):
            if isinstance(update, Lost):
                self._lose(record, update.cause, update.reason, self._clock.read(now_s))
            elif isinstance(update, Broken):
                flight.fail_interrupted(update.reason)
            elif isinstance(update, Unwanted):
                self._cancel_choice(record, update.choice, now_s)
            elif record.owner.prompt is not None:
                record.owner.prompt.logprobs += update.logprobs
            return
        if record.interrupted_s is not None:
            self._goes_on(record, now_s)
        if update.cached >= 0 and record.owner.cached < 0:  # told for each choice; the prompt is counted once
            record.owner.cached = update.cached
            flight.cached_tokens += update.cached
        choice = record.owner.choices[update.choice]
        flight.feed(choice, update.tokens, update.end, now_s, update.log_prob, update.logprobs)
        if choice.text.stopped_here and not update.end:
            record.choices[update.choice].closed = record.choices[update.choice].ended = True
            self._cancel_choice(record, update.choice, now_s)

    def _on_event(self, message: AnyMessage) -> None:
        if not isinstance(message, RequestEvent):
            raise BadMessage(f"{type(message).__name__} where events come")
        applied = self.ledger.apply_event(message)
        if applied is not None:
            record, told = applied
            if isinstance(told, Lost):
                self._lose(record, told.cause, told.reason, self._clock.read(time.monotonic()))
            elif message.kind == "dropped":  # by policy: it can no longer make its deadline
                record.owner.flight.fail(late(told.reason))
            else:
                record.owner.flight.fail_interrupted(told.reason)

    # --- presence -------------------------------------------------------------------------------------------------

    def _on_scheduler_beat(self, message: AnyMessage) -> None:
        if not isinstance(message, SchedulerBeat):
            raise BadMessage(f"{type(message).__name__} where a scheduler's beats come")
        now_s = time.monotonic()
        new_epoch = self.mesh.observe(message, now_s)
        self._tell_other_models(now_s)
        if new_epoch:
            log.info("scheduler %s leads mesh %s with epoch %d", message.scheduler, self.name, message.epoch)
            self.ledger.epoch = self.mesh.epoch
            self._lose_all("epoch", "the scheduler has changed", message.epoch)
        if 0 < message.epoch == self.mesh.epoch:
            self._heard_s = self._clock.read(now_s)
            self.offers.beat_heard()

    def _tell_other_models(self, now_s: float) -> None:
        """Log, once for each change, that the workers serve other models than this gateway."""
        served = self.mesh.served(now_s)
        if served == self._served:
            return
        self._served = served
        names = [source.name for source in self._config.sources]
        if served and not set(names) & set(served):
            log.warning("%s", self.mesh.why_not_ready(names[0], now_s))

    def _on_roll_call(self, message: AnyMessage) -> None:
        if not isinstance(message, RollCall):
            raise BadMessage(f"{type(message).__name__} where a roll is called")
        self._beat_now.set()

    def tick(self, now_s: float) -> None:
        """Nothing waits for ever: flights end once they, or the scheduler, do not go on for too long."""
        self.look_for_losses()
        if self._interruptions:
            told = "; ".join(f"{reason} ({count})" for reason, count in self._interruptions.most_common(3))
            many = self._interruptions.total()
            what = "request is" if many == 1 else "requests are"
            log.warning("%d interrupted %s resumed: %s", many, what, told)
            self._interruptions.clear()
        now_s = self._clock.read(now_s)
        config = self._config
        silence_s = now_s - self._heard_s
        for record in self.ledger:
            if not (record.epoch or record.resuming):
                continue  # offered for the first time, by somebody who has a patience of his own
            waits_s = 0.0 if record.epoch or record.interrupted_s is None else now_s - record.interrupted_s
            if silence_s > config.resume_timeout_s:
                self._give_up(record, "the scheduler is silent")
            elif waits_s > config.resume_timeout_s:
                self._give_up(record, record.trouble)
            elif (
                waits_s > config.mesh_away_s or silence_s > max(config.mesh_away_s, config.scheduler_stale_s)
            ) and now_s - record.owner.came_s > config.mesh_away_s * 2**record.owner.moves:
                self.offers.elsewhere(record)

    def beat(self) -> GatewayBeat:
        live = self.ledger.live()
        room = max(1, (self._bus.max_payload - MESSAGE_MARGIN_BYTES) // LIVE_ENTRY_BYTES)
        return GatewayBeat(self.gateway_id, self.mesh.epoch, live[:room], partial=len(live) > room)

    async def beat_forever(self) -> None:
        """Publish a beat each second, and at once when a scheduler asks."""
        subject = self._subjects.beat("gateway", self.gateway_id)
        while True:
            self._beat_now.clear()
            self.tick(time.monotonic())
            try:
                await self._bus.publish(subject, encode(self.beat()))
            except (BusUnavailable, PayloadTooLarge) as error:
                log.debug("no beat: %s", error)
            try:
                async with asyncio.timeout(BEAT_INTERVAL_S):
                    await self._beat_now.wait()
            except TimeoutError:
                pass

    def tell(self, record: RequestRecord[Part], answer: AnswerTrace) -> None:
        """Tell the scheduler how the answer to a request went, for whoever explains it. May be lost."""
        self._outbox.post(self._subjects.answered, encode(Answered(answer)))

    def _cancel_choice(self, record: RequestRecord[Part], choice: int, now_s: float) -> None:
        """End one choice of a request of which others go on. Said again if its tokens still come after a while: beats
        do not tell of choices, so nothing else would make good a cancel that is lost.
        """
        stopped = record.choices[choice]
        if stopped.cancelled_s is None or now_s - stopped.cancelled_s >= CANCEL_AGAIN_S:
            stopped.cancelled_s = now_s
            self._cancel(Cancel(record.submit.request_id, record.attempt, choice))

    def _cancel(self, cancel: Cancel) -> None:
        """Of a whole request one that is lost is made good by the beats, which no longer list the request."""
        self._outbox.post(self._subjects.cancel(self.mesh.epoch), encode(cancel))
        self._metrics.cancels.inc()

    async def send_forever(self) -> None:
        """Publish what plain calls have posted."""
        await self._outbox.run()

    async def sent(self) -> None:
        """Return once everything posted so far is published."""
        await self._outbox.drain()

    def _reader(self, handler: Callable[[AnyMessage], None]) -> Callable[[bytes, str], None]:
        def read(payload: bytes, reply: str) -> None:
            try:
                handler(decode(payload))
            except BadMessage as error:
                self._metrics.bad_messages.inc()
                log.debug("a message was dropped: %s", error)  # noise fills no disk: a metric counts it

        return read
