"""Eager admission with naive preemption: what engines did before they learned to hold back.

``vllm-v0``: admit in strict order while the whole prompt's blocks and the watermark are free; when a running
sequence finds no block, evict the youngest running one; it forgets everything and goes to the front of the queue (vLLM
v0's ``BlockSpaceManager`` and recompute preemption). Nothing is admitted in a step that preempted.

``first-chunk``: the same, but a prompt is admitted as soon as its first chunk fits, and takes blocks chunk by chunk
(vLLM V1 before ``scheduler_reserve_full_isl``, and any engine whose check is not held). Prompts then evict one another.

Both without prefix cache unless the limits turn it on, in which case an evicted sequence finds what nobody has
overwritten.
"""

from __future__ import annotations

import math

from scheduler.core.core import SchedulerCore
from scheduler.core.draft import PlanDraft
from scheduler.core.events import CoreEvent, Counters, Preempted
from scheduler.core.limits import Limits
from scheduler.core.looking import Look
from scheduler.core.sequence import Sequence, Status, pages_for
from scheduler.core.waiting import WaitingQueue
from scheduler.core.worker_state import Placement, WorkerState


class EagerPlanner:
    """Takes the place of the core's ContinuousPlanner. ``n > 1`` is not supported."""

    def __init__(self, limits: Limits, counters: Counters, *, whole_prompt: bool) -> None:
        self._limits = limits
        self._counters = counters
        self._whole_prompt = whole_prompt

    def draft(
        self, worker: WorkerState, queue: WaitingQueue, admit: bool, placing: Look, now: int,
        events: list[CoreEvent],
    ) -> PlanDraft:  # fmt: skip
        draft = PlanDraft(worker, self._counters)
        budget = self._limits.max_num_batched_tokens
        preempted = False
        # Age of admission decides: the list of running sequences in the order of their last admission.
        running = sorted(worker.running, key=lambda sequence: (sequence.admitted_ns, sequence.seniority))
        index = 0
        while index < len(running) and budget > 0:
            sequence = running[index]
            count = min(sequence.remaining, budget, self._limits.prefill_chunk_limit)
            if count <= 0:
                index += 1
                continue
            evicted_itself = False
            while not self._grow(worker, sequence, count, draft):
                preempted = True
                victim = running.pop()
                self._preempt(worker, victim, draft)
                events.append(Preempted(victim, "no_free_block", sequence.request_id, now))
                if victim is sequence:
                    evicted_itself = True
                    break
            if evicted_itself:
                break
            self._run(sequence, count, draft)
            budget -= count
            index += 1
        if not preempted and not worker.draining:
            self._join(worker, queue, admit, draft, budget, now)
        return draft

    def _run(self, sequence: Sequence, count: int, draft: PlanDraft) -> None:
        if sequence.remaining == 1:
            draft.decode(sequence)
        else:
            draft.chunk(sequence, count)

    def _grow(self, worker: WorkerState, sequence: Sequence, count: int, draft: PlanDraft) -> bool:
        missing = pages_for(sequence.scheduled + count, worker.capacity.block_size) - len(sequence.pages)
        if missing > 0:
            pages = worker.pool.allocate(missing)
            if pages is None:
                return False
            sequence.pages += pages
            draft.append_pages(sequence, pages)
        return True

    def _preempt(self, worker: WorkerState, victim: Sequence, draft: PlanDraft) -> None:
        worker.running.remove(victim)
        worker.pool.release(victim.pages)
        victim.pages = []
        victim.computed_before = max(victim.computed_before, victim.scheduled)
        victim.scheduled = 0
        victim.registered = 0
        victim.preemptions += 1
        self._counters.preemptions += 1
        victim.become(Status.SETTLING if victim.in_flight else Status.PREEMPTED)
        worker.add_preempted(victim)
        draft.drop(victim.slot)
        victim.slot = -1

    def _join(
        self, worker: WorkerState, queue: WaitingQueue, admit: bool, draft: PlanDraft, budget: int, now: int
    ) -> None:
        """Evicted sequences are the front of the queue; the first that does not fit stops those behind it."""
        watermark = math.ceil(worker.pool.num_blocks * self._limits.admission_watermark)
        while budget > 0 and len(worker.running) < self._limits.max_num_seqs:
            resumed = bool(worker.preempted)
            head = worker.preempted[0] if resumed else (queue.head(now) if admit else None)
            if head is None or (resumed and head.status is not Status.PREEMPTED) or not worker.can_hold(head):
                return
            chunk = min(budget, self._limits.prefill_chunk_limit)
            placement = worker.place(head, len(head.tokens))
            if not self._whole_prompt:
                placement = self._first_chunk_only(worker, head, placement, chunk)
            spare = watermark if self._whole_prompt and worker.running else 0
            if placement.takes + spare > worker.pool.num_free:
                return
            if resumed:
                worker.preempted.pop(0)
            else:
                queue.remove(head)
                self._counters.admitted += 1
                hits = len(placement.hits) * worker.capacity.block_size
                self._counters.looked_up(worker.capacity.model, len(head.tokens), hits)
            head.admitted_ns = now
            worker.hold(head, placement)
            head.become(Status.RUNNING)
            head.worker = worker.name
            head.slot = worker.take_slot()
            worker.running.add(head)
            draft.start(head)
            count = min(head.remaining, chunk)
            self._run(head, count, draft)
            budget -= count

    @staticmethod
    def _first_chunk_only(worker: WorkerState, head: Sequence, whole: Placement, chunk: int) -> Placement:
        block_size = worker.capacity.block_size
        hits = len(whole.hits)
        new = pages_for(min(len(head.tokens), hits * block_size + chunk), block_size) - hits
        return Placement(whole.hits, new, whole.takes - whole.new + new)


class EagerCore(SchedulerCore):
    def __init__(self, limits: Limits, policy: str, *, whole_prompt: bool) -> None:
        super().__init__(limits, policy)
        self._continuous = EagerPlanner(limits, self.counters, whole_prompt=whole_prompt)  # type: ignore[assignment]


def eager_core(limits: Limits, policy: str) -> SchedulerCore:
    return EagerCore(limits, policy, whole_prompt=True)


def first_chunk_core(limits: Limits, policy: str) -> SchedulerCore:
    return EagerCore(limits, policy, whole_prompt=False)
