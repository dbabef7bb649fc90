"""A thousand workers and a million requests on one scheduler core: what a decision costs, and whether anything grows.

    python -m benchmarks.mesh_scale [--workers 1000] [--requests 1000000] [--load 0.85]

The core is driven in virtual time, as the service drives it: a result is taken in, its worker gets its next plan, and
those of the others are asked that could have one. Workers take 10 ms a step, 25 us a row and 60 us a prompt token, and
have 24 places. Four queues (two models of two pools each, of unequal sizes). Prompts begin with one of 2,000 prefixes
of 64 tokens, their own part is 16 to 48, outputs are 4 to 12 tokens; two tenants. Requests come by a Poisson process at
``--load`` of what the workers can do, and for a tenth of the run at 1.3 times that.

Prints, for each tenth of the run, microseconds of this thread's CPU for a request (submit, and asking the workers that
could take it at once) and for a step (result, plan, asking), the process's memory, and what waits; at the end, how long
the requests of each queue have waited for admission. Exits with 1 if one has waited longer than --most-wait-s.
"""

from __future__ import annotations

import argparse
import gc
import heapq
import random
import sys
import time
from dataclasses import dataclass, field

from scheduler.core.core import SchedulerCore
from scheduler.core.limits import Limits
from shared.messages import Capacity, Outcome, Sampling, StepPlan, StepResult, Submit, pack_tokens

BLOCK_SIZE, BLOCKS, SLOTS = 16, 400, 24
PREFIXES, PREFIX, OWN, OUTPUT = 2000, 64, (16, 48), (4, 12)
STEP_NS, ROW_NS, TOKEN_NS = 10_000_000, 25_000, 60_000
BUS_NS = 125_000
TICK_NS = 250_000_000
TENTHS = 10
QUEUES = (("small", "chat", 0.5), ("small", "long", 0.1), ("large", "chat", 0.3), ("large", "long", 0.1))
"""(model, pool, share of the workers and of the requests)."""


@dataclass
class Tenth:
    """What one tenth of the run has cost, us."""

    requests: list[float] = field(default_factory=list)
    steps: list[float] = field(default_factory=list)

    def line(self, number: int, core: SchedulerCore) -> str:
        cells = [f"{percentile(some, share):>9.0f}" for some in (self.requests, self.steps) for share in (0.5, 0.99)]
        means = [f"{sum(some) / max(1, len(some)):>9.0f}" for some in (self.requests, self.steps)]
        running = core.num_running / len(core.workers)
        return (
            f"{number:>5} {cells[0]} {cells[1]} {means[0]} {cells[2]} {cells[3]} {means[1]} {len(self.steps):>9} "
            f"{resident_mib():>7} {running:>8.1f} {core.num_waiting:>8}"
        )


class Mesh:
    """The core and its workers, in virtual time."""

    def __init__(self, workers: int, requests: int, load: float) -> None:
        self.core = SchedulerCore(
            Limits(max_num_seqs=SLOTS, max_num_batched_tokens=1024, max_num_queued_reqs=1 << 30, pool_lend="")
        )
        self.now = 0
        self.left = requests
        self.total = requests
        self.refused = 0
        self.waits: dict[tuple[str, str], list[int]] = {(model, pool): [] for model, pool, _ in QUEUES}
        self.tenth = Tenth()
        self._random = random.Random(1)
        self._heap: list[tuple[int, int, StepResult | None]] = []
        self._order = 0
        self._free: dict[str, None] = {}  # workers with nothing in flight
        self._queue_of: list[tuple[str, str]] = []
        place = 0
        for model, pool, share in QUEUES:
            for _ in range(max(1, round(share * workers))):
                capacity = Capacity(model, 4096, BLOCK_SIZE, BLOCKS, 1 << 20, [], pool=pool)
                self.core.worker_up(f"w{place}", 1, capacity, 0)
                self._free[f"w{place}"] = None
                place += 1
        tokens = (OWN[0] + OWN[1]) / 2 + PREFIX  # as if no prefix were found
        rows = (OUTPUT[0] + OUTPUT[1]) / 2
        step_s = (STEP_NS + SLOTS * ROW_NS + SLOTS / rows * tokens * TOKEN_NS) / 1e9
        self._rate = load * place * SLOTS / (rows * step_s)
        self._next_tick = TICK_NS
        self._next_arrival = self._gap()

    def run(self, report: bool) -> None:
        every, done = max(1, self.total // TENTHS), 0
        while self.left or self._heap:
            result_at = self._heap[0][0] if self._heap else 1 << 62
            arrival_at = self._next_arrival if self.left else 1 << 62
            if self._next_tick <= min(result_at, arrival_at):
                self.now = self._next_tick
                self.core.tick(self.now)
                self._ask()
                self._next_tick += TICK_NS
            elif arrival_at <= result_at:
                self.now = arrival_at
                self._arrive()
                self._next_arrival = self.now + self._gap()
                if (self.total - self.left) % every == 0 and report:
                    done += 1
                    print(self.tenth.line(done, self.core), flush=True)
                    self.tenth = Tenth()
            else:
                self.now, _, result = heapq.heappop(self._heap)
                assert result is not None
                self._settle(result)

    def _gap(self) -> int:
        busy = 0.5 <= 1 - self.left / self.total < 0.6
        return int(self._random.expovariate(self._rate * (1.3 if busy else 1.0)) * 1e9)

    def _arrive(self) -> None:
        draw = self._random
        number = self.total - self.left
        self.left -= 1
        ((model, pool, _),) = draw.choices(QUEUES, [share for _, _, share in QUEUES])
        prefix = draw.randrange(PREFIXES)
        own = draw.randint(*OWN)
        prompt = pack_tokens([prefix] * PREFIX + [PREFIXES + number % 900_000] * own)
        sampling = Sampling(number, draw.randint(*OUTPUT), ignore_eos=True)
        tenant = ("a", "b")[number % 2]
        submit = Submit(f"{number}", 1, "g", model, prompt, sampling, self.now, tenant=tenant, pool=pool)
        began = time.thread_time()
        reply = self.core.submit(submit, self.now)
        self._ask()
        self.tenth.requests.append((time.thread_time() - began) * 1e6)
        self.refused += reply.outcome is not Outcome.ACCEPTED

    def _settle(self, result: StepResult) -> None:
        began = time.thread_time()
        self.core.apply(result, self.now)
        self._free[result.worker] = None
        self._plan(result.worker)
        self._ask()
        self.tenth.steps.append((time.thread_time() - began) * 1e6)

    def _ask(self) -> None:
        """As ``scheduler.pacing`` does, without run-ahead: every worker that could take something is asked."""
        asked = list(self._free)
        while asked:
            before = len(self._free)
            for name in self.core.whom_to_ask(asked, self.now):
                self._plan(name)
            asked = list(self._free) if len(self._free) < before else []

    def _plan(self, name: str) -> None:
        plan, _ = self.core.plan(name, self.now)
        if plan is None:
            return
        del self._free[name]
        for start in plan.starts:
            (sequence,) = self.core.sequences_of(start.request_id)
            submit = sequence.submit
            self.waits[submit.model, submit.pool].append(self.now - sequence.submitted_ns)
        self._order += 1
        took = STEP_NS + len(plan.decodes) * ROW_NS + sum(count for _, count in plan.chunks) * TOKEN_NS
        heapq.heappush(self._heap, (self.now + took + 2 * BUS_NS, self._order, self._result(plan, took)))

    def _result(self, plan: StepPlan, took: int) -> StepResult:
        in_flight = self.core.workers[plan.worker].in_flight[-1]
        ended = [
            (slot, "length")
            for slot, sequence in in_flight.sampled
            if sequence.generated + 1 >= sequence.submit.sampling.max_tokens
        ]
        return StepResult(
            plan.epoch, plan.worker, 1, plan.step, [7] * len(in_flight.sampled), ended, took // 1000,
            rows=len(in_flight.ran),
        )  # fmt: skip


def percentile(values: list[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0


def resident_mib() -> int:
    """Of this process, now."""
    with open("/proc/self/statm", encoding="ascii") as statm:
        return int(statm.read().split()[1]) * 4096 >> 20


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--workers", type=int, default=1000)
    parser.add_argument("--requests", type=int, default=1_000_000)
    parser.add_argument("--load", type=float, default=0.85, help="share of what the workers can do")
    parser.add_argument("--most-wait-s", type=float, default=60.0, help="longest that a request may wait")
    args = parser.parse_args()
    mesh = Mesh(args.workers, args.requests, args.load)
    print(f"{args.workers} workers, {args.requests} requests; CPU in microseconds, memory in MiB")
    print(f"{'':>5} {'request':>9} {'p99':>9} {'mean':>9} {'step':>9} {'p99':>9} {'mean':>9} {'steps':>9} "
          f"{'memory':>7} {'running':>8} {'waiting':>8}")  # fmt: skip
    gc.freeze()
    mesh.run(report=True)
    worst = 0.0
    for (model, pool), waits in mesh.waits.items():
        ms = [wait / 1e6 for wait in waits]
        worst = max(worst, max(ms, default=0.0) / 1e3)
        print(
            f"{model}/{pool}: {len(ms)} admitted, waited p50 {percentile(ms, 0.5):.1f} p99 {percentile(ms, 0.99):.1f} "
            f"most {max(ms, default=0):.1f} ms"
        )
    counters = mesh.core.counters
    print(
        f"prompt tokens found in a cache {counters.prefix_hits / max(1, counters.prefix_queries):.0%}; "
        f"preemptions {counters.preemptions}; refused {mesh.refused}; {mesh.now / 1e9:.0f} s of virtual time"
    )
    mesh.core.check()
    lost = args.requests - mesh.refused - sum(map(len, mesh.waits.values()))
    if mesh.core.live_requests() or lost or worst > args.most_wait_s:
        print(
            f"{len(mesh.core.live_requests())} live, {lost} never admitted, longest wait {worst:.1f} s", file=sys.stderr
        )
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
