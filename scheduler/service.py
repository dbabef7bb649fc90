"""The scheduler's NATS shell: stand by, take the lease, lead until another one does, stand by again."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Coroutine
from typing import Any

from observability.tracing import Tracing
from scheduler.config import SchedulerConfig
from scheduler.context import Means
from scheduler.core.core import SchedulerCore
from scheduler.lease import LeaseKeeper
from scheduler.metrics import SchedulerMetrics
from scheduler.recorder import FlightRecorder
from scheduler.recording import Recording, RecordingCore
from scheduler.term import Term
from shared.bus import Bus, BusUnavailable
from shared.flight_record import Report
from shared.jetstream import KeyStore
from shared.lifecycle import end
from shared.messages import (
    MAX_EPOCH,
    Answered,
    AnyMessage,
    BadMessage,
    GatewayBeat,
    RollCall,
    SchedulerBeat,
    WorkerBeat,
    decode,
    encode,
)
from shared.outbox import Outbox
from shared.subjects import Subjects
from shared.supervision import LEADS, tell

log = logging.getLogger("headrace.scheduler")

ROLL_CALL_S = 0.3  # for beats to answer a roll call: they tell the highest epoch that anybody has seen
LATELY_S = 1.5  # workers whose last beat is not older are greeted when this scheduler takes over
MOST_HEARD = 4096  # workers whose last beats are kept for that
RETRY_S = 0.5


class SchedulerService:
    """``step_bus`` carries plans and results only; ``store`` holds the lease."""

    def __init__(
        self, config: SchedulerConfig, name: str, step_bus: Bus, bus: Bus, store: KeyStore, metrics: SchedulerMetrics,
        tracing: Tracing, recording: Recording | None = None,
    ) -> None:  # fmt: skip
        self.name = name
        self.mesh = config.mesh
        self.recorder = FlightRecorder(config.recorded_requests, config.recorded_steps)
        self._config = config
        self._store = store
        self._recording = recording
        self._metrics = metrics
        self._lease = LeaseKeeper(store, name, config.lease_s, metrics)
        self._bus = bus
        self._subjects = Subjects(config.mesh)
        self._step_out = Outbox(step_bus, self._lease.holds)
        self._out = Outbox(bus, self._lease.holds)
        self._means = Means(
            name, config, self._subjects, metrics, tracing, self.recorder, step_bus, bus, self._out.post,
            self._step_out.post, self._lease.holds, time.time_ns() - time.monotonic_ns(),
        )  # fmt: skip
        self._term: Term | None = None
        self._idle_core = SchedulerCore(config.limits(), config.policy)
        self._seen_epoch = 0
        self._heard: dict[str, tuple[float, WorkerBeat]] = {}  # the last beat of each worker, and when it came
        self._over = asyncio.Event()  # this time of leading
        self._why_over = ""
        self._outdated = False  # it is over since a higher epoch has been seen

    @property
    def leads(self) -> bool:
        """Else it stands by."""
        return self._term is not None

    @property
    def core(self) -> SchedulerCore:
        """To look at, on the event loop: an empty one while this scheduler stands by."""
        return self._term.core if self._term is not None else self._idle_core

    def report(self, request_id: str) -> Report:
        """What is remembered of a request."""
        now = time.monotonic_ns()
        told = self.recorder.report(self.name, self._lease.epoch, self._means.unix_offset_ns, request_id, now)
        if told.request is not None and told.request.live:
            for sequence in self.core.sequences_of(told.request.request_id):
                choice = told.request.choices.get(sequence.choice)
                if choice is not None and not choice.end:
                    choice.generated = sequence.generated
        return told

    async def run(self, stop: asyncio.Event) -> None:
        """Serve until ``stop``. Raises NoStore, one line, if nothing can hold the lease."""
        await self._store.open()
        async with asyncio.TaskGroup() as group:
            sending = [group.create_task(self._step_out.run()), group.create_task(self._out.run())]
            await self._bus.subscribe(self._subjects.beats(), self._on_beat)
            await self._bus.subscribe(self._subjects.answered, self._on_answered)
            await self._bus.flush()
            await self._bus.publish(self._subjects.roll_call, encode(RollCall(self.name)))
            await asyncio.sleep(ROLL_CALL_S)
            while await self._lease.acquire(stop, lambda: self._seen_epoch):
                await self._lead(stop)
                if self._outdated:
                    self._lease.abandon()
                else:
                    await self._lease.release()
                if not stop.is_set():
                    log.warning("scheduler %s stands down: %s", self.name, self._why_over)
            await end(sending)

    # --- leading ----------------------------------------------------------------------------------------------------

    async def _lead(self, stop: asyncio.Event) -> None:
        """Lead under the lease until ``stop`` is set or another one leads."""
        self._over.clear()
        self._outdated = False
        async with asyncio.TaskGroup() as group:
            tasks: set[asyncio.Task[None]] = set()

            def spawn(work: Coroutine[Any, Any, None]) -> None:
                task = group.create_task(work)
                tasks.add(task)
                task.add_done_callback(tasks.discard)

            async def lead(term: Term) -> None:
                await self._begin(term)
                spawn(term.ticks())
                spawn(term.presence.run())

            term = self._term = Term(self._means, self._new_core(), spawn)
            try:
                spawn(self._keep(term))
                spawn(self._heed(stop))
                spawn(lead(term))
                await self._over.wait()
                if stop.is_set():
                    term.drain()
                    await self._step_out.drain()
                    await self._out.drain()
            finally:
                self._term = None
                self._metrics.stands_by()
                for task in list(tasks):
                    task.cancel()
                await term.end()
                while tasks:  # what is cancelled may have begun another one before
                    await end(list(tasks))
                    await asyncio.sleep(0)

    async def _begin(self, term: Term) -> None:
        now = time.monotonic()
        known = [beat for heard_s, beat in self._heard.values() if now - heard_s < LATELY_S]
        try:
            await term.begin(known, wait=term.epoch > 1)
        except BusUnavailable as error:
            await asyncio.sleep(RETRY_S)
            self._depose(f"it cannot listen: {error}")
            return
        self._metrics.leading.set(1)
        self._metrics.epoch.set(term.epoch)
        log.info("scheduler %s leads mesh %s in epoch %d", self.name, self._config.mesh, term.epoch)
        tell(LEADS)

    async def _keep(self, term: Term) -> None:
        self._depose(await self._lease.keep(term.regained))

    async def _heed(self, stop: asyncio.Event) -> None:
        await stop.wait()
        self._over.set()

    def _depose(self, why: str, outdated: bool = False) -> None:
        if self._term is not None and not self._over.is_set():
            self._why_over, self._outdated = why, outdated
            self._over.set()

    def _new_core(self) -> SchedulerCore:
        limits, policy = self._config.limits(), self._config.policy
        writer = self._recording.begin() if self._recording is not None else None
        core = SchedulerCore(limits, policy) if writer is None else RecordingCore(limits, policy, writer)
        core.epoch = self._lease.epoch
        return core

    # --- in ---------------------------------------------------------------------------------------------------------

    def _on_beat(self, payload: bytes, _: str) -> None:
        message = self._decode(payload)
        if not isinstance(message, WorkerBeat | GatewayBeat | SchedulerBeat) or not 0 <= message.epoch < MAX_EPOCH:
            self._metrics.bad_messages.inc()
            return
        self._seen_epoch = max(self._seen_epoch, message.epoch)
        if isinstance(message, WorkerBeat):
            self._hear(message)
        term = self._term
        if term is None:
            return
        if isinstance(message, SchedulerBeat):
            if (message.epoch, message.scheduler) > (term.epoch, self.name):
                self._depose(f"scheduler {message.scheduler} leads in epoch {message.epoch}", outdated=True)
        elif message.epoch > term.epoch or term.knows_too_much(message):
            # It was silent while this one took its epoch. It obeys nobody below what it has seen: lead again, above,
            # once whoever led in that epoch can lead no more.
            self._depose(f"epoch {message.epoch} has been seen by others; this one took {term.epoch}", outdated=True)
        else:
            term.on_beat(message)

    def _hear(self, beat: WorkerBeat) -> None:
        now = time.monotonic()
        self._heard[beat.worker] = (now, beat)
        if len(self._heard) > MOST_HEARD:
            self._heard = {name: one for name, one in self._heard.items() if now - one[0] < LATELY_S}

    def _on_answered(self, payload: bytes, _: str) -> None:
        message = self._decode(payload)
        if isinstance(message, Answered):
            self.recorder.answered(message.answer)

    def _decode(self, payload: bytes) -> AnyMessage | None:
        try:
            return decode(payload)
        except BadMessage:
            self._metrics.bad_messages.inc()
            return None
