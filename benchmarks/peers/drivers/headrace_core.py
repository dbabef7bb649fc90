"""Headrace's own scheduler core and runner in one process, step by step: no gateway, no NATS, no other process.

What the mesh costs on top of this is the difference to ``headrace`` in the same table.
"""

from __future__ import annotations

import time
from collections.abc import Iterable

from driving import Request, serve, stepped

from scheduler.config import SchedulerConfig
from scheduler.core.core import SchedulerCore
from shared.config import parse_service
from shared.messages import Sampling, StepPlan, StepResult, Submit, pack_tokens
from worker.batch import Batch
from worker.config import WorkerConfig
from worker.torch_runner import load_torch_runner

WORKER = "worker"


class Core:
    def __init__(self, settings: dict[str, str]) -> None:
        self._runner = load_torch_runner(WorkerConfig(model=settings["model"], dtype="bfloat16"))
        capacity = self._runner.capacity
        self._core = SchedulerCore(parse_service(SchedulerConfig, "scheduler", "headrace scheduler", []).limits())
        self._core.worker_up(WORKER, 1, capacity, time.monotonic_ns())
        self._batch = Batch(
            capacity.block_size, capacity.num_blocks, capacity.max_model_len, frozenset(capacity.eos_token_ids)
        )
        self._added = 0

    def add(self, request: Request) -> None:
        sampling = Sampling(seed=0, max_tokens=request.want, temperature=0.0, ignore_eos=True)
        self._added += 1  # a request's number recurs in every run
        name = f"{self._added}-{request.number}"
        prompt = pack_tokens(request.prompt)
        self._core.submit(
            Submit(name, 0, "gateway", self._runner.capacity.model, prompt, sampling, time.time_ns()),
            time.monotonic_ns(),
        )

    def step(self) -> Iterable[tuple[int, int, bool]]:
        plan, _ = self._core.plan(WORKER, time.monotonic_ns())
        if plan is None:
            return
        began = time.perf_counter_ns()
        step = self._batch.stage(plan)
        settled = self._batch.settle(step, self._runner.forward(self._batch, step))
        took_us = (time.perf_counter_ns() - began) // 1000
        result = self._result(plan, settled.tokens, settled.ended, step.num_tokens, took_us)
        self._core.apply(result, time.monotonic_ns())
        for slot, entry in settled.entries:
            yield int(slot.request_id.partition("-")[2]), len(entry.tokens), bool(entry.end)

    def _result(
        self, plan: StepPlan, tokens: list[int], ended: list[tuple[int, str]], rows: int, took_us: int
    ) -> StepResult:
        return StepResult(
            plan.epoch, plan.worker, plan.incarnation, plan.step, tokens, ended=ended, forward_us=took_us, rows=rows
        )


if __name__ == "__main__":
    serve(stepped(Core))
