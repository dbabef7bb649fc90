"""Which worker of a queue a waiting sequence should go to. Pure; nothing is bound before admission.

A worker that plans looks at the queue in order and leaves a sequence to another worker only if that one could admit it
now and is where it delays everybody least: itself until its first token and its end, and those that run there. A prefix
that a worker holds, or is about to compute, counts as computed. A full worker holds nobody's place, and nobody is left
to others for longer than some of their steps, nor for a gain that waiting for them takes back.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from functools import lru_cache

from scheduler.core.fleet import Fleet, Form, Load, delay_us
from scheduler.core.lengths import OutputLengths
from scheduler.core.limits import Limits
from scheduler.core.sequence import Sequence as CoreSequence
from scheduler.core.sequence import pages_for
from scheduler.core.worker_state import WorkerState

TIE_SHARE = 0.5
"""Of the time that the whole prompt takes: workers whose delays differ by less are equal, and the content decides."""

STEPS_WAITED = 1
"""Of its own: how long what is left to a worker that works is taken to wait for its next plan. Who could take it with
the plan that is being made keeps it unless that one is better by more."""

PATIENCE_STEPS = 4
LEAST_PATIENCE_NS = 20_000_000
MOST_PATIENCE_NS = 1_000_000_000
"""How long a sequence is left to others in all: so many steps of the one it is left to, within these limits."""

MOST_CHOICES = 64
"""Sequences that one look chooses a worker for. Of what waits behind them the worker takes its share: as many as bring
it level with the others if all of them do."""

_GOLDEN = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1
_NO_CHAIN: list[bytes] = []


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


def left_until(sequence: CoreSequence, load: Load) -> int:
    """Until when a sequence that was left to others may be left to this one."""
    return sequence.left_since + patience_ns(load)


def patience_ns(load: Load) -> int:
    """How long a sequence may have been left to others, in all, for it to be left to this one now."""
    return min(MOST_PATIENCE_NS, max(LEAST_PATIENCE_NS, int(PATIENCE_STEPS * load.step_us * 1000)))


class Placing:
    """One look at a queue, in its order."""

    def __init__(self, limits: Limits, lengths: OutputLengths, fleet: Fleet, waiting: int) -> None:
        self._limits = limits
        self._lengths = lengths
        self._fleet = fleet
        self._waiting = waiting
        self._choices = 0
        self._level = 0
        self.spent = False  # the worker that looks has its share, and no choice is left
        self._own = ""  # the worker that looks
        self._touched: dict[str, Load] = {}  # loads of this look alone: its own worker's, and those given something

    def leaves(self, worker: WorkerState, sequence: CoreSequence, now: int, refused: bool = False) -> bool:
        """True if ``worker`` should leave the sequence to another one. ``refused``: it has no room for it itself.

        To whom it is left is remembered until that one has planned: others pass it over without choosing again.
        """
        fleet = self._fleet
        if len(fleet) < 2:
            return False
        left_to = fleet.left_to(sequence) if sequence.left_to and not refused else None
        if left_to is not None and left_to.worker is not worker and _patient(sequence, left_to, now):
            return True
        if not self._own:
            self._begin(worker)
        own = self._touched[worker.name]
        if refused:
            own.slots = 0
        self._choices += 1
        if self._choices > MOST_CHOICES:
            if refused:
                return False
            self.spent = own.rows >= self._level and _patient(sequence, own, now)
            if not self.spent:
                own.give(sequence)
            return self.spent
        chosen = self._choose(sequence, own)
        if chosen is None or chosen is own or not _patient(sequence, chosen, now):
            if not refused:
                own.give(sequence)
            return False
        if not sequence.left_since:
            sequence.left_since = now
        fleet.leave_to(chosen.worker.name, sequence)
        return True

    def park(self, sequence: CoreSequence) -> None:
        """After the look, until the one to whom the sequence is left has planned, or nobody waits for it any more."""
        left_to = self._fleet.left_to(sequence)
        if left_to is not None:
            self._fleet.park(sequence, left_until(sequence, left_to))

    def first_asked(self, queue: Iterable[CoreSequence], now: int) -> tuple[list[str], bool]:
        """(workers that the sequences should go to, whether others may have something to plan too)."""
        names: dict[str, None] = {}
        others = False
        given: list[tuple[Load, CoreSequence]] = []  # as chosen at an earlier asking
        for sequence in queue:
            left_to = self._fleet.left_to(sequence) if sequence.left_to else None
            if left_to is not None and _patient(sequence, left_to, now):
                names[left_to.worker.name] = None
                continue
            asked = self._asked(sequence) if sequence.asked else None
            if asked is not None and _patient(sequence, asked, now):
                others = others or _stays_out(sequence, asked, now)
                names[sequence.asked] = None
                given.append((asked, sequence))
                continue
            for load, earlier in given:
                self._give(load, earlier)
            given.clear()
            chosen = self._choose(sequence, None)
            if chosen is None:
                others = True
                if not self._fleet.loads:
                    break
                continue
            sequence.asked_since = sequence.asked_since or now
            others = others or not _patient(sequence, chosen, now) or _stays_out(sequence, chosen, now)
            self._give(chosen, sequence)
            names[chosen.worker.name] = None
            sequence.asked, sequence.asked_at = chosen.worker.name, (chosen.worker.next_plan, self._fleet.openings)
        return list(names), others

    def _asked(self, sequence: CoreSequence) -> Load | None:
        """Whom an earlier asking chose, unless that one has planned, or another one came to have nothing in hand."""
        load = self._fleet.loads.get(sequence.asked)
        if load is None or sequence.asked_at != (load.worker.next_plan, self._fleet.openings):
            return None
        return load

    def _begin(self, worker: WorkerState) -> None:
        """The worker that looks counts as it stands now: it was last noted before its plan began."""
        fleet = self._fleet
        own = self._touched[worker.name] = fleet.load_now(worker)
        noted = fleet.loads.get(worker.name)
        rows = fleet.rows + own.rows - (noted.rows - noted.given if noted is not None else 0)
        self._level = -(-(rows + self._waiting) // (len(fleet.loads) + (noted is None)))
        self._own = worker.name

    def _choose(self, sequence: CoreSequence, keeper: Load | None) -> Load | None:
        """Where the sequence should go, of the workers that could admit it now; None if none could. ``keeper`` looks,
        and could take it at once."""
        if self._limits.placement == "round-robin":
            return self._in_turn(sequence)
        width = max(1, sequence.submit.sampling.beam_width)
        able: list[tuple[Load, int]] = []
        known: dict[Form, tuple[int, list[bytes]]] = {}
        form: Form | None = None
        blocks, chain = -1, _NO_CHAIN
        for load in self._compared(sequence):
            if load.slots < width:
                continue
            if load.form != form:
                form = load.form
                if form not in known:
                    known[form] = _needs(load, sequence)
                blocks, chain = known[form]
            if blocks >= 0 and load.has_room(blocks, held := load.hits(chain)):
                able.append((load, held))
        if len(able) < 2:
            return able[0][0] if able else None
        if self._limits.placement == "least-loaded":
            return min((load for load, _ in able), key=lambda load: (load.rows, load.worker.name))
        return self._by_delay(sequence, able, keeper)

    def _compared(self, sequence: CoreSequence) -> Iterable[Load]:
        loads, touched = self._fleet.loads, self._touched
        if self._fleet.holders is None:
            return {**loads, **touched}.values() if touched else loads.values()
        any_of = next(iter(loads.values()), None)
        chain = any_of.worker.prompt_chain(sequence) if any_of is not None else _NO_CHAIN
        names = self._fleet.likely(chain, sequence.number)
        if self._own:
            names[self._own] = None
        return [touched.get(name) or loads[name] for name in names]

    def _in_turn(self, sequence: CoreSequence) -> Load | None:
        names = self._fleet.names
        turn = sequence.number % max(1, len(names))
        for name in (*names[turn:], *names[:turn]):
            load = self._touched.get(name) or self._fleet.loads.get(name)
            if load is not None and load.slots >= max(1, sequence.submit.sampling.beam_width):
                blocks, chain = _needs(load, sequence)
                if blocks >= 0 and load.has_room(blocks, load.hits(chain)):
                    return load
        return None

    def _by_delay(self, sequence: CoreSequence, able: list[tuple[Load, int]], keeper: Load | None) -> Load:
        tokens = len(sequence.tokens)
        outputs = self._lengths.left_at(0.5, sequence.generated, sequence.submit.sampling.max_tokens)
        delays = []
        for load, held in able:
            delay = delay_us(load, tokens - held * load.worker.capacity.block_size, outputs)
            if load.waits and load is not keeper:
                delay += STEPS_WAITED * load.step_us
            delays.append(delay)
        least = min(delays)
        most = least + TIE_SHARE * tokens * able[delays.index(least)][0].token_us
        equal = [load for (load, _), delay in zip(able, delays, strict=True) if delay <= most]
        if len(equal) == 1:
            return equal[0]
        if keeper is not None and keeper.waits and any(load is keeper for load in equal):
            return keeper
        chain = equal[0].worker.prompt_chain(sequence)
        content = chain[0] if chain else hashlib.blake2b(sequence.request_id.encode(), digest_size=8).digest()
        return max(equal, key=lambda load: (rendezvous(content, key_of(load.worker.name)), load.worker.name))

    def _give(self, load: Load, sequence: CoreSequence) -> None:
        """In this look alone."""
        name = load.worker.name
        if name not in self._touched:
            self._touched[name] = load.copy()
        self._touched[name].give(sequence)


def _needs(load: Load, sequence: CoreSequence) -> tuple[int, list[bytes]]:
    """(blocks that workers like this one need for the sequence, the hashes of their contents); -1: it never fits."""
    worker = load.worker
    if not worker.can_hold(sequence):
        return -1, _NO_CHAIN
    return pages_for(len(sequence.tokens), worker.capacity.block_size), worker.prompt_chain(sequence)


def _stays_out(sequence: CoreSequence, chosen: Load, now: int) -> bool:
    """True if it has been asked for in vain for as long as a sequence is left to others at most: those it is meant for
    do not look, and nobody has begun to count. Then others look too."""
    return not sequence.left_since and now - sequence.asked_since >= patience_ns(chosen)


def _patient(sequence: CoreSequence, chosen: Load, now: int) -> bool:
    return not sequence.left_since or now < left_until(sequence, chosen)
