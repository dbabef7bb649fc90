"""What an idle worker lends: while nothing of its own pool runs on it or waits, it takes requests of another pool whose
own workers have no room, as far as the rules allow. Pure, and read-only.

It takes them in order and passes nobody: the first that does not fit ends the look, so that a lender neither holds the
other queue's reservation nor shifts service between its tenants. What it lends at most leaves room for the next request
of its own pool, beside which the borrowed ones run to their ends.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import islice

from scheduler.core.limits import Limits
from scheduler.core.pools import PoolRules, QueueKey
from scheduler.core.sequence import Sequence
from scheduler.core.state import QueueState
from scheduler.core.waiting import WaitingQueue
from scheduler.core.worker_state import WorkerState

LENT_SHARE = 0.5
"""Of a worker's slots and KV blocks: what it lends at most."""


class Lending:
    """A lender's look at the queue that it takes from; it takes ``most`` sequences."""

    def __init__(self, queue: WaitingQueue, most: int) -> None:
        self.queue = queue
        self._left = most
        self.spent = False

    def leaves(self, worker: WorkerState, sequence: Sequence, now: int, refused: bool = False) -> bool:
        """True if the sequence is left to its own pool's workers and to other lenders."""
        self.spent = self._left <= 0
        self._left -= 1
        return self.spent

    def park(self, sequence: Sequence) -> None:
        """What a lender leaves is left to nobody in particular."""


def borrower(
    worker: WorkerState, queues: Mapping[QueueKey, QueueState], rules: PoolRules, limits: Limits
) -> Lending | None:
    """The queue that the worker, of whose own pool nothing waits, takes from now; None: it lends nothing."""
    lent = rules.lent.get(worker.serves.pool)
    if not lent or worker.draining or worker.trial:
        return None
    slots = int(limits.batch_slots(worker.capacity) * LENT_SHARE) - worker.occupied
    if slots <= 0 or worker.pool.num_used >= worker.pool.num_blocks * LENT_SHARE:
        return None
    for pool in lent:
        state = queues.get(QueueKey(worker.capacity.model, pool))
        if state is None or not state.queue or state.fleet.has_room:
            continue
        if not any(map(worker.can_hold, islice(state.queue, limits.backfill_window + 1))):
            continue
        own = queues[worker.serves].queue
        if any(one.home is own for one in worker.sequences()):
            return None
        return Lending(state.queue, min(slots, -(-len(state.queue) // _lenders(state, queues, rules))))
    return None


def _lenders(state: QueueState, queues: Mapping[QueueKey, QueueState], rules: PoolRules) -> int:
    """Among how many workers what waits may be shared out; at least the one that asks."""
    lending = (QueueKey(state.queue.key.model, pool) for pool in rules.lenders_to(state.queue.key.pool))
    return max(1, sum(len(queues[key].workers) for key in lending if key in queues and not queues[key].queue))
