"""The mesh in a box on a bus that loses, repeats and delays, with workers and schedulers that restart or fall silent.

Both ends do what the services do: the worker keeps the production ledger (``worker.ledger``), the scheduler's side
resends as ``scheduler.pacing`` does and greets, loses and restarts workers as ``scheduler.service`` does: a reset, then
nothing until the worker has said what its pages hold, which it keeps when the scheduler restarts.
"""

from __future__ import annotations

import pickle
from collections import Counter, deque
from dataclasses import asdict, dataclass, field

import msgspec
from mesh_in_a_box import MS
from resuming_gateway import ResumingBox

from scheduler.core.core import ResultGap, SchedulerCore
from scheduler.core.sequence import Status
from shared.messages import (
    Capacity,
    Need,
    PageSnapshot,
    Reset,
    StepPlan,
    StepResult,
    decode,
    encode,
    unpack_tokens,
)
from shared.page_hash import DIGEST_BYTES
from worker.batch import Batch
from worker.ledger import StepLedger
from worker.page_book import PageBook
from worker.simulated import SimulatedRunner, StepTime

MOST_RESENDS = 5  # of one plan, before its batch counts as lost
MOST_SNAPSHOT_BYTES = 30 * (4 + DIGEST_BYTES)  # less than some pools fill
ROUGH = (
    "lose plan", "repeat plan", "lose result", "leave results",
    "overtake", "repeat result", "foreign result", "restart",
)  # fmt: skip
"""What can go wrong in a round."""

REPAIR_EXCHANGES = 4 * MOST_RESENDS
"""So many exchanges of beats, plans and results repair anything, once the bus loses no more."""


@dataclass
class Wire:
    """One worker's line: what is under way on it, and what both ends remember."""

    ledger: StepLedger
    plans: deque[StepPlan | Reset] = field(default_factory=deque)  # on the way to the worker, in order
    inbox: deque[StepPlan | Reset] = field(default_factory=deque)  # accepted by the worker, not executed
    results: list[StepResult | Need | PageSnapshot] = field(
        default_factory=list
    )  # on the way to the scheduler, in any order
    sent: deque[StepPlan] = field(default_factory=deque)  # the scheduler's: plans without a result
    delivered: list[StepResult] = field(default_factory=list)  # the last results that the scheduler has seen
    incarnation: int = 1  # that the scheduler talks to
    resends: int = 0  # of the oldest plan without a result
    next_step: tuple[int, int] = (0, 1)  # (incarnation, first step it has not seen), of a worker that was lost
    first_step: int = 1  # of the batch that the scheduler knows
    greeted: Reset | None = None  # the scheduler's: it waits for the answer
    pages: PageBook = field(default_factory=lambda: PageBook(1, 1))


class LossyBox(ResumingBox):
    def __init__(self, *args: object, **kwargs: int) -> None:
        self.wires: dict[str, Wire] = {}
        self.capacities: dict[str, Capacity] = {}
        self.before: Counter[str] = Counter()  # counters of schedulers that are gone
        super().__init__(*args, **kwargs)

    # --- the scheduler's driver -------------------------------------------------------------------------------------

    def add_worker(self, name: str, cap: Capacity, incarnation: int = 1) -> None:
        super().add_worker(name, cap, incarnation)
        self.capacities[name] = cap
        wire = self.wires[name] = Wire(StepLedger(name, incarnation), pages=PageBook(cap.block_size, cap.num_blocks))
        wire.ledger.offer(Reset(self.core.epoch, name, incarnation, 1))

    def knows(self, worker: str) -> bool:
        return worker in self.core.workers

    def send(self, plan: StepPlan) -> None:
        wire = self.wires[plan.worker]
        wire.sent.append(plan)
        wire.plans.append(plan)
        state = self.core.workers[plan.worker]
        self.seen["lent"] += any(one.home.key != state.serves for one in state.running)

    def resend(self, worker: str, step: int) -> None:
        """The plans from ``step`` on, if the result of ``step`` is still out (``PlanSender.resend``)."""
        wire = self.wires[worker]
        awaited = {plan.step for plan in wire.sent}
        if step < wire.first_step and wire.first_step in awaited:
            self.seen["resets sent again"] += 1
            wire.plans.append(Reset(self.core.epoch, worker, wire.incarnation, wire.first_step))
        elif step not in awaited:
            return
        if awaited:
            self.seen["resent plans"] += 1
            wire.plans.extend(plan for plan in wire.sent if plan.step >= step)

    def lose(self, worker: str, suspect: bool = True) -> None:
        """The worker has been silent for too long, or its batch is not to be trusted."""
        wire, state = self.wires[worker], self.core.workers[worker]
        wire.next_step = (state.incarnation, state.next_step)
        wire.sent.clear()
        before = self.core.queues[state.serves].waiting
        self.events += self.core.worker_lost(worker, "silent", self.now, suspect)
        self.seen["overflowed"] += self.core.queues[state.serves].waiting < before

    def hand_over(self, worker: str) -> None:
        """The worker is told to stop: nothing new comes, and what it runs goes elsewhere if anybody can take it."""
        if self.knows(worker):
            self.core.worker_draining(worker)
            self.events += self.core.hand_over(worker, self.now)

    def restart_batch(self, worker: str) -> None:
        if self.knows(worker):
            self.lose(worker)
            self.greet(worker)

    def greet(self, worker: str) -> None:
        """A beat of an incarnation that the scheduler does not know, or no longer."""
        wire = self.wires[worker]
        wire.incarnation = wire.ledger.incarnation
        first = wire.next_step[1] + 1 if wire.next_step[0] == wire.incarnation else 1
        wire.first_step = first
        wire.sent.clear()
        wire.resends = 0
        if self.knows(worker):
            self.lose(worker)
        wire.greeted = Reset(self.core.epoch, worker, wire.incarnation, first)
        wire.plans.append(wire.greeted)

    def meet(self, worker: str, snapshot: PageSnapshot) -> None:
        """The worker's batch is gone, and this is what its pages hold."""
        wire, reset = self.wires[worker], self.wires[worker].greeted
        if reset is None or (snapshot.epoch, snapshot.incarnation, snapshot.step) != (
            reset.epoch, reset.incarnation, reset.step
        ):  # fmt: skip
            self.seen["answers that nobody waits for"] += 1
            return
        wire.greeted = None
        pages, size = unpack_tokens(snapshot.pages), DIGEST_BYTES
        cached = [(page, snapshot.hashes[place * size : (place + 1) * size]) for place, page in enumerate(pages)]
        self.events += self.core.worker_up(
            worker, reset.incarnation, self.capacities[worker], self.now, reset.step, cached
        )
        self.core.check()
        self.seen["pages taken over"] += self.core.workers[worker].pool.num_cached

    def restart_scheduler(self) -> None:
        """Another one leads, and knows nothing. Workers keep their pages, the gateway resumes."""
        self.seen["schedulers restarted"] += 1
        self.before.update({name: n for name, n in asdict(self.core.counters).items() if isinstance(n, int)})
        live = self.core.live_requests()
        for sequence in (one for request_id in live for one in self.core.sequences_of(request_id)):
            if sequence.status not in (Status.ENDED, Status.HELD):
                self.ended[self._key(sequence)] = 1  # with its scheduler; the new epoch tells the gateway
        self.core = SchedulerCore(self.limits, self.core.policy.name, self.core.epoch + 1)
        for wire in self.wires.values():
            wire.sent.clear()
            wire.greeted, wire.next_step, wire.incarnation = None, (0, 1), 0
        self.lost += [request_id for request_id in live if request_id not in self.lost]

    def beat(self, worker: str) -> None:
        """``SchedulerService._meet_worker``, with the time between two resends always up."""
        wire = self.wires[worker]
        if wire.greeted is not None and wire.incarnation == wire.ledger.incarnation:
            wire.plans.append(wire.greeted)  # the reset or its answer was lost
        elif not self.knows(worker) or wire.incarnation != wire.ledger.incarnation:
            self.greet(worker)
        elif wire.sent and not wire.inbox:
            wire.resends += 1
            if wire.resends > MOST_RESENDS:
                self.seen["batch given up"] += 1
                self.restart_batch(worker)
            else:
                self.resend(worker, wire.sent[0].step)

    def take(self, worker: str, message: StepResult | Need | PageSnapshot) -> None:
        """``SchedulerService._on_result``. What is no news must change nothing: the core's whole state is compared."""
        wire = self.wires[worker]
        if isinstance(message, PageSnapshot):
            self.meet(worker, message)
            return
        if isinstance(message, Need):
            if message.incarnation == wire.incarnation and message.epoch == self.core.epoch:
                self.seen["needs"] += 1
                self.resend(worker, message.step)
            return
        state = self.core.workers.get(worker)
        why = ""
        if message.epoch != self.core.epoch:
            why = "results of another epoch"
        elif state is None:
            why = "results of a lost worker"
        elif message.incarnation != state.incarnation:
            why = "results of another incarnation"
        elif not state.in_flight or message.step < state.in_flight[0].step:
            why = "results repeated or of a lost batch"
        elif message.step > state.in_flight[0].step:
            why = "results ahead of a missing one"
        if why:
            self.seen[why] += 1
            before = pickle.dumps(self.core)
            try:
                assert self.core.apply(message, self.now) == []
                assert why != "results ahead of a missing one"
            except ResultGap as gap:
                assert state is not None and gap.step == state.in_flight[0].step
                self.resend(worker, gap.step)
            assert pickle.dumps(self.core) == before, f"{why} changed something"
            return
        self.apply(message)
        wire.resends = 0
        while wire.sent and wire.sent[0].step <= message.step:
            wire.sent.popleft()
        wire.delivered = [*wire.delivered[-3:], message]

    # --- the worker -------------------------------------------------------------------------------------------------

    def carry(self, worker: str) -> None:
        """The next message on the way reaches the worker (``WorkerService._on_plan``)."""
        wire = self.wires[worker]
        if not wire.plans:
            return
        message = wire.plans.popleft()
        verdict = wire.ledger.offer(message)
        self.seen["plans for another incarnation"] += verdict.stale
        if verdict.reset:
            assert isinstance(message, Reset)
            wire.inbox.append(message)
        if verdict.execute is not None:
            wire.inbox.append(verdict.execute)
        elif verdict.resend is not None:
            self.seen["kept results"] += 1
            wire.results.append(decode(verdict.resend))  # type: ignore[arg-type]
        elif verdict.need is not None:
            wire.results.append(verdict.need)

    def work(self, worker: str) -> None:
        """The step loop takes what is next in its queue."""
        wire = self.wires[worker]
        while wire.inbox:
            item = wire.inbox.popleft()
            if isinstance(item, Reset):
                self.forget_batch(worker)
                packed = wire.pages.packed(MOST_SNAPSHOT_BYTES)
                wire.results.append(PageSnapshot(item.epoch, worker, item.incarnation, item.step, *packed))
                continue
            if not wire.ledger.current(item):
                continue
            wire.pages.begin(item)
            result = self.run_plan(item)
            wire.pages.end(item)
            wire.ledger.record(item, encode(result))
            wire.results.append(result)
            return

    def forget_batch(self, worker: str) -> None:
        """A reset is carried out."""
        self.batches[worker].clear()

    def crash(self, worker: str) -> None:
        """The process dies and starts again; its old results are still under way, and the scheduler has no idea."""
        wire, cap = self.wires[worker], self.capacities[worker]
        wire.inbox.clear()
        wire.ledger = StepLedger(worker, wire.ledger.incarnation + 1)
        wire.pages = PageBook(cap.block_size, cap.num_blocks)
        self.batches[worker] = Batch(cap.block_size, cap.num_blocks, cap.max_model_len, frozenset(cap.eos_token_ids))
        self.runners[worker] = SimulatedRunner(cap, StepTime())

    # --- faults of the bus ------------------------------------------------------------------------------------------

    def lose_plan(self, worker: str) -> None:
        wire = self.wires[worker]
        if wire.plans:
            wire.plans.popleft()
            self.seen["lost plans"] += 1

    def repeat_plan(self, worker: str) -> None:
        """A copy of a plan under way, or of one without a result, comes late."""
        wire = self.wires[worker]
        plans = [plan for plan in (*wire.plans, *wire.sent) if isinstance(plan, StepPlan)]
        if plans:
            wire.plans.append(plans[0])
            self.seen["repeated plans"] += 1

    def lose_result(self, worker: str) -> None:
        wire = self.wires[worker]
        if wire.results:
            wire.results.pop(0)
            self.seen["lost results"] += 1

    def deliver(self, worker: str, place: int = 0) -> None:
        """A result reaches the scheduler; with ``place`` it overtakes others."""
        wire = self.wires[worker]
        if wire.results:
            self.take(worker, wire.results.pop(place % len(wire.results)))

    def repeat_result(self, worker: str, place: int) -> None:
        """A result is taken once more, or for a first time without leaving the line: the second one is to come."""
        wire = self.wires[worker]
        results = [*wire.delivered, *wire.results]
        if results:
            self.take(worker, results[place % len(results)])

    def foreign_result(self, worker: str) -> None:
        """What the scheduler may wait for, but said to the leaders before and after it."""
        for result in self.wires[worker].results:
            if isinstance(result, StepResult):
                for epoch in (result.epoch - 1, result.epoch + 1):
                    self.take(worker, msgspec.structs.replace(result, epoch=epoch))

    def rough_round(self, worker: str, fault: str) -> None:
        """One iteration with all the run-ahead that there is, in which one thing goes wrong."""
        self.now += MS
        while self.plan(worker) is not None:
            pass
        wire = self.wires[worker]
        if fault == "lose plan":
            self.lose_plan(worker)
        elif fault == "repeat plan":
            self.repeat_plan(worker)
        while wire.plans:
            self.carry(worker)
        self.work(worker)
        if fault == "leave results":
            return
        if fault == "lose result":
            self.lose_result(worker)
        elif fault == "repeat result":
            self.repeat_result(worker, len(wire.delivered))  # the oldest under way, which comes again below
        elif fault == "foreign result":
            self.foreign_result(worker)
        elif fault == "restart":
            self.crash(worker)
            self.beat(worker)
            while wire.plans:
                self.carry(worker)
            self.work(worker)
            self.deliver(worker, -1)  # its answer overtakes what it said before it died
        while wire.inbox and fault == "overtake":
            self.work(worker)
        while wire.results:
            self.deliver(worker, -1 if fault == "overtake" else 0)

    # --- without further faults -------------------------------------------------------------------------------------

    def round(self, worker: str) -> None:
        """One iteration as it should be, with as much run-ahead as the limits allow."""
        self.now += MS
        while self.knows(worker) and self.plan(worker) is not None:
            pass
        self._exchange(worker)

    def _exchange(self, worker: str) -> None:
        wire = self.wires[worker]
        while wire.plans:
            self.carry(worker)
        self.work(worker)
        while wire.results:
            self.deliver(worker)
        self.observe()

    def heal(self) -> None:
        """The bus loses nothing any more: whatever was lost is made good, within a bounded number of exchanges."""
        for worker in self.wires:
            if self.knows(worker) and self.core.workers[worker].draining:
                self.crash(worker)  # it has stopped, and the next one starts
        for _ in range(REPAIR_EXCHANGES):
            for worker, wire in self.wires.items():
                if not self.knows(worker) or wire.incarnation != wire.ledger.incarnation:
                    self.beat(worker)
                self._exchange(worker)
                if not self.knows(worker):
                    break
                if wire.sent and not (wire.inbox or wire.plans):
                    self.beat(worker)
            met = all(self.knows(worker) for worker in self.wires)
            if met and not any(wire.sent or wire.plans or wire.inbox for wire in self.wires.values()):
                return
        raise AssertionError(f"not repaired after {REPAIR_EXCHANGES} exchanges: {self.wires}")

    def check_books(self) -> None:
        """When all is settled, a worker vouches for just the pages that the scheduler would hit, as far as it was told.

        It may know of pages beside them: those that did not fit in its answer.
        """
        for worker, wire in self.wires.items():
            pool = self.core.workers[worker].pool
            told = {page: content for page, content in pool._hash_of.items() if page not in pool._news}
            known = wire.pages._hash_of
            assert told.items() <= known.items(), "the scheduler would hit what the worker does not know"
            assert all(pool._hash_of.get(page, content) == content for page, content in known.items())

    def most_rounds(self) -> int:
        """A bound on the rounds in which everything that is live ends, with no further input.

        At worst one sequence after the other runs (the most senior is never preempted), its prompt token by token;
        a few rounds more for each, in which what was preempted settles, and the window of the dynamic policy.
        """
        bound = 0
        for request_id in self.core.live_requests():
            submit = self.submits[request_id]
            alone = len(submit.prompt) // 4 + submit.sampling.max_tokens + 4 + self.core.policy.window_ns // MS
            bound += alone * max(submit.n, submit.sampling.beam_width)
        return bound

    def drain(self) -> int:
        """Repair, resume, and run until all has ended. Returns the rounds it took; fails beyond the bound."""
        self.heal()
        rounds = 0
        while self.core.live_requests() or self.lost:
            self.resume()
            bound, taken = self.most_rounds(), 0
            while self.core.live_requests():
                assert taken < bound, f"live after {bound} rounds: {self.core.live_requests()}"
                taken += 1
                for worker in self.wires:
                    self.round(worker)
            rounds += taken
        return rounds
