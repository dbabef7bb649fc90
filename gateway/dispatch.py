"""The gateway's side of the bus: offers requests to the scheduler, routes tokens to flights, cancels what is unwanted.

Owns the ledger and the view of the mesh. Handlers of bus messages are plain calls; two tasks belong to it, one that
publishes cancels and one that publishes beats and watches for silence.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

from gateway.config import GatewayConfig
from gateway.errors import invalid, late, refusal, unavailable
from gateway.flight import Choice, Flight
from gateway.ledger import Broken, Ledger, PromptPiece, RequestRecord, Update
from gateway.mesh_view import MeshView
from gateway.metrics import GatewayMetrics
from gateway.token_details import PromptReport
from shared.bus import Bus, BusUnavailable, NoResponder, PayloadTooLarge
from shared.flight_record import AnswerTrace
from shared.messages import (
    Answered,
    AnyMessage,
    BadMessage,
    Cancel,
    GatewayBeat,
    Outcome,
    RequestEvent,
    RollCall,
    SchedulerBeat,
    Submit,
    SubmitReply,
    TokenBatch,
    decode,
    encode,
)
from shared.outbox import Outbox
from shared.subjects import Subjects

log = logging.getLogger("headrace.gateway")

BEAT_INTERVAL_S = 1.0
LATE_S = 0.5  # a tick that comes so much later tells that this process stood still, e.g. stopped or starved
REPLY_TIMEOUT_S = 1.0
RETRY_PAUSE_S = 0.1
MESSAGE_MARGIN_BYTES = 4096  # of what carries a Submit's parts on: a plan with its pages, ids
LIVE_ENTRY_BYTES = 48  # of one (request, attempt) in a beat, rounded up


@dataclass(slots=True, eq=False)
class Part:
    """One prompt of a flight: the owner that the ledger hands back."""

    flight: Flight
    choices: list[Choice]
    prompt: PromptReport | None = None  # where the client wants to know something about it
    cached: int = -1  # its tokens that the prefix cache held, once that is known


class Dispatch:
    """Requests out, tokens in."""

    def __init__(
        self,
        config: GatewayConfig,
        bus: Bus,
        gateway_id: str,
        metrics: GatewayMetrics,
        losses: Callable[[], int] = lambda: 0,
    ) -> None:
        """``losses`` counts the occasions on which the bus may have lost messages (reconnects, slow consumer)."""
        self.gateway_id = gateway_id
        self.mesh = MeshView(config.scheduler_stale_s)
        self.ledger: Ledger[Part] = Ledger()
        self._config = config
        self._bus = bus
        self._subjects = Subjects(config.mesh)
        self._metrics = metrics
        self._losses = losses
        self._losses_seen = losses()
        self._outbox = Outbox(bus)
        self._beat_now = asyncio.Event()
        self._mesh_changed = asyncio.Event()
        self._ticked_s = float("inf")  # when the last tick came, monotonic seconds; none yet
        self._judge_s = 0.0  # silence is not judged before
        self._excused = False  # the last late tick did not judge, and none has since
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
        self._end_what_losses_reached()  # and not what begins after them
        return self.ledger.open(submit, part)

    async def offer(self, record: RequestRecord[Part]) -> None:
        """Submit a request and return once a scheduler has accepted it; an ``ApiError`` says why it will not run.

        Lost messages, a change of leader and a bus that is away are retried, idempotently, for a bounded time.
        """
        submit = record.submit
        payload = encode(submit)
        deadline_s = time.monotonic() + self._config.submit_timeout_s
        trouble = "no scheduler has been heard of lately"
        tries = 0
        while not record.owner.flight.over:
            self._mesh_changed.clear()
            epoch = self.mesh.epoch
            if epoch and self.mesh.has_scheduler(time.monotonic()):
                tries += 1
                if tries > 1:
                    self._metrics.resubmits.inc()
                try:
                    reply = await self._request(self._subjects.submit(submit.model, epoch), payload)
                except PayloadTooLarge as error:
                    raise invalid(str(error)) from None
                except NoResponder:
                    trouble = "no scheduler answers"
                except (BusUnavailable, BadMessage) as error:
                    trouble = f"the scheduler cannot be reached: {error}"
                else:
                    if reply.outcome in (Outcome.ACCEPTED, Outcome.DUPLICATE):
                        record.epoch = max(reply.epoch, epoch)
                        return
                    if reply.outcome != Outcome.STALE_EPOCH:
                        record.settle()
                        raise refusal(reply)
                    trouble = reply.reason or "the scheduler has changed"
            if time.monotonic() >= deadline_s:
                raise unavailable(trouble, Outcome.NO_WORKER.value)
            try:
                async with asyncio.timeout(RETRY_PAUSE_S):
                    await self._mesh_changed.wait()
            except TimeoutError:
                pass

    def release(self, record: RequestRecord[Part]) -> None:
        """Nobody wants more of this request: forget it, and cancel what may still run. Idempotent."""
        if record.running:
            record.settle()
            self._cancel(Cancel(record.submit.request_id, record.attempt))
        self.ledger.close(record.submit.request_id)

    async def _request(self, subject: str, payload: bytes) -> SubmitReply:
        began_s = time.monotonic()
        message = decode(await self._bus.request(subject, payload, REPLY_TIMEOUT_S))
        self._metrics.submit_seconds.observe(time.monotonic() - began_s)
        if not isinstance(message, SubmitReply):
            raise BadMessage(f"{type(message).__name__} instead of a reply")
        return message

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
        if isinstance(update, Broken):
            flight.fail_interrupted(update.reason)
            return
        if isinstance(update, PromptPiece):
            if record.owner.prompt is not None:
                record.owner.prompt.logprobs += update.logprobs
            return
        if update.cached >= 0 and record.owner.cached < 0:  # told for each choice; the prompt is counted once
            record.owner.cached = update.cached
            flight.cached_tokens += update.cached
        choice = record.owner.choices[update.choice]
        flight.feed(choice, update.tokens, update.end, now_s, update.log_prob, update.logprobs)
        if choice.text.stopped_here and not update.end:
            record.choices[update.choice].closed = record.choices[update.choice].ended = True
            self._cancel(Cancel(record.submit.request_id, record.attempt, update.choice))

    def _on_event(self, message: AnyMessage) -> None:
        if not isinstance(message, RequestEvent):
            raise BadMessage(f"{type(message).__name__} where events come")
        applied = self.ledger.apply_event(message)
        if applied is not None:
            record, broken = applied
            if message.kind == "dropped":  # by policy: it can no longer make its deadline
                record.owner.flight.fail(late(broken.reason))
            else:
                record.owner.flight.fail_interrupted(broken.reason)

    # --- presence -------------------------------------------------------------------------------------------------

    def _on_scheduler_beat(self, message: AnyMessage) -> None:
        if not isinstance(message, SchedulerBeat):
            raise BadMessage(f"{type(message).__name__} where a scheduler's beats come")
        now_s = time.monotonic()
        new_epoch = self.mesh.observe(message, now_s)
        self._tell_other_models(now_s)
        if new_epoch:
            log.info("scheduler %s leads with epoch %d", message.scheduler, message.epoch)
            self.ledger.epoch = self.mesh.epoch
            self._mesh_changed.set()
            for record in self.ledger:
                if 0 < record.epoch < message.epoch:
                    record.owner.flight.fail_interrupted("the scheduler has changed")

    def _tell_other_models(self, now_s: float) -> None:
        """Log, once for each change, that the workers serve other models than this gateway."""
        served = self.mesh.served(now_s)
        if served == self._served:
            return
        self._served = served
        reason = self.mesh.why_not_ready(self._config.model_name, now_s)
        if served and reason is not None:
            log.warning("%s", reason)

    def _on_roll_call(self, message: AnyMessage) -> None:
        if not isinstance(message, RollCall):
            raise BadMessage(f"{type(message).__name__} where a roll is called")
        self._beat_now.set()

    def fail_all(self, reason: str) -> None:
        """End every flight that waits for tokens with an error."""
        for record in self.ledger:
            record.owner.flight.fail_interrupted(reason)

    def _end_what_losses_reached(self) -> None:
        """A reconnect may have lost messages of whatever was open then."""
        losses = self._losses()
        if losses != self._losses_seen:
            self._losses_seen = losses
            self.fail_all("the connection to the mesh was interrupted")

    def tick(self, now_s: float) -> None:
        """Nothing waits for ever: flights end once the scheduler is silent for too long, or messages may be lost.

        A lost last entry would never show as a gap, so each reconnect ends what is open. While this process stood still
        it read nothing: the silence is judged an interval later, when the beats that waited in the socket are read. One
        that is late each time judges every second time.
        """
        self._end_what_losses_reached()
        late_tick = now_s - self._ticked_s > BEAT_INTERVAL_S + LATE_S
        self._ticked_s = now_s
        if late_tick and not self._excused:
            self._excused, self._judge_s = True, now_s + BEAT_INTERVAL_S
        if now_s < self._judge_s:
            return
        self._excused = False
        if len(self.ledger) and self.mesh.silence_s(now_s) > self._config.stall_timeout_s:
            self.fail_all(f"the scheduler has been silent for {self._config.stall_timeout_s:g} s")

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

    def tell(self, answer: AnswerTrace) -> None:
        """Tell the scheduler how an answer went, for whoever explains it. May be lost."""
        self._outbox.post(self._subjects.answered, encode(Answered(answer)))

    def _cancel(self, cancel: Cancel) -> None:
        """One that is lost is made good by the beats, which no longer list the request."""
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
                log.warning("a message was dropped: %s", error)

        return read
