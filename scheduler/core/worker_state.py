"""What the core knows of one worker: its pool, its slots, who runs there, and which plans are in flight."""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from scheduler.core.blocks import BlockPool
from scheduler.core.move import Fetching, Move
from scheduler.core.pools import QueueKey
from scheduler.core.sequence import Seniority, Sequence, pages_for
from scheduler.core.step_time import PlannedWork, StepTimePredictor
from shared.messages import Capacity, Role
from shared.page_hash import extend_chain, root_hash
from shared.pool_name import DEFAULT_POOL

_USUAL_PROMPT = 512

MOST_SALTS = 10_000
"""Cache salts (by adapter) whose roots are remembered; they are recomputed when asked for again."""


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
    work: PlannedWork  # as the step-time predictor counts it
    swapped: int = 0  # blocks swapped out or in
    trial: int = 0  # the group of suspects that it runs, and nobody else; 0: it is an ordinary one
    moving: list[tuple[Move, int]] = field(default_factory=list)  # moves away from it, and tokens computed with it


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
    slots: int  # of its batch
    max_model_len: int  # longest prompt + output that it is given, in tokens
    running: RunningSet = field(default_factory=RunningSet)
    held: list[Sequence] = field(default_factory=list)  # ended members of a static batch, still in their slots
    preempted: list[Sequence] = field(default_factory=list)  # settling and settled, most senior first
    in_flight: deque[PlanInFlight] = field(default_factory=deque)
    next_step: int = 1
    drops: list[int] = field(default_factory=list)  # slots the next plan must drop
    forks: list[Sequence] = field(default_factory=list)  # beams that the next plan must start
    feeds: list[tuple[Sequence, int]] = field(default_factory=list)  # tokens that the next plan must hand to beams
    searches: bool = False  # a beam search may be running
    swap_us_per_block: float = 0.0  # one way, as measured; 0 before any swap
    draining: bool = False
    role: Role = Role.MIXED
    takes_new: bool = True  # whether sequences of the queue enter here (scheduler.core.roles)
    departing: list[Move] = field(default_factory=list)  # of what runs here
    arriving: list[Move] = field(default_factory=list)  # of what runs elsewhere, with blocks held here
    fetching: dict[int, Fetching] = field(default_factory=dict)  # without an answer, by number; into this worker
    lent: dict[int, Fetching] = field(default_factory=dict)  # out of it
    drop_fetches: list[int] = field(default_factory=list)  # whose answers the next plan acknowledges
    fetch_pace: dict[str, tuple[float, float]] = field(default_factory=dict)  # source -> (us, blocks) fetched of late
    trial: int = 0  # the group of suspects (scheduler.core.suspects) that has the worker for itself; 0: none
    backlog: bool = False  # work was in hand when the last result came
    # Left-padded prefill of a static batch: (columns done, columns in all); None outside of one.
    static_columns: tuple[int, int] | None = None
    prefix_caching: bool = True
    predictor: StepTimePredictor = field(default_factory=StepTimePredictor)
    pinned_for: Sequence | None = None  # the blocked head whose cached prefix must not be evicted
    pinned: list[int] = field(default_factory=list)
    num_pinned: int = 0  # of those, blocks that only the pin keeps from being had
    lack: tuple[str, str] = (
        "",
        "",
    )  # (Lack, request id): what those that wait waited for at the last look; empty: none
    full_look: tuple[int, int, int] | None = None  # (step, changes of the queue, releases) when admission left off
    refused: tuple[int, int, int] | None = None  # (step, releases, blocks) when it had no room for one that was to move
    prefilling: list[Sequence] = field(default_factory=list)  # with prompt tokens that the last plan left over
    prompts_left: int = 0  # how many tokens those are
    prompts_us: float = 0.0  # that steps have taken because of prompts, since it came up
    expected_growth: int = 0  # blocks that what runs is expected to grow by, as of the last look at the queue
    _roots: dict[tuple[str, str], bytes] = field(default_factory=dict)  # (salt, adapter) -> root of their hash chains
    _free_host: list[int] | None = None
    _free_slots: list[int] = field(default_factory=list)
    _slots_made: int = 0

    @property
    def serves(self) -> QueueKey:
        """The queue of its pool."""
        return QueueKey(self.capacity.model, self.capacity.pool or DEFAULT_POOL)

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
        hits = self.pool.match(self.prompt_chain(sequence))
        return Placement(hits, blocks - len(hits), blocks - len(hits) + self.pool.num_unreferenced(hits))

    def hold(self, sequence: Sequence, placement: Placement) -> None:
        """Give the sequence its pages; what the cache holds counts as computed."""
        self.pool.share(placement.hits)
        fresh = self.pool.allocate(placement.new)
        assert fresh is not None
        sequence.pages = placement.hits + fresh
        sequence.scheduled = len(placement.hits) * self.capacity.block_size
        sequence.registered = len(placement.hits)

    def written(self, sequence: Sequence) -> list[int]:
        """The blocks of the sequence that hold something: what a fork of it shares. It may have more, reserved ones."""
        return sequence.pages[: pages_for(sequence.scheduled, self.capacity.block_size)]

    def pin(self, head: Sequence, blocks: list[int]) -> None:
        """Keep the blocked head's cached prefix from being evicted by those who pass it."""
        self.unpin()
        self.num_pinned = self.pool.num_unreferenced(blocks)
        self.pool.share(blocks)
        self.pinned_for, self.pinned = head, list(blocks)

    def unpin(self) -> bool:
        """Give the pinned blocks back. True if there were any: growth comes before the head's prefix."""
        had = bool(self.pinned)
        if had:
            self.pool.release(self.pinned)
        self.pinned_for, self.pinned, self.num_pinned = None, [], 0
        return had

    @property
    def free_host(self) -> list[int]:
        """Free places in host memory."""
        if self._free_host is None:
            self._free_host = list(range(self.capacity.host_blocks - 1, -1, -1))
        return self._free_host

    def release_host(self, sequence: Sequence) -> None:
        """The sequence's copy in host memory is of no more use."""
        if sequence.host:
            self.free_host.extend(sequence.host)
            sequence.host, sequence.swapped = [], 0

    def swap_pays(self, sequence: Sequence) -> bool:
        """True if moving its blocks out and back is quicker than computing them again, as far as was measured."""
        blocks = pages_for(sequence.scheduled, self.capacity.block_size)
        if not blocks or blocks > len(self.free_host):
            return False
        recompute_us = self.predictor.prompt_us(sequence.scheduled)
        return 2 * blocks * self.swap_us_per_block <= recompute_us or not self.swap_us_per_block

    def own_blocks(self) -> list[int]:
        """For each running sequence, the blocks that come back when it ends: those that it alone refers to.

        A shared block comes back with its last holder, later than any of these says: leaving it out errs on the safe
        side. References along a table never grow, so that the shared part is a prefix, found by bisection.
        """
        running = self.running
        if not self.pool.num_shared:
            return [len(sequence.pages) for sequence in running]
        refs = self.pool.refs
        own = []
        for sequence in running:
            pages = sequence.pages
            low, high = 0, len(pages)
            while low < high:
                middle = (low + high) // 2
                if refs(pages[middle]) > 1:
                    low = middle + 1
                else:
                    high = middle
            own.append(len(pages) - low)
        return own

    def committed_blocks(self) -> int:
        """Blocks in use if every sequence that runs or is coming reached its max_tokens, sharing nothing."""
        coming = sum(self.worst_case_blocks(move.sequence) for move in self.arriving)
        return coming + sum(map(self.worst_case_blocks, self.running))

    def worst_case_blocks(self, sequence: Sequence) -> int:
        """Blocks that it and what will fork from it have at their max_tokens, sharing nothing."""
        return pages_for(sequence.worst_case_tokens, self.capacity.block_size) * (1 + sequence.to_fork)

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

    def prompt_chain(self, sequence: Sequence) -> list[bytes]:
        """Hashes of the blocks of which the cache may hold some. Empty without a prefix cache."""
        if not self.prefix_caching:
            return []
        # Never the whole sequence: its last token is computed again, to have logits to sample from.
        return self._chain(sequence, (len(sequence.tokens) - 1) // self.capacity.block_size)

    def root_of(self, salt: str, adapter: str = "") -> bytes:
        """Where the hash chains of sequences with this cache salt and LoRA adapter begin."""
        root = self._roots.get((salt, adapter))
        if root is None:
            if len(self._roots) >= MOST_SALTS:
                self._roots.clear()
            capacity = self.capacity
            stored = f"{capacity.dtype}{capacity.kv_dtype and ':'}{capacity.kv_dtype}/{capacity.block_size}"
            root = self._roots[salt, adapter] = root_hash(capacity.model, stored, salt, adapter)
        return root

    def _chain(self, sequence: Sequence, blocks: int) -> list[bytes]:
        root = self.root_of(sequence.submit.cache_salt, sequence.submit.adapter)
        if sequence.chain_root != root:
            sequence.chain_root = root
            sequence.chain = []
        extend_chain(sequence.chain, root, sequence.tokens, self.capacity.block_size, blocks)
        return sequence.chain if len(sequence.chain) == blocks else sequence.chain[:blocks]

    def can_hold(self, sequence: Sequence) -> bool:
        """True if the sequence's worst case fits this worker when it is empty (workers of a model may differ), with all
        the beams of a search, and the worker has its adapter."""
        if sequence.submit.adapter and sequence.submit.adapter not in self.capacity.adapters:
            return False
        total = sequence.worst_case_tokens + 1
        blocks = pages_for(sequence.worst_case_tokens, self.capacity.block_size)
        beams = max(1, sequence.submit.sampling.beam_width)  # a search goes on only with all of its beams
        return total <= self.max_model_len and beams <= self.slots and beams * blocks <= self.pool.num_blocks

    @property
    def has_searches(self) -> bool:
        """True if the beams of a search are here."""
        if self.searches:
            self.searches = any(one.group is not None for one in self.sequences())
        return self.searches

    @property
    def occupied(self) -> int:
        """Slots in use or spoken for: a search keeps as many as it has beams at most, and what is coming has one."""
        if not self.has_searches:
            return len(self.running) + len(self.arriving)
        beams = {id(s.group): s.group.width for s in self.sequences() if s.group is not None}
        return sum(s.group is None for s in self.running) + len(self.arriving) + sum(beams.values())

    @property
    def predicted_us(self) -> float:
        """How long the oldest plan in flight is expected to take; 0 if none is, or nothing was measured yet."""
        return self.predictor.predict_us(self.in_flight[0].work) if self.in_flight else 0.0

    def observe(self, work: PlannedWork, took_us: float) -> None:
        """A step is over: what it teaches of those to come, and how much of it was the prompts'."""
        if work.prefill:
            decodes_us = self.predictor.decode_us(work.decodes) if work.decodes else 0.0
            self.prompts_us += max(0.0, took_us - decodes_us)
        self.predictor.observe(work, took_us)

    def speed_us(self) -> tuple[float, float, float] | None:
        """What a prompt token, a step that only decodes and one more row in it take; None as long as either kind of
        step was not measured."""
        rows = max(1, len(self.running))
        token, step = self.predictor.prompt_us(_USUAL_PROMPT) / _USUAL_PROMPT, self.predictor.decode_us(rows)
        if not token or not step:
            return None
        return token, step, max(0.0, self.predictor.decode_us(rows + 1) - step)

    @property
    def next_plan(self) -> tuple[int, int]:
        """Which one comes next. No later process of the same name, and no later batch of this one, has the same."""
        return self.incarnation, self.next_step

    @property
    def has_work(self) -> bool:
        """Whether it may have something to plan, but for what waits in its queue."""
        return bool(
            self.running or self.preempted or self.drops or self.drop_fetches
            or any(move.wants_plan for move in self.arriving)
        )  # fmt: skip

    @property
    def rests(self) -> bool:
        """True if it has nothing in hand, so that only what waits in its queue could give it something to do."""
        return not (
            self.running or self.in_flight or self.preempted or self.drops or self.drop_fetches or self.arriving
        )

    @property
    def transferring(self) -> bool:
        """True if blocks here come free by themselves, without any plan for this worker: when a fetch is over, or when
        somebody who gets no more rows is gone."""
        return bool(self.fetching or self.lent) or any(move.sequence.leaving for move in self.departing)

    def sequences(self) -> Iterator[Sequence]:
        yield from self.running
        yield from self.held
        yield from self.preempted

    def tables(self) -> Iterator[list[int]]:
        """Every holder of blocks."""
        for sequence in self.sequences():
            yield sequence.pages
        yield self.pinned
        for move in self.arriving:
            yield move.pages
        for fetching in self.fetching.values():
            yield fetching.here
        for fetching in self.lent.values():
            yield fetching.there
