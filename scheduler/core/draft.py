"""A plan under construction: rows are added, and each row's effect on its sequence is accounted at once."""

from __future__ import annotations

from scheduler.core.events import Counters
from scheduler.core.sequence import Sequence, Status
from scheduler.core.step_time import PlannedWork, attention_pairs
from scheduler.core.worker_state import PlanInFlight, WorkerState
from shared.messages import Fetch, Sampling, SlotStart, StepPlan, pack_tokens


class PlanDraft:
    """Collects one plan. The delta is against the worker's batch as all plans in flight leave it."""

    def __init__(self, worker: WorkerState, counters: Counters) -> None:
        self._worker = worker
        self._counters = counters
        self.trial = worker.trial
        self._drops = worker.drops
        worker.drops = []
        self._starts: list[SlotStart] = []
        self._pages: list[tuple[int, list[int]]] = []
        self._decodes: list[int] = []
        self._chunks: list[tuple[int, int]] = []
        self._padding: list[tuple[int, int]] = []
        self._copies: list[tuple[int, int]] = []
        self._replaces: list[tuple[int, int, int]] = []
        self._forked: list[tuple[int, Sequence]] = []
        self._sampled_decodes: list[tuple[int, Sequence]] = []
        self._sampled_chunks: list[tuple[int, Sequence]] = []
        self._ran: list[Sequence] = []
        self._prefill_tokens = 0
        self._pairs = 0
        self.start_bytes = 0
        self._feeds: list[tuple[int, int]] = []
        self._swap_outs: list[tuple[int, int]] = []
        self._swap_ins: list[tuple[int, int]] = []
        self._fetches: list[Fetch] = []
        self._drop_fetches = worker.drop_fetches
        worker.drop_fetches = []
        for child in worker.forks:
            if child.status is Status.RUNNING:
                self.start(child)
        for beam, token in worker.feeds:
            if beam.status is Status.RUNNING:
                self._feeds.append((beam.slot, token))
        worker.forks, worker.feeds = [], []

    def drop(self, slot: int) -> None:
        """The slot leaves before anything else happens: what this plan had for it is taken back."""
        self._feeds = [feed for feed in self._feeds if feed[0] != slot]
        started = [start for start in self._starts if start.slot == slot]
        if started:
            self._starts = [start for start in self._starts if start.slot != slot]
        else:
            self._drops.append(slot)
        self._worker.free_slot(slot)

    def swap_out(self, sequence: Sequence, places: list[int]) -> None:
        """Move the sequence's computed blocks to ``places`` in host memory, before anything overwrites them."""
        self._swap_outs += list(zip(sequence.pages, places, strict=False))
        self._counters.swapped_out += len(places)

    def swap_in(self, sequence: Sequence) -> None:
        """Move its blocks back into its new pages; nothing of it is computed again."""
        self._swap_ins += list(zip(sequence.host, sequence.pages, strict=False))
        self._counters.swapped_in += len(sequence.host)

    def start(self, sequence: Sequence) -> None:
        submit = sequence.submit
        packed = pack_tokens(sequence.tokens)
        self.start_bytes += len(packed) + _extra_bytes(submit.sampling)
        self._starts.append(
            SlotStart(
                slot=sequence.slot,
                request_id=submit.request_id,
                attempt=submit.attempt,
                choice=sequence.choice,
                gateway=submit.gateway,
                tokens=packed,
                prompt_len=sequence.prompt_len,
                pages=list(sequence.pages),
                sampling=submit.sampling,
                prompt_index=submit.prompt_index,
                traceparent=submit.traceparent,
                computed=sequence.scheduled,
                adapter=submit.adapter,
            )
        )

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """``child`` joins with the parent's tokens and pages, and samples from the logits that end its prompt."""
        submit = child.submit
        child.scheduled = parent.scheduled
        child.pending = 1
        child.in_flight = 1
        self._counters.forks += 1
        self.start_bytes += _extra_bytes(submit.sampling)
        self._starts.append(
            SlotStart(
                child.slot, submit.request_id, submit.attempt, child.choice, submit.gateway, b"", child.prompt_len, [],
                submit.sampling, submit.prompt_index, submit.traceparent, child.scheduled, parent.slot,
                submit.adapter,
            )
        )  # fmt: skip
        self._forked.append((child.slot, child))
        self._ran.append(child)

    def replace_page(self, sequence: Sequence, index: int, page: int) -> None:
        """Copy a shared page of the sequence before it is written to."""
        self._copies.append((sequence.pages[index], page))
        self._replaces.append((sequence.slot, index, page))
        self._counters.page_copies += 1

    def append_pages(self, sequence: Sequence, pages: list[int]) -> None:
        self._pages.append((sequence.slot, pages))

    def decode(self, sequence: Sequence) -> None:
        self.decode_all([sequence])

    def decode_all(self, sequences: list[Sequence]) -> None:
        """One token each; it always samples the next. The busiest loop of the core: nothing in it calls anything."""
        block_size = self._worker.capacity.block_size
        for sequence in sequences:
            scheduled = sequence.scheduled = sequence.scheduled + 1
            sequence.pending += 1
            sequence.in_flight += 1
            if scheduled % block_size == 0 and scheduled <= len(sequence.tokens):
                self._worker.register(sequence, scheduled)
        slots = [sequence.slot for sequence in sequences]
        self._decodes += slots
        self._sampled_decodes += zip(slots, sequences, strict=True)
        self._ran += sequences

    def chunk(self, sequence: Sequence, count: int) -> None:
        """``count`` prompt tokens; the last chunk samples. Pages it fills can be hit from the next plan on."""
        self._counters.recomputed_tokens += min(count, max(0, sequence.computed_before - sequence.scheduled))
        self._pairs += attention_pairs(sequence.scheduled, count)
        sequence.scheduled += count
        sequence.in_flight += 1
        self._prefill_tokens += count
        self._chunks.append((sequence.slot, count))
        if sequence.scheduled == len(sequence.tokens) + sequence.pending:
            sequence.pending += 1
            self._sampled_chunks.append((sequence.slot, sequence))
        self._worker.register(sequence, sequence.scheduled)
        self._ran.append(sequence)

    def fetch(self, fetch: Fetch) -> None:
        self._fetches.append(fetch)

    def pad(self, sequence: Sequence, rows: int) -> None:
        self._padding.append((sequence.slot, rows))

    def plan_is_full(self, tokens: int, max_bytes: int) -> bool:
        """True if so many tokens more would make the plan's message too long; the next plan takes them."""
        return self.start_bytes > 0 and self.start_bytes + 4 * tokens > max_bytes

    @property
    def has_rows(self) -> bool:
        return bool(self._ran)

    @property
    def empty(self) -> bool:
        moves = self._fetches or self._drop_fetches
        return not (self._ran or self._drops or self._starts or self._feeds or moves)

    def finish(self, epoch: int, now: int) -> StepPlan:
        """The plan; it counts as in flight from here on."""
        worker = self._worker
        padding = sum(rows for _, rows in self._padding)
        if self._prefill_tokens:  # padding is of the same kind as what it is computed beside
            work = PlannedWork(len(self._decodes), self._prefill_tokens + padding, self._pairs)
        else:
            work = PlannedWork(len(self._decodes) + padding)
        plan = StepPlan(
            epoch=epoch,
            worker=worker.name,
            incarnation=worker.incarnation,
            step=worker.next_step,
            drops=self._drops,
            starts=self._starts,
            pages=self._pages,
            decodes=self._decodes,
            chunks=self._chunks,
            padding=self._padding,
            copies=self._copies,
            backlog=worker.backlog,
            replaces=self._replaces,
            feeds=self._feeds,
            swap_outs=self._swap_outs,
            swap_ins=self._swap_ins,
            hashes=worker.pool.take_news(),
            fetches=self._fetches,
            drop_fetches=self._drop_fetches,
        )
        worker.in_flight.append(
            PlanInFlight(
                step=worker.next_step,
                planned_ns=now,
                sampled=self._sampled_decodes + self._sampled_chunks + self._forked,
                ran=self._ran,
                decode_tokens=len(self._decodes),
                prefill_tokens=self._prefill_tokens,
                padding_tokens=padding,
                work=work,
                swapped=len(self._swap_outs) + len(self._swap_ins),
                trial=self.trial,
                moving=[(move, move.sequence.scheduled) for move in worker.departing],
            )
        )
        worker.next_step += 1
        self._counters.plans += 1
        self._counters.padding_tokens += padding
        self._counters.prefill_tokens += self._prefill_tokens
        return plan


def _extra_bytes(sampling: Sampling) -> int:
    """What can be long in the sampling parameters, which travel with every start, a fork's too."""
    grammar = len(sampling.grammar.encode("utf-8", "replace")) if sampling.grammar else 0
    return grammar + 16 * len(sampling.logit_bias)
