"""One sequence on its way from a worker to another: data, and the changes that keep both workers' books right.

The sequence keeps its slot and its blocks at the source until every one of them is at the target. While blocks are
fetched early it runs on; then it gets no more rows there (``Sequence.leaving``), the rest is fetched once no plan in
flight runs it, and the plan that starts it at the target is also where it leaves the source. So it runs at one worker
at a time, in one attempt, and whatever fails before that leaves it where it is.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from scheduler.core.sequence import pages_for

if TYPE_CHECKING:
    from scheduler.core.sequence import Sequence
    from scheduler.core.worker_state import WorkerState

EARLY_BLOCKS = 4
"""Blocks that are worth a fetch of their own while the source computes more of the prompt."""

LAST_BLOCKS = 4
"""A sequence stops for its move when no more blocks are missing at the target."""

LATE_FETCHES = 2
"""Or when so many fetches have come since its prompt was computed: one that decodes faster than it is fetched."""

MOST_PAGES = 4096
"""Pages that the fetches of one plan name, some 6 bytes each: a plan stays below a message's limit."""


class Why(StrEnum):
    ROLE = "role"  # its prompt is computed, and others decode
    DRAIN = "drain"  # its worker stops
    BALANCE = "balance"  # its worker runs out of blocks


@dataclass(slots=True, eq=False)
class Fetching:
    """A fetch whose answer has not come. It holds its blocks on both sides, whatever becomes of the move meanwhile: the
    source's may still be read, the target's written."""

    number: int
    move: Move
    there: list[int]  # of the source, one reference each
    here: list[int]  # of the target, likewise
    asked_ns: int

    def close(self) -> None:
        """Its answer has come, or one of its workers is gone."""
        source, target = self.move.source, self.move.target
        del target.fetching[self.number]
        del source.lent[self.number]
        source.pool.release(self.there)
        target.pool.release(self.here)


@dataclass(slots=True, eq=False)
class Move:
    """``pages`` are held at the target, where they are to be the sequence's block table. The first ``fetched`` of them
    hold what the source's hold; what the target's prefix cache had counts. ``settled`` leading tokens have their KV
    entries at the source for sure."""

    sequence: Sequence
    source: WorkerState
    target: WorkerState
    why: Why
    pages: list[int]
    fetched: int
    began_ns: int
    settled: int = 0
    step: int = 0  # the source's last step of which that is known
    left_ns: int = 0  # when it was decided that it gets no more rows there; 0: it runs on
    still_ns: int = 0  # since when no plan in flight runs it there
    open: Fetching | None = None
    late: int = 0  # fetches that came after its prompt was computed
    blocks: int = 0  # that came, in all
    bytes: int = 0
    fetch_us: int = 0
    transport: str = ""
    over: bool = False

    def begin(self) -> None:
        self.sequence.move = self
        self.source.departing.append(self)
        self.target.arriving.append(self)

    @property
    def block_size(self) -> int:
        return self.source.capacity.block_size

    @property
    def needs(self) -> int:
        """Blocks that the sequence has written, or will have once every plan in flight has run."""
        return pages_for(self.sequence.scheduled, self.block_size)

    @property
    def due(self) -> int:
        """How many leading blocks should be at the target by now: those that the source has for sure."""
        sequence = self.sequence
        if sequence.leaving:
            return self.fetched if sequence.in_flight else self.needs
        full = self.settled // self.block_size
        if self.open is not None or (sequence.remaining > 1 and full - self.fetched < EARLY_BLOCKS):
            return self.fetched
        return max(full, self.fetched)

    @property
    def arrived(self) -> bool:
        """All of it is at the target, and nothing runs it at the source."""
        sequence = self.sequence
        return sequence.leaving and not sequence.in_flight and self.open is None and self.fetched >= self.needs

    @property
    def wants_plan(self) -> bool:
        """The target's next plan is to start it, or to fetch something."""
        return self.arrived or (self.open is None and self.due > self.fetched)

    def fetch(self, number: int, most: int, now: int) -> Fetching:
        """Its next fetch, of ``most`` blocks at most."""
        first, last = self.fetched, min(self.due, self.fetched + most)
        there, here = self.sequence.pages[first:last], self.pages[first:last]
        fetching = self.open = Fetching(number, self, there, here, now)
        self.source.pool.share(there)
        self.target.pool.share(here)
        self.source.lent[number] = self.target.fetching[number] = fetching
        return fetching

    def cancel(self) -> None:
        """It comes to nothing: the sequence stays where it is. What is being fetched keeps its blocks until then."""
        self._close()
        self.target.pool.release(self.pages)

    def arrive(self) -> None:
        """From here on it is the target's, which has a slot for it; the source's next plan drops its own."""
        sequence, source, target = self.sequence, self.source, self.target
        assert self.arrived
        self._close()
        source.running.remove(sequence)
        source.pool.release(sequence.pages)
        source.drops.append(sequence.slot)
        source.free_slot(sequence.slot)
        sequence.pages = self.pages
        sequence.registered = 0
        sequence.shares_tail = False
        sequence.worker = target.name
        sequence.slot = target.take_slot()
        target.running.add(sequence)
        target.register(sequence, sequence.scheduled)

    def _close(self) -> None:
        self.over = True
        self.sequence.move = None
        self.sequence.leaving = False
        self.source.departing.remove(self)
        self.target.arriving.remove(self)

    def check(self) -> None:
        """Raise AssertionError unless its books are right."""
        sequence, source = self.sequence, self.source
        assert not self.over and sequence.move is self and source is not self.target
        assert sequence.worker == source.name and sequence.slot >= 0
        assert self in source.departing and self in self.target.arriving
        assert self.fetched <= len(self.pages)
        assert sequence.leaving == bool(self.left_ns)
        assert not sequence.leaving or len(self.pages) >= self.needs
        assert self.open is None or self.open is self.target.fetching[self.open.number]


def check_moves(worker: WorkerState) -> None:
    """Raise AssertionError unless the moves to and from the worker are consistent, nobody uses a block that is being
    written to, and nobody writes to one that is being read."""
    for move in (*worker.arriving, *worker.departing):
        move.check()
    for sequence in worker.running:
        assert sequence.move is None or sequence.move in worker.departing
        assert not sequence.leaving or sequence.move is not None
    written = [block for fetching in worker.fetching.values() for block in fetching.here]
    assert len(set(written)) == len(written), "two fetches write to one block"
    used = {block for sequence in worker.sequences() for block in sequence.pages}
    assert not used.intersection(written), "a fetch writes to a block of a sequence that runs"
    assert not any(worker.pool.indexed(block) for block in written), "a block that is being written to could be hit"
    # (What a move that is over still reads is thrown away.)
    read = {block for one in worker.lent.values() if not one.move.over for block in one.there}
    for sequence in worker.running:
        if not (sequence.leaving or sequence.shares_tail):  # (a shared block is copied before it is written to)
            rest = sequence.pages[sequence.scheduled // worker.capacity.block_size :]
            assert not read.intersection(rest), "a block that is being read may be written to"
    for number, fetching in worker.fetching.items():
        assert fetching.number == number and fetching.move.source.lent[number] is fetching
