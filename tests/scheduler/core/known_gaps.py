"""What the core is known to do wrong, recognised just before it happens: the random tests end an example there.

Each entry goes when the core is mended; the tests are then as strict as their words.
"""

from __future__ import annotations

from scheduler.core.sequence import Status, pages_for
from scheduler.core.worker_state import WorkerState


class KnownGap(Exception):
    """Nothing that follows in this example means anything."""


def raise_if_known(worker: WorkerState) -> None:
    """Raise KnownGap if the state is one from which the core goes wrong."""
    size = worker.capacity.block_size
    for sequence in worker.running:
        if sequence.group is not None and sequence.remaining > 1 and len(sequence.tokens) > len(sequence.pages) * size:
            # Preempted with its continuations known, and its search goes on before it is computed again.
            raise KnownGap("a beam was fed a token for which it has no block")
        reserved = sequence.pages[pages_for(sequence.scheduled, size) :]
        if any(worker.pool.refs(page) > 1 for page in reserved):
            # The parent came back with its worst case reserved: both would write to the same blocks.
            raise KnownGap("a fork shares blocks that nothing is written to yet")


def raise_if_stalled(worker: WorkerState) -> None:
    """Raise KnownGap if nothing can grow since each possible victim shares all of its blocks with another, or nobody
    can enter since a pin was left behind."""
    if has_stale_pin(worker):
        raise KnownGap("another worker took the blocked head, and this one's pin stays")
    victims = list(worker.running)[1:]
    if victims and not any(worker.pool.refs(page) == 1 for sequence in victims for page in sequence.pages):
        raise KnownGap("whoever could be preempted would free nothing alone")


def has_stale_pin(worker: WorkerState) -> bool:
    return worker.pinned_for is not None and worker.pinned_for.status is not Status.WAITING
