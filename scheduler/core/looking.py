"""One look of a worker at a queue, as admission sees it: what is left to others is somebody else's to say."""

from __future__ import annotations

from typing import Protocol

from scheduler.core.sequence import Sequence
from scheduler.core.worker_state import WorkerState


class Look(Protocol):
    """What a worker that looks at a queue leaves to others (see ``placement`` and ``lending``)."""

    spent: bool  # it has its share: the look is over

    def leaves(self, worker: WorkerState, sequence: Sequence, now: int, refused: bool = False) -> bool: ...

    def park(self, sequence: Sequence) -> None:
        """After the look: the one to whom the sequence is left sees it first."""
