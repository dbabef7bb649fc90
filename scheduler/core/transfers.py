"""Which running sequences move to another worker, where to, and when: the decisions over ``scheduler.core.move``.

A prefill worker hands what it has computed to workers that decode; a worker that stops, or is about to run out of
blocks, hands over what it runs. Nobody waits for a move: as long as there is no room elsewhere a sequence decodes where
it is, and one whose move fails goes on there. At the target its blocks are held, but whatever runs or was preempted
there comes first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from scheduler.core.admission import LOOK_AGAIN
from scheduler.core.draft import PlanDraft
from scheduler.core.events import CoreEvent, Counters, Moved, NotMoved
from scheduler.core.limits import Limits
from scheduler.core.move import LAST_BLOCKS, LATE_FETCHES, MOST_PAGES, Move, Why
from scheduler.core.roles import can_fetch, same_adapter
from scheduler.core.sequence import Sequence, Status, pages_for
from scheduler.core.suspects import Suspects
from scheduler.core.worker_state import Placement, PlanInFlight, WorkerState
from scheduler.policies.victim import Candidate, choose_victim
from shared.messages import Fetch, Fetched, Role

LEAST_LEFT = 4
"""Tokens that a sequence may still generate, for a move to be worth its while."""

MOST_FAILED = 3
"""Moves of one sequence; then it stays where it is."""

HANDED_PER_PLAN = 4
"""Sequences for which a prefill worker looks for a place in one plan."""

BALANCED_AT_ONCE = 2
"""Moves for want of blocks that go on from one worker."""

LOOKED_AT = 64
"""Workers that are asked whether they take one sequence; of more of them, others in each plan."""

TARGETS_TRIED = 3
"""Workers that are looked at closely for one sequence, the likeliest first."""

KEPT = 0.8
"""Weight of fetches before the last one, in what a block is expected to take."""

MOST_PACES = 64
"""Sources of which a worker remembers how long their blocks took: a thousand may come and go under new names."""

Fits = Callable[[WorkerState, Sequence, Placement, int], bool]
"""(worker, sequence, what it takes there, now): whether it fits there, with what all are expected to grow by."""


class Transfers:
    """``note`` is told of workers whose places or blocks have changed without a plan or a result of their own."""

    def __init__(
        self, limits: Limits, counters: Counters, suspects: Suspects, fits: Fits, note: Callable[[WorkerState], None]
    ) -> None:  # fmt: skip
        self._limits = limits
        self._counters = counters
        self._suspects = suspects
        self._fits = fits
        self._note = note
        self._fetches = 0  # asked for, ever: the number of the last one

    # --- beginnings -------------------------------------------------------------------------------------------------

    def hand_on(self, worker: WorkerState, peers: Iterable[WorkerState], now: int) -> None:
        """Begin moves away from the worker for which a plan is being made, if its role or its memory asks for any.
        ``peers`` are the workers of its queue."""
        if worker.draining or worker.trial or not worker.capacity.transfer:
            return
        if worker.role is Role.PREFILL:
            # Before half of it is computed nothing is held for it elsewhere: it may stand behind others.
            ready = [
                one for one in worker.running
                if one.move is None and 2 * one.scheduled >= len(one.tokens) and one.home.key == worker.serves
                and self.may_move(worker, one)
            ]  # fmt: skip
            first = 0 if len(ready) <= HANDED_PER_PLAN else worker.next_step % len(ready)
            for sequence in (ready[first:] + ready[:first])[:HANDED_PER_PLAN]:  # in turn: some may fit nowhere
                self.begin(worker, sequence, peers, Why.ROLE, now)
        elif self._limits.balance and worker.pool.num_free < len(worker.running):
            self._balance(worker, peers, now)

    def _balance(self, worker: WorkerState, peers: Iterable[WorkerState], now: int) -> None:
        """Somebody would be preempted before long: hand over whom that would be. Each once in its life."""
        if sum(move.why is Why.BALANCE for move in worker.departing) >= BALANCED_AT_ONCE:
            return
        refs = worker.pool.refs
        index = choose_victim(
            Candidate(index, one.submit.priority, one.scheduled)
            for index, one in enumerate(worker.running)
            if one.remaining == 1 and not one.balanced and one.home.key == worker.serves
            and self.may_move(worker, one) and any(refs(block) == 1 for block in one.pages)
        )  # fmt: skip
        if index is not None:
            self.begin(worker, worker.running[index], peers, Why.BALANCE, now)

    def may_move(self, worker: WorkerState, sequence: Sequence) -> bool:
        """True if it is one that runs by itself: no beam, no prompt from which others are still to fork, no suspect."""
        return (
            sequence.move is None
            and sequence.status is Status.RUNNING
            and sequence.group is None
            and not sequence.children
            and sequence.failed_moves < MOST_FAILED
            and sequence.submit.sampling.max_tokens - sequence.generated - sequence.pending >= LEAST_LEFT
            and not self._suspects
            and bool(worker.capacity.transfer)
        )

    def begin(
        self, source: WorkerState, sequence: Sequence, peers: Iterable[WorkerState], why: Why, now: int
    ) -> bool:  # fmt: skip
        """Hold blocks for the sequence at the worker where it goes on best. False if none has room for it, or if it is
        computed again sooner than it is fetched."""
        asked = list(peers)
        stride = max(1, -(-len(asked) // LOOKED_AT))
        first = (sequence.number + source.next_step) % stride
        able = [one for one in asked[first::stride] if self._takes(source, one, sequence, why)]
        # A prefill worker takes what a stopping one runs, if nobody else does; prompts go to a mixed one only then.
        last = Role.MIXED if why is Why.ROLE else Role.PREFILL
        measured = all(one.predictor.decode_us(1) for one in able)
        able.sort(key=lambda one: (one.role is last, _cost(one, measured), one.name))
        blocks = pages_for(len(sequence.tokens), source.capacity.block_size)
        tried = 0
        for target in able:
            if _refused_lately(target, blocks):
                continue
            if tried == TARGETS_TRIED:
                break
            tried += 1
            placement = target.place(sequence, len(sequence.tokens))
            if why is not Why.ROLE and not _quicker(source, target, sequence, placement):
                continue
            if not self._fits(target, sequence, placement, now):
                target.refused = target.next_step, target.pool.releases, blocks
                continue
            target.pool.share(placement.hits)
            fresh = target.pool.allocate(placement.new)
            assert fresh is not None
            Move(sequence, source, target, why, placement.hits + fresh, len(placement.hits), now).begin()
            self._note(target)
            return True
        return False

    def _takes(self, source: WorkerState, target: WorkerState, sequence: Sequence, why: Why) -> bool:
        return (
            target is not source
            and (target.role is not Role.PREFILL or why is Why.DRAIN)  # else it is computed again, and there too
            and not (target.draining or target.trial or target.preempted)
            and not (target.takes_new and (target.full_look or sequence.home.blocked) and sequence.home)
            # (what waits for room there comes first)
            and target.occupied < self._limits.batch_slots(target.capacity)
            and len(target.arriving) < self._limits.max_arrivals
            and can_fetch(target, source)
            and same_adapter(target, source, sequence.submit.adapter)
            and target.can_hold(sequence)
        )

    # --- the target's plans -----------------------------------------------------------------------------------------

    def arrive(self, worker: WorkerState, draft: PlanDraft, now: int, events: list[CoreEvent]) -> None:
        """Start what has come whole."""
        if worker.trial or not worker.arriving:
            return
        arrived = [move for move in worker.arriving if move.arrived]
        for move in sorted(arrived, key=lambda one: one.sequence.seniority):
            sequence = move.sequence
            if draft.plan_is_full(len(sequence.tokens), self._limits.max_plan_start_bytes):
                break
            paused_ns = now - (move.still_ns or move.left_ns)
            move.arrive()
            self._note(move.source)
            sequence.balanced = sequence.balanced or move.why is Why.BALANCE
            draft.start(sequence)
            self._counters.moves += 1
            self._counters.fetched_blocks += move.blocks
            events.append(
                Moved(
                    sequence, move.source.name, move.why, move.blocks, move.bytes, move.fetch_us, paused_ns,
                    move.transport, now,
                )
            )  # fmt: skip

    def ask(self, worker: WorkerState, draft: PlanDraft, now: int, events: list[CoreEvent]) -> None:
        """Fetch what is there to be fetched."""
        room = MOST_PAGES
        for move in list(worker.arriving):
            if not move.wants_plan or move.arrived or not room:
                continue
            lack = move.due - len(move.pages)
            if lack > 0:  # it has grown meanwhile
                more = worker.pool.allocate(lack)
                if more is None:
                    self._fail(move, "the worker has no blocks for what it has grown by", now, events)
                    continue
                move.pages += more
            self._fetches += 1
            fetching = move.fetch(self._fetches, room, now)
            room -= len(fetching.here)
            source = move.source
            draft.fetch(
                Fetch(
                    fetching.number, source.name, source.incarnation, list(source.capacity.transfer),
                    list(zip(fetching.there, fetching.here, strict=True)), move.step,
                )
            )  # fmt: skip

    def give_way(self, worker: WorkerState, now: int, events: list[CoreEvent]) -> bool:
        """Whoever runs there or was preempted needs blocks: the least senior that is coming stays where it is, if that
        frees any now. False if none does."""
        refs = worker.pool.refs
        for move in sorted(worker.arriving, key=lambda one: one.sequence.seniority, reverse=True):
            if any(refs(block) == 1 for block in move.pages):
                self._fail(move, "its blocks were needed", now, events)
                return True
        return False

    # --- what comes in ----------------------------------------------------------------------------------------------

    def applied(self, worker: WorkerState, plan: PlanInFlight, now: int, events: list[CoreEvent]) -> None:
        """A plan's result is in: more is settled at its worker."""
        for move, scheduled in plan.moving:
            if not move.over:
                move.settled, move.step = scheduled, plan.step
        for move in list(worker.departing):
            if not move.sequence.in_flight:  # (it may still have a prefix that a later plan in flight computes)
                move.step = plan.step
            self._look(move, now, events)
            if move.left_ns and not (move.sequence.in_flight or move.still_ns):
                move.still_ns = now

    def fetched(self, worker: WorkerState, answer: Fetched, now: int) -> list[CoreEvent]:
        """A fetch is over. Its answer may come again: that changes nothing."""
        fetching = worker.fetching.get(answer.fetch)
        if fetching is None:
            return []
        move, blocks = fetching.move, len(fetching.here)
        fetching.close()
        worker.drop_fetches.append(answer.fetch)
        self._note(worker)
        events: list[CoreEvent] = []
        if not answer.reason:
            us, fetched = worker.fetch_pace.pop(move.source.name, (0.0, 0.0))
            worker.fetch_pace[move.source.name] = KEPT * us + answer.us, KEPT * fetched + blocks
            if len(worker.fetch_pace) > MOST_PACES:
                del worker.fetch_pace[next(iter(worker.fetch_pace))]
            self._counters.fetched_bytes += answer.bytes
        if move.over:
            return events
        move.open = None
        if answer.reason:
            self._fail(move, answer.reason, now, events)
            return events
        move.fetched += blocks
        move.blocks += blocks
        move.bytes += answer.bytes
        move.fetch_us += answer.us
        move.transport = answer.transport
        move.late += move.sequence.remaining <= 1
        self._look(move, now, events)
        return events

    def expire(self, workers: Iterable[WorkerState], now: int) -> list[CoreEvent]:
        """End what takes too long: its sequence goes on where it is."""
        events: list[CoreEvent] = []
        for worker in workers:
            for move in list(worker.arriving):
                since = move.left_ns or (move.open.asked_ns if move.open is not None else now)
                if now - since > self._limits.transfer_timeout_ns:
                    self._fail(move, f"it took more than {self._limits.transfer_timeout_ns / 1e9:g} s", now, events)
        return events

    def _look(self, move: Move, now: int, events: list[CoreEvent]) -> None:
        """Whether the sequence is to get no more rows where it is: when little of it is missing at the target."""
        sequence = move.sequence
        if sequence.leaving or sequence.remaining > 1:
            return
        if sequence.submit.sampling.max_tokens - sequence.generated - sequence.pending < LEAST_LEFT:
            self.stop(move)  # it ends before it would be there
            return
        if move.needs - move.fetched > LAST_BLOCKS and move.late < LATE_FETCHES:
            return
        lack = move.needs - len(move.pages)
        more = move.target.pool.allocate(lack) if lack > 0 else []
        if more is None:
            self._fail(move, "the worker has no blocks for what it has grown by", now, events)
            return
        move.pages += more
        sequence.leaving = True
        move.left_ns = now

    def stop(self, move: Move) -> None:
        """The sequence stays where it is, or is no more."""
        move.cancel()
        self._note(move.target)

    def _fail(self, move: Move, reason: str, now: int, events: list[CoreEvent]) -> None:
        self.stop(move)
        move.sequence.failed_moves += 1
        self._counters.failed_moves += 1
        events.append(NotMoved(move.sequence, move.target.name, move.why, reason, now))


def _refused_lately(worker: WorkerState, blocks: int) -> bool:
    """True if the worker had no room for one of no more ``blocks`` of late, and to look again would be in vain or too
    dear: a look costs in proportion to what runs there, and it is asked for with every plan of the others."""
    if worker.refused is None or not worker.running:
        return False
    step, releases, least = worker.refused
    plans = worker.next_step - step
    return blocks >= least and (not plans or (releases == worker.pool.releases and plans < LOOK_AGAIN))


def _cost(worker: WorkerState, measured: bool) -> float:
    """Of two workers that could take a sequence, the one with the lower cost should: a step's time there with one more
    row (rows alone, as long as not all are ``measured``), and more the less memory is left."""
    rows = len(worker.running) + len(worker.arriving) + 1
    step_us = worker.predictor.decode_us(rows) if measured else float(rows)
    return step_us * worker.pool.num_blocks / max(1, worker.pool.num_free)


def _quicker(source: WorkerState, target: WorkerState, sequence: Sequence, placement: Placement) -> bool:
    """True if its blocks are fetched sooner than what they hold is computed again, as far as either was measured."""
    of_source = target.fetch_pace.get(source.name)
    paces = [of_source] if of_source is not None else list(target.fetch_pace.values())
    blocks = sum(blocks for _, blocks in paces)
    fetch_us = placement.new * sum(us for us, _ in paces) / blocks if blocks else 0.0
    saved = sequence.scheduled - len(placement.hits) * target.capacity.block_size
    recompute_us = target.predictor.prompt_us(max(0, saved))
    return saved > 0 and (not recompute_us or fetch_us <= recompute_us)
