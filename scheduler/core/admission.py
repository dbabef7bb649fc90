"""Who enters the batch: memory-aware FIFO breaking (DESIGN 7) over one projection of used blocks.

The queue is served in order as long as its head fits. A head that does not fit becomes the *blocked head*: its matched
prefix is pinned, and later sequences may pass it by the rule of EASY backfilling (Lifka 1995; Mu'alem and Feitelson,
TPDS 2001): they must fit now, and either be expected to end before the head's shadow time or fit in what the head will
leave. Expectations can be wrong, so the head's wait is also bounded hard: after ``max_bypasses`` or
``max_bypass_wait_ns`` it holds a reservation, and only what is sure, by its max_tokens, to end first still passes.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from scheduler.core.draft import PlanDraft
from scheduler.core.events import Counters
from scheduler.core.fairness import VirtualTokenCounters
from scheduler.core.lengths import OutputLengths
from scheduler.core.limits import Limits
from scheduler.core.looking import Look
from scheduler.core.projection import Growing, Projection
from scheduler.core.sequence import Lack, Sequence, pages_for
from scheduler.core.suspects import Suspects
from scheduler.core.waiting import WaitingQueue
from scheduler.core.worker_state import Placement, WorkerState

LOOK_AGAIN = 8
"""Plans after which a queue that could not be served is looked at again although nothing has changed."""

RUNNING_PER_PLAN = 256
"""Running sequences for each plan that passes between two looks at a queue that could not be served."""

EXPECT_AGAIN = 8
"""Tokens after which the expected length of a running sequence is looked up again."""

SHARED_PREFILL_TOKENS = 128
"""Waiting for somebody else's prefill to fill the prefix cache pays from so many tokens: about what a GPU computes in
the time of one step that only reads the weights."""

Join = Callable[[WorkerState, Sequence, Placement, PlanDraft], None]


class Admission:
    def __init__(
        self, limits: Limits, counters: Counters, lengths: OutputLengths, fairness: VirtualTokenCounters,
        settle_service: Callable[[], None], unpin: Callable[[Sequence], None], suspects: Suspects,
    ) -> None:  # fmt: skip
        self._limits = limits
        self._counters = counters
        self._lengths = lengths
        self._fairness = fairness
        self._settle_service = settle_service
        self._unpin = unpin
        self._suspects = suspects

    def admit(
        self, worker: WorkerState, queue: WaitingQueue, draft: PlanDraft, placing: Look, join: Join, now: int
    ) -> list[Sequence]:
        """Admit what may enter now; each is removed from the queue and joined. The queue may be one that the worker
        only borrows from: there it takes what fits, in order, and neither blocks nor passes anybody."""
        limits = self._limits
        chosen: list[tuple[Sequence, Placement]] = []
        pass_ = _Pass(self, worker, now)
        if pass_.free_slots <= 0:
            worker.lack = (Lack.SLOTS, "")
            return []
        if self._full_lately(worker, queue):
            return []
        worker.full_look = None
        if self._fairness.contended:
            self._settle_service()
        looked = 0
        left: list[Sequence] = []  # to others
        awaiting = False
        suspects = bool(self._suspects)
        borrowed = queue.key != worker.serves
        worker.lack = (Lack.TURN, "")
        for sequence in queue.order(now):
            if pass_.free_slots <= 0:
                worker.lack = (Lack.SLOTS, "")
                break
            if looked > limits.backfill_window:
                break
            group = self._suspects.group_of(sequence) if suspects else 0
            if group in self._suspects.on_trial:  # of what is tried here or elsewhere there was no room for it yet
                sequence.waits_for(Lack.SUSPECT, "", now)
                continue
            looked += 1
            if max(1, sequence.submit.sampling.beam_width) > pass_.free_slots:
                worker.lack = (Lack.SLOTS, sequence.request_id)
                break  # a search waits for slots for all of its beams
            if draft.plan_is_full(len(sequence.tokens), limits.max_plan_start_bytes):
                worker.lack = (Lack.MESSAGE, sequence.request_id)
                break
            if not worker.can_hold(sequence):
                continue  # it waits for a larger worker, and nobody here holds it up
            if sequence is not queue.blocked and placing.leaves(worker, sequence, now):
                sequence.waits_for(Lack.WORKER, "", now)
                if placing.spent:
                    break
                left.append(sequence)
                looked -= 1
                continue  # not blocked: another worker that could admit it now is to take it
            if pass_.head is None and sequence is not queue.blocked and pass_.too_long(sequence):
                sequence.waits_for(Lack.LONG, "", now)
                continue  # isolated, not blocked: it waits for the long ones that run, not for memory
            placement = worker.place(sequence, len(sequence.tokens))
            if sequence is not queue.blocked and (other := pass_.computes_prefix_of(sequence, placement)) is not None:
                awaiting = True  # not blocked either: by the next plans most of its prompt will be cached
                sequence.waits_for(Lack.PREFIX, other.request_id, now)
                continue
            if pass_.head is None:
                if not pass_.fits(sequence, placement):
                    if borrowed:
                        break
                    if sequence is not queue.blocked and placing.leaves(worker, sequence, now, refused=True):
                        sequence.waits_for(Lack.WORKER, "", now)
                        left.append(sequence)
                        continue
                    worker.lack = (Lack.BLOCKS, sequence.request_id)
                    sequence.waits_for(Lack.BLOCKS, "", now)
                    if not self.block(worker, queue, sequence, placement, now):
                        break
                    pass_.set_head(sequence, placement)
                    if limits.max_bypasses == 0:
                        break
                    continue
            elif pass_.too_long(sequence) or not pass_.may_pass(sequence, placement):
                sequence.waits_for(Lack.HEAD, pass_.head.request_id, now)
                continue
            else:
                pass_.passed()
                self._counters.bypasses += 1
            if group:  # it fits, but must have the worker for itself and its group: once this plan has run
                worker.trial = group
                self._suspects.on_trial.add(group)
                worker.lack = (Lack.SUSPECT, sequence.request_id)
                sequence.waits_for(Lack.SUSPECT, "", now)
                break
            if sequence is queue.blocked:
                self._unpin(sequence)
            chosen.append((sequence, placement))
            self._enter(worker, sequence, placement, draft, join, now)
            pass_.joined(sequence, placement)
        for sequence, _ in chosen:
            queue.remove(sequence)
        if not suspects:  # (they go by what waits, to whomever it is left)
            for sequence in left:
                placing.park(sequence)
        full = (pass_.head is not None or pass_.free_slots <= 0) and not (awaiting or borrowed)
        worker.full_look = (worker.next_step, queue.changes, worker.pool.releases) if full else None
        return [sequence for sequence, _ in chosen]

    def admit_tried(
        self, worker: WorkerState, queue: WaitingQueue, draft: PlanDraft, members: int, join: Join, now: int
    ) -> list[Sequence]:
        """Of the group on trial, those that fit now; ``members`` of it run already."""
        limits = self._limits
        joined: list[Sequence] = []
        members_waiting: list[Sequence] = []
        for sequence in queue.order(now):
            if group := self._suspects.group_of(sequence):
                sequence.waits_for(Lack.SUSPECT, "", now)
                if group == worker.trial:
                    members_waiting.append(sequence)
        for sequence in members_waiting:
            if not worker.can_hold(sequence):
                continue
            slots = limits.batch_slots(worker.capacity) - worker.occupied
            full = draft.plan_is_full(len(sequence.tokens), limits.max_plan_start_bytes)
            placement = worker.place(sequence, len(sequence.tokens))
            growth = members + len(joined)
            if full or max(1, sequence.submit.sampling.beam_width) > slots or (
                placement.takes + growth > worker.pool.num_free
            ):  # fmt: skip
                break
            if sequence is queue.blocked:
                self._unpin(sequence)
            self._enter(worker, sequence, placement, draft, join, now)
            queue.remove(sequence)
            joined.append(sequence)
        return joined

    def _full_lately(self, worker: WorkerState, queue: WaitingQueue) -> bool:
        """True if the last pass left off for lack of blocks or slots, and another look would be in vain or too dear.

        In vain as long as nothing came, left or was freed: only expectations have moved, which is worth a look every
        ``LOOK_AGAIN`` plans. Too dear, since a look costs in proportion to what runs, more often than every
        ``running / RUNNING_PER_PLAN`` plans.
        """
        if worker.full_look is None or not worker.running:
            return False
        step, changes, releases = worker.full_look
        plans = worker.next_step - step
        unchanged = changes == queue.changes and releases == worker.pool.releases
        return plans <= len(worker.running) // RUNNING_PER_PLAN or (unchanged and plans < LOOK_AGAIN)

    def block(self, worker: WorkerState, queue: WaitingQueue, head: Sequence, placement: Placement, now: int) -> bool:
        """``head`` does not fit: it stays the head, and what the cache holds of it is pinned. False if another
        sequence is the blocked head already (of another worker): one reservation at a time."""
        if queue.blocked is not None and queue.blocked is not head:
            return False
        if queue.blocked is None:
            queue.blocked = head
            if not head.blocked_since:
                head.blocked_since = now
        if placement.hits and worker.pinned_for is not head:
            worker.pin(head, placement.hits)
        return True

    def _enter(
        self, worker: WorkerState, sequence: Sequence, placement: Placement, draft: PlanDraft, join: Join, now: int
    ) -> None:
        sequence.admitted_ns = now
        self._counters.admitted += 1
        hits = len(placement.hits) * worker.capacity.block_size
        self._counters.looked_up(worker.capacity.model, len(sequence.tokens), hits)
        if sequence.blocked_since:
            self._counters.worst_head_wait_ns = max(self._counters.worst_head_wait_ns, now - sequence.blocked_since)
        if sequence.submit.attempt == 1:  # a resume after a loss is no service, as a preemption is none
            self._fairness.charge_input(sequence.submit.tenant, len(sequence.tokens))
        join(worker, sequence, placement, draft)

    def lead(self, tenant: str, other: str) -> float:
        return self._fairness.lead(tenant, other)

    # --- the projection's inputs ------------------------------------------------------------------------------------

    def growing(self, worker: WorkerState, sequence: Sequence, own: int, sure: bool) -> Growing:
        """``sure``: by its max_tokens instead of by expectation."""
        tokens = len(sequence.tokens) + sequence.pending
        generated = tokens - sequence.prompt_len
        if sure:
            left = max(0, sequence.submit.sampling.max_tokens - generated)
        else:
            if generated >= sequence.expect_again:
                self._expect(sequence, generated)
            left = sequence.expected - generated
        return Growing(tokens, left, own, len(sequence.pages), sequence.to_fork)

    def _expect(self, sequence: Sequence, generated: int) -> None:
        """How long it is expected to be in the end; asked again when it gets there, and every now and then."""
        max_left = max(0, sequence.submit.sampling.max_tokens - generated)
        sequence.expected = generated + self._lengths.expected_left(sequence.rank, generated, max_left)
        sequence.expect_again = generated + max(1, min(EXPECT_AGAIN, sequence.expected - generated))

    def candidate(self, worker: WorkerState, sequence: Sequence, placement: Placement) -> Growing:
        max_left = max(0, sequence.submit.sampling.max_tokens - sequence.generated)
        left = self._lengths.expected_left(sequence.rank, sequence.generated, max_left)
        tokens = len(sequence.tokens)
        blocks = pages_for(tokens, worker.capacity.block_size)
        return Growing(tokens, left, placement.new, blocks, sequence.to_fork)

    def fits(self, worker: WorkerState, sequence: Sequence, placement: Placement, now: int) -> bool:
        """True if the worker has room for a sequence that runs elsewhere, with what all are expected to grow by."""
        return _Pass(self, worker, now).fits(sequence, placement)

    def project(self, worker: WorkerState, sure: bool = False) -> Projection:
        own = worker.own_blocks()
        growing = [self.growing(worker, sequence, own[index], sure) for index, sequence in enumerate(worker.running)]
        for move in worker.arriving:
            coming = self.growing(worker, move.sequence, len(move.pages), sure)
            coming.blocks = len(move.pages)
            growing.append(coming)
        return Projection(
            growing,
            worker.pool.num_used - worker.num_pinned,
            worker.capacity.block_size,
        )


class _Pass:
    """One pass over the queue for one worker: figures are made when first needed, and again after a join."""

    def __init__(self, admission: Admission, worker: WorkerState, now: int) -> None:
        self._admission = admission
        self._limits = admission._limits
        self._worker = worker
        self._now = now
        self._watermark = math.ceil(worker.pool.num_blocks * self._limits.admission_watermark)
        self._projection: Projection | None = None
        self.head: Sequence | None = None
        self.free_slots = self._limits.batch_slots(worker.capacity) - worker.occupied
        self._shadow = 0
        self._spare = 0
        self._reserved = False
        self._reserve_next = False
        self._head_need = 0
        self._long_blocks: int | None = None
        self._long_held = False
        self._committed: int | None = None
        self._prefilling: list[Sequence] | None = None
        self._left_behind: set[str] = set()  # tenants with a sequence that waits for memory

    @property
    def _limit(self) -> int:
        return self._worker.pool.num_blocks - self._watermark

    def joined(self, sequence: Sequence, placement: Placement) -> None:
        if self._projection is not None:
            candidate = self._admission.candidate(self._worker, sequence, placement)
            self._projection.add(candidate, placement.takes)
        if self._prefilling is not None:
            self._prefilling.append(sequence)
        if self._reserve_next:
            self._reserve_next = False
            self._reserve()
        self.free_slots -= max(1, sequence.submit.sampling.beam_width)
        if self._committed is not None:
            self._committed += self._worker.worst_case_blocks(sequence)
        if self._long_blocks is not None and self._is_long(sequence):
            self._long_blocks += len(sequence.pages)

    def fits(self, sequence: Sequence, placement: Placement) -> bool:
        """True if the whole prompt fits now, with the watermark, and what all are expected to grow by fits too."""
        worker = self._worker
        if not (worker.running or worker.arriving):
            return placement.takes <= worker.pool.num_free
        if placement.takes + self._watermark > worker.pool.num_free:
            return False
        if not self._limits.growth_aware_admission:
            return True
        worst = worker.worst_case_blocks(sequence)
        if self._committed is None:
            self._committed = worker.committed_blocks()
        pinned = worker.num_pinned if sequence is not worker.pinned_for else 0
        if self._committed + worst + pinned <= self._limit:
            worker.expected_growth = 0
            return True  # even if every one runs to its max_tokens
        candidate = self._admission.candidate(worker, sequence, placement)
        return self._project().fits_with(candidate, placement.takes + pinned, self._limit)

    def set_head(self, head: Sequence, placement: Placement) -> None:
        limits = self._limits
        self.head = head
        self._left_behind.add(head.submit.tenant)
        self._head_need = pages_for(len(head.tokens), self._worker.capacity.block_size)
        waited = self._now - head.blocked_since
        if head.bypasses >= limits.max_bypasses or waited >= limits.max_bypass_wait_ns:
            self._reserve()
        else:
            self._shadow, self._spare = self._project().shadow(self._head_need, self._limit)

    def passed(self) -> None:
        """A sequence passes the head."""
        assert self.head is not None
        self.head.bypasses += 1
        if not self._reserved and self.head.bypasses >= self._limits.max_bypasses:
            self._reserve_next = True  # once this one is among those that run

    def _reserve(self) -> None:
        self._reserved = True
        sure = self._admission.project(self._worker, sure=True)
        self._shadow, self._spare = sure.shadow(self._head_need, self._limit)

    def may_pass(self, sequence: Sequence, placement: Placement) -> bool:
        """True if the sequence may enter before the head, and before whoever else this pass leaves waiting.

        Not if its tenant leads one of theirs by more than ``max_bypass_lead``: else a tenant that sends short ones
        would gain with every head of one that sends long ones, without end.
        """
        tenant = sequence.submit.tenant
        leads = max((self._admission.lead(tenant, one) for one in self._left_behind if one != tenant), default=0)
        if leads <= self._limits.max_bypass_lead and self._backfills(sequence, placement):
            return True
        self._left_behind.add(tenant)
        return False

    def _backfills(self, sequence: Sequence, placement: Placement) -> bool:
        """The rule of EASY backfilling. What fits in the spare uses it up."""
        if not self.fits(sequence, placement):
            return False
        max_left = sequence.submit.sampling.max_tokens - sequence.generated
        if self._reserved:
            return max_left + self._prefill_steps(sequence) <= self._shadow
        candidate = self._admission.candidate(self._worker, sequence, placement)
        if candidate.left + self._prefill_steps(sequence) <= self._shadow:
            return True
        blocks = placement.takes + candidate.extra(candidate.left, self._worker.capacity.block_size)
        if blocks <= self._spare:
            self._spare -= blocks
            return True
        return False

    def _prefill_steps(self, sequence: Sequence) -> int:
        return -(-len(sequence.tokens) // self._limits.prefill_chunk_limit)

    def computes_prefix_of(self, sequence: Sequence, placement: Placement) -> Sequence | None:
        """The running prefill, if any, that is about to compute at least half of what the sequence would have to.

        Equal prompts that come together are then computed once: the first one is, and the others join when they can
        hit its blocks. They lose nothing, since those tokens share one budget in any case.
        """
        size = self._worker.capacity.block_size
        hits = len(placement.hits)
        rest = len(sequence.tokens) - hits * size
        if not self._worker.prefix_caching or rest < SHARED_PREFILL_TOKENS:
            return None
        if self._prefilling is None:
            self._prefilling = [one for one in self._worker.running if one.remaining > 1]
        wanted = -(-max(SHARED_PREFILL_TOKENS, rest // 2) // size)  # blocks in common, beyond the hits
        last = hits + wanted - 1  # hashes are chained: if these blocks are equal, so are all before them
        chain = sequence.chain
        if last >= len(chain):
            return None
        return next(
            (
                one
                for one in self._prefilling
                if last < len(one.chain) and one.chain[last] == chain[last] and one.registered <= last
            ),
            None,
        )

    def too_long(self, sequence: Sequence) -> bool:
        """Long-context isolation: long ones together hold no more than their share of the blocks while shorter ones
        wait. Never against the only long one; nor is the blocked head asked.

        Among themselves they enter in order: else those that fit in the share would keep a longer one out for ever.
        """
        limits = self._limits
        if not limits.long_context_tokens or not self._is_long(sequence):
            return False
        worker = self._worker
        if self._long_blocks is None:
            self._long_blocks = sum(len(s.pages) for s in worker.running if self._is_long(s))
        if not self._long_blocks:
            return False
        need = pages_for(len(sequence.tokens), worker.capacity.block_size)
        share = limits.long_context_share * worker.pool.num_blocks
        self._long_held = self._long_held or self._long_blocks + need > share
        return self._long_held

    def _is_long(self, sequence: Sequence) -> bool:
        return sequence.prompt_len >= self._limits.long_context_tokens

    def _project(self) -> Projection:
        if self._projection is None:
            worker = self._worker
            self._projection = self._admission.project(worker)
            worker.expected_growth = max(0, self._projection.peak - worker.pool.num_used + worker.num_pinned)
        return self._projection
