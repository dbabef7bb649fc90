"""The workers of a mesh, as its leading scheduler meets, probes, drains and loses them."""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import dataclass

from scheduler.context import LeadContext
from scheduler.core.roles import other_weights
from scheduler.known_workers import KnownWorkers
from scheduler.pacing import WorkerLink
from shared.bus import BusTimeout, BusUnavailable, NoResponder
from shared.messages import (
    BadMessage,
    Capacity,
    Fetched,
    PageSnapshot,
    Reset,
    RollCall,
    WorkerBeat,
    WorkerFault,
    WorkerState,
    encode,
    unpack_tokens,
)
from shared.page_hash import DIGEST_BYTES

log = logging.getLogger("headrace.scheduler")

RESEND_AFTER_S = 1.0
MOST_RESENDS = 5  # of one plan, before its batch counts as lost
GREET_AGAIN_S = 0.2  # a reset that was not answered for so long is sent again with the next beat
PROBE_AFTER_S = 0.7  # of silence; beats come each 0.5 s, and results more often
PROBE_TIMEOUT_S = 0.5
PROBE_AGAIN_S = 0.4  # nobody who listens, twice so far apart: a connection that was only being made again would be back


@dataclass(slots=True)
class Greeting:
    """A reset whose answer is awaited."""

    incarnation: int
    capacity: Capacity
    step: int  # the first of its batch
    reset: bytes
    sent_s: float


class Workers:
    def __init__(self, context: LeadContext) -> None:
        self._context = context
        self._means = context.means
        self._greetings: dict[str, Greeting] = {}
        self._known = KnownWorkers()
        self._probed: set[str] = set()  # under a probe now

    @property
    def greeting(self) -> bool:
        """Whether an answer to a reset is awaited."""
        return bool(self._greetings)

    def told(self, beat: WorkerBeat) -> bool:
        """Whether the worker, or the process before it, can know of this leader's epoch."""
        return self._known.told(beat.worker, beat.incarnation)

    # --- presence ---------------------------------------------------------------------------------------------------

    def meet(self, beat: WorkerBeat) -> None:
        plans = self._context.plans
        link = plans.links.get(beat.worker)
        known = link.incarnation if link is not None else 0
        greeting = self._greetings.get(beat.worker)
        if greeting is not None:
            known = max(known, greeting.incarnation)
        if known > beat.incarnation:
            return  # a beat of the process before this one
        if link is not None and link.incarnation == beat.incarnation:
            link.seen = max(link.seen, time.monotonic())
            self._look_at(beat, link)
            return
        if link is not None:  # the process that had its batch is gone
            self.lose(beat.worker, "its worker restarted", "restart")
        if beat.state is WorkerState.READY and beat.capacity is not None:
            self._greet(beat.worker, beat.incarnation, beat.capacity)
        elif beat.state is WorkerState.DRAINING and beat.slots:
            # Nobody here knows what it runs, so that nobody will end it: without it the worker may go at once.
            reset = Reset(self._context.core.epoch, beat.worker, beat.incarnation, self._first_step(beat))
            self._send_reset(beat.worker, beat.incarnation, encode(reset))

    def _look_at(self, beat: WorkerBeat, link: WorkerLink) -> None:
        context = self._context
        for answer in beat.fetched:
            self.on_fetched(answer)
        if beat.state is WorkerState.DRAINING:
            self._drain(beat.worker)
        if beat.executing_us > self._means.config.step_timeout_s * 1e6:
            self.lose(beat.worker, f"a step has run for {beat.executing_us / 1e6:.0f} s", "stuck")
        elif not beat.executing and link.sent and time.monotonic() - link.sent_at > RESEND_AFTER_S:
            link.sent_at = time.monotonic()
            link.resends += 1
            if link.resends > MOST_RESENDS:
                self.restart_batch(beat.worker, beat.incarnation, "its plans get no results", suspect=False)
            else:
                context.plans.resend(beat.worker, link.sent[0][0])  # a plan or its result was lost

    def _drain(self, worker: str) -> None:
        """Hand over what other workers can hold; the rest runs to its end. Asked again at each beat: a choice that had
        to be settled first, or a worker that came later, may make more possible. What moves by its blocks runs on here
        until they are there, so that a worker stops when nothing of it is left."""
        context = self._context
        state = context.core.workers.get(worker)
        if state is None:
            return
        began = not state.draining
        if began:
            context.core.worker_draining(worker)
        moved = context.core.hand_over(worker, time.monotonic_ns())
        if moved:
            log.info("worker %s is stopping: %d of its sequences to go on elsewhere", worker, len(moved))
            context.carry_out(moved)
        if moved or began:
            context.beat()
        context.plans.pump_all()

    def on_fetched(self, answer: Fetched) -> None:
        """A fetch is over: told at once, and in the worker's beats until a plan has dropped it."""
        context = self._context
        state = context.core.workers.get(answer.worker)
        if state is not None and answer.fetch in state.fetching:
            context.carry_out(context.core.fetched(answer, time.monotonic_ns()))
            context.plans.pump_all()

    # --- greeting ---------------------------------------------------------------------------------------------------

    def _greet(self, worker: str, incarnation: int, capacity: Capacity) -> None:
        """Ask for an empty batch and what the pages hold. No plan is made before that is told."""
        clash = self._clash(capacity)
        if clash:
            if self._known.refuse(worker, incarnation):
                log.error("worker %s is refused: %s", worker, clash)
            return
        now_s = time.monotonic()
        greeting = self._greetings.get(worker)
        if greeting is None or greeting.incarnation != incarnation:
            step = self._known.first_step(worker, incarnation)
            reset = encode(Reset(self._context.core.epoch, worker, incarnation, step))
            greeting = self._greetings[worker] = Greeting(incarnation, capacity, step, reset, now_s)
        elif now_s - greeting.sent_s < GREET_AGAIN_S:
            return
        greeting.sent_s = now_s
        self._send_reset(worker, incarnation, greeting.reset)

    def _send_reset(self, worker: str, incarnation: int, reset: bytes) -> None:
        self._known.tell(worker, incarnation)
        self._means.post_step(self._means.subjects.step(worker), reset)

    def on_snapshot(self, snapshot: PageSnapshot) -> None:
        """The answer to a reset: from now on the worker is planned for."""
        context, worker = self._context, snapshot.worker
        greeting = self._greetings.get(worker)
        if greeting is None or (greeting.incarnation, greeting.step) != (snapshot.incarnation, snapshot.step):
            return  # to a reset before that, or sent again
        del self._greetings[worker]
        cached = self._pages_of(snapshot)
        now = time.monotonic_ns()
        capacity, step = greeting.capacity, greeting.step
        context.carry_out(context.core.worker_up(worker, greeting.incarnation, capacity, now, step, cached))
        context.plans.add(worker, WorkerLink(greeting.incarnation, time.monotonic(), step, greeting.reset))
        log.info(
            "worker %s is ready: %s, %d blocks%s", worker, capacity.model, capacity.num_blocks,
            f", {len(cached):,} of them with a prefix cache from before" if cached else "",
        )  # fmt: skip
        self._compare(worker)
        context.beat()
        context.plans.pump(worker)

    def _compare(self, name: str) -> None:
        """Say so where another worker has other weights under the same name: they may answer differently."""
        core = self._context.core
        worker = core.workers[name]
        for other in core.workers_of(worker.capacity.model, worker.serves.pool):
            what = other_weights(worker.capacity, other.capacity)
            if what:
                log.warning(
                    "worker %s has other weights than worker %s for %s: answers may differ, and neither takes KV "
                    "blocks from the other", name, other.name, what,
                )  # fmt: skip
                return

    def _pages_of(self, snapshot: PageSnapshot) -> list[tuple[int, bytes]]:
        """(page, hash); none of them if the two lists do not fit together."""
        try:
            pages = unpack_tokens(snapshot.pages)
        except BadMessage:
            pages = []
        if len(snapshot.hashes) != len(pages) * DIGEST_BYTES or (snapshot.pages and not pages):
            self._means.metrics.bad_messages.inc()
            return []
        digests = (snapshot.hashes[at : at + DIGEST_BYTES] for at in range(0, len(snapshot.hashes), DIGEST_BYTES))
        return list(zip(pages, digests, strict=True))

    def _first_step(self, beat: WorkerBeat) -> int:
        return max(beat.step + 1, self._known.first_step(beat.worker, beat.incarnation))

    def _clash(self, capacity: Capacity) -> str:
        """Why a worker cannot serve beside those of its model, or nothing: answers must not depend on the worker."""
        for other in self._context.core.workers.values():
            known = other.capacity
            if known.model != capacity.model:
                continue
            if (known.device == "simulated") != (capacity.device == "simulated"):
                return f"{capacity.model} is served by {known.device} workers; a simulated one gives random tokens"
            if (known.vocab_size, sorted(known.eos_token_ids)) != (capacity.vocab_size, sorted(capacity.eos_token_ids)):
                return f"{capacity.model} is served by workers with another vocabulary or other end tokens"
        return ""

    # --- losses -----------------------------------------------------------------------------------------------------

    def on_fault(self, fault: WorkerFault) -> None:
        link = self._context.plans.links.get(fault.worker)
        if link is not None and link.awaits(fault.step):  # else: of a batch lost before
            self.restart_batch(fault.worker, fault.incarnation, f"step {fault.step} failed: {fault.reason}")

    def restart_batch(self, worker: str, incarnation: int, reason: str, suspect: bool = True) -> None:
        """The worker lives, but its batch cannot be trusted: lose the batch, reset, go on with an empty one."""
        link = self._context.plans.links.get(worker)
        if link is None or link.incarnation != incarnation:
            return
        capacity = self._context.core.workers[worker].capacity
        self.lose(worker, reason, "fault", suspect)
        self._greet(worker, incarnation, capacity)

    def lose(self, worker: str, reason: str, cause: str, suspect: bool = True) -> None:
        """``suspect``: what it ran may have been the cause."""
        context = self._context
        state = context.core.workers.get(worker)
        context.plans.forget(worker)
        if state is None:
            return
        self._known.lose(worker, state.incarnation, state.next_step)
        left = state.draining and not any(state.sequences())
        self._means.recorder.worker_lost(worker)
        context.carry_out(context.core.worker_lost(worker, reason, time.monotonic_ns(), suspect and not left))
        if left:
            log.info("worker %s has left", worker)
        else:
            log.error("worker %s lost: %s", worker, reason)
            self._means.metrics.workers_lost.labels(cause).inc()
        context.beat()

    def excuse(self, since_s: float) -> None:
        """Count everybody's silence from then on."""
        for link in self._context.plans.links.values():
            link.seen = max(link.seen, since_s)

    def tick(self, now_s: float) -> None:
        timeout_s = self._means.config.worker_timeout_s
        for worker, greeting in list(self._greetings.items()):
            if (
                now_s - greeting.sent_s > timeout_s
            ):  # no beat since: it is gone, and another one of its name may be there
                del self._greetings[worker]
        for worker, link in list(self._context.plans.links.items()):
            silence_s = now_s - link.seen
            if silence_s > timeout_s:
                # Cut off or hung as a whole. A step that hangs leaves the beats alone, so that no request is suspect.
                self.lose(worker, f"its worker was silent for {timeout_s:g} s", "silence", suspect=False)
            elif silence_s > PROBE_AFTER_S and worker not in self._probed:
                self._probed.add(worker)
                self._context.spawn(self._probe(worker, link))
        present = self._context.plans.links.keys() | self._greetings.keys()
        self._known.trim(present, len(present))

    async def _probe(self, worker: str, link: WorkerLink) -> None:
        """Ask NATS whether anybody still listens where the worker's plans go."""
        try:
            heard = (link.seen, self._means.bus.reconnects)
            for last in (False, True):
                gone = await self._nobody_listens(worker)
                if not last and gone:
                    await asyncio.sleep(PROBE_AGAIN_S)
                same = self._context.plans.links.get(worker) is link
                if not gone or not same or (link.seen, self._means.bus.reconnects) != heard:
                    return  # it is there, or was heard of meanwhile, or everybody was cut off
            if self._means.leads():
                self.lose(worker, "its worker is gone: nobody listens to its plans", "gone")
        finally:
            self._probed.discard(worker)

    async def _nobody_listens(self, worker: str) -> bool:
        outcome = "there"
        try:
            roll_call = encode(RollCall(self._means.name))
            await self._means.bus.request(self._means.subjects.step(worker), roll_call, PROBE_TIMEOUT_S)
        except NoResponder:
            outcome = "gone"
        except BusTimeout:
            pass  # it does not answer: its next beat does
        except BusUnavailable:
            outcome = "unknown"
        self._means.metrics.probes[outcome].inc()
        return outcome == "gone"
