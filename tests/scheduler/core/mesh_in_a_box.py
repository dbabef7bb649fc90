"""A scheduler core and workers' batches in one process, without a bus: the driver of the core's tests.

Each worker is the production Batch with the simulated runner, whose tokens are right only if every plan was. Plans
are executed late (up to the run-ahead depth), as on the bus.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import msgspec

from scheduler.core.beams import BeamSearch, Hypothesis
from scheduler.core.core import SchedulerCore
from scheduler.core.events import CoreEvent, Found
from scheduler.core.limits import Limits
from scheduler.core.placement import MOST_PATIENCE_NS
from scheduler.core.pools import PoolRules
from scheduler.core.sequence import Sequence
from shared.beams import candidates_wanted
from shared.messages import (
    Capacity,
    Outcome,
    Sampling,
    StepPlan,
    StepResult,
    Submit,
    SubmitReply,
    encode,
    pack_tokens,
    unpack_tokens,
)
from worker.batch import Batch
from worker.simulated import SimulatedRunner, StepTime, chain, continuations, expected_tokens, first_state

VOCAB = 997
EOS = 5
MS = 1_000_000


def capacity(num_blocks: int = 64, block_size: int = 4, max_model_len: int = 128, **more: Any) -> Capacity:
    return Capacity("m", max_model_len, block_size, num_blocks, VOCAB, [EOS], **more)


def request(
    request_id: str, prompt_len: int = 5, max_tokens: int = 6, *, seed: int = 1, n: int = 1, arrival_ns: int = 0,
    ignore_eos: bool = True, attempt: int = 1, priority: int = 0, gateway: str = "g",
    resumed: list[bytes] | None = None, prompt: list[int] | None = None, salt: str = "", tenant: str = "",
    beams: int = 0,
    length_penalty: float = 1.0,
    adapter: str = "",
) -> Submit:  # fmt: skip
    return Submit(
        request_id=request_id,
        attempt=attempt,
        gateway=gateway,
        model="m",
        prompt=pack_tokens(prompt_of(request_id, prompt_len) if prompt is None else prompt),
        sampling=Sampling(
            seed=seed, max_tokens=max_tokens, ignore_eos=ignore_eos, beam_width=beams, length_penalty=length_penalty
        ),
        arrival_ns=arrival_ns,
        n=n,
        priority=priority,
        resumed=resumed or [],
        cache_salt=salt,
        tenant=tenant,
        adapter=adapter,
    )


def prompt_of(request_id: str, length: int) -> list[int]:
    return [(sum(request_id.encode()) * 7 + 3 * i) % VOCAB for i in range(length)]


def searched(submit: Submit) -> list[Hypothesis]:
    """The same search without batch, pages or forks: each beam's tokens are hashed afresh at every step."""
    prompt = unpack_tokens(submit.prompt)
    sampling = submit.sampling
    search = BeamSearch(sampling, [EOS])
    beams: list[list[int]] = [[]]
    while not search.done:
        seen = []
        for beam in beams:
            state = first_state(submit.adapter)
            for token in prompt + beam:
                state = chain(state, token)
            seen.append(continuations(state, candidates_wanted(sampling, [EOS]), VOCAB))
        beams = [[*beams[one.parent], one.token] for one in search.advance(beams, seen)]
    return search.hypotheses[: submit.n]


class Box:
    def __init__(self, limits: Limits | None = None, policy: str = "continuous", workers: int = 1, **cap: Any) -> None:
        # Without foresight, so that tests of preemption see some.
        self.limits = limits or Limits(
            max_num_seqs=4, max_num_batched_tokens=16, prefill_chunk_limit=8, growth_aware_admission=False
        )
        self.core = SchedulerCore(self.limits, policy)
        self.now = 0
        self.trials = 0  # plans of suspects
        self.events: list[CoreEvent] = []
        self.plans: list[StepPlan] = []
        self.delivered: dict[tuple[str, int], list[int]] = {}
        self.ends: dict[tuple[str, int], str] = {}
        self.batches: dict[str, Batch] = {}
        self.runners: dict[str, SimulatedRunner] = {}
        self.queues: dict[str, deque[StepPlan]] = {}
        self.submits: dict[str, Submit] = {}
        pools = list(PoolRules.parse(self.limits.pools).names) or [""]
        for index in range(workers):
            self.add_worker(f"w{index}", capacity(**{"pool": pools[index % len(pools)], **cap}))

    def add_worker(self, name: str, cap: Capacity, incarnation: int = 1) -> None:
        self.batches[name] = Batch(cap.block_size, cap.num_blocks, cap.max_model_len, frozenset(cap.eos_token_ids))
        self.runners[name] = SimulatedRunner(cap, StepTime())
        self.queues[name] = deque()
        self.events += self.core.worker_up(name, incarnation, cap, self.now)

    def submit(self, submit: Submit, deadline: int = 0) -> SubmitReply:
        reply = self.core.submit(msgspec.structs.replace(submit, deadline_ns=deadline), self.now)
        if reply.outcome is Outcome.ACCEPTED:
            self.submits[submit.request_id] = submit
        return reply

    def cancel(self, request_id: str, choice: int = -1) -> None:
        attempt = self.submits[request_id].attempt if request_id in self.submits else 1
        self.events += self.core.cancel(request_id, attempt, choice, self.now)

    def plan(self, worker: str = "w0") -> StepPlan | None:
        settled = not self.core.workers[worker].in_flight
        plan, events = self.core.plan(worker, self.now)
        self.events += events
        if plan is not None:
            encode(plan)
            self.plans.append(plan)
            self.send(plan)
            self.check_plan(plan)
            self.check_trial(worker)
        if settled and plan is None:
            self.check_nothing_could_run(worker)
        return plan

    def send(self, plan: StepPlan) -> None:
        self.queues[plan.worker].append(plan)

    def check_plan(self, plan: StepPlan) -> None:
        """Invariant 5."""
        rows = len(plan.decodes) + sum(n for _, n in plan.chunks) + sum(n for _, n in plan.padding)
        assert rows <= self.limits.max_num_batched_tokens
        assert len(plan.decodes) + len(plan.chunks) <= self.limits.max_num_seqs

    def check_trial(self, worker: str) -> None:
        """Suspects run with their group alone, and who is none runs beside none."""
        plans = self.core.workers[worker].in_flight
        assert len({plan.trial for plan in plans}) == 1, "a group of suspects is not alone in flight"
        groups = {self.core._suspects.group_of(sequence) for sequence in plans[-1].ran}
        if self.core.policy.holds_batch:
            groups.discard(0)  # such a batch runs whole, with those of its group that are cleared
        assert groups <= {plans[-1].trial}, f"{groups} run in a plan of {plans[-1].trial}"
        self.trials += plans[-1].trial > 0

    def check_nothing_could_run(self, worker_name: str) -> None:
        """Invariant 3: with nothing in flight, no plan means that nothing is there that could run.

        Otherwise no result will ever come, nobody asks again, and what is there waits for ever.
        """
        worker = self.core.workers[worker_name]
        assert not len(worker.running), f"{len(worker.running)} sequences run and none has a row"
        assert not worker.preempted, f"{len(worker.preempted)} preempted sequences have an empty worker and stay out"
        if self.core.policy.name == "continuous" and worker.takes_new and not worker.draining:
            suspects = self.core._suspects
            waiting = [
                sequence.request_id
                for sequence in self.core.queues[worker.serves]
                if worker.can_hold(sequence)
                and suspects.group_of(sequence) not in suspects.on_trial
                and not self.left_to_another(sequence)
            ]
            assert not waiting, f"{waiting} wait for an empty worker"

    def left_to_another(self, sequence: Sequence) -> bool:
        """True if a worker may leave the sequence to another one (whose plan or result makes somebody ask again)."""
        live = [one for one in self.core.workers.values() if not one.draining]
        return len(live) > 1 and 0 <= self.now - sequence.left_since < MOST_PATIENCE_NS and sequence.left_since > 0

    def execute(self, worker: str = "w0") -> StepResult:
        """Run the oldest plan in flight at the worker; its result goes nowhere yet."""
        return self.run_plan(self.queues[worker].popleft())

    def run_plan(self, plan: StepPlan) -> StepResult:
        worker = plan.worker
        batch = self.batches[worker]
        step = batch.stage(plan)
        sampled = self.runners[worker].forward(batch, step)
        settled = batch.settle(step, sampled)
        for _, entry in settled.entries:
            known = self.submits.get(entry.request_id)
            if known is not None and entry.attempt < known.attempt:
                continue  # its gateway has resumed it and listens to the new attempt only
            got = self.delivered.setdefault((entry.request_id, entry.choice), [])
            assert entry.offset == len(got), "invariant 4: in order, each once"
            got += entry.tokens
            if entry.end:
                assert (entry.request_id, entry.choice) not in self.ends
                assert entry.count == len(got)
                self.ends[entry.request_id, entry.choice] = entry.end
        rows = step.num_tokens
        return StepResult(
            plan.epoch,
            worker,
            plan.incarnation,
            plan.step,
            settled.tokens,
            settled.ended,
            forward_us=100 + 10 * rows,
            rows=rows,
            candidates=settled.candidates,
            swap_us=self.runners[worker].swap_us,
        )

    def apply(self, result: StepResult) -> None:
        self.events += self.core.apply(result, self.now)
        self.core.check()

    def step(self, worker: str = "w0") -> None:
        """One iteration with as much run-ahead as the limits allow."""
        self.now += MS
        while self.plan(worker) is not None:
            pass
        if self.queues[worker]:
            self.apply(self.execute(worker))

    def run(self, max_steps: int = 5000) -> None:
        """Until everything has ended; fails if that takes more than ``max_steps`` (nothing waits for ever)."""
        for _ in range(max_steps):
            if not self.core.live_requests() and not any(self.queues.values()):
                return
            for worker in list(self.queues):
                self.step(worker)
        raise AssertionError(f"still live after {max_steps} steps: {self.core.live_requests()}")

    def assert_tokens_right(self) -> None:
        """Every choice that ended got exactly the tokens that it gets alone."""
        for event in self.events:
            if isinstance(event, Found):
                assert event.hypotheses == searched(event.submit), event.submit.request_id
        for (request_id, choice), reason in self.ends.items():
            submit = self.submits[request_id]
            prompt = unpack_tokens(submit.prompt)
            want = expected_tokens(
                prompt, submit.sampling.seed, submit.sampling.max_tokens, VOCAB, choice, submit.adapter
            )
            if not submit.sampling.ignore_eos and EOS in want:
                want = want[: want.index(EOS) + 1]
                assert reason == "stop"
            else:
                assert reason == "length"
            assert self.delivered[request_id, choice] == want, (request_id, choice)

    def assert_idle(self) -> None:
        """Invariant 2, when idle: every block is free."""
        self.core.check()
        for worker in self.core.workers.values():
            assert worker.pool.num_free == worker.pool.num_blocks
            assert not worker.running and not worker.preempted and not worker.held
