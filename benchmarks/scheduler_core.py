"""Time of the scheduler core alone: plan + apply of one iteration, without NATS.

    python benchmarks/scheduler_core.py [--steps 400] [--waiting 0]
    python benchmarks/scheduler_core.py --workers 1,16,64 [--running 256] [--steps 40]

For 16, 256 and 1024 running sequences: a decode-only iteration; one in which sequences end and others join (churn);
and one under memory pressure, in which the head of the queue does not fit and the window behind it is searched for
sequences that may pass it (pressed). Two tenants, two priority classes. Prints p50 and p99 in microseconds; the plan's
encoding and the result's decoding are timed apart.

With ``--workers`` so many workers of one model are planned in turn, each with its batch nearly full while sequences end
and others come, and the time is that of one worker's iteration: at each, a sequence for each that ended is submitted,
and the workers that could take it are asked as a driver asks them.
"""

from __future__ import annotations

import argparse
import gc
import time

from scheduler.__main__ import COLLECT_EVERY
from scheduler.core.core import SchedulerCore
from scheduler.core.limits import Limits
from shared.messages import Capacity, Sampling, StepPlan, StepResult, Submit, decode, encode, pack_tokens

BLOCK_SIZE = 16
PROMPT = 32


def percentile(values: list[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


class Load:
    """A core with ``running`` sequences, fed so that the batch stays full."""

    def __init__(
        self, running: int, waiting: int, max_tokens: int, pool_share: float, workers: int = 1, aged: bool = False
    ) -> None:  # fmt: skip
        self.core = SchedulerCore(
            Limits(
                max_num_seqs=running,
                max_num_batched_tokens=max(2048, 2 * running),
                max_num_queued_reqs=waiting + 2 * running * workers + 1,
            )
        )
        blocks = int(running * (PROMPT + max_tokens) / BLOCK_SIZE * pool_share)
        self.names = ["w", *(f"w{index}" for index in range(1, workers))]
        for name in self.names:
            self.core.worker_up(name, 1, Capacity("m", 1 << 20, BLOCK_SIZE, blocks, 32000, []), 0)
        self.max_tokens = max_tokens
        self.at_once = running * workers if aged else 0  # the first ones are at all ages
        self.count = 0
        self.target = running * workers + waiting
        self.now = 0
        self.top_up()

    def top_up(self) -> None:
        while self.core.num_waiting + self.core.num_running + self.core.num_preempted < self.target:
            # Lengths differ, so that in steady state a few sequences end in each iteration rather than all in one.
            tokens = self.max_tokens - (self.count * 7919) % (self.max_tokens // 2)
            if self.count < self.at_once:
                tokens = 1 + (self.count * 7919) % tokens
            prompt = pack_tokens((self.count * 31 + place) % 32000 for place in range(PROMPT))
            submit = Submit(
                f"r{self.count}", 1, "g", "m", prompt, Sampling(1, tokens, ignore_eos=True), self.count,
                tenant=("a", "b")[self.count % 2], priority=self.count % 3 // 2,
            )  # fmt: skip
            self.core.submit(submit, self.now)
            self.count += 1

    def result(self, plan: StepPlan) -> StepResult:
        """What a worker would answer: lengths are its to check."""
        in_flight = self.core.workers[plan.worker].in_flight[-1]
        ended = [
            (slot, "length")
            for slot, sequence in in_flight.sampled
            if sequence.generated + 1 >= sequence.submit.sampling.max_tokens
        ]
        rows = len(in_flight.ran)
        return StepResult(
            plan.epoch, plan.worker, 1, plan.step, [7] * len(in_flight.sampled), ended, 9000 + 10 * rows, rows=rows
        )


def measure(running: int, waiting: int, steps: int, max_tokens: int, pool_share: float) -> dict[str, list[float]]:
    load = Load(running, waiting, max_tokens, pool_share)
    times: dict[str, list[float]] = {"plan": [], "apply": [], "both": [], "encode": [], "decode": []}
    warm_up = 20
    for step in range(steps + warm_up):
        load.now += 10_000_000
        began = time.perf_counter()
        plan, _ = load.core.plan("w", load.now)
        planned = time.perf_counter()
        assert plan is not None
        payload = encode(plan)
        encoded = time.perf_counter()
        answer = encode(load.result(plan))
        ready = time.perf_counter()
        result = decode(answer)
        decoded = time.perf_counter()
        assert isinstance(result, StepResult)
        load.core.apply(result, load.now)
        applied = time.perf_counter()
        load.top_up()
        if step >= warm_up:
            times["plan"].append((planned - began) * 1e6)
            times["encode"].append((encoded - planned) * 1e6)
            times["decode"].append((decoded - ready) * 1e6)
            times["apply"].append((applied - decoded) * 1e6)
            times["both"].append((planned - began + applied - decoded) * 1e6)
        del payload
    return times


def measure_mesh(workers: int, running: int, steps: int) -> list[float]:
    """Microseconds (of this thread's CPU) of one worker's iteration, of ``workers`` that are nine tenths full."""
    load = Load(running, 0, 400, 1.1, workers, aged=True)
    load.target = workers * running * 9 // 10
    core, took = load.core, []
    warm_up = 10
    in_flight: dict[str, StepResult] = {}
    for step in range(steps + warm_up):
        for name in load.names:
            load.now += 20_000_000 // workers
            began = time.thread_time()
            if name in in_flight:
                core.apply(in_flight.pop(name), load.now)
            spent = time.thread_time() - began
            load.top_up()
            began = time.thread_time()
            asked = [one for one in load.names if one not in in_flight]
            for one in core.whom_to_ask(asked, load.now) if workers > 1 else asked:
                plan, _ = core.plan(one, load.now)
                if plan is not None:
                    spent += time.thread_time() - began
                    in_flight[one] = load.result(plan)
                    began = time.thread_time()
            spent += time.thread_time() - began
            if step >= warm_up:
                took.append(spent * 1e6)
    return took


def main() -> None:
    gc.set_threshold(*COLLECT_EVERY)
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--waiting", type=int, default=0, help="sequences that wait behind the running ones")
    parser.add_argument("--workers", default="", help="numbers of workers, such as 1,16,64")
    parser.add_argument("--running", type=int, default=256, help="with --workers: places in each batch")
    args = parser.parse_args()
    if args.workers:
        print(f"scheduler core, workers of {args.running} sequences; microseconds of one worker's iteration")
        print(f"{'workers':>8} {'p50':>8} {'p99':>8} {'workers at 50 steps/s':>22}")
        for workers in map(int, args.workers.split(",")):
            took = measure_mesh(workers, args.running, args.steps)
            mean = sum(took) / len(took)
            print(f"{workers:>8} {percentile(took, 0.5):>8.0f} {percentile(took, 0.99):>8.0f} {1e6 / mean / 50:>22.0f}")
        return
    print(f"scheduler core, {args.steps} iterations each, {args.waiting} waiting; microseconds")
    print(f"{'running':>8} {'iteration':<10} {'plan+apply p50':>15} {'p99':>8} {'plan p50':>9} {'apply p50':>10} "
          f"{'encode p50':>11} {'decode p50':>11}")  # fmt: skip
    for running in (16, 256, 1024):
        for kind, max_tokens, pool_share in (("decode", 20_000, 1.1), ("churn", 400, 1.1), ("pressed", 400, 0.6)):
            times = measure(running, args.waiting, args.steps, max_tokens, pool_share)
            both, plan, apply = times["both"], times["plan"], times["apply"]
            print(
                f"{running:>8} {kind:<10} {percentile(both, 0.5):>15.0f} {percentile(both, 0.99):>8.0f} "
                f"{percentile(plan, 0.5):>9.0f} {percentile(apply, 0.5):>10.0f} "
                f"{percentile(times['encode'], 0.5):>11.0f} {percentile(times['decode'], 0.5):>11.0f}"
            )


if __name__ == "__main__":
    main()
