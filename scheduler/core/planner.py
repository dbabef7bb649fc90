"""Builds one iteration's plan for one worker with continuous batching. Mechanism: the invariants are kept here.

Order (DESIGN 3): running sequences get one decode token each, preempting if a block is missing; then preempted ones
resume; then waiting ones are admitted; then prompts fill what the decodes left of the token budget.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from scheduler.core.draft import PlanDraft
from scheduler.core.events import CoreEvent, Counters, Preempted
from scheduler.core.limits import Limits
from scheduler.core.sequence import Sequence, Status, pages_for
from scheduler.core.waiting import WaitingQueue
from scheduler.core.worker_state import WorkerState
from scheduler.policies.prefill import share_prefill, share_whole_prompts
from scheduler.policies.victim import Candidate, choose_victim

Defer = Callable[[WorkerState], bool]
"""True if another worker should admit the head of the queue instead (a request binds when it is admitted)."""


class ContinuousPlanner:
    def __init__(self, limits: Limits, counters: Counters) -> None:
        self._limits = limits
        self._counters = counters

    def draft(
        self, worker: WorkerState, queue: WaitingQueue, admit: bool, defer: Defer, now: int, events: list[CoreEvent]
    ) -> PlanDraft:
        limits = self._limits
        draft = PlanDraft(worker, self._counters)
        decodes: list[Sequence] = []
        prefills: list[Sequence] = []
        for sequence in worker.running:
            remaining = sequence.remaining
            if remaining == 1:
                decodes.append(sequence)
            elif remaining > 1:
                prefills.append(sequence)
        if prefills and not limits.enable_chunked_prefill:
            # A whole prompt may need nearly all of the budget: decodes sit out the step rather than starve it.
            need = prefills[0].remaining
            if need > limits.max_num_batched_tokens - len(decodes):
                del decodes[max(0, limits.max_num_batched_tokens - need) :]
        preempted = self._grow(worker, decodes, prefills, draft, now, events)
        if not preempted:
            joined = self._resume(worker, draft)
            if admit and not worker.preempted and not worker.draining:
                joined += self._admit(worker, queue, draft, defer, now)
            for sequence in joined:
                (decodes if sequence.remaining == 1 else prefills).append(sequence)
        for sequence in decodes:
            draft.decode(sequence)
        prefills.sort(key=lambda sequence: sequence.seniority)
        budget = limits.max_num_batched_tokens - len(decodes)
        needs = [sequence.remaining for sequence in prefills]
        if limits.enable_chunked_prefill:
            grants = share_prefill(needs, budget, limits.prefill_chunk_limit, limits.oldest_prefill_share)
        else:
            grants = share_whole_prompts(needs, budget)
        for sequence, grant in zip(prefills, grants, strict=True):
            if grant:
                draft.chunk(sequence, grant)
        return draft

    def _grow(
        self, worker: WorkerState, decodes: list[Sequence], prefills: list[Sequence], draft: PlanDraft, now: int,
        events: list[CoreEvent],
    ) -> bool:  # fmt: skip
        """Give each decode the block it needs, preempting if none is free. True if anything was preempted."""
        block_size = worker.capacity.block_size
        needy = [sequence for sequence in decodes if sequence.scheduled >= len(sequence.pages) * block_size]
        preempted = False
        while len(needy) > worker.pool.num_free:
            victim = self._victim(worker)
            if victim is None:
                break  # only the most senior runs: the check at submit makes its blocks exist, so this is a short wait
            preempted = True
            cause = needy[0].request_id
            self._preempt(worker, victim)
            draft.drop(victim.slot)
            victim.slot = -1
            events.append(Preempted(victim, "no_free_block", cause, now))
            for group in (needy, decodes, prefills):
                if victim in group:
                    group.remove(victim)
        for sequence in needy:
            pages = worker.pool.allocate(1)
            if pages is None:
                decodes.remove(sequence)
            else:
                sequence.pages += pages
                draft.append_pages(sequence, pages)
        return preempted

    def _victim(self, worker: WorkerState) -> Sequence | None:
        index = choose_victim(
            Candidate(index, sequence.submit.priority, sequence.scheduled)
            for index, sequence in enumerate(worker.running)
        )
        return None if index is None else worker.running[index]

    def _preempt(self, worker: WorkerState, victim: Sequence) -> None:
        """Release the victim's pages now: its plans in flight run before the drop that frees them at the worker."""
        worker.running.remove(victim)
        worker.pool.release(victim.pages)
        victim.pages = []
        victim.computed_before = max(victim.computed_before, victim.scheduled)
        victim.scheduled = 0
        victim.preemptions += 1
        self._counters.preemptions += 1
        victim.become(Status.SETTLING if victim.in_flight else Status.PREEMPTED)
        worker.add_preempted(victim)

    def _resume(self, worker: WorkerState, draft: PlanDraft) -> list[Sequence]:
        """Preempted sequences, the most senior first, each once its recompute and some growth fit."""
        joined: list[Sequence] = []
        while worker.preempted and len(worker.running) < self._limits.max_num_seqs:
            sequence = worker.preempted[0]
            if sequence.status is not Status.PREEMPTED:
                break  # its tokens are not all known yet; nobody less senior overtakes it
            tokens = len(sequence.tokens)
            if sequence.preemptions > self._limits.reserve_after_preemptions:
                tokens = sequence.worst_case_tokens
            need = pages_for(tokens, worker.capacity.block_size)
            growth = len(worker.running) + 1 if worker.running else 0
            if need + growth > worker.pool.num_free or self._plan_is_full(sequence, draft):
                break
            worker.preempted.pop(0)
            self._join(worker, sequence, need, draft)
            joined.append(sequence)
        return joined

    def _admit(
        self, worker: WorkerState, queue: WaitingQueue, draft: PlanDraft, defer: Defer, now: int
    ) -> list[Sequence]:
        """Waiting sequences in order, while slots and blocks for the *whole* prompt are there; the blocks are held."""
        joined: list[Sequence] = []
        block_size = worker.capacity.block_size
        watermark = math.ceil(worker.pool.num_blocks * self._limits.admission_watermark)
        while (head := queue.head) is not None and len(worker.running) < self._limits.max_num_seqs:
            need = pages_for(len(head.tokens), block_size)
            if not worker.can_hold(head) or defer(worker):
                break  # another worker takes it
            if need + (watermark if worker.running else 0) > worker.pool.num_free:
                break
            if self._plan_is_full(head, draft):
                break
            queue.remove(head)
            head.admitted_ns = now
            self._counters.admitted += 1
            self._join(worker, head, need, draft)
            joined.append(head)
        return joined

    def _plan_is_full(self, sequence: Sequence, draft: PlanDraft) -> bool:
        """True if the tokens of one more sequence would make the plan's message too long; the next plan takes it."""
        return (
            draft.start_bytes > 0 and draft.start_bytes + 4 * len(sequence.tokens) > self._limits.max_plan_start_bytes
        )

    def _join(self, worker: WorkerState, sequence: Sequence, pages: int, draft: PlanDraft) -> None:
        allocated = worker.pool.allocate(pages)
        assert allocated is not None
        sequence.pages = allocated
        sequence.become(Status.RUNNING)
        sequence.worker = worker.name
        sequence.slot = worker.take_slot()
        worker.running.add(sequence)
        draft.start(sequence)
