"""Builds one iteration's plan for one worker with continuous batching. Mechanism: the invariants are kept here.

Order (DESIGN 3): running sequences get one decode token each, preempting if a block is missing; then preempted ones
resume; then waiting ones are admitted; then prompts fill what the decodes left of the token budget.
"""

from __future__ import annotations

from collections.abc import Callable

from scheduler.core.admission import Admission
from scheduler.core.draft import PlanDraft
from scheduler.core.events import CoreEvent, Counters, Preempted
from scheduler.core.limits import Limits
from scheduler.core.looking import Look
from scheduler.core.sequence import Lack, Sequence, Status, pages_for
from scheduler.core.step_time import attention_pairs
from scheduler.core.suspects import Suspects
from scheduler.core.transfers import Transfers
from scheduler.core.waiting import WaitingQueue
from scheduler.core.worker_state import Placement, WorkerState
from scheduler.policies.prefill import finish_short, share_prefill, share_whole_prompts
from scheduler.policies.victim import Candidate, choose_victim

FINISHING_STRETCH = 2
"""Times the target ITL that a step may take if prompts get their first token by it."""


class ContinuousPlanner:
    def __init__(
        self, limits: Limits, counters: Counters, admission: Admission, suspects: Suspects, transfers: Transfers
    ) -> None:  # fmt: skip
        self._limits = limits
        self._suspects = suspects
        self._counters = counters
        self._admission = admission
        self._transfers = transfers

    def draft(
        self, worker: WorkerState, queue: WaitingQueue, admit: bool, placing: Look, now: int,
        events: list[CoreEvent],
    ) -> PlanDraft:  # fmt: skip
        limits = self._limits
        draft = PlanDraft(worker, self._counters)
        self._transfers.arrive(worker, draft, now, events)
        step_tokens = limits.step_tokens(worker.capacity)
        decodes: list[Sequence] = []
        prefills: list[Sequence] = []
        trial = worker.trial
        for sequence in worker.running:
            if trial and self._sits_out(worker, sequence):
                continue
            remaining = sequence.remaining
            if remaining == 1:
                decodes.append(sequence)
            elif remaining > 1:
                prefills.append(sequence)
        if prefills and not limits.enable_chunked_prefill:
            # A whole prompt may need nearly all of the budget: decodes sit out the step rather than starve it.
            need = prefills[0].remaining
            if need > step_tokens - len(decodes):
                del decodes[max(0, step_tokens - need) :]
        preempted = self._grow(worker, decodes, prefills, draft, now, events)
        if not preempted:
            joined = self._resume(worker, draft, now, events)
            if kept_out := next((one for one in worker.preempted if not self._sits_out(worker, one)), None):
                worker.lack = (Lack.PREEMPTED, kept_out.request_id)
            elif trial and not worker.draining:
                running = sum(not self._sits_out(worker, one) for one in worker.running)
                joined += self._admission.admit_tried(worker, queue, draft, running, self._join, now)
            elif admit and not worker.draining:
                joined += self._admission.admit(worker, queue, draft, placing, self._join, now)
            if not (decodes or prefills or joined or worker.in_flight or worker.transferring):
                if kept_out is not None:
                    joined = self._unstall(worker, kept_out, draft, now, events)
                if not joined:
                    decodes = self._make_room(worker, draft, now, events)
            for sequence in joined:
                (decodes if sequence.remaining == 1 else prefills).append(sequence)
        draft.decode_all(decodes)
        for sequence in [sequence for sequence in decodes if sequence.children]:
            self._fork_if_done(worker, sequence, draft, now)
        prefills.sort(key=lambda sequence: sequence.seniority)
        budget = step_tokens - len(decodes)
        needs = [sequence.remaining for sequence in prefills]
        if limits.enable_chunked_prefill:
            capped: list[bool] = []
            if limits.long_context_tokens:
                capped = [sequence.prompt_len >= limits.long_context_tokens for sequence in prefills]

            def share(tokens: int) -> list[int]:
                return share_prefill(
                    needs, tokens, limits.prefill_chunk_limit, limits.oldest_prefill_share, capped,
                    limits.long_context_share,
                )  # fmt: skip

            within = self._within_target(worker, len(decodes), prefills, budget, share, 1)
            grants = share(within)
            if within < budget:  # prompts that this step can finish may stretch it
                stretched = self._within_target(worker, len(decodes), prefills, budget, share, FINISHING_STRETCH)
                finish_short(grants, needs, stretched - sum(grants), limits.prefill_chunk_limit)
        else:
            grants = share_whole_prompts(needs, budget)
        for sequence, grant in zip(prefills, grants, strict=True):
            if grant:
                draft.chunk(sequence, grant)
                self._fork_if_done(worker, sequence, draft, now)
        worker.prefilling = [one for one, grant, need in zip(prefills, grants, needs, strict=True) if grant < need]
        worker.prompts_left = sum(needs) - sum(grants)
        return draft

    def _within_target(
        self,
        worker: WorkerState,
        decodes: int,
        prefills: list[Sequence],
        budget: int,
        share: Callable[[int], list[int]],
        stretch: int,
    ) -> int:
        """The prefill budget with which the step is predicted to keep ``stretch`` times the target ITL (Niyama: dynamic
        chunking)."""
        limits = self._limits
        if not limits.target_itl_ns or not decodes or not prefills:
            return budget

        def pairs(tokens: int) -> int:
            grants = zip(prefills, share(tokens), strict=True)
            return sum(attention_pairs(sequence.scheduled, grant) for sequence, grant in grants)

        target_us = stretch * limits.target_itl_ns / 1000
        return worker.predictor.prefill_within(target_us, decodes, budget, limits.min_prefill_tokens, pairs)

    def _fork_if_done(self, worker: WorkerState, sequence: Sequence, draft: PlanDraft, now: int) -> None:
        if sequence.children and sequence.scheduled == len(sequence.tokens):
            self._fork(worker, sequence, draft, now)

    def _grow(
        self, worker: WorkerState, decodes: list[Sequence], prefills: list[Sequence], draft: PlanDraft, now: int,
        events: list[CoreEvent],
    ) -> bool:  # fmt: skip
        """Give each decode the block it needs, preempting if none is free. True if anything was preempted.

        A decode needs a block where its next token begins one, or where that token would be written into a block that
        a fork shares (copy-on-write).
        """
        block_size = worker.capacity.block_size
        preempted = False
        needy = [s for s in decodes if s.shares_tail or s.scheduled >= len(s.pages) * block_size]
        while _blocks_needed(worker, needy) > worker.pool.num_free:
            if worker.unpin():
                continue  # growth comes before what is kept for the blocked head
            if self._transfers.give_way(worker, now, events):
                continue  # and before what comes from other workers
            victim = self._victim(worker)
            if victim is None:
                break  # preempting would free nothing now; who lacks a block sits out this step
            preempted = True
            cause = needy[0].request_id
            self._evict(worker, victim, draft, "no_free_block", cause, now, events)
            for group in (needy, decodes, prefills):
                if victim in group:
                    group.remove(victim)
        for sequence in needy:
            place = sequence.scheduled // block_size
            if place >= len(sequence.pages):
                pages = worker.pool.allocate(1)
                if pages is None:
                    decodes.remove(sequence)
                    continue
                sequence.pages += pages
                draft.append_pages(sequence, pages)
            elif sequence.shares_tail and worker.pool.refs(sequence.pages[place]) > 1:
                pages = worker.pool.allocate(1)
                if pages is None:
                    decodes.remove(sequence)
                    continue
                draft.replace_page(sequence, place, pages[0])
                worker.pool.release([sequence.pages[place]])
                sequence.pages[place] = pages[0]
            sequence.shares_tail = False
        return preempted

    def _sits_out(self, worker: WorkerState, sequence: Sequence) -> bool:
        """True if others have the worker for themselves: a group of suspects."""
        return worker.trial != 0 and self._suspects.group_of(sequence) != worker.trial

    def _idle(self, worker: WorkerState) -> Sequence | None:
        """During a trial: the least senior of those that sit it out."""
        if not worker.trial:
            return None
        return next((one for one in reversed(list(worker.running)) if self._sits_out(worker, one)), None)

    def _victim(self, worker: WorkerState) -> Sequence | None:
        if (idle := self._idle(worker)) is not None:
            return idle
        refs = worker.pool.refs
        index = choose_victim(
            Candidate(index, sequence.submit.priority, sequence.scheduled)
            for index, sequence in enumerate(worker.running)
            if any(refs(page) == 1 for page in sequence.pages)  # only blocks that are freed now count
        )
        return None if index is None else worker.running[index]

    def _evict(
        self, worker: WorkerState, victim: Sequence, draft: PlanDraft, cause: str, by: str, now: int,
        events: list[CoreEvent],
    ) -> None:  # fmt: skip
        self._preempt(worker, victim, draft)
        draft.drop(victim.slot)
        victim.slot = -1
        events.append(Preempted(victim, cause, by, now))

    def _preempt(self, worker: WorkerState, victim: Sequence, draft: PlanDraft) -> None:
        """Release the victim's pages now: its plans in flight run before the drop that frees them at the worker."""
        if victim.move is not None:
            self._transfers.stop(victim.move)
        worker.running.remove(victim)
        if self._limits.swap and worker.capacity.host_blocks and worker.swap_pays(victim):
            blocks = pages_for(victim.scheduled, worker.capacity.block_size)
            victim.host = [worker.free_host.pop() for _ in range(blocks)]
            victim.swapped = victim.scheduled
            draft.swap_out(victim, victim.host)
        worker.pool.release(victim.pages)
        victim.pages = []
        victim.computed_before = max(victim.computed_before, victim.scheduled)
        victim.scheduled = 0
        victim.registered = 0
        victim.shares_tail = False
        victim.preemptions += 1
        self._counters.preemptions += 1
        victim.become(Status.SETTLING if victim.in_flight else Status.PREEMPTED)
        worker.add_preempted(victim)

    def _resume(
        self, worker: WorkerState, draft: PlanDraft, now: int, events: list[CoreEvent]
    ) -> list[Sequence]:  # fmt: skip
        """Preempted sequences, the most senior first, each once its recompute and some growth fit."""
        joined: list[Sequence] = []
        for sequence in list(worker.preempted):
            if self._sits_out(worker, sequence):
                continue
            if sequence.group is None and worker.occupied >= self._limits.batch_slots(worker.capacity):
                sequence.waits_for(Lack.SLOTS, "", now)
                break  # (a beam's slot is kept for it)
            if sequence.status is not Status.PREEMPTED:
                break  # its tokens are not all known yet; nobody less senior overtakes it
            if draft.plan_is_full(len(sequence.tokens), self._limits.max_plan_start_bytes):
                break
            growth = len(worker.running) + 1 if worker.running else 0
            placement = self._return_placement(worker, sequence)
            if placement.takes + growth > worker.pool.num_free and worker.unpin():
                placement = self._return_placement(worker, sequence)  # it comes before the blocked head's prefix
            while placement.takes + growth > worker.pool.num_free and self._transfers.give_way(worker, now, events):
                placement = self._return_placement(worker, sequence)
            while placement.takes + growth > worker.pool.num_free and (idle := self._idle(worker)) is not None:
                self._evict(worker, idle, draft, "no_free_block", sequence.request_id, now, events)
                placement = self._return_placement(worker, sequence)
            if placement.takes + growth > worker.pool.num_free:
                sequence.waits_for(Lack.BLOCKS, "", now)
                break
            worker.preempted.remove(sequence)
            self._counters.resumed_hits += len(placement.hits) * worker.capacity.block_size
            self._join(worker, sequence, placement, draft)
            joined.append(sequence)
        return joined

    def _return_placement(self, worker: WorkerState, sequence: Sequence) -> Placement:
        """What a preempted sequence needs to come back."""
        tokens = len(sequence.tokens)
        if sequence.preemptions > self._limits.reserve_after_preemptions:
            tokens = sequence.worst_case_tokens
        if sequence.host:
            blocks = pages_for(tokens, worker.capacity.block_size)
            return Placement([], blocks, blocks)
        return worker.place(sequence, tokens)

    def _unstall(
        self, worker: WorkerState, head: Sequence, draft: PlanDraft, now: int, events: list[CoreEvent]
    ) -> list[Sequence]:
        """Everything that runs waits for something preempted: beams for their siblings. Nothing would ever move again.

        ``head``, the most senior preempted sequence, comes back in place of the least senior that run. It fits: what is
        more senior than it and runs is of its own search, whose beams all fit together (``can_hold``).
        """
        placement = self._return_placement(worker, head)
        while placement.takes > worker.pool.num_free and worker.running:
            victim = worker.running[len(worker.running) - 1]
            if victim.seniority < head.seniority:
                break
            self._evict(worker, victim, draft, "stalled_search", head.request_id, now, events)
            placement = self._return_placement(worker, head)
        if placement.takes > worker.pool.num_free:
            return []
        worker.preempted.remove(head)
        self._join(worker, head, placement, draft)
        return [head]

    def _make_room(
        self, worker: WorkerState, draft: PlanDraft, now: int, events: list[CoreEvent]
    ) -> list[Sequence]:  # fmt: skip
        """Every decode lacks a block, and whoever could be preempted shares all of its own: alone it would free none.

        The least senior leave, one after the other, until the most senior that lacks one has it. Alone it fits.
        """
        needy = [one for one in worker.running if one.remaining == 1 and not self._sits_out(worker, one)]
        if not needy:
            return []
        while not worker.pool.num_free and worker.running[len(worker.running) - 1] is not needy[0]:
            victim = worker.running[len(worker.running) - 1]
            self._evict(worker, victim, draft, "no_free_block", needy[0].request_id, now, events)
        decodes = [one for one in worker.running if one.remaining == 1 and not self._sits_out(worker, one)]
        self._grow(worker, decodes, [], draft, now, events)
        return decodes

    def _join(self, worker: WorkerState, sequence: Sequence, placement: Placement, draft: PlanDraft) -> None:
        worker.hold(sequence, placement)
        if sequence.host:
            draft.swap_in(sequence)
            sequence.scheduled = sequence.swapped
            worker.release_host(sequence)
            worker.register(sequence, sequence.scheduled)
        self._enter(worker, sequence)
        draft.start(sequence)

    def _enter(self, worker: WorkerState, sequence: Sequence) -> None:
        sequence.become(Status.RUNNING)
        worker.searches = worker.searches or sequence.group is not None
        sequence.worker = worker.name
        sequence.slot = worker.take_slot()
        worker.running.add(sequence)

    def _fork(self, worker: WorkerState, parent: Sequence, draft: PlanDraft, now: int) -> None:
        """The parent's prompt ends in this plan: its other choices join it, sharing every page.

        Each will need a block of its own at its next token. Those for which there is no slot, block or room in the
        plan's message wait their turn; they will find the prompt in the prefix cache.
        """
        for child in parent.children:
            room = worker.pool.num_free - len(worker.running) > 0
            room = room and not draft.plan_is_full(0, self._limits.max_plan_start_bytes)
            if room and worker.occupied < self._limits.batch_slots(worker.capacity):
                child.pages = worker.written(parent)
                worker.pool.share(child.pages)
                child.registered = parent.registered
                child.chain, child.chain_root = list(parent.chain), parent.chain_root
                child.shares_tail = parent.shares_tail = True
                child.admitted_ns = now
                self._counters.admitted += 1
                self._enter(worker, child)
                draft.fork(parent, child)
            else:
                child.home.push(child)
        parent.children = []


def _blocks_needed(worker: WorkerState, needy: list[Sequence]) -> int:
    """Blocks that this step's decodes need: new ones, and copies of shared ones (all sharers but one copy)."""
    block_size = worker.capacity.block_size
    needed = 0
    sharers: dict[int, int] = {}
    for sequence in needy:
        if sequence.scheduled >= len(sequence.pages) * block_size:
            needed += 1
        elif sequence.shares_tail:
            page = sequence.pages[sequence.scheduled // block_size]
            sharers[page] = sharers.get(page, 0) + 1
    return needed + sum(min(count, worker.pool.refs(page) - 1) for page, count in sharers.items())
