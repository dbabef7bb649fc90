"""What becomes of sequences when their worker goes: lost, or failed for having ended it twice."""

from __future__ import annotations

from scheduler.core.events import CoreEvent, Failed
from scheduler.core.pools import QueueKey
from scheduler.core.searching import SearchingState
from scheduler.core.sequence import Sequence, Status
from scheduler.core.state import QueueState
from scheduler.core.worker_state import WorkerState
from shared.messages import EndReason


class LosingState(SearchingState):
    """The state, with the ways in which workers leave it."""

    def worker_lost(self, name: str, reason: str, now: int, suspect: bool = True) -> list[CoreEvent]:
        """The worker's batch is gone: its sequences are lost to their gateways. Waiting ones keep their places.

        ``suspect``: what it ran when it went may have been the cause.
        """
        worker = self.workers.pop(name, None)
        if worker is None:
            return []
        self._end_trial(worker)
        convicted = self._accuse(worker, now) if suspect else ""
        events: list[CoreEvent] = []
        for sequence in list(worker.sequences()):
            if sequence.status is Status.HELD:
                sequence.become(Status.ENDED)
            else:
                for lost in (sequence, *sequence.children):
                    self._end(lost, EndReason.FAILED.value, now)
                    if speaks(lost):
                        self.counters.failed += 1
                        guilty = lost.request_id == convicted
                        events.append(
                            Failed(lost, "failed" if guilty else "lost", _verdict(reason) if guilty else reason, now)
                        )
                sequence.children = []
        if convicted:
            events += self._fail_rest(convicted, _verdict(reason), now)
        state = self._queues[worker.serves]
        del state.workers[name]
        state.fleet.forget(name)
        self._rests(worker, False)
        state.worker_lost_ns = max(1, now)
        self._overflow(state)
        return events

    def _overflow(self, state: QueueState) -> None:
        """If no worker of a pool takes anything any more, what waits goes where the rules say, if that can hold it, and
        else waits."""
        if state.fleet.names:
            return
        model, pool = state.queue.key
        for other in self._rules.overflow.get(pool, ()):
            target = self._queues.get(QueueKey(model, other))
            live = [one for one in target.workers.values() if not one.draining] if target is not None else []
            for head in list(state.queue):
                if target is not None and any(one.can_hold(head) for one in live):
                    self._unpin(head)
                    head.move_home(target.queue)

    # --- suspects (scheduler.core.suspects) -------------------------------------------------------------------------

    def _accuse(self, worker: WorkerState, now: int) -> str:
        """Suspect the requests with rows in the plans in flight; returns the one that this convicts, if any."""
        ran = {
            one.request_id: one
            for plan in worker.in_flight
            for one in plan.ran
            if one.status not in (Status.ENDED, Status.HELD)
        }
        seniors = sorted(ran.values(), key=lambda one: one.seniority)
        return self._suspects.accuse([(one.request_id, one.submit.attempt) for one in seniors], now) if ran else ""

    def _fail_rest(self, request_id: str, reason: str, now: int) -> list[CoreEvent]:
        """End the choices of a request that wait, or run on other workers."""
        events: list[CoreEvent] = []
        for sequence in list(self._requests[request_id].sequences):
            if sequence.status not in (Status.ENDED, Status.HELD):
                self._leave(sequence)
                self._end(sequence, EndReason.FAILED.value, now)
                if speaks(sequence):
                    self.counters.failed += 1
                    events.append(Failed(sequence, "failed", reason, now))
        return events

    def _end_trial(self, worker: WorkerState) -> None:
        self._suspects.on_trial.discard(worker.trial)
        worker.trial = 0

    def _has_members(self, worker: WorkerState) -> bool:
        """True if somebody of the group that the worker tries is there, or waits for it."""
        queue = self._queues[worker.serves].queue if worker.takes_new else ()
        group_of = self._suspects.group_of
        return any(group_of(one) == worker.trial for some in (worker.running, worker.preempted, queue) for one in some)

    def _clear_suspects(self, worker: WorkerState) -> None:
        """Of the group that the worker tries: who got far enough, or ended, is suspect no more."""
        for request_id, attempt in self._suspects.members(worker.trial):
            request = self._requests.get(request_id)
            if request is None or request.attempt <= attempt:
                continue  # it has not come back yet
            live = [one for one in request.sequences if one.status not in (Status.ENDED, Status.HELD)]
            ended = all(one.end_reason != EndReason.FAILED.value for one in request.sequences)
            if not any(map(self._suspects.group_of, live)) and (live or ended):
                self._suspects.clear(request_id)


def speaks(sequence: Sequence) -> bool:
    """True if what becomes of the sequence is told: the beams of a search are told of once."""
    return sequence.group is None or sequence is sequence.group.members[0]


def _verdict(reason: str) -> str:
    return f"the request has twice ended the worker that ran it alone ({reason})"
