"""What the core knows of one worker: its pool, its slots, who runs there, and which plans are in flight."""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from scheduler.core.blocks import BlockPool
from scheduler.core.sequence import Seniority, Sequence, pages_for
from shared.messages import Capacity


@dataclass(slots=True)
class PlanInFlight:
    """A plan whose result is not in: which sequences its rows ran, in the order of the result's tokens."""

    step: int
    planned_ns: int
    sampled: list[tuple[int, Sequence]]  # (slot, sequence) for each row that samples
    ran: list[Sequence]  # every sequence with a row
    decode_tokens: int
    prefill_tokens: int
    padding_tokens: int


class RunningSet:
    """Running sequences in order of seniority, the most senior first."""

    def __init__(self) -> None:
        self._keys: list[Seniority] = []
        self._sequences: list[Sequence] = []

    def __len__(self) -> int:
        return len(self._keys)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._sequences)

    def __getitem__(self, index: int) -> Sequence:
        return self._sequences[index]

    def add(self, sequence: Sequence) -> None:
        index = bisect_left(self._keys, sequence.seniority)
        self._keys.insert(index, sequence.seniority)
        self._sequences.insert(index, sequence)

    def remove(self, sequence: Sequence) -> None:
        index = bisect_left(self._keys, sequence.seniority)
        assert self._sequences[index] is sequence
        del self._keys[index], self._sequences[index]


@dataclass(slots=True)
class WorkerState:
    name: str
    incarnation: int
    capacity: Capacity
    pool: BlockPool
    running: RunningSet = field(default_factory=RunningSet)
    held: list[Sequence] = field(default_factory=list)  # ended members of a static batch, still in their slots
    preempted: list[Sequence] = field(default_factory=list)  # settling and settled, most senior first
    in_flight: deque[PlanInFlight] = field(default_factory=deque)
    next_step: int = 1
    drops: list[int] = field(default_factory=list)  # slots the next plan must drop
    draining: bool = False
    backlog: bool = False  # work was in hand when the last result came
    # Left-padded prefill of a static batch: (columns done, columns in all); None outside of one.
    static_columns: tuple[int, int] | None = None
    _free_slots: list[int] = field(default_factory=list)
    _slots_made: int = 0

    def take_slot(self) -> int:
        """The lowest free slot: the worker's tables stay small."""
        if self._free_slots:
            return heapq.heappop(self._free_slots)
        self._slots_made += 1
        return self._slots_made - 1

    def free_slot(self, slot: int) -> None:
        heapq.heappush(self._free_slots, slot)

    def add_preempted(self, sequence: Sequence) -> None:
        insort(self.preempted, sequence, key=lambda item: item.seniority)

    def can_hold(self, sequence: Sequence) -> bool:
        """True if the sequence's worst case fits this worker when it is empty (workers of a model may differ)."""
        total = sequence.worst_case_tokens + 1
        blocks = pages_for(sequence.worst_case_tokens, self.capacity.block_size)
        return total <= self.capacity.max_model_len and blocks <= self.pool.num_blocks

    @property
    def has_work(self) -> bool:
        return bool(self.running) or bool(self.preempted) or bool(self.drops)

    def sequences(self) -> Iterator[Sequence]:
        yield from self.running
        yield from self.held
        yield from self.preempted
