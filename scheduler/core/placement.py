"""Which worker of a model a waiting sequence should go to. Pure, and read-only: nothing is bound before admission.

A worker that plans looks at the queue in order and leaves a sequence to another worker only if that one could admit it
now and is where it delays everybody least: itself until its first token and its end, and those that run there. A prefix
that a worker holds, or is about to compute, counts as computed. A full worker holds nobody's place, and nobody is left
to others for longer than some of their steps.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

from scheduler.core.lengths import OutputLengths
from scheduler.core.limits import Limits
from scheduler.core.sequence import Sequence as CoreSequence
from scheduler.core.sequence import Status, pages_for
from scheduler.core.worker_state import WorkerState

TIE_SHARE = 0.5
"""Of the time that the whole prompt takes: workers whose delays differ by less are equal, and the content decides."""

PATIENCE_STEPS = 4
LEAST_PATIENCE_NS = 20_000_000
MOST_PATIENCE_NS = 1_000_000_000
"""How long a sequence is left to others in all: so many steps of the one it is left to, within these limits."""

MOST_CHOICES = 64
MOST_SCORES = 1024
"""Sequences that one look chooses a worker for, fewer where that compares many workers. Of what waits behind them the
worker takes its share: as many as bring it level with the others if all of them do."""

UNMEASURED = (100.0, 10_000.0, 50.0)
"""Microseconds of a prompt token, a decode step and a row in it, as long as no worker of the model has run any. Only
their ratios count."""

_GOLDEN = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1


@dataclass(slots=True)
class Load:
    """A worker as placement sees it, with what this look has left to it so far."""

    worker: WorkerState
    slots: int  # free
    free: int  # blocks for prompts, less what those that run are expected to grow by
    rows: int  # sequences that run
    queued: int = 0  # prompt tokens that a newcomer's would wait for or share the budget with
    idle: bool = True  # nothing runs: what is left to it may have every block
    token_us: float = UNMEASURED[0]
    step_us: float = UNMEASURED[1]
    row_us: float = UNMEASURED[2]
    form: tuple[str, str, int, int, int] = ("", "", 0, 0, 0)  # equal ones hold the same, in blocks of the same hashes
    computes: dict[bytes, list[list[bytes]]] = field(default_factory=dict)  # first block -> chains being computed

    def hits(self, chain: list[bytes]) -> int:
        """Blocks of ``chain`` that the worker holds, or will when it has computed what was given to it."""
        if not chain:
            return 0
        found = _depth(chain, self.worker.pool.holds)
        for other in self.computes.get(chain[0], ()):
            found = max(found, _common(chain, other))
        return found

    def has_room(self, blocks: int, hits: int) -> bool:
        """True if ``blocks`` would do, as far as can be told without looking through all that runs there."""
        return (blocks if self.idle else blocks - hits) <= self.free

    def give(self, sequence: CoreSequence, chain: list[bytes], hits: int) -> None:
        """Count the sequence among the worker's own from now on."""
        size = self.worker.capacity.block_size
        self.slots -= max(1, sequence.submit.sampling.beam_width)
        self.free -= pages_for(len(sequence.tokens), size) - hits
        self.rows += 1
        self.queued += len(sequence.tokens) - hits * size
        self.idle = False
        if chain:
            self.computes.setdefault(chain[0], []).append(chain)


def delay_us(load: Load, rest: int, outputs: int) -> float:
    """What it costs all together if a sequence with ``rest`` prompt tokens to compute and ``outputs`` expected tokens
    runs there: its own time until its first token and until its end, and what those that run lose by it."""
    own = rest * load.token_us
    until_first = load.queued * load.token_us + own + load.step_us
    return until_first + outputs * (load.step_us + load.row_us) + load.rows * (own + outputs * load.row_us)


def rendezvous(content: bytes, key: int) -> int:
    """The weight of a worker for a content: the greatest one has it, and a worker that joins or leaves moves only what
    it gets or had (highest random weight; Thaler and Ravishankar, IEEE/ACM ToN 1998)."""
    mixed = (int.from_bytes(content[:8], "little") ^ key) * _GOLDEN & _MASK
    mixed = (mixed ^ mixed >> 30) * 0xBF58476D1CE4E5B9 & _MASK
    mixed = (mixed ^ mixed >> 27) * 0x94D049BB133111EB & _MASK
    return mixed ^ mixed >> 31


@lru_cache(4096)
def key_of(name: str) -> int:
    """A worker's part in ``rendezvous``."""
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little")


def patience_ns(load: Load) -> int:
    """How long a sequence may have been left to others, in all, for it to be left to this one now."""
    return min(MOST_PATIENCE_NS, max(LEAST_PATIENCE_NS, int(PATIENCE_STEPS * load.step_us * 1000)))


class Placing:
    """One look at a queue, in its order. ``workers`` are those of its model."""

    def __init__(
        self, limits: Limits, lengths: OutputLengths, workers: Iterable[WorkerState], waiting: int
    ) -> None:  # fmt: skip
        self._limits = limits
        self._waiting = waiting
        self._choices = 0
        self._level = 0
        self.spent = False  # the worker that looks has its share, and no choice is left
        self._lengths = lengths
        self._workers = list(workers)
        self._made: list[Load] | None = None
        self._chains: dict[tuple[CoreSequence, bytes], list[bytes]] = {}
        self._names: list[str] = []

    def leaves(self, worker: WorkerState, sequence: CoreSequence, now: int, refused: bool = False) -> bool:
        """True if ``worker`` should leave the sequence to another one. ``refused``: it has no room for it itself."""
        if len(self._workers) == 1:
            return False
        own = next((load for load in self._loads if load.worker is worker), None)
        if refused and own is not None:
            own.slots = 0
        self._choices += 1
        if self._choices > min(MOST_CHOICES, MOST_SCORES // max(1, len(self._loads))):
            if refused or own is None:
                return False
            self.spent = own.rows >= self._level and _patient(sequence, own, now)
            if not self.spent:
                self._give(own, sequence)
            return self.spent
        chosen = self.choose(sequence)
        if chosen is None or chosen is own or not _patient(sequence, chosen, now):
            if own is not None and not refused:
                self._give(own, sequence)
            return False
        if not sequence.left_since:
            sequence.left_since = now
        self._give(chosen, sequence)
        return True

    def first_asked(self, queue: Iterable[CoreSequence], now: int) -> tuple[list[str], bool]:
        """(workers that the sequences should go to, whether others may have something to plan too)."""
        names: dict[str, None] = {}
        others = False
        for sequence in queue:
            chosen = self.choose(sequence)
            if chosen is None:
                others = True
                continue
            others = others or not _patient(sequence, chosen, now)
            self._give(chosen, sequence)
            names[chosen.worker.name] = None
        return list(names), others

    def choose(self, sequence: CoreSequence) -> Load | None:
        """Where the sequence should go, of the workers that could admit it now; None if none could."""
        width = max(1, sequence.submit.sampling.beam_width)
        known: dict[tuple[str, str, int, int, int], tuple[int, list[bytes]]] = {}
        able: list[tuple[Load, int]] = []
        for load in self._loads:
            if load.slots < width:
                continue
            if load.form not in known:
                fits = load.worker.can_hold(sequence)
                blocks = pages_for(len(sequence.tokens), load.worker.capacity.block_size) if fits else -1
                known[load.form] = blocks, self._chain(load, sequence)
            blocks, chain = known[load.form]
            if blocks >= 0 and load.has_room(blocks, held := load.hits(chain)):
                able.append((load, held))
        if len(able) < 2:
            return able[0][0] if able else None
        if self._limits.placement == "round-robin":
            turn = sequence.number % len(self._names)
            order = {name: place for place, name in enumerate(self._names[turn:] + self._names[:turn])}
            return min((load for load, _ in able), key=lambda load: order[load.worker.name])
        if self._limits.placement == "least-loaded":
            return min((load for load, _ in able), key=lambda load: (load.rows, load.worker.name))
        return self._by_delay(sequence, able)

    def _by_delay(self, sequence: CoreSequence, able: Sequence[tuple[Load, int]]) -> Load:
        tokens = len(sequence.tokens)
        outputs = self._lengths.left_at(0.5, sequence.generated, sequence.submit.sampling.max_tokens)
        delays = [
            delay_us(load, tokens - held * load.worker.capacity.block_size, outputs) for load, held in able
        ]  # fmt: skip
        least = min(delays)
        tie = TIE_SHARE * tokens * able[delays.index(least)][0].token_us
        equal = [load for (load, _), delay in zip(able, delays, strict=True) if delay <= least + tie]
        if len(equal) == 1:
            return equal[0]
        chain = self._chain(equal[0], sequence)
        content = chain[0] if chain else hashlib.blake2b(sequence.request_id.encode(), digest_size=8).digest()
        return max(equal, key=lambda load: (rendezvous(content, key_of(load.worker.name)), load.worker.name))

    def _give(self, load: Load, sequence: CoreSequence) -> None:
        chain = self._chain(load, sequence)
        load.give(sequence, chain, load.hits(chain))

    def _chain(self, load: Load, sequence: CoreSequence) -> list[bytes]:
        key = sequence, load.worker.root_of(sequence.submit.cache_salt)
        if key not in self._chains:
            self._chains[key] = load.worker.prompt_chain(sequence)
        return self._chains[key]

    @property
    def _loads(self) -> list[Load]:
        """Of the workers that take newcomers now."""
        if self._made is None:
            self._names = sorted(worker.name for worker in self._workers if not worker.draining)
            self._made = [
                load_of(worker, slots)
                for worker in self._workers
                if not (worker.draining or worker.trial or worker.preempted or worker.full_look)
                and (slots := self._limits.batch_slots(worker.capacity) - worker.occupied) > 0
            ]
            _share_speeds(self._made, self._workers)
            if self._made:
                self._level = -(-(sum(load.rows for load in self._made) + self._waiting) // len(self._made))
        return self._made


def load_of(worker: WorkerState, slots: int) -> Load:
    """A worker's load as it stands, with ``slots`` free."""
    rows = len(worker.running)
    load = Load(worker, slots, worker.pool.num_free, rows, idle=not rows)
    capacity, total = worker.capacity, worker.pool.num_blocks
    load.form = capacity.dtype, capacity.kv_dtype, capacity.block_size, capacity.max_model_len, total
    if rows:
        load.free -= rows + worker.expected_growth
        load.queued = worker.prompts_left + sum(plan.prefill_tokens for plan in worker.in_flight)
        for one in worker.prefilling:
            if one.chain and one.status is Status.RUNNING and one.remaining > 1:
                load.computes.setdefault(one.chain[0], []).append(one.chain)
    return load


def _share_speeds(loads: Sequence[Load], workers: Sequence[WorkerState]) -> None:
    """Each worker's speed as learned; one that has run nothing is expected to be as quick as the others."""
    speeds = {worker.name: speed for worker in workers if (speed := worker.speed_us()) is not None}
    mean = UNMEASURED
    if 0 < len(speeds) < len(workers):
        token, step, row = (sum(values) / len(speeds) for values in zip(*speeds.values(), strict=True))
        mean = token, step, row
    for load in loads:
        load.token_us, load.step_us, load.row_us = speeds.get(load.worker.name, mean)


def _patient(sequence: CoreSequence, chosen: Load, now: int) -> bool:
    return not sequence.left_since or now - sequence.left_since < patience_ns(chosen)


def _depth(chain: Sequence[bytes], holds: Callable[[bytes], bool]) -> int:
    """How many leading blocks are held. By bisection: a block goes before the one that it follows."""
    if not holds(chain[0]):
        return 0
    low, high = 1, len(chain)
    while low < high:
        middle = (low + high + 1) // 2
        if holds(chain[middle - 1]):
            low = middle
        else:
            high = middle - 1
    return low


def _common(one: Sequence[bytes], other: Sequence[bytes]) -> int:
    """How many leading blocks are equal. Hashes are chained: what is equal at a place is so up to it."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[middle - 1] == other[middle - 1]:
            low = middle
        else:
            high = middle - 1
    return low
