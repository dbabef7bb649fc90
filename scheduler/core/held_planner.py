"""Plans for the baselines ``static`` and ``dynamic``: a batch is formed, padded, and held until its longest ends.

Memory is reserved for each member's maximum length (as servers did before paging), so nothing is ever preempted.
Prompts are left-padded to the longest: all reach their first token in the same step. The padding is really computed
by the worker and counted.
"""

from __future__ import annotations

from scheduler.core.draft import PlanDraft
from scheduler.core.events import Counters
from scheduler.core.limits import Limits
from scheduler.core.sequence import Lack, Sequence, Status, pages_for
from scheduler.core.suspects import Suspects
from scheduler.core.waiting import WaitingQueue
from scheduler.core.worker_state import WorkerState


class HeldBatchPlanner:
    def __init__(self, limits: Limits, counters: Counters, suspects: Suspects) -> None:
        self._limits = limits
        self._counters = counters
        self._suspects = suspects

    def draft(self, worker: WorkerState, queue: WaitingQueue, admit: bool, now: int) -> PlanDraft:
        draft = PlanDraft(worker, self._counters)
        if admit and not worker.running and not worker.held and not worker.draining:
            self._form(worker, queue, draft, now)
        if worker.static_columns is not None:
            self._prefill(worker, draft)
        else:
            self._decode(worker, draft)
        return draft

    def _form(self, worker: WorkerState, queue: WaitingQueue, draft: PlanDraft, now: int) -> None:
        if self._suspects and worker.in_flight:
            return  # a batch of suspects must be the only one in flight
        self._suspects.on_trial.discard(worker.trial)
        worker.trial = draft.trial = 0  # whoever of the last batch's group is left waits for another turn
        longest = 0
        for head in list(queue.order(now)):
            if len(worker.running) >= self._limits.batch_slots(worker.capacity):
                break
            if not worker.can_hold(head):
                continue  # it waits for a larger worker
            if self._suspects and not self._may_join(worker, head):
                head.waits_for(Lack.SUSPECT, "", now)
                continue
            pages = worker.pool.allocate(pages_for(head.worst_case_tokens, worker.capacity.block_size))
            if pages is None:
                break
            if draft.start_bytes and draft.start_bytes + 4 * len(head.tokens) > self._limits.max_plan_start_bytes:
                worker.pool.release(pages)
                break
            if group := self._suspects.group_of(head):
                worker.trial = draft.trial = group
                self._suspects.on_trial.add(group)
            queue.remove(head)
            head.pages = pages
            head.become(Status.RUNNING)
            head.worker = worker.name
            head.slot = worker.take_slot()
            head.admitted_ns = now
            self._counters.admitted += 1
            worker.running.add(head)
            draft.start(head)
            longest = max(longest, len(head.tokens))
        worker.static_columns = (0, longest) if longest else None

    def _may_join(self, worker: WorkerState, sequence: Sequence) -> bool:
        """A batch is of one group of suspects, or has none."""
        group = self._suspects.group_of(sequence)
        return group == worker.trial if worker.running else group not in self._suspects.on_trial

    def _prefill(self, worker: WorkerState, draft: PlanDraft) -> None:
        """One slice of the padded prompt matrix: ``width`` columns of every row, real tokens or padding."""
        assert worker.static_columns is not None
        done, total = worker.static_columns
        members = len(worker.running)
        if not members:
            worker.static_columns = None  # every member was cancelled
            return
        # Columns that only a cancelled member had are computed for nobody.
        done = max(done, total - max(len(sequence.tokens) for sequence in worker.running))
        budget = self._limits.step_tokens(worker.capacity)
        width = min(total - done, self._limits.prefill_chunk_limit, budget // members)
        for sequence in worker.running:
            real = min(width, max(0, done + width - (total - len(sequence.tokens))))
            if real:
                draft.chunk(sequence, real)
            if width > real:
                draft.pad(sequence, width - real)
        worker.static_columns = None if done + width == total else (done + width, total)

    def _decode(self, worker: WorkerState, draft: PlanDraft) -> None:
        idle = list(worker.held)
        for sequence in worker.running:
            if sequence.remaining == 1:
                draft.decode(sequence)
            else:
                idle.append(sequence)  # its last token is being sampled by a plan in flight
        if draft.has_rows:
            for sequence in idle:
                draft.pad(sequence, 1)
            self._counters.idle_slot_iterations += len(idle)
