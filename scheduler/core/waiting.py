"""The waiting queue of one model: first in, first out inside a priority class, by original arrival."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator

from scheduler.core.sequence import Seniority, Sequence


class WaitingQueue:
    """Ordered by seniority, so that a resumed request takes the place its first arrival gave it."""

    def __init__(self) -> None:
        self._keys: list[Seniority] = []
        self._by_key: dict[Seniority, Sequence] = {}

    def __len__(self) -> int:
        return len(self._keys)

    def __iter__(self) -> Iterator[Sequence]:
        return (self._by_key[key] for key in self._keys)

    @property
    def head(self) -> Sequence | None:
        return self._by_key[self._keys[0]] if self._keys else None

    def push(self, sequence: Sequence) -> None:
        insort(self._keys, sequence.seniority)
        self._by_key[sequence.seniority] = sequence

    def remove(self, sequence: Sequence) -> None:
        del self._by_key[sequence.seniority]
        del self._keys[bisect_left(self._keys, sequence.seniority)]

    def position(self, sequence: Sequence) -> int:
        return bisect_left(self._keys, sequence.seniority)
