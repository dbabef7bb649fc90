"""The waiting queue of one pool of a model: priority classes that age, fair between tenants inside a class, first in
first out inside a tenant.

A sequence that once failed to fit in memory stays the head until it is admitted or leaves: fairness must not pick
another head at every step, or nobody gathers bypasses (DESIGN 7).
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Iterator

from scheduler.core.fairness import VirtualTokenCounters
from scheduler.core.pools import QueueKey
from scheduler.core.sequence import Seniority, Sequence


def _charged(sequence: Sequence) -> int:
    """Input tokens that its tenant is charged for at its admission: of a resume none."""
    return len(sequence.tokens) if sequence.submit.attempt == 1 else 0


class _Fifo:
    """Sequences of one tenant in one class, by seniority: a resumed request takes the place of its first arrival."""

    def __init__(self) -> None:
        self.keys: list[Seniority] = []
        self.open: list[Seniority] = []  # of those that are not parked
        self.by_key: dict[Seniority, Sequence] = {}
        self.parked_tokens = 0  # that the tenant will be charged for, of those that are

    def push(self, sequence: Sequence) -> None:
        insort(self.keys, sequence.seniority)
        insort(self.open, sequence.seniority)
        self.by_key[sequence.seniority] = sequence

    def remove(self, sequence: Sequence) -> None:
        """One that is not parked."""
        del self.by_key[sequence.seniority]
        del self.keys[bisect_left(self.keys, sequence.seniority)]
        del self.open[bisect_left(self.open, sequence.seniority)]

    def park(self, sequence: Sequence) -> None:
        del self.open[bisect_left(self.open, sequence.seniority)]
        self.parked_tokens += _charged(sequence)
        sequence.parked = True

    def unpark(self, sequence: Sequence) -> None:
        insort(self.open, sequence.seniority)
        self.parked_tokens -= _charged(sequence)
        sequence.parked = False

    def at(self, index: int) -> Sequence | None:
        return self.by_key[self.open[index]] if index < len(self.open) else None


class WaitingQueue:
    """``aging_ns``: waiting so long raises a sequence by one priority class; 0 turns aging off.

    What is left to another worker is *parked* for that time: ``order`` does not have it, so that a look costs by what
    it could take, not by what waits. Everything else counts it.
    """

    def __init__(self, key: QueueKey, fairness: VirtualTokenCounters | None = None, aging_ns: int = 0) -> None:
        self.key = key
        self._fairness = fairness or VirtualTokenCounters()
        self._aging_ns = aging_ns
        self._classes: dict[int, dict[str, _Fifo]] = {}
        self._length = 0
        self.waiting = 0  # sequences, with the choices that will fork from one that waits or is being prefilled
        self.changes = 0  # how often anything came or left
        self.left = 0  # sequences that left, with the choices that fork from them
        self.tokens = 0  # prompts and max_tokens of all choices that wait
        self.prompt_tokens = 0  # known tokens of what waits: to be computed, or found in a cache
        self.left_tokens = 0  # those of all that left
        self._tokens_of: dict[Seniority, int] = {}  # as counted at the push: choices may be cancelled meanwhile
        self.blocked: Sequence | None = None  # the head that failed to fit, until it is admitted or leaves
        self.num_parked = 0
        self._parkings = 0
        self._parked_until: list[tuple[int, int, Sequence]] = []  # a heap; some are parked no more, or again

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[Sequence]:
        for tenants in self._classes.values():
            for fifo in tenants.values():
                yield from (fifo.by_key[key] for key in fifo.keys)

    def push(self, sequence: Sequence) -> None:
        tenants = self._classes.setdefault(sequence.submit.priority, {})
        tenants.setdefault(sequence.submit.tenant, _Fifo()).push(sequence)
        self._length += 1
        self.changes += 1
        sampling = sequence.submit.sampling
        choices = (1 + len(sequence.children)) * (sampling.beam_width or 1)
        tokens = self._tokens_of[sequence.seniority] = sequence.prompt_len + choices * sampling.max_tokens
        self.tokens += tokens
        self.prompt_tokens += len(sequence.tokens)
        self._fairness.queued(sequence.submit.tenant)

    def remove(self, sequence: Sequence) -> None:
        tenants = self._classes[sequence.submit.priority]
        fifo = tenants[sequence.submit.tenant]
        self.unpark(sequence)
        fifo.remove(sequence)
        if not fifo.keys:
            del tenants[sequence.submit.tenant]
            if not tenants:
                del self._classes[sequence.submit.priority]
        self._length -= 1
        self.changes += 1
        self.left += 1 + len(sequence.children)
        tokens = self._tokens_of.pop(sequence.seniority)
        self.tokens -= tokens
        self.prompt_tokens -= len(sequence.tokens)
        self.left_tokens += tokens
        self._fairness.unqueued(sequence.submit.tenant)
        if self.blocked is sequence:
            self.blocked = None

    def park(self, sequence: Sequence, until_ns: int) -> None:
        """Another worker is to take it: nobody else is shown it before ``until_ns``."""
        if sequence.parked or sequence is self.blocked:
            return
        self._classes[sequence.submit.priority][sequence.submit.tenant].park(sequence)
        self.num_parked += 1
        self._parkings += 1
        heapq.heappush(self._parked_until, (until_ns, self._parkings, sequence))

    def unpark(self, sequence: Sequence) -> None:
        """Show it to everybody again, if it waits here."""
        if sequence.parked and sequence.home is self:
            self._classes[sequence.submit.priority][sequence.submit.tenant].unpark(sequence)
            self.num_parked -= 1

    def unpark_all(self) -> None:
        while self._parked_until:
            self.unpark(self._parked_until.pop()[2])

    @property
    def oldest_ns(self) -> int:
        """When the sequence that has waited longest was submitted; 0 if none waits. It is the first of some tenant."""
        return min(
            (
                fifo.by_key[fifo.keys[0]].submitted_ns
                for tenants in self._classes.values()
                for fifo in tenants.values()
                if fifo.keys
            ),
            default=0,
        )

    def head(self, now: int) -> Sequence | None:
        """The first in order; where all are parked, the one that came first."""
        first = next(self.order(now), None)
        if first is None and self._length:
            first = min((one for *_, one in self.lines()), key=lambda one: one.seniority[1:])
        return first

    def order(self, now: int) -> Iterator[Sequence]:
        """Sequences in the order they should be admitted, lazily. The queue must not change while it is read."""
        while self._parked_until and self._parked_until[0][0] <= now:
            self.unpark(heapq.heappop(self._parked_until)[2])
        if self.blocked is not None:
            yield self.blocked
        heads: list[tuple[int, int, int, Iterator[Sequence], Sequence]] = []
        for priority, tenants in self._classes.items():
            self._push_next(heads, priority, self._fair(tenants), now)
        while heads:
            _, _, priority, rest, sequence = heapq.heappop(heads)
            if sequence is not self.blocked:
                yield sequence
            self._push_next(heads, priority, rest, now)

    def _push_next(
        self, heads: list[tuple[int, int, int, Iterator[Sequence], Sequence]], priority: int,
        rest: Iterator[Sequence], now: int,
    ) -> None:  # fmt: skip
        sequence = next(rest, None)
        if sequence is not None:
            aged = (now - sequence.submitted_ns) // self._aging_ns if self._aging_ns else 0
            heapq.heappush(heads, (priority - aged, sequence.seniority[1], priority, rest, sequence))

    def _fair(self, tenants: dict[str, _Fifo]) -> Iterator[Sequence]:
        """One class: the tenant with the least service first, as if each one yielded were admitted."""
        if len(tenants) == 1:
            (fifo,) = tenants.values()
            index = 0
            while (sequence := fifo.at(index)) is not None:
                yield sequence
                index += 1
            return
        turn = [
            (self._fairness.counter(tenant) + self._parked_cost(tenant, fifo, 0), tenant, 0)
            for tenant, fifo in tenants.items()
        ]
        heapq.heapify(turn)
        while turn:
            counter, tenant, index = heapq.heappop(turn)
            sequence = tenants[tenant].at(index)
            if sequence is not None:
                yield sequence
                cost = self._parked_cost(tenant, tenants[tenant], index + 1)
                if sequence is not self.blocked:  # that one came first, and was charged then or is not served now
                    cost += self._fairness.input_cost(tenant, _charged(sequence))
                heapq.heappush(turn, (counter + cost, tenant, index + 1))

    def _parked_cost(self, tenant: str, fifo: _Fifo, index: int) -> int:
        """Before the open sequence ``index``, all that is parked counts as admitted, which it is about to be: before
        the first one, but behind one that is older than all of it."""
        if not fifo.parked_tokens or index != int(fifo.keys[:1] == fifo.open[:1]):
            return 0
        return self._fairness.input_cost(tenant, fifo.parked_tokens)

    def check(self) -> None:
        """Raise AssertionError unless what is parked agrees with who waits."""
        assert self.prompt_tokens == sum(len(sequence.tokens) for sequence in self)
        assert self.num_parked == sum(sequence.parked for sequence in self)
        assert not (self.blocked is not None and self.blocked.parked)
        for tenants in self._classes.values():
            for fifo in tenants.values():
                assert fifo.open == [key for key in fifo.keys if not fifo.by_key[key].parked]
                assert fifo.parked_tokens == sum(_charged(one) for one in fifo.by_key.values() if one.parked)

    def lines(self) -> Iterator[tuple[int, str, int, Sequence]]:
        """(priority, tenant, how many wait, the first of them) of each line. Costs by lines, not by who waits."""
        for priority, tenants in self._classes.items():
            for tenant, fifo in tenants.items():
                yield priority, tenant, len(fifo.keys), fifo.by_key[fifo.keys[0]]

    def surely_ahead(self, priority: int, tenant: str) -> int:
        """How many come before a newcomer: those of better classes, and its tenant's in its own class."""
        ahead = sum(
            len(fifo.keys) for other, tenants in self._classes.items() if other < priority for fifo in tenants.values()
        )
        own = self._classes.get(priority, {}).get(tenant)
        return ahead + (len(own.keys) if own is not None else 0)

    def position(self, sequence: Sequence) -> int:
        """How many of its own class and tenant stand before it, and all of better classes."""
        ahead = sum(
            len(fifo.keys)
            for priority, tenants in self._classes.items()
            if priority < sequence.submit.priority
            for fifo in tenants.values()
        )
        fifo = self._classes[sequence.submit.priority][sequence.submit.tenant]
        return ahead + bisect_left(fifo.keys, sequence.seniority)
