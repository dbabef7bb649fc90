"""What a run is measured by: gaps between tokens, when requests were admitted and ended, and a coarse timeline."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from headrace.simulate.worker import Executed, Ints, Population
from scheduler.core.core import SchedulerCore
from shared.messages import Role

_PER_OCTAVE = 32
_MOST_SAMPLES = 1024


class GapHistogram:
    """Durations in logarithmic buckets 2.2 % wide, from 1 µs to several hours."""

    def __init__(self) -> None:
        self.counts: Ints = np.zeros(44 * _PER_OCTAVE, np.int64)

    def add_equal(self, gap_ns: int, count: int) -> None:
        self.counts[self._bucket(gap_ns)] += count

    def add(self, gaps_ns: Ints) -> None:
        buckets = (np.log2(np.maximum(gaps_ns, 1000) / 1000) * _PER_OCTAVE).astype(np.int64)
        self.counts += np.bincount(buckets, minlength=len(self.counts))[: len(self.counts)]

    def quantile_ns(self, share: float) -> float:
        total = int(self.counts.sum())
        if not total:
            return 0.0
        index = int(np.searchsorted(np.cumsum(self.counts), share * total))
        return float(1000 * 2 ** ((index + 0.5) / _PER_OCTAVE))

    @staticmethod
    def _bucket(gap_ns: int) -> int:
        return int(math.log2(max(gap_ns, 1000) / 1000) * _PER_OCTAVE)


@dataclass(slots=True)
class Sample:
    """The state at one time, and rates since the sample before it."""

    at_s: float
    running: int
    waiting: int
    preempted: int
    pages_used: int
    pages_cached: int
    pages_shared: int
    pages_total: int
    slots_filled: int  # KV entries that hold a computed token
    slots_held: int  # entries of pages that sequences hold
    slots_awaited: int  # entries held for prompt tokens that are not computed yet
    tokens: int  # so far: new tokens, preemptions, recomputed and prefill tokens, decode and padding rows
    preemptions: int
    recomputed: int
    prefill_rows: int
    decode_rows: int
    padding_rows: int
    busy_s: float
    tenant_service: tuple[int, ...] = ()  # so far, by tenant, where there are several: prompts admitted + 2 x outputs


@dataclass
class Measurements:
    population: Population
    gaps: GapHistogram = field(default_factory=GapHistogram)
    samples: list[Sample] = field(default_factory=list)
    steps: int = 0
    busy_ns: int = 0
    rows: int = 0
    decode_rows: int = 0
    prefill_rows: int = 0
    padding_rows: int = 0
    slot_steps: int = 0  # occupied slots, summed over steps
    tokens: int = 0
    longest_step_ns: int = 0
    finished_ns: int = 0  # when the last sequence ended
    worst_head_wait_ns: int = 0
    refused: dict[str, int] = field(default_factory=dict)
    roles: list[tuple[float, str, Role]] = field(default_factory=list)  # (virtual s, worker, role), as they changed
    pauses_ns: list[int] = field(default_factory=list)  # of each sequence that moved to another worker
    watched: npt.NDArray[np.bool_] | None = None  # sequences whose gaps are counted apart, too
    watched_gaps: GapHistogram = field(default_factory=GapHistogram)

    def __post_init__(self) -> None:
        size = self.population.size
        self.arrived_ns: Ints = np.zeros(size, np.int64)
        self.admitted_ns: Ints = np.full(size, -1, np.int64)
        self.ended_ns: Ints = np.full(size, -1, np.int64)
        self.reason = [""] * size
        tenants = sorted({request.tenant for request in self.population.requests})
        self.tenants = tenants if len(tenants) > 1 else []
        numbers = {tenant: index for index, tenant in enumerate(tenants)}
        self._tenant_of = np.array([numbers[one.tenant] for one in self.population.requests], np.int64)[
            self.population.request_of
        ]
        self._tenant_prompts = [0] * len(tenants)
        self._head = 0  # the oldest sequence that waits
        self._head_since_ns = 0
        self._sample_every_ns = 50_000_000
        self._next_sample_ns = 0

    def step(self, done: Executed) -> None:
        self.steps += 1
        self.busy_ns += done.duration_ns
        self.longest_step_ns = max(self.longest_step_ns, done.duration_ns)
        self.rows += done.work.rows
        self.decode_rows += done.decode_rows
        self.prefill_rows += done.prefill_rows
        self.padding_rows += done.padding_rows
        self.slot_steps += done.occupied

    def tokens_at(self, numbers: Ints, now: int) -> None:
        """Each of these sequences got a token that its client has at ``now``."""
        if not len(numbers):
            return
        self.tokens += len(numbers)
        last = self.population.last_ns
        gaps = now - last[numbers]
        last[numbers] = now
        widest, narrowest = int(gaps.max()), int(gaps.min())
        if widest == now:  # some have their first token
            first = numbers[gaps == now]
            self.population.first_ns[first] = now
            later = gaps != now
            numbers, gaps = numbers[later], gaps[later]
            if not len(gaps):
                return
            widest = int(gaps.max())
        if self.watched is not None:
            self.watched_gaps.add(gaps[self.watched[numbers]])
        if widest == narrowest:
            self.gaps.add_equal(widest, len(gaps))
        else:
            self.gaps.add(gaps)
        known = self.population.widest_gap_ns
        known[numbers] = np.maximum(known[numbers], gaps)

    def found(self, index: int, now: int) -> None:
        """A beam search ended: its client has the whole answer at once."""
        number = self.population.first_of[index]
        self.tokens += int(self.population.length[number])
        self.population.first_ns[number] = self.population.last_ns[number] = now

    def admitted(self, number: int, now: int) -> None:
        if self.admitted_ns[number] < 0:
            self.admitted_ns[number] = now
            index = int(self.population.request_of[number])
            self._tenant_prompts[self._tenant_of[number]] += self.population.requests[index].prompt_len
            if number == self._head:
                self.worst_head_wait_ns = max(self.worst_head_wait_ns, now - self._head_since())
                self._advance_head(now)

    def ended(self, number: int, reason: str, now: int) -> None:
        assert self.ended_ns[number] < 0, f"sequence {number} ended twice"
        self.ended_ns[number] = now
        self.reason[number] = reason
        self.finished_ns = max(self.finished_ns, now)
        if number == self._head:
            self._advance_head(now)

    def _head_since(self) -> int:
        return max(self._head_since_ns, int(self.arrived_ns[self._head]))

    def _advance_head(self, now: int) -> None:
        size = self.population.size
        while self._head < size and (self.admitted_ns[self._head] >= 0 or self.ended_ns[self._head] >= 0):
            self._head += 1
        self._head_since_ns = now

    def sample(self, core: SchedulerCore, now: int) -> None:
        """Take a sample if one is due. The spacing doubles so that a run of any length has at most 1024."""
        if now < self._next_sample_ns:
            return
        if len(self.samples) >= _MOST_SAMPLES:
            del self.samples[::2]
            self._sample_every_ns *= 2
        self._next_sample_ns = now + self._sample_every_ns
        filled = held = awaited = 0
        used = cached = shared = total = 0
        for worker in core.workers.values():
            pool, size = worker.pool, worker.capacity.block_size
            fill: dict[int, int] = {}
            for sequence in worker.running:
                whole, rest = divmod(sequence.scheduled, size)
                for page in sequence.pages[:whole]:
                    fill[page] = size
                if rest:
                    page = sequence.pages[whole]
                    fill[page] = max(rest, fill.get(page, 0))
                awaited += max(0, len(sequence.tokens) - sequence.scheduled - 1)
            filled += sum(fill.values())
            held += pool.num_used * size
            used += pool.num_used
            cached += pool.num_cached
            shared += pool.num_shared
            total += pool.num_blocks
        counters = core.counters
        self.samples.append(
            Sample(
                now / 1e9, core.num_running, core.num_waiting, core.num_preempted, used, cached, shared, total, filled,
                held, awaited, counters.new_tokens, counters.preemptions, counters.recomputed_tokens,
                self.prefill_rows, self.decode_rows, self.padding_rows, self.busy_ns / 1e9, self._by_tenant(),
            )
        )  # fmt: skip

    def _by_tenant(self) -> tuple[int, ...]:
        if not self.tenants:
            return ()
        generated = self.population.length - self.population.left
        counts = np.bincount(self._tenant_of, weights=generated, minlength=len(self.tenants))
        return tuple(int(prompts + 2 * outputs) for prompts, outputs in zip(self._tenant_prompts, counts, strict=True))
