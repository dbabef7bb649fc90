"""The simulator: the production core driven in virtual time, by events in a heap.

The driver does what ``scheduler.service`` and ``scheduler.pacing`` do, with the bus as a delay: results are taken in as
they arrive, the next plan leaves at once where nothing is in flight, and otherwise at the predicted end of the running
step less a margin. The same requests, limits and seed give the same plans.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from headrace.simulate.measure import Measurements
from headrace.simulate.transfers import Fetches, Link
from headrace.simulate.worker import VOCAB_SIZE, Executed, Population, SimulatedWorker
from scheduler.core.core import SchedulerCore
from scheduler.core.events import CoreEvent, Ended, Failed, Moved
from scheduler.pacing import MARGIN_S, MARGIN_SHARE
from scheduler.policies.roles import RolePolicy
from scheduler.roles import RolePlanner
from shared.messages import Capacity, Fetched, Outcome, Sampling, StepPlan, Submit

MODEL = "simulated"
TICK_NS = 250_000_000
STALL_NS = 3600 * 10**9
"""Virtual time without any plan while requests live: the scheduler is stuck."""

OWN_CONTENT = 1 << 20
"""Token ids from here to OUTPUT_CONTENT are the own parts of prompts, below are shared prefixes."""


class Stalled(RuntimeError):
    """Live requests, and nothing happens any more."""


@dataclass(slots=True)
class _Link:
    """One worker as the driver sees it."""

    worker: SimulatedWorker
    sent: deque[int] = field(default_factory=deque)  # steps of plans without a result
    inbox: deque[StepPlan] = field(default_factory=deque)  # at the worker, not begun
    executing: bool = False
    step_began: int = 0
    timer: bool = False


class Simulation:
    """``concurrency`` > 0 makes a closed loop: so many requests are open at once, and arrival times are ignored."""

    def __init__(
        self, core: SchedulerCore, workers: Sequence[SimulatedWorker], population: Population, *,
        bus_ns: int = 125_000, concurrency: int = 0, progress: Callable[[int, int], None] | None = None,
        on_plan: Callable[[StepPlan], None] | None = None, link: Link | None = None,
        plan_roles: RolePolicy | None = None,
    ) -> None:  # fmt: skip
        self.core = core
        self.now = 0
        self.measured = Measurements(population)
        self._fetches = Fetches(link or Link(), self._call_at, self._answer_fetch)
        self._planner = RolePlanner(core, plan_roles) if plan_roles is not None else None
        self._population = population
        self._requests = population.requests
        self._links = {worker.name: _Link(worker) for worker in workers}
        self._ready = dict.fromkeys(self._links)  # those that a plan may go to now: no timer is set for one
        self._bus_ns = bus_ns
        self._concurrency = concurrency
        self._progress = progress
        self._on_plan = on_plan
        self._heap: list[tuple[int, int, Callable[..., None], tuple[object, ...]]] = []
        self._order = 0
        self._next_request = 0
        self._open = 0  # choices without an end, of requests that were submitted
        self._choices_left: dict[int, int] = {}
        self._last_plan_ns = 0
        for worker in workers:
            self._carry_out(core.worker_up(worker.name, worker.incarnation, worker.capacity, 0))

    def run(self, until_ns: int = 0, drain: bool = True) -> Measurements:
        """Until every request has ended; or until ``until_ns``; or, without ``drain``, until none is left to submit.

        Raises Stalled if nothing happens any more.
        """
        self._at(TICK_NS, self._tick)
        if self._concurrency:
            for _ in range(self._concurrency):
                self._closed_loop()
            self._pump_all()
        elif self._requests:
            self._at(self._requests[0].at_ns + self._bus_ns, self._arrive)
        heap = self._heap
        while heap and (self._open or self._next_request < len(self._requests)):
            when, _, call, arguments = heapq.heappop(heap)
            if until_ns and when > until_ns:
                self.measured.finished_ns = until_ns
                break
            self.now = when
            call(*arguments)
            if not drain and self._next_request == len(self._requests):
                self.measured.finished_ns = self.now
                break
        return self.measured

    def _at(self, when: int, call: Callable[..., None], *arguments: object) -> None:
        self._order += 1
        heapq.heappush(self._heap, (when, self._order, call, arguments))

    def _call_at(self, when: int, call: Callable[[int], None]) -> None:
        self._at(when, call, when)

    # --- clients ----------------------------------------------------------------------------------------------------

    def _arrive(self) -> None:
        requests = self._requests
        while self._next_request < len(requests) and requests[self._next_request].at_ns + self._bus_ns <= self.now:
            self._submit_next()
        if self._next_request < len(requests):
            self._at(requests[self._next_request].at_ns + self._bus_ns, self._arrive)
        self._pump_all()

    def _submit_next(self) -> bool:
        """Whether the request was accepted."""
        index = self._next_request
        self._next_request += 1
        request = self._requests[index]
        first = self._population.first_of[index]
        arrived = self.now if self._concurrency else request.at_ns
        choices = len(request.outputs)
        self.measured.arrived_ns[first : first + choices] = arrived
        submit = Submit(
            request_id=f"{index:08d}",
            attempt=1,
            gateway="simulated",
            model=MODEL,
            prompt=request.prompt(OWN_CONTENT + index),
            sampling=Sampling(
                seed=index,
                max_tokens=request.max_tokens,
                ignore_eos=request.beam_width > 0,  # a search of simulated beams ends at max_tokens
                beam_width=request.beam_width,
            ),
            arrival_ns=arrived,
            n=choices,
            priority=request.priority,
            tenant=request.tenant,
            deadline_ns=arrived + request.deadline_ns if request.deadline_ns else 0,
            cache_salt=request.cache_salt,
        )
        reply = self.core.submit(submit, self.now)
        if reply.outcome is not Outcome.ACCEPTED:
            refused = self.measured.refused
            refused[reply.outcome.value] = refused.get(reply.outcome.value, 0) + choices
            for number in range(first, first + choices):
                self.measured.ended(number, "refused", self.now)
            return False
        self._open += choices
        self._choices_left[index] = choices
        if request.cancel_ns:
            self._at(arrived + request.cancel_ns, self._cancel, submit.request_id)
        return True

    def _cancel(self, request_id: str) -> None:
        self._carry_out(self.core.cancel(request_id, 1, -1, self.now))
        self._pump_all()

    def _closed_loop(self) -> None:
        """A client whose request has ended sends the next one, and at once another if that is refused."""
        while self._concurrency and self._next_request < len(self._requests):
            if self._submit_next():
                break

    # --- scheduler --------------------------------------------------------------------------------------------------

    def _carry_out(self, events: Iterable[CoreEvent]) -> None:
        for event in events:
            if isinstance(event, Ended):
                self._end(event.sequence.request_id, event.sequence.choice, event.reason)
            elif isinstance(event, Failed):
                self._end(event.sequence.request_id, event.sequence.choice, event.kind)
            elif isinstance(event, Moved):
                self.measured.pauses_ns.append(event.paused_ns)

    def _end(self, request_id: str, choice: int, reason: str) -> None:
        self.measured.ended(self._population.number(request_id, choice), reason, self.now)
        self._open -= 1
        index = int(request_id)
        if self._requests[index].beam_width:
            self.measured.found(index, self.now + self._bus_ns)
        self._choices_left[index] -= 1
        if not self._choices_left[index]:
            del self._choices_left[index]
            if self._progress is not None:
                self._progress(self._next_request - len(self._choices_left), len(self._requests))
            self._closed_loop()

    def _tick(self) -> None:
        self._carry_out(self.core.tick(self.now))
        for name, role in self._planner.tick(self.now) if self._planner is not None else ():
            self._carry_out(self.core.set_role(name, role, self.now))
            self.measured.roles.append((self.now / 1e9, name, role))
        self._pump_all()
        if self._open and self.now - self._last_plan_ns > STALL_NS:
            live = self.core.live_requests()
            raise Stalled(f"no plan for {STALL_NS // 10**9} s of virtual time, {len(live)} requests live: {live[:5]}")
        idle = not any(link.sent for link in self._links.values())
        if idle and not self._open and self._next_request < len(self._requests):
            self._at(max(self.now + TICK_NS, self._requests[self._next_request].at_ns), self._tick)
        else:
            self._at(self.now + TICK_NS, self._tick)

    def _pump_all(self) -> None:
        asked = list(self._ready)
        while asked:
            idle = sum(not self._links[name].sent for name in asked)
            for name in self.core.whom_to_ask(asked, self.now):
                self._pump(self._links[name])
            left = [name for name in asked if not self._links[name].sent]
            asked = left if len(left) < idle and len(self._links) > 1 else []

    def _pump(self, link: _Link) -> None:
        if not link.sent and not self._send_plan(link):
            wake = self.core.wake_at(link.worker.name, self.now)
            if wake is not None and not link.timer:
                link.timer = True
                self._at(wake, self._on_timer, link)
            return
        if not link.timer and len(link.sent) < self.core.limits.run_ahead:
            predicted_ns = self.core.workers[link.worker.name].predicted_us * 1e3
            due = link.step_began + predicted_ns - max(MARGIN_S * 1e9, MARGIN_SHARE * predicted_ns)
            link.timer = True
            self._at(max(self.now, int(due)), self._on_timer, link)
        self._note(link)

    def _note(self, link: _Link) -> None:
        if not link.sent or (not link.timer and len(link.sent) < self.core.limits.run_ahead):
            self._ready[link.worker.name] = None
        else:
            self._ready.pop(link.worker.name, None)

    def _on_timer(self, link: _Link) -> None:
        link.timer = False
        if len(link.sent) < self.core.limits.run_ahead and self._send_plan(link):
            self._pump(link)
        else:
            self._note(link)

    def _send_plan(self, link: _Link) -> bool:
        plan, events = self.core.plan(link.worker.name, self.now)
        if events:
            self._carry_out(events)
        if plan is None:
            return False
        self._last_plan_ns = self.now
        if self._on_plan is not None:
            self._on_plan(plan)
        for start in plan.starts:
            self.measured.admitted(self._population.number(start.request_id, start.choice), self.now)
        if not link.sent:
            link.step_began = self.now
        link.sent.append(plan.step)
        self._at(self.now + self._bus_ns, self._plan_arrives, link, plan)
        return True

    def _result_arrives(self, link: _Link, done: Executed) -> None:
        self._carry_out(self.core.apply(done.result, self.now))
        link.step_began = self.now
        while link.sent and link.sent[0] <= done.result.step:
            link.sent.popleft()
        self._note(link)
        self._pump(link)
        if len(self._links) > 1:
            self._pump_all()
        self.measured.sample(self.core, self.now)

    # --- worker -----------------------------------------------------------------------------------------------------

    def _plan_arrives(self, link: _Link, plan: StepPlan) -> None:
        link.inbox.append(plan)
        if not link.executing:
            self._begin(link)

    def _begin(self, link: _Link) -> None:
        plan = link.inbox.popleft()
        link.executing = True
        self._fetches.begin(link.worker, plan, self.now)
        done = link.worker.execute(plan)
        self._at(self.now + done.duration_ns, self._step_ends, link, done)

    def _step_ends(self, link: _Link, done: Executed) -> None:
        self.measured.step(done)
        self.measured.tokens_at(done.got_token, self.now + self._bus_ns)
        self._at(self.now + self._bus_ns, self._result_arrives, link, done)
        link.executing = False
        if link.inbox:
            self._begin(link)

    def _answer_fetch(self, answer: Fetched) -> None:
        self._at(self.now + self._bus_ns, self._fetched_arrives, answer)

    def _fetched_arrives(self, answer: Fetched) -> None:
        self._carry_out(self.core.fetched(answer, self.now))
        self._pump_all()


def simulated_capacity(
    kv_tokens: int, block_size: int, max_model_len: int, host_tokens: int = 0, kv_bytes_per_token: int = 0
) -> Capacity:
    """What a simulated worker tells the scheduler about itself."""
    return Capacity(
        MODEL, max_model_len, block_size, max(1, kv_tokens // block_size), VOCAB_SIZE, [], "simulated",
        kv_bytes_per_token=kv_bytes_per_token, host_blocks=host_tokens // block_size,
    )  # fmt: skip
