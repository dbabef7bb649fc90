"""What the core knows: workers, queues, requests, and the changes that keep them consistent. Decides nothing."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from scheduler.core.events import Counters
from scheduler.core.fairness import VirtualTokenCounters
from scheduler.core.fleet import Fleet
from scheduler.core.lengths import OutputLengths
from scheduler.core.limits import Limits
from scheduler.core.move import check_moves
from scheduler.core.pools import PoolRules, QueueKey
from scheduler.core.sequence import Sequence, Status
from scheduler.core.service_rate import ServiceRate
from scheduler.core.suspects import Suspects
from scheduler.core.waiting import WaitingQueue
from scheduler.core.worker_state import WorkerState
from scheduler.policies.batching import BATCHING_POLICIES
from shared.messages import Capacity, EndReason
from shared.pool_name import DEFAULT_POOL

_FAILED = EndReason.FAILED.value

KEPT_WHOLE_NS = 2_000_000_000
"""For how long the tokens of an ended request are kept: whoever drives the core may still tell of them. Its id is kept
for longer, since a long prompt takes a hundred times more."""


@dataclass(slots=True)
class RequestState:
    attempt: int
    sequences: list[Sequence]
    live: int
    ended_ns: int = 0
    searches: bool = False  # its sequences are the beams of one search


@dataclass(slots=True)
class QueueState:
    """The queue of one pool of a model that has ever had a worker, and the pool's workers."""

    queue: WaitingQueue
    fleet: Fleet  # the pool's workers as placement sees them
    workers: dict[str, WorkerState] = field(default_factory=dict)
    rate: ServiceRate = field(default_factory=ServiceRate)
    worker_lost_ns: int = 0  # when it last lost a worker; 0: since then everything that waits was seen to fit another


@dataclass(frozen=True, slots=True)
class QueueFigures:
    waiting: int  # sequences, with the choices that will fork from one that waits or is being prefilled
    tokens: int  # prompts and max_tokens
    service_rate: float  # sequences that leave the queue per second while somebody waits; 0: not measured yet


class CoreState:
    """``policy`` names a batching policy (scheduler.policies.batching)."""

    def __init__(self, limits: Limits, policy: str = "continuous", epoch: int = 1) -> None:
        self.limits = limits
        self.policy = BATCHING_POLICIES[policy]
        self.epoch = epoch
        self.counters = Counters()
        self.workers: dict[str, WorkerState] = {}
        self._resting: dict[str, QueueKey] = {}  # of the workers, those that rest
        self._num_resting: dict[QueueKey, int] = {}
        self._rules = PoolRules.parse(limits.pools, limits.pool_overflow, limits.pool_lend)
        self._queues: dict[QueueKey, QueueState] = {}
        self._requests: dict[str, RequestState] = {}
        self._live_of: dict[str, dict[str, None]] = {}  # gateway -> its requests with a live sequence
        self._ended: deque[tuple[int, str]] = deque()  # (when, request) of those without a live sequence, in order
        self._whole: deque[tuple[int, str]] = deque()  # those of them that still hold their tokens
        self._unsettled: dict[str, None] = {}  # workers of which results came since tenants' counters were up to date
        self._tombstones: dict[tuple[str, int], int] = {}  # (request, attempt) cancelled before its submit -> when
        self._created = 0  # sequences
        self._deadlines: dict[int, Sequence] = {}  # live sequences with a deadline, in order of submit
        self.lengths = OutputLengths(limits.length_quantile)
        self.fairness = VirtualTokenCounters()
        self._suspects = Suspects()

    @property
    def num_waiting(self) -> int:
        """Waiting sequences, with the choices that will fork from one that waits or is being prefilled."""
        return sum(state.queue.waiting for state in self._queues.values())

    @property
    def waiting_tokens(self) -> int:
        """Prompt tokens and max_tokens of what waits."""
        return sum(state.queue.tokens for state in self._queues.values())

    @property
    def full_queues(self) -> frozenset[QueueKey]:
        """Those that take not one more sequence, or not one more token."""
        most, most_tokens = self.limits.max_num_queued_reqs, self.limits.max_num_queued_tokens
        return frozenset(
            key
            for key, state in self._queues.items()
            if state.queue.waiting >= most or 0 < most_tokens <= state.queue.tokens
        )

    @property
    def queues(self) -> dict[QueueKey, WaitingQueue]:
        """Of every pool of a model that has ever had a worker."""
        return {key: state.queue for key, state in self._queues.items()}

    def queue_of(self, model: str, pool: str = DEFAULT_POOL) -> QueueFigures:
        """What waits for one pool of a model."""
        state = self._queues[QueueKey(model, pool)]
        return QueueFigures(state.queue.waiting, state.queue.tokens, state.rate.per_s)

    def workers_of(self, model: str, pool: str = DEFAULT_POOL) -> list[WorkerState]:
        """Those of one pool of a model."""
        state = self._queues.get(QueueKey(model, pool))
        return list(state.workers.values()) if state is not None else []

    def capacities_of(self, model: str, pool: str = DEFAULT_POOL) -> list[Capacity]:
        """By which requests to one pool of a model are judged: of workers that take newcomers, one of each kind."""
        return self._queues[QueueKey(model, pool)].fleet.capacities

    @property
    def pool_rules(self) -> PoolRules:
        return self._rules

    @property
    def oldest_waiting_ns(self) -> int:
        """When the sequence that has waited longest was submitted; 0 if none waits."""
        return min((state.queue.oldest_ns for state in self._queues.values() if state.queue), default=0)

    @property
    def num_running(self) -> int:
        return sum(len(worker.running) for worker in self.workers.values())

    @property
    def num_preempted(self) -> int:
        return sum(len(worker.preempted) for worker in self.workers.values())

    @property
    def num_swapped(self) -> int:
        """Preempted sequences whose blocks are in host memory."""
        return sum(bool(sequence.swapped) for worker in self.workers.values() for sequence in worker.preempted)

    def sequences_of(self, request_id: str) -> list[Sequence]:
        """The choices of a request (the beams of a search) that are remembered."""
        request = self._requests.get(request_id)
        return list(request.sequences) if request is not None else []

    def live_requests(self) -> list[str]:
        return [request_id for requests in self._live_of.values() for request_id in requests]

    def knows(self, request_id: str, attempt: int) -> bool:
        """True if the request is live here in this attempt: somebody is going to end it."""
        request = self._requests.get(request_id)
        return request is not None and request.attempt == attempt and request.live > 0

    def check(self) -> None:
        """Raise AssertionError unless the invariants hold (DESIGN 9: blocks, limits, each sequence in one place)."""
        for worker in self.workers.values():
            holders = list(worker.sequences())
            for sequence in holders:
                model, pool = sequence.home.key
                borrowed = pool in self._rules.lent.get(worker.serves.pool, ())
                assert sequence.home.key == worker.serves or (model == worker.serves.model and borrowed)
            worker.pool.check(worker.tables())
            coming = len(worker.arriving)
            assert len(worker.running) + len(worker.held) + coming <= self.limits.batch_slots(worker.capacity)
            check_moves(worker)
            assert len(worker.in_flight) <= self.limits.run_ahead
            hosted = [place for sequence in holders for place in sequence.host]
            assert sorted(hosted + worker.free_host) == list(range(worker.capacity.host_blocks))
            slots = [sequence.slot for sequence in holders if sequence.slot >= 0]
            assert len(set(slots)) == len(slots), "two sequences in one slot"
            for sequence in worker.running:
                assert sequence.status is Status.RUNNING and sequence.slot >= 0
                assert sequence.scheduled <= len(sequence.pages) * worker.capacity.block_size
            for sequence in worker.preempted:
                assert sequence.status in (Status.SETTLING, Status.PREEMPTED) and not sequence.pages
        tried = [worker.trial for worker in self.workers.values() if worker.trial]
        assert sorted(tried) == sorted(self._suspects.on_trial), "a group is tried by one worker at a time"
        waiting = 0
        for request in self._requests.values():
            waiting += sum(s.status is Status.WAITING for s in request.sequences)
            assert request.live == sum(s.status not in (Status.ENDED, Status.HELD) for s in request.sequences)
        for key, state in self._queues.items():
            assert all(one.status is Status.WAITING and one.home is state.queue for one in state.queue)
            assert state.queue.key == key
            assert [*state.workers] == [name for name, one in self.workers.items() if one.serves == key]
            assert all(self.workers[name] is one for name, one in state.workers.items())
            assert state.fleet.workers == state.workers
            state.fleet.check()
            state.queue.check()
            for sequence in state.queue:
                assert not sequence.parked or state.fleet.left_to(sequence) is not None
            resting = {name for name, one in state.workers.items() if one.rests}
            assert resting == {name for name, other in self._resting.items() if other == key}
            assert len(resting) == self._num_resting.get(key, 0)
        assert waiting == self.num_waiting
        live = {one for one, request in self._requests.items() if request.live}
        assert live == set(self.live_requests()) and len(live) == len(self.live_requests())
        for gateway, requests in self._live_of.items():
            assert all(self._requests[one].sequences[0].submit.gateway == gateway for one in requests)

    def _settle_service(self) -> None:
        """Bring the tenants' counters up to date. Output is charged when somebody looks, not token by token."""
        for name in self._unsettled:
            if name in self.workers:
                for sequence in self.workers[name].sequences():
                    self._charge(sequence)
        self._unsettled.clear()

    def _charge(self, sequence: Sequence) -> None:
        generated = sequence.generated
        if generated > sequence.charged:
            self.fairness.charge_output(sequence.submit.tenant, generated - sequence.charged)
            sequence.charged = generated

    def _finish(self, worker: WorkerState, sequence: Sequence, reason: str, now: int) -> None:
        """A sequence ended at its worker: its pages are free at once (a held batch keeps them)."""
        self.counters.finished += 1
        self.lengths.observe(sequence.generated)
        if self.policy.holds_batch and sequence.status is Status.RUNNING:
            worker.running.remove(sequence)
            worker.held.append(sequence)
            self._end(sequence, reason, now, Status.HELD)
            return
        if sequence.status is Status.RUNNING:
            worker.running.remove(sequence)
            worker.pool.release(sequence.pages)
            worker.free_slot(sequence.slot)
        else:
            worker.preempted.remove(sequence)
            worker.release_host(sequence)
        sequence.pages = []
        self._end(sequence, reason, now)

    def _release_held(self, worker: WorkerState) -> None:
        for sequence in worker.held:
            worker.pool.release(sequence.pages)
            worker.free_slot(sequence.slot)
            sequence.pages = []
            sequence.become(Status.ENDED)
        worker.held.clear()
        worker.static_columns = None

    def _unpin(self, head: Sequence) -> None:
        """The head is blocked no more: no worker keeps what its cache holds of it."""
        if head.home.blocked is head:
            for worker in self.workers.values():
                if worker.pinned_for is head:
                    worker.unpin()

    def _note(self, worker: WorkerState) -> None:
        """Something has changed with the worker that placement goes by."""
        self._queues[worker.serves].fleet.note(worker)
        self._rests(worker, worker.rests)

    def _rests(self, worker: WorkerState, yes: bool) -> None:
        """Whether the worker is there and rests."""
        name, key = worker.name, worker.serves
        if yes == (name in self._resting):
            return
        if yes:
            self._resting[name] = key
        else:
            del self._resting[name]
        self._num_resting[key] = self._num_resting.get(key, 0) + (1 if yes else -1)

    def _leave(self, sequence: Sequence) -> None:
        """Take a live sequence out of wherever it is; a slot it has is dropped by the next plan."""
        self._unpin(sequence)
        queue = sequence.home
        if sequence.children:  # it has not forked yet: the next choice takes its place
            heir, *rest = sequence.children
            heir.children, sequence.children = rest, []
            queue.push(heir)
        if sequence.status is Status.WAITING:
            for other in self._requests[sequence.request_id].sequences:
                if sequence in other.children:
                    other.children.remove(sequence)
                    return
            queue.remove(sequence)
            return
        worker = self.workers[sequence.worker]
        if sequence.status is Status.RUNNING:
            worker.running.remove(sequence)
            worker.pool.release(sequence.pages)
            if sequence in worker.forks:
                worker.forks.remove(sequence)  # the worker has not heard of it
            else:
                worker.drops.append(sequence.slot)
            worker.free_slot(sequence.slot)
            sequence.pages = []
            if self.policy.holds_batch and not worker.running:
                self._release_held(worker)
        else:
            worker.preempted.remove(sequence)
            worker.release_host(sequence)
        self._note(worker)

    def _end(self, sequence: Sequence, reason: str, now: int, status: Status = Status.ENDED) -> None:
        if sequence.move is not None:
            target = sequence.move.target
            sequence.move.cancel()
            self._note(target)
        sequence.become(status)
        sequence.end_reason = reason
        self._deadlines.pop(id(sequence), None)
        self._charge(sequence)
        self.fairness.leave(sequence.submit.tenant)
        request = self._requests[sequence.request_id]
        request.live -= 1
        if request.live == 0:
            request.ended_ns = now
            gateway = sequence.submit.gateway
            self._live_of[gateway].pop(sequence.request_id)
            if not self._live_of[gateway]:
                del self._live_of[gateway]
            self._ended.append((now, sequence.request_id))
            self._whole.append((now, sequence.request_id))

    def _forget(self, now: int) -> None:
        """Let go of what has ended: at first of what it held, in the end of all."""
        while self._whole and self._whole[0][0] < now - KEPT_WHOLE_NS:
            _, request_id = self._whole.popleft()
            request = self._requests.get(request_id)
            if request is not None and not request.live and request.ended_ns < now - KEPT_WHOLE_NS:
                for sequence in request.sequences:
                    if sequence.status is Status.ENDED:  # a held one is still in its batch
                        sequence.shed()
                # What was lost may be suspect, and a held one still has its slot: of all others only the id is kept.
                if all(one.end_reason != _FAILED and one.status is Status.ENDED for one in request.sequences):
                    request.sequences = []
        horizon = now - self.limits.tombstone_ns
        while self._ended and self._ended[0][0] < horizon:
            _, request_id = self._ended.popleft()
            request = self._requests.get(request_id)
            if request is not None and not request.live and request.ended_ns < horizon:  # not in a later attempt
                del self._requests[request_id]
