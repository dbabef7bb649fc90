"""The entry points by which sequences move between workers, and what of a worker's coming and going concerns moves."""

from __future__ import annotations

from collections.abc import Iterator

from scheduler.core.admission import Admission
from scheduler.core.draft import PlanDraft
from scheduler.core.events import CoreEvent, Failed
from scheduler.core.limits import Limits
from scheduler.core.losses import LosingState, speaks
from scheduler.core.move import Why
from scheduler.core.roles import settle_newcomers
from scheduler.core.sequence import Sequence, Status
from scheduler.core.transfers import Transfers
from scheduler.core.worker_state import WorkerState
from shared.messages import EndReason, Fetched, Role

MOST_GONE = 64
"""Workers that are not there whose roles are remembered: a batch that is given up comes back in a moment."""


class MovingState(LosingState):
    """The state, with sequences that go on at other workers."""

    def __init__(self, limits: Limits, policy: str = "continuous", epoch: int = 1) -> None:
        super().__init__(limits, policy, epoch)
        self._admission = Admission(
            limits, self.counters, self.lengths, self.fairness, self._settle_service, self._unpin, self._suspects
        )
        self._transfers = Transfers(limits, self.counters, self._suspects, self._admission.fits, self._note)
        self._given_roles: dict[str, tuple[int, Role]] = {}  # worker -> (incarnation, role that it was given)

    def set_role(self, name: str, role: Role, now: int) -> list[CoreEvent]:
        """From now on the worker has another role: what it runs goes on, and is handed over as that role asks."""
        worker = self.workers.get(name)
        if worker is not None and worker.role is not role:
            worker.role, worker.full_look = role, None
            self._given_roles.pop(name, None)
            self._given_roles[name] = worker.incarnation, role
            gone = [other for other in self._given_roles if other not in self.workers]
            for other in gone[:-MOST_GONE]:
                del self._given_roles[other]
            self._settle_newcomers(worker)
        return []

    def fetched(self, answer: Fetched, now: int) -> list[CoreEvent]:
        """A worker's fetch is over. Idempotent: it is told until a plan has dropped it."""
        worker = self.workers.get(answer.worker)
        if worker is None or (worker.incarnation, self.epoch) != (answer.incarnation, answer.epoch):
            return []
        return self._transfers.fetched(worker, answer, now)

    def worker_lost(self, name: str, reason: str, now: int, suspect: bool = True) -> list[CoreEvent]:
        """The worker's batch is gone: its sequences are lost to their gateways. Waiting ones keep their places, and
        those that were on their way to it are where they were.

        ``suspect``: what it ran when it went may have been the cause.
        """
        worker = self.workers.get(name)
        if worker is None:
            return []
        for move in list(worker.arriving):
            move.cancel()
        for fetching in list(worker.fetching.values()):
            fetching.close()  # nothing writes there any more
        events = super().worker_lost(name, reason, now, suspect)
        self._settle_newcomers(worker)
        return events

    def worker_draining(self, name: str) -> None:
        """Admit nothing more to the worker, and let nothing come from others; what runs there goes on."""
        worker = self.workers.get(name)
        if worker is not None:
            worker.draining = True
            for move in list(worker.arriving):
                move.cancel()
            self._note(worker)
            self._settle_newcomers(worker)
            self._overflow(self._queues[worker.serves])

    def hand_over(self, name: str, now: int) -> list[CoreEvent]:
        """Let what runs on a draining worker go on elsewhere, as far as another worker can hold it.

        By its blocks, in the same attempt, where a worker has room for it now and that is quicker than to compute it
        again. Else its gateway is told to resume it.
        """
        worker = self.workers.get(name)
        if worker is None or not worker.draining:
            return []
        events: list[CoreEvent] = []
        for sequence in list(worker.sequences()):
            if sequence.status in (Status.ENDED, Status.HELD) or sequence.move is not None:
                continue
            peers = list(self._queues[sequence.home.key].workers.values())
            if self._moves_by_blocks(worker, sequence, peers, now):
                continue
            if not any(not other.draining and other.can_hold(sequence) for other in self._resuming(sequence)):
                continue
            for moved in (*sequence.children, sequence):  # children first: else one of them would be its heir
                self._leave(moved)
                self._end(moved, EndReason.CANCELLED.value, now)
                if speaks(moved):
                    events.append(Failed(moved, "moved", "its worker is stopping", now))
        return events

    def _resuming(self, sequence: Sequence) -> Iterator[WorkerState]:
        """Workers to which it may come when it is resumed: its pool's, or those that its pool overflows to."""
        key = sequence.home.key
        pools = (key.pool,) if self._queues[key].fleet.names else self._rules.overflow.get(key.pool, ())
        for pool in pools:
            yield from self.workers_of(key.model, pool)

    def _moves_by_blocks(
        self, worker: WorkerState, sequence: Sequence, peers: list[WorkerState], now: int
    ) -> bool:  # fmt: skip
        transfers = self._transfers
        return (
            not self.policy.holds_batch
            and transfers.may_move(worker, sequence)
            and transfers.begin(worker, sequence, peers, Why.DRAIN, now)
        )

    def _transfer(self, worker: WorkerState, draft: PlanDraft, now: int, events: list[CoreEvent]) -> None:
        """At the end of a plan's making: begin moves away from the worker, fetch for those to it."""
        if worker.capacity.transfer:
            self._transfers.hand_on(worker, self._queues[worker.serves].workers.values(), now)
        if worker.arriving:
            self._transfers.ask(worker, draft, now, events)

    def _take_up(self, worker: WorkerState) -> None:
        """A worker is there: it has the role that it was started for, or the one that it was given since."""
        incarnation, role = self._given_roles.get(worker.name, (0, worker.capacity.role))
        worker.role = role if incarnation == worker.incarnation else worker.capacity.role
        self._settle_newcomers(worker)

    def _settle_newcomers(self, worker: WorkerState) -> None:
        if self.policy.holds_batch:
            return  # such a batch ends where it began
        for changed in settle_newcomers(self._peers(worker)):
            self._note(changed)

    def _peers(self, worker: WorkerState) -> list[WorkerState]:
        """The workers of its queue, itself too as long as it is there."""
        return list(self._queues[worker.serves].workers.values())
