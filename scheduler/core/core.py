"""The scheduler core: every decision of the mesh, as a function of its inputs and their times.

Pure: no I/O, clock, randomness, torch or nats. Drivers (the NATS service, the simulator, the tests) pass messages and
the time in, and carry out what comes back. The same inputs at the same times give the same plans, byte for byte.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice

from scheduler.core.admissible import max_model_len, unfinished
from scheduler.core.beams import BeamSearch
from scheduler.core.blocks import BlockPool
from scheduler.core.events import Applied, CoreEvent, Ended, Failed
from scheduler.core.fleet import Fleet
from scheduler.core.held_planner import HeldBatchPlanner
from scheduler.core.lending import borrower
from scheduler.core.lengths import rank_of
from scheduler.core.limits import Limits
from scheduler.core.losses import speaks
from scheduler.core.moving import MovingState
from scheduler.core.placement import Placing
from scheduler.core.planner import ContinuousPlanner
from scheduler.core.pools import QueueKey
from scheduler.core.routing import live_capacities, route
from scheduler.core.sequence import BeamGroup, Sequence, Status
from scheduler.core.state import QueueState, RequestState
from scheduler.core.waiting import WaitingQueue
from scheduler.core.worker_state import PlanInFlight, WorkerState
from scheduler.policies.batching import BatchView
from shared.messages import (
    Capacity,
    EndReason,
    Outcome,
    StepPlan,
    StepResult,
    Submit,
    SubmitReply,
    unpack_tokens,
)
from shared.retry import retry_after_s


class ResultGap(Exception):
    """A result came before that of an earlier plan: the driver resends the plan of ``step`` to have its result."""

    def __init__(self, worker: str, step: int) -> None:
        super().__init__(f"{worker}: the result of step {step} is missing")
        self.worker = worker
        self.step = step


class BadResult(ValueError):
    """A result that does not fit its plan: the worker's batch cannot be trusted, and the driver declares it lost."""


class SchedulerCore(MovingState):
    """The entry points, and what they decide. ``policy`` names a batching policy (scheduler.policies.batching)."""

    def __init__(self, limits: Limits, policy: str = "continuous", epoch: int = 1) -> None:
        super().__init__(limits, policy, epoch)
        self._continuous = ContinuousPlanner(limits, self.counters, self._admission, self._suspects, self._transfers)
        self._held = HeldBatchPlanner(limits, self.counters, self._suspects)

    def worker_up(
        self, name: str, incarnation: int, capacity: Capacity, now: int, first_step: int = 1,
        cached: Iterable[tuple[int, bytes]] = (),
    ) -> list[CoreEvent]:  # fmt: skip
        """A worker (or a new incarnation of one) is ready with an empty batch. Its next plan is ``first_step``.

        ``cached``: blocks that still hold whole pages of content by its hash, the least recently used first.

        After a fault the same incarnation goes on with a step that it has never seen, so that a kept result of the
        lost batch can't be taken for one of the new batch.
        """
        events = self.worker_lost(name, "its worker restarted", now) if name in self.workers else []
        caching = self.limits.enable_prefix_caching and not self.policy.holds_batch
        worker = self.workers[name] = WorkerState(
            name, incarnation, capacity, BlockPool(capacity.num_blocks), self.limits.batch_slots(capacity),
            max_model_len(capacity, self.limits), next_step=first_step, prefix_caching=caching,
        )  # fmt: skip
        if caching:
            worker.pool.adopt(cached)
        key = worker.serves
        if key not in self._queues:
            queue = WaitingQueue(key, self.fairness, self.limits.priority_aging_ns)
            self._queues[key] = QueueState(queue, Fleet(self.limits))
        self._queues[key].workers[name] = worker
        self._note(worker)
        self._take_up(worker)
        return events

    def submit(self, submit: Submit, now: int) -> SubmitReply:
        """Queue every choice of a request, or none. Idempotent on (request_id, attempt).

        Its deadline is on the core's clock (the driver turns it from unix time); 0 is none.
        """
        deadline = submit.deadline_ns
        known = self._requests.get(submit.request_id)
        if known is not None and submit.attempt <= known.attempt:
            return SubmitReply(Outcome.DUPLICATE, self.epoch)
        routed = route(submit, self._queues, self._rules, self.limits)
        outcome, reason, state, tokens = routed.outcome, routed.reason, routed.queue, routed.tokens
        if outcome is Outcome.ACCEPTED and submit.sampling.beam_width and self.policy.holds_batch:
            outcome, reason = Outcome.INVALID, f"no beam search with the policy {self.policy.name}"
        if state is not None and outcome is Outcome.ACCEPTED and deadline and submit.attempt == 1:
            # (later attempts have been promised it)
            needs = _queued_ns(submit, state)
            needs += self._predicted_ns(state, len(tokens), 0, submit, deadline - now - needs)
            left_ms = (deadline - now - needs) // 1_000_000
            if left_ms < 0:
                outcome, reason = Outcome.DEADLINE, f"the request is predicted to miss its deadline by {-left_ms} ms"
        if state is None or outcome is not Outcome.ACCEPTED:
            return SubmitReply(outcome, self.epoch, reason, retry_after_ms=_retry_after_ms(outcome, submit, state))
        if known is not None:
            self.cancel(submit.request_id, known.attempt, -1, now)
        queue, eos = state.queue, live_capacities(state)[0].eos_token_ids
        sequences: list[Sequence] = []
        for choice in range(1 if submit.sampling.beam_width else submit.n):
            if choice in submit.done_choices:
                continue
            resumed = unpack_tokens(submit.resumed[choice]) if choice < len(submit.resumed) else []
            resumed = unfinished(resumed, submit.sampling, eos)
            seniority = (submit.priority, submit.arrival_ns, submit.request_id, choice)
            sequence = Sequence(submit, choice, tokens + resumed, len(tokens), seniority, now, queue, deadline=deadline)
            sequence.number = self._created + len(sequences)
            sequence.rank = rank_of(sequence.number)
            sequence.began = sequence.charged = len(resumed)  # charged by whoever ran it before
            sequences.append(sequence)
        request = self._requests[submit.request_id] = RequestState(submit.attempt, sequences, len(sequences))
        if submit.sampling.beam_width:
            sequences[0].group = BeamGroup(BeamSearch(submit.sampling, eos), list(sequences))
            request.searches = True
        if not sequences:
            request.ended_ns = now
            self._ended.append((now, submit.request_id))
        self.counters.submitted += 1
        self._created += len(sequences)
        if sequences:
            self._live_of.setdefault(submit.gateway, {})[submit.request_id] = None
            if self.fairness.starts_level(submit.tenant):
                self._settle_service()  # with the others as they stand now
            self.fairness.arrive(submit.tenant, len(sequences), submit.tenant_weight)
        if deadline:
            self._deadlines.update((id(sequence), sequence) for sequence in sequences)
        if self._tombstones.pop((submit.request_id, submit.attempt), None) is not None:
            for sequence in sequences:  # its cancel overtook it
                self._end(sequence, EndReason.CANCELLED.value, now)
                self.counters.cancelled += 1
            return SubmitReply(Outcome.ACCEPTED, self.epoch)
        self._enqueue(sequences, queue)
        position = queue.position(sequences[0]) if sequences else 0
        return SubmitReply(Outcome.ACCEPTED, self.epoch, queue_position=position)

    def cancel(self, request_id: str, attempt: int, choice: int, now: int) -> list[CoreEvent]:
        """End one choice (-1: all) in whatever state it is. Idempotent; an unknown id leaves a tombstone."""
        request = self._requests.get(request_id)
        if request is None or attempt > request.attempt:
            if choice == -1:
                self._tombstones[request_id, attempt] = now
            return []
        events: list[CoreEvent] = []
        if attempt < request.attempt:
            return events
        if request.searches:
            choice = -1
        for sequence in list(request.sequences):
            if choice in (-1, sequence.choice) and sequence.status not in (Status.ENDED, Status.HELD):
                self._leave(sequence)
                self._end(sequence, EndReason.CANCELLED.value, now)
                if speaks(sequence):
                    self.counters.cancelled += 1
                    events.append(Ended(sequence, EndReason.CANCELLED.value, now))
        return events

    def reconcile(self, gateway: str, live: Iterable[str], before_ns: int, now: int) -> list[CoreEvent]:
        """Cancel what ``gateway`` no longer knows: requests submitted before ``before_ns`` that ``live`` lacks."""
        known = set(live)
        orphans = [
            (request_id, self._requests[request_id].attempt)
            for request_id in self._live_of.get(gateway, ())
            if request_id not in known and self._requests[request_id].sequences[0].submitted_ns < before_ns
        ]
        return [event for request_id, attempt in orphans for event in self.cancel(request_id, attempt, -1, now)]

    def plan(self, worker_name: str, now: int) -> tuple[StepPlan | None, list[CoreEvent]]:
        """The next plan for a worker, or None: nothing to run, or ``run_ahead`` plans are in flight."""
        worker = self.workers[worker_name]
        events: list[CoreEvent] = []
        if len(worker.in_flight) >= self.limits.run_ahead or (worker.in_flight and worker.has_searches):
            return None, events  # beams go on from settled results: ahead of them a plan would have half of a batch
        if worker.trial and not self._has_members(worker):
            self._end_trial(worker)
        if any(plan.trial != worker.trial for plan in worker.in_flight):
            return None, events  # suspects run with nobody beside them, nor before or after them
        queue, lending = self._queues[worker.serves].queue, None
        if self._rules.lent and not (queue or self._suspects or self.policy.holds_batch):
            lending = borrower(worker, self._queues, self._rules, self.limits)
        if lending is not None:
            queue = lending.queue
        admit = worker.takes_new and len(queue) > 0 and self.policy.admits(self._view(worker, queue, now))
        if not (worker.has_work or admit):
            return None, events
        if admit:
            self._queues[worker.serves].fleet.show(worker_name)
            if self._suspects:
                queue.unpark_all()
        for _ in range(3):  # ordinary; a trial that begins, and nothing else runs that it must wait for; ordinary again
            trial = worker.trial
            if self.policy.holds_batch:
                draft = self._held.draft(worker, queue, admit, now)
            else:
                placing = lending or self._placing(queue.key)
                draft = self._continuous.draft(worker, queue, admit, placing, now, events)
                self._transfer(worker, draft, now, events)
            if not draft.empty:
                plan = draft.finish(self.epoch, now)
                self._note(worker)
                return plan, events
            if worker.in_flight or not worker.trial:
                break
            if trial:
                self._end_trial(worker)  # there is no room for any of them
        self._note(worker)
        return None, events

    def apply(self, result: StepResult, now: int) -> list[CoreEvent]:
        """Take a step's result in. A repeated one changes nothing; raises ResultGap or BadResult."""
        worker = self.workers.get(result.worker)
        if worker is None or worker.incarnation != result.incarnation or result.epoch != self.epoch:
            return []
        if not worker.in_flight or result.step < worker.in_flight[0].step:
            return []
        plan = worker.in_flight[0]
        if result.step > plan.step:
            if result.step >= worker.next_step:
                raise BadResult(f"{result.worker}: result of step {result.step}, which was never planned")
            raise ResultGap(result.worker, plan.step)
        if len(result.tokens) != len(plan.sampled):
            raise BadResult(f"{result.worker}: {len(result.tokens)} tokens for {len(plan.sampled)} rows")
        worker.in_flight.popleft()
        if plan.swapped and result.swap_us:
            per_block = result.swap_us / plan.swapped
            known = worker.swap_us_per_block
            worker.swap_us_per_block = per_block if not known else 0.8 * known + 0.2 * per_block
        if result.rows:
            worker.observe(plan.work, result.forward_us - result.swap_us)
        events: list[CoreEvent] = []
        new_tokens = self._take_tokens(worker, plan, result, now, events)
        self.counters.new_tokens += new_tokens
        if plan.moving or worker.departing:
            self._transfers.applied(worker, plan, now, events)
        if plan.trial:
            self._clear_suspects(worker)
        self._unsettled[worker.name] = None
        self._note(worker)
        waiting = worker.takes_new and len(self._queues[worker.serves].queue) > 0
        worker.backlog = waiting or bool(worker.running or worker.preempted)
        events.append(Applied(worker.name, plan.step, new_tokens, plan.prefill_tokens, plan.padding_tokens, now))
        return events

    def tick(self, now: int) -> list[CoreEvent]:
        """Time-driven changes: expiry of memory about ended requests, and of waiting without any worker."""
        horizon = now - self.limits.tombstone_ns
        for key in [key for key, at in self._tombstones.items() if at < horizon]:
            del self._tombstones[key]
        self._forget(now)
        if self._suspects:
            self._suspects.expire(horizon, set(self.live_requests()))
        events = self._drop_late(now) + self._transfers.expire(self.workers.values(), now)
        for state in self._queues.values():
            state.rate.observe(state.queue.left, len(state.queue) > 0, now)
            if not state.worker_lost_ns or now - state.worker_lost_ns <= self.limits.no_worker_grace_ns:
                continue
            state.worker_lost_ns = 0
            live = state.workers.values()
            for head in [head for head in state.queue if not any(worker.can_hold(head) for worker in live)]:
                state.queue.remove(head)
                for sequence in (head, *head.children):
                    self._end(sequence, EndReason.FAILED.value, now)
                    self.counters.failed += 1
                    events.append(Failed(sequence, "lost", "no worker that can hold it is left", now))
                head.children = []
            if not live:
                state.worker_lost_ns = now  # whatever is still submitted by mistake waits no longer than this again
        return events

    def whom_to_ask(self, names: Iterable[str], now: int) -> list[str]:
        """Of the workers ``names``, those that may have something to plan, those that what waits should go to first.

        No plan depends on it: a replay need not ask. A driver asks it when anything has come, and asks them for plans.
        """
        names = list(names)
        if not self._resting or self._suspects or self.policy.holds_batch:
            return names
        first: dict[str, None] = {}
        woken: set[QueueKey] = set()  # whose resting workers may all have something to plan
        for key, state in self._queues.items():
            if not (state.queue and self._num_resting.get(key)):
                continue
            queue = state.queue
            window = list(islice(queue.order(now), self.limits.backfill_window + 1))
            first.update(dict.fromkeys(state.fleet.waited_for()))
            placed, others = self._placing(key).first_asked(window, now)
            first.update(dict.fromkeys(placed))
            if others or len(window) < len(queue) - queue.num_parked or len(state.workers) < 2:
                woken.add(key)
        for key, state in self._queues.items():
            if state.queue and not state.fleet.has_room:
                woken.update(QueueKey(key.model, lender) for lender in self._rules.lenders_to(key.pool))
        resting = self._resting
        if woken:
            rest = [name for name in names if name not in resting or resting[name] in woken]
        else:
            rest = [name for name in names if name not in resting]
        if not first:
            return rest
        known = set(names)
        return [name for name in first if name in known] + [name for name in rest if name not in first]

    def wake_at(self, worker_name: str, now: int) -> int | None:
        """When ``plan`` should be asked again although no input comes (the dynamic policy's window), or None."""
        worker = self.workers[worker_name]
        head = self._queues[worker.serves].queue.head(now)
        if not self.policy.window_ns or head is None or worker.running or worker.held:
            return None
        return max(now, head.submitted_ns + self.policy.window_ns)

    def _view(self, worker: WorkerState, queue: WaitingQueue, now: int) -> BatchView:
        head = queue.head(now) if self.policy.window_ns else None
        waited = now - head.submitted_ns if head is not None else 0
        slots = self.limits.batch_slots(worker.capacity)
        return BatchView(len(worker.running) + len(worker.held), len(queue), waited, slots)

    def _placing(self, key: QueueKey) -> Placing:
        state = self._queues[key]
        return Placing(self.limits, self.lengths, state.fleet, len(state.queue))

    def _take_tokens(
        self, worker: WorkerState, plan: PlanInFlight, result: StepResult, now: int, events: list[CoreEvent]
    ) -> int:
        reasons = dict(result.ended)
        candidates = {slot: (tokens, log_probs) for slot, tokens, log_probs in result.candidates}
        searches: dict[int, BeamGroup] = {}
        for sequence in plan.ran:
            sequence.in_flight -= 1
        new_tokens = 0
        for (slot, sequence), token in zip(plan.sampled, result.tokens, strict=True):
            sequence.pending -= 1
            if sequence.group is not None:
                if slot in candidates and sequence.status is not Status.ENDED:
                    sequence.group.ready[sequence.choice] = candidates[slot]
                    searches[id(sequence.group)] = sequence.group
                    new_tokens += 1
                continue
            if token < 0 or sequence.status in (Status.ENDED, Status.HELD):
                if self.policy.holds_batch:
                    self.counters.idle_slot_iterations += 1
                continue
            sequence.tokens.append(token)
            new_tokens += 1
            computed = len(sequence.tokens) - 1
            if computed % worker.capacity.block_size == 0 and sequence.status is Status.RUNNING:
                worker.register(sequence, computed)
            if not sequence.first_token_ns:
                sequence.first_token_ns = now
            if slot in reasons:
                self._finish(worker, sequence, reasons[slot], now)
                events.append(Ended(sequence, reasons[slot], now))
        for sequence in worker.preempted:
            if sequence.status is Status.SETTLING and not sequence.in_flight:
                sequence.become(Status.PREEMPTED)
        for group in searches.values():
            if len(group.ready) == len(group.members) and all(map(_settled, group.members)):
                self._search(worker, group, now, events)
        if self.policy.holds_batch and not worker.running:
            self._release_held(worker)
        return new_tokens

    def _drop_late(self, now: int) -> list[CoreEvent]:
        """End what can't make its deadline any more, at once instead of late."""
        events: list[CoreEvent] = []
        for sequence in list(self._deadlines.values()):
            if sequence.status in (Status.HELD, Status.ENDED) or not speaks(sequence):
                continue
            beams = sequence.group.members if sequence.group is not None else [sequence]
            submit = sequence.submit
            needs = 0
            if all(beam.status is not Status.RUNNING for beam in beams):
                state = self._queues[sequence.home.key]
                left_ns = sequence.deadline - now
                needs = self._predicted_ns(state, len(sequence.tokens), sequence.generated, submit, left_ns)
            if now + needs > sequence.deadline:
                for beam in beams:
                    self._leave(beam)
                    self._end(beam, EndReason.FAILED.value, now)
                self.counters.deadline_drops += 1
                events.append(Failed(sequence, "dropped", "the request can no longer make its deadline", now))
        return events

    def _predicted_ns(self, state: QueueState, tokens: int, generated: int, submit: Submit, within_ns: int) -> int:
        """How long a sequence is expected to take from admission to its end, on the quickest worker, or on the first
        of which that is no more than ``within_ns``: of a thousand the others need not be asked.

        0 as long as some worker was not measured: nobody is refused on a guess.
        """
        left = self.lengths.left_at(0.5, generated, submit.sampling.max_tokens - generated)
        quickest = 0.0
        for worker in state.workers.values():
            step_us = worker.predictor.decode_us(max(1, len(worker.running)))
            chunks = -(-tokens // self.limits.prefill_chunk_limit)
            needs = worker.predictor.prompt_us(tokens) + step_us * (chunks + max(0, left - 1))
            if not needs or needs * 1000 <= within_ns:
                return int(needs * 1000)
            quickest = needs if not quickest else min(quickest, needs)
        return int(quickest * 1000)

    def _enqueue(self, sequences: list[Sequence], queue: WaitingQueue) -> None:
        """Choices of one fresh prompt fork from the first one; held batches and resumed choices run on their own."""
        same = all(len(sequence.tokens) == sequence.prompt_len for sequence in sequences)
        if len(sequences) > 1 and same and not self.policy.holds_batch:
            sequences[0].children = sequences[1:]
            sequences = sequences[:1]
        for sequence in sequences:
            queue.push(sequence)


def _retry_after_ms(outcome: Outcome, submit: Submit, state: QueueState | None) -> int:
    if outcome is Outcome.NO_WORKER:
        return 1000
    if outcome is not Outcome.QUEUE_FULL or state is None:
        return 0
    return 1000 * retry_after_s(state.queue.waiting, state.rate.per_s, submit.request_id)


def _queued_ns(submit: Submit, state: QueueState) -> int:
    """How long a newcomer is expected to wait at the least; 0 as long as no service was measured."""
    if submit.attempt > 1 or not state.rate.per_s:  # a resumed one takes the place of its first arrival
        return 0
    return int(1e9 * state.queue.surely_ahead(submit.priority, submit.tenant) / state.rate.per_s)


def _settled(beam: Sequence) -> bool:
    """True if the search may go on with the beam: what was planned for it is in, and a beam that came back after a
    preemption is computed up to its last token (else it would be fed a token for which nobody made room)."""
    return not beam.in_flight and (beam.status is not Status.RUNNING or not beam.remaining)
