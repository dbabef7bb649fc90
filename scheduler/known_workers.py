"""What a leader remembers of workers by their names, also of those that are gone. Pure.

Names come and go with pods and processes, so only the last ones that went are remembered. Forgetting is safe: the next
batch of a name that is not known begins above every step of those that were forgotten, and a process that comes back
and tells this leader's epoch counts as never told of it, for which the leader takes a new one.
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass

MOST_GONE = 4096


@dataclass(slots=True)
class _Known:
    told: int = 0  # incarnation that has been sent a reset, and so knows the epoch
    refused: int = 0  # incarnation whose refusal was logged
    lost: tuple[int, int] = (0, 0)  # (incarnation, first step that it has not seen) of the batch that was lost last


class KnownWorkers:
    def __init__(self) -> None:
        self._known: dict[str, _Known] = {}  # in the order in which something was noted last
        self._fresh_step = 1  # the first step of a batch of whoever is not known

    def __len__(self) -> int:
        return len(self._known)

    def told(self, worker: str, incarnation: int) -> bool:
        """Whether the process, or one before it, has been sent a reset."""
        known = self._known.get(worker)
        return known is not None and incarnation <= known.told

    def tell(self, worker: str, incarnation: int) -> None:
        """It is sent a reset."""
        self._note(worker).told = incarnation

    def refuse(self, worker: str, incarnation: int) -> bool:
        """It is refused: whether that is news."""
        known = self._note(worker)
        news, known.refused = known.refused != incarnation, incarnation
        return news

    def lose(self, worker: str, incarnation: int, next_step: int) -> None:
        """Its batch is lost, which had steps below ``next_step``."""
        self._note(worker).lost = incarnation, next_step

    def first_step(self, worker: str, incarnation: int) -> int:
        """A late result of a lost batch must fit no plan of the new one, and a late plan of it no step of the new."""
        known = self._known.get(worker)
        if known is not None and known.lost[0] == incarnation:
            return max(self._fresh_step, known.lost[1] + 1)
        return self._fresh_step

    def trim(self, present: Container[str], count: int) -> None:
        """Forget those that went first, if too many have gone. ``count`` names are ``present``."""
        excess = len(self._known) - count - MOST_GONE
        if excess <= 0:
            return
        for worker in [worker for worker in self._known if worker not in present][:excess]:
            self._fresh_step = max(self._fresh_step, self._known.pop(worker).lost[1] + 1)

    def _note(self, worker: str) -> _Known:
        known = self._known[worker] = self._known.pop(worker, _Known())
        return known
