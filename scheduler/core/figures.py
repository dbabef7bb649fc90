"""Memory and queue figures of a worker at any moment. Read-only."""

from __future__ import annotations

from dataclasses import dataclass

from scheduler.core.worker_state import WorkerState


@dataclass(frozen=True, slots=True)
class MemoryFigures:
    """In blocks, but for ``slots`` and ``wasted``."""

    total: int
    used: int  # referenced
    cached: int  # not referenced, content usable again
    shared: int  # referenced twice or more
    slots: int  # token slots in the block tables
    wasted: int  # of those, slots that hold no token: internal fragmentation

    @property
    def waste_share(self) -> float:
        return self.wasted / self.slots if self.slots else 0.0


def memory_figures(worker: WorkerState) -> MemoryFigures:
    """Walks the running sequences. A prompt that is partly computed counts whole: its blocks are meant for it."""
    size = worker.capacity.block_size
    slots = wasted = 0
    for sequence in (*worker.running, *worker.held):
        room = len(sequence.pages) * size
        slots += room
        wasted += room - max(sequence.scheduled, len(sequence.tokens))
    pool = worker.pool
    return MemoryFigures(pool.num_blocks, pool.num_used, pool.num_cached, pool.num_shared, slots, max(0, wasted))
