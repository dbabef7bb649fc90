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
from shared.page_hash import extend_chain, root_hash

MOST_SALTS = 10_000
"""Cache salts whose roots are remembered; they are recomputed when asked for again."""


@dataclass(slots=True, frozen=True)
class Placement:
    """``hits`` are cached pages that are used again, ``new`` pages are needed beside them; ``takes`` is what both
    together take from the pages that can be had."""

    hits: list[int]
    new: int
    takes: int


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
    prefix_caching: bool = True
    _roots: dict[str, bytes] = field(default_factory=dict)  # cache salt -> root of its hash chains
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

    def place(self, sequence: Sequence, tokens: int) -> Placement:
        """What holding ``tokens`` tokens of the sequence would take here, given what the prefix cache holds."""
        blocks = pages_for(tokens, self.capacity.block_size)
        hits: list[int] = []
        if self.prefix_caching:
            # Never the whole sequence: its last token is computed again, to have logits to sample from.
            hits = self.pool.match(self._chain(sequence, (len(sequence.tokens) - 1) // self.capacity.block_size))
        return Placement(hits, blocks - len(hits), blocks - len(hits) + self.pool.num_unreferenced(hits))

    def hold(self, sequence: Sequence, placement: Placement) -> None:
        """Give the sequence its pages; what the cache holds counts as computed."""
        self.pool.share(placement.hits)
        fresh = self.pool.allocate(placement.new)
        assert fresh is not None
        sequence.pages = placement.hits + fresh
        sequence.scheduled = len(placement.hits) * self.capacity.block_size
        sequence.registered = len(placement.hits)

    def register(self, sequence: Sequence, computed: int) -> None:
        """Index the pages that ``computed`` leading tokens fill. Their tokens must be known."""
        if not self.prefix_caching:
            return
        full = computed // self.capacity.block_size
        if full > sequence.registered:
            chain = self._chain(sequence, full)
            for index in range(sequence.registered, full):
                self.pool.register(sequence.pages[index], chain[index])
            sequence.registered = full

    def _chain(self, sequence: Sequence, blocks: int) -> list[bytes]:
        salt = sequence.submit.cache_salt
        root = self._roots.get(salt)
        if root is None:
            if len(self._roots) >= MOST_SALTS:
                self._roots.clear()
            capacity = self.capacity
            root = self._roots[salt] = root_hash(capacity.model, f"{capacity.dtype}/{capacity.block_size}", salt)
        if sequence.chain_root != root:
            sequence.chain_root = root
            sequence.chain = []
        extend_chain(sequence.chain, root, sequence.tokens, self.capacity.block_size, blocks)
        return sequence.chain if len(sequence.chain) == blocks else sequence.chain[:blocks]

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
