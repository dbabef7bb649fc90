"""The workers of one queue as placement sees them: what each has left for a newcomer, how busy it is, what it holds.

Noted worker by worker, after its plans and its results, so that a look at the queue need not go through all of them:
it compares a few, however many there are. Pure.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterator, Sequence
from copy import copy
from dataclasses import dataclass, field

from scheduler.core.holders import Holders, depth_held
from scheduler.core.limits import Limits
from scheduler.core.sequence import Sequence as CoreSequence
from scheduler.core.sequence import Status, pages_for
from scheduler.core.worker_state import WorkerState
from shared.messages import Capacity

UNMEASURED = (100.0, 10_000.0, 50.0)
"""Microseconds of a prompt token, a decode step and a row in it, as long as no worker of the model has run any. Only
their ratios count."""

COMPARED = 16
"""Workers that one choice compares: all, if there are no more of them. Else some of those that hold most of the
prompt, of the least busy (a few at random are nearly as good as all: Mitzenmacher, IEEE TPDS 2001) and the roomiest."""

HOLDERS, ROOMY = 6, 2
"""Of those, how many of the first and of the last kind."""

EQUALLY_BUSY = 1.125
"""Times the least: up to there a worker is as good as the least busy one."""

USUAL_PROMPT, USUAL_OUTPUT = 512, 128
"""Tokens of the newcomer by whose delay workers are ordered."""

_CAUGHT_UP = 4
"""Workers without a speed of their own that are told the others' at each note."""

Form = tuple[str, str, int, int, int, int, tuple[str, ...]]


@dataclass(slots=True)
class Load:
    """One worker; in a look, with what that has left to it so far."""

    worker: WorkerState
    slots: int  # free
    rows: int  # sequences that run, and those given to it since
    kept: int = 0  # free blocks that are not for newcomers: what those that run are expected to grow by
    queued: int = 0  # prompt tokens that a newcomer's would wait for or share the budget with
    idle: bool = True  # nothing runs: what is left to it may have every block
    waits: bool = False  # it works on something: a newcomer waits for its next plan
    token_us: float = UNMEASURED[0]
    step_us: float = UNMEASURED[1]
    row_us: float = UNMEASURED[2]
    form: Form = ("", "", 0, 0, 0, 0, ())  # equal ones hold the same, in blocks of the same hashes
    computes: dict[bytes, list[list[bytes]]] = field(default_factory=dict)  # first block -> chains being computed
    given: int = 0  # of the rows, those
    weight: float = 0.0  # what the fleet orders it by
    room: int = 0  # blocks for prompts, as it was noted

    def hits(self, chain: list[bytes]) -> int:
        """Blocks of ``chain`` that the worker holds, or will when it has computed what was given to it."""
        found = depth_held(chain, self.worker.pool.holds)
        if chain and self.computes:
            for other in self.computes.get(chain[0], ()):
                found = max(found, _common(chain, other))
        return found

    def has_room(self, blocks: int, hits: int) -> bool:
        """True if ``blocks`` would do, as far as can be told without looking through all that runs there."""
        return (blocks if self.idle else blocks - hits) + self.kept <= self.worker.pool.num_free

    def copy(self) -> Load:
        """To be given sequences in one look."""
        own = copy(self)
        own.computes = {first: list(chains) for first, chains in self.computes.items()}
        return own

    def give(self, sequence: CoreSequence) -> None:
        """Count the sequence among the worker's own from now on."""
        chain = self.worker.prompt_chain(sequence)
        hits = self.hits(chain)
        tokens, size = len(sequence.tokens), self.worker.capacity.block_size
        self.slots -= max(1, sequence.submit.sampling.beam_width)
        self.kept += pages_for(tokens, size) - hits
        self.rows += 1
        self.given += 1
        self.queued += tokens - hits * size
        self.idle = False
        if chain:
            self.computes.setdefault(chain[0], []).append(chain)


def delay_us(load: Load, rest: int, outputs: int) -> float:
    """What it costs all together if a sequence with ``rest`` prompt tokens to compute and ``outputs`` expected tokens
    runs there: its own time until its first token and until its end, and what those that run lose by it."""
    own = rest * load.token_us
    until_first = load.queued * load.token_us + own + load.step_us
    return until_first + outputs * (load.step_us + load.row_us) + load.rows * (own + outputs * load.row_us)


class Fleet:
    """``loads`` has those that take newcomers now, as they stood when they were last noted."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self.workers: dict[str, WorkerState] = {}
        self.names: list[str] = []  # of all that are not draining, in order
        self.loads: dict[str, Load] = {}
        self.rows = 0  # sequences that run on those
        self.least_busy: list[tuple[float, str]] = []  # they in order: by the delay of a usual newcomer, or by rows
        self.roomiest: list[tuple[int, str]] = []  # they by blocks for prompts, the roomiest last
        self.holders: Holders | None = None  # kept where not all are compared
        self._speeds: dict[str, tuple[float, float, float]] = {}
        self._total = _NOTHING  # of those
        self.openings = 0  # how often one came among them that had nothing in hand
        self._unmeasured: dict[str, None] = {}  # of those in ``loads``
        self._capacities: list[Capacity] | None = None
        self._left: dict[str, tuple[tuple[int, int], list[CoreSequence]]] = {}  # worker -> (its next plan, those)
        self._waited_for: dict[str, None] = {}  # of those, for which something was parked

    def __len__(self) -> int:
        return len(self.workers)

    def note(self, worker: WorkerState) -> None:
        """The worker is there, or something has changed with it."""
        if self.workers.get(worker.name) is not worker:
            self._join(worker)
            return
        if worker.draining and worker.name in self.names:
            self.names.remove(worker.name)
            self._capacities = None
        if len(self.workers) > 1:  # alone it is compared with nobody
            self._note(worker)

    def forget(self, name: str) -> None:
        """The worker is gone."""
        worker = self.workers.pop(name, None)
        if worker is None:
            return
        if name in self.names:
            self.names.remove(name)
        self._capacities = None
        self._leave(name)
        for other in [name] if len(self.workers) > 1 else list(self._left):  # who is alone leaves nothing to others
            self._give_back(other)
        self._count_speed(name, None)
        worker.pool.tell("", None)
        if self.holders is not None and len(self.workers) <= COMPARED:
            for one in self.workers.values():
                one.pool.tell("", None)
            self.holders = None

    @property
    def capacities(self) -> list[Capacity]:
        """Of workers that are not draining: one of each kind that requests are judged by."""
        if self._capacities is None:
            kinds = {_kind(self.workers[name].capacity): self.workers[name].capacity for name in self.names}
            self._capacities = list(kinds.values())
        return self._capacities

    @property
    def has_room(self) -> bool:
        """True if some worker takes newcomers now."""
        if len(self.workers) == 1:
            return any(self._slots(worker) for worker in self.workers.values())
        return bool(self.loads)

    def load_now(self, worker: WorkerState) -> Load:
        """The load of a worker that looks at the queue, whatever it was when it was noted."""
        load = _load_of(worker, self._limits.batch_slots(worker.capacity) - worker.occupied)
        load.token_us, load.step_us, load.row_us = self._speeds.get(worker.name) or self._usual_speed()
        return load

    def left_to(self, sequence: CoreSequence) -> Load | None:
        """To whom the sequence is left, if that one has not planned since and still takes newcomers."""
        load = self.loads.get(sequence.left_to)
        return load if load is not None and load.worker.next_plan == sequence.left_plan else None

    def leave_to(self, name: str, sequence: CoreSequence) -> None:
        """The sequence is left to a worker of ``loads``, and counts among its load until it has planned."""
        load = self.loads[name]
        plan = load.worker.next_plan
        sequence.left_to, sequence.left_plan = name, plan
        if name not in self._left or self._left[name][0] != plan:
            self._give_back(name)
            self._left[name] = plan, []
        self._left[name][1].append(sequence)
        self._leave(name)
        load.give(sequence)
        self._enter(load, self._speeds.get(name))

    def park(self, sequence: CoreSequence, until_ns: int) -> None:
        """Nobody but the worker to whom it is left is shown the sequence, for so long at most."""
        sequence.home.park(sequence, until_ns)
        self._waited_for[sequence.left_to] = None

    def waited_for(self) -> list[str]:
        """Workers for which something is parked."""
        for name in [name for name in self._waited_for if not any(self._parked_for(name))]:
            del self._waited_for[name]  # nobody waits for it any more
        return list(self._waited_for)

    def show(self, name: str) -> None:
        """Nothing that is left to the worker is parked: it looks itself, or takes no newcomers."""
        if self._waited_for.pop(name, self) is None:
            for sequence in list(self._parked_for(name)):
                sequence.home.unpark(sequence)

    def likely(self, chain: list[bytes], number: int) -> dict[str, None]:
        """Of many workers, some among which the best for a sequence with this ``chain`` is likely to be. ``number``
        decides where several are alike."""
        busy, some = self.least_busy, COMPARED - HOLDERS - ROOMY
        if not busy:
            return {}
        found = self.holders.best(chain, HOLDERS, number, self.loads.__contains__) if self.holders is not None else {}
        for _, name in self.roomiest[-ROOMY:]:
            found[name] = None
        alike = min(len(busy), max(some, bisect_right(busy, (busy[0][0] * EQUALLY_BUSY, ""))))
        for place in range(some):
            found[busy[(number + place * alike // some) % alike][1]] = None
        return found

    def check(self) -> None:
        """Raise AssertionError unless the orders and the index agree with what they are made from."""
        assert self.least_busy == sorted((load.weight, name) for name, load in self.loads.items())
        assert self.roomiest == sorted((load.room, name) for name, load in self.loads.items())
        assert self.loads.keys() <= self.workers.keys() and set(self.names) <= self.workers.keys()
        for name, (plan, left) in self._left.items():
            parked = any(sequence.parked and sequence.left_to == name for sequence in left)
            assert not parked or name in self._waited_for
            assert not parked or (self.loads[name].worker.next_plan == plan and len(self.workers) > 1)
        assert self.rows == sum(load.rows - load.given for load in self.loads.values())
        assert (self.holders is not None) == (len(self.workers) > COMPARED)
        if self.holders is not None:
            held: dict[bytes, list[str]] = {}
            for name, worker in self.workers.items():
                for content in worker.pool.contents():
                    held.setdefault(content, []).append(name)
            assert len(held) == len(self.holders)
            assert all(sorted(names) == sorted(self.holders.of(content)) for content, names in held.items())

    def _join(self, worker: WorkerState) -> None:
        self.forget(worker.name)
        self.workers[worker.name] = worker
        insort(self.names, worker.name)
        self._capacities = None
        if self.holders is not None:
            worker.pool.tell(worker.name, self.holders)
        elif len(self.workers) > COMPARED:
            self.holders = Holders()
            for one in self.workers.values():
                one.pool.tell(one.name, self.holders)
        if len(self.workers) == 2:
            for one in self.workers.values():
                self._note(one)
        elif len(self.workers) > 2:
            self._note(worker)

    def _note(self, worker: WorkerState) -> None:
        name = worker.name
        speed = worker.speed_us()
        self._count_speed(name, speed)
        known = self.loads.get(name)
        self._leave(name)
        plan, left = self._left.get(name, ((0, 0), []))
        if plan != worker.next_plan:
            self._give_back(name)
            left = []
        slots = self._slots(worker)
        if not slots:
            self.show(name)
        else:
            load = _load_of(worker, slots)
            self.openings += not load.waits and (known is None or known.waits)
            for sequence in left:
                if sequence.status is Status.WAITING and (sequence.left_to, sequence.left_plan) == (name, plan):
                    load.give(sequence)
            self._enter(load, speed)
        if speed is not None:
            for other in list(self._unmeasured)[:_CAUGHT_UP]:
                load = self.loads[other]
                self._leave(other)
                self._enter(load, None)

    def _parked_for(self, name: str) -> Iterator[CoreSequence]:
        """Of what was left to it; some of that may have been left to others later."""
        return (one for one in self._left[name][1] if one.parked and one.left_to == name)

    def _give_back(self, name: str) -> None:
        """Nothing is left to the worker any more."""
        self.show(name)
        self._left.pop(name, None)

    def _slots(self, worker: WorkerState) -> int:
        """How many newcomers it takes at most."""
        full = worker.full_look is not None and len(worker.running) > 0
        if worker.draining or not worker.takes_new or worker.trial or worker.preempted or full:
            return 0
        return max(0, self._limits.batch_slots(worker.capacity) - worker.occupied)

    def _enter(self, load: Load, speed: tuple[float, float, float] | None) -> None:
        name = load.worker.name
        load.token_us, load.step_us, load.row_us = speed or self._usual_speed()
        if self._limits.placement == "least-loaded":
            load.weight = load.rows
        else:
            load.weight = delay_us(load, USUAL_PROMPT, USUAL_OUTPUT)
        load.room = load.worker.pool.num_free - load.kept
        if speed is None:
            self._unmeasured[name] = None
        self.loads[name] = load
        self.rows += load.rows - load.given
        insort(self.least_busy, (load.weight, name))
        insort(self.roomiest, (load.room, name))

    def _leave(self, name: str) -> None:
        load = self.loads.pop(name, None)
        if load is not None:
            self._unmeasured.pop(name, None)
            self.rows -= load.rows - load.given
            del self.least_busy[bisect_left(self.least_busy, (load.weight, name))]
            del self.roomiest[bisect_left(self.roomiest, (load.room, name))]

    def _count_speed(self, name: str, speed: tuple[float, float, float] | None) -> None:
        before, now = self._speeds.pop(name, _NOTHING), speed or _NOTHING
        if speed is not None:
            self._speeds[name] = speed
        token, step, row = self._total if self._speeds else _NOTHING
        if self._speeds:
            token, step, row = token + now[0] - before[0], step + now[1] - before[1], row + now[2] - before[2]
        self._total = token, step, row

    def _usual_speed(self) -> tuple[float, float, float]:
        """One that has run nothing is expected to be as quick as the others."""
        count = len(self._speeds)
        if not count:
            return UNMEASURED
        token, step, row = self._total
        return token / count, step / count, row / count


def _load_of(worker: WorkerState, slots: int) -> Load:
    """A worker's load as it stands, with ``slots`` free."""
    rows = len(worker.running)
    load = Load(worker, slots, rows, idle=not rows, waits=bool(rows or worker.in_flight))
    capacity = worker.capacity
    load.form = (
        capacity.dtype, capacity.kv_dtype, capacity.block_size, worker.max_model_len, worker.slots,
        worker.pool.num_blocks, tuple(capacity.adapters),
    )  # fmt: skip
    if rows:
        load.kept = rows + worker.expected_growth
        load.queued = worker.prompts_left + sum(plan.prefill_tokens for plan in worker.in_flight)
        for one in worker.prefilling:
            if one.chain and one.status is Status.RUNNING and one.remaining > 1:
                load.computes.setdefault(one.chain[0], []).append(one.chain)
    return load


def _kind(capacity: Capacity) -> tuple[object, ...]:
    return (
        capacity.max_model_len, capacity.block_size, capacity.num_blocks, capacity.vocab_size,
        tuple(capacity.eos_token_ids), capacity.max_batched_tokens, tuple(capacity.adapters),
    )  # fmt: skip


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


_NOTHING = (0.0, 0.0, 0.0)
