"""Offers requests to the scheduler, for the first time and when they are to be resumed, until they are accepted.

One coroutine does it, and a request is in the hands of one of them at most: what is lost while it is being offered is
offered again by the same one. A first offer belongs to whoever waits for it, and is refused with an ``ApiError``. A
resume is a task of its own, and some of them at once at most: the others wait in line, so that a mesh that has no
worker is asked by a few when it gives a sign of life, and not by thousands ten times a second.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

from gateway.awake_clock import AwakeClock
from gateway.config import GatewayConfig
from gateway.errors import ApiError, interrupted, invalid, refusal, unavailable
from gateway.flight import Choice, Flight
from gateway.ledger import RequestRecord
from gateway.mesh_view import PATIENCE_S, MeshView
from gateway.metrics import GatewayMetrics
from gateway.token_details import PromptReport
from observability.logs import about
from shared.bus import Bus, BusUnavailable, NoResponder, PayloadTooLarge
from shared.messages import BadMessage, Outcome, Submit, SubmitReply, decode, encode
from shared.subjects import Subjects

log = logging.getLogger("headrace.gateway")

REPLY_TIMEOUT_S = 1.0
RETRY_PAUSE_S = 0.25  # unless the scheduler is heard before
MAX_BACKOFF_S = 1.0  # before what is lost again and again without progress is offered again
RESUMES_AT_ONCE = 64
PASSING = frozenset(
    {Outcome.NO_WORKER, Outcome.UNKNOWN_MODEL, Outcome.DRAINING, Outcome.QUEUE_FULL, Outcome.STALE_EPOCH}
)
"""Refusals of a resume that the next try may not meet."""


@dataclass(slots=True, eq=False)
class Part:
    """One prompt of a flight: the owner that the ledger hands back."""

    flight: Flight
    choices: list[Choice]
    prompt: PromptReport | None = None  # where the client wants to know something about it
    cached: int = -1  # its tokens that the prefix cache held, once that is known
    offered: bool = False  # in the hands of whoever offers it for the first time
    resume: asyncio.Task[None] | None = None  # in whose hands it is to be resumed
    mesh: str = ""  # that it is in
    came_s: float = 0.0  # when it came there from another one, by the dispatch's clock; 0: it was there from the first
    moves: int = 0  # of an open request, from mesh to mesh since its last progress: each is given twice the time
    refused_by: tuple[str, ...] = ()  # meshes that would not take it


class Offers:
    """To one mesh. Whoever hears its scheduler's beat calls ``beat_heard``.

    ``has_alternative``: whether another mesh would take a new request now, so that this one need not be waited for.
    ``elsewhere``: gives a request that cannot go on here to another mesh, if there is one; True if it did.
    """

    def __init__(
        self, config: GatewayConfig, bus: Bus, mesh: MeshView, metrics: GatewayMetrics, clock: AwakeClock
    ) -> None:
        self.has_alternative: Callable[[RequestRecord[Part]], bool] = lambda record: False
        self.elsewhere: Callable[[RequestRecord[Part]], bool] = lambda record: False
        self._name = config.mesh
        self._submit_timeout_s = config.submit_timeout_s
        self._bus = bus
        self._subjects = Subjects(config.mesh)
        self._mesh = mesh
        self._metrics = metrics
        self._clock = clock
        self._heard = asyncio.Event()
        self._slots = asyncio.Semaphore(RESUMES_AT_ONCE)

    def beat_heard(self) -> None:
        """Wake whoever waits for one."""
        self._heard.set()
        self._heard.clear()

    async def next_beat(self, within_s: float) -> None:
        """Return at a scheduler's next beat, or after so long."""
        try:
            async with asyncio.timeout(within_s):
                await self._heard.wait()
        except TimeoutError:
            pass

    async def first(self, record: RequestRecord[Part]) -> None:
        """Return once a scheduler has accepted the request; an ``ApiError`` says why it will not run.

        Lost messages, a change of leader and a bus that is away are retried, idempotently, for a bounded time.
        """
        record.owner.offered = True
        try:
            await self._offer(record)
        finally:
            record.owner.offered = False

    def resume(self, record: RequestRecord[Part]) -> None:
        """See to it that a suspended request is offered again."""
        part = record.owner
        if not part.offered and part.resume is None:
            part.resume = asyncio.create_task(self._resume(record))

    async def _resume(self, record: RequestRecord[Part]) -> None:
        part = record.owner
        try:
            async with self._slots:
                await self._offer(record)
        except ApiError as error:
            part.resume = None
            part.refused_by += (self._name,)
            if not self.elsewhere(record):
                self.give_up(part.flight, error)
        except Exception:
            log.exception("a resume failed", extra=about(record.submit.request_id, record.submit.traceparent))
            self.give_up(part.flight, interrupted("the request was interrupted and could not be resumed"))
        finally:
            if part.resume is asyncio.current_task():  # else it was given to another mesh's
                part.resume = None

    def give_up(self, flight: Flight, error: ApiError) -> None:
        """End a flight that had been accepted and cannot go on."""
        if not flight.over:
            self._metrics.resume_failures.inc()
            flight.fail(error)

    async def _offer(self, record: RequestRecord[Part]) -> None:
        flight, mesh = record.owner.flight, self._mesh
        began_s = self._now_s()
        error = unavailable("no scheduler has been heard of lately", Outcome.NO_WORKER.value)
        patience_s = self._submit_timeout_s
        tries = losses = 0
        refused = False
        while not flight.over and not record.epoch and record.owner.mesh == self._name:
            if record.losses > max(1, losses):
                losses = record.losses
                await asyncio.sleep(min(MAX_BACKOFF_S, 0.1 * 2 ** min(losses - 2, 10)))
                continue
            epoch = mesh.epoch
            submit = record.offer()
            if epoch and (record.resuming or mesh.has_scheduler(time.monotonic())):
                tries += 1
                if tries > 1:
                    self._metrics.resubmits.inc()
                patience_s, refused = self._submit_timeout_s, False
                try:
                    reply = await self._request(self._subjects.submit(submit.model, epoch), submit)
                except PayloadTooLarge as problem:
                    raise invalid(str(problem)) from None
                except NoResponder:
                    error = unavailable("no scheduler answers", Outcome.NO_WORKER.value)
                except (BusUnavailable, BadMessage) as problem:
                    error = unavailable(f"the scheduler cannot be reached: {problem}", Outcome.NO_WORKER.value)
                else:
                    if record.attempt != submit.attempt or record.epoch:
                        continue  # it was lost meanwhile, or its tokens have overtaken the reply
                    if reply.outcome in (Outcome.ACCEPTED, Outcome.DUPLICATE):
                        record.accept(max(reply.epoch, epoch))
                        if record.epoch < mesh.epoch:
                            self._metrics.resumes.labels("epoch").inc()
                            record.suspend("epoch", "the scheduler has changed", self._now_s())
                        continue
                    error, refused = refusal(reply), True
                    patience_s = self._patience_s(record, reply)
            if record.resuming:
                record.trouble = error.message
            elif self._now_s() - began_s >= patience_s or self.has_alternative(record):
                if refused:
                    record.refused()
                raise error
            await self.next_beat(RETRY_PAUSE_S)

    def _patience_s(self, record: RequestRecord[Part], reply: SubmitReply) -> float:
        """For how long in all what was refused so is offered; raises if there is no use, or is no more."""
        outcome = reply.outcome
        if record.resuming:
            if outcome in PASSING:
                return 0.0  # whoever watches over resumes ends it in time
            if outcome is Outcome.DEADLINE:
                raise refusal(reply)
            raise interrupted(f"the request was interrupted and cannot be resumed: {reply.reason or outcome.value}")
        if outcome in (Outcome.DRAINING, Outcome.STALE_EPOCH):
            return self._submit_timeout_s  # a successor comes
        if outcome in (Outcome.NO_WORKER, Outcome.UNKNOWN_MODEL):
            return PATIENCE_S
        return 0.0

    def _now_s(self) -> float:
        return self._clock.read(time.monotonic())

    async def _request(self, subject: str, submit: Submit) -> SubmitReply:
        began_s = time.monotonic()
        message = decode(await self._bus.request(subject, encode(submit), REPLY_TIMEOUT_S))
        self._metrics.submit_seconds.observe(time.monotonic() - began_s)
        if not isinstance(message, SubmitReply):
            raise BadMessage(f"{type(message).__name__} instead of a reply")
        return message
