"""The scheduler's core and a runner in one process, with no bus between them: what serving takes without a mesh.

The core decides as it does in the scheduler, the runner runs behind the worker's own step loop, and plans are sent when
:mod:`scheduler.pacing` would send them.
"""

from __future__ import annotations

import queue
import time
from collections.abc import Iterable, Iterator, Sequence

from headrace.bench.observer import Observer
from headrace.bench.taken import Taken
from headrace.bench.workload import Shot
from scheduler.core.core import SchedulerCore
from scheduler.core.events import CoreEvent, Failed
from scheduler.core.limits import Limits
from scheduler.pacing import MARGIN_S, MARGIN_SHARE
from shared.messages import Outcome, Sampling, StepPlan, Submit, encode, pack_tokens
from worker.batch import Batch
from worker.runner import Runner
from worker.step_loop import Executed, StepLoop

WORKER, GATEWAY = "worker-0", "gateway-0"
TICK_S = 0.25
STALL_S = 60.0


class ServingFailed(RuntimeError):
    """A step or a request failed; the message says why."""


class OneProcess:
    """``encoded``: plans and results are made bytes and thrown away, as they would be on a bus. ``adapters``: LoRA
    adapters that requests have in turn; empty: none."""

    def __init__(
        self, runner: Runner, limits: Limits, policy: str = "continuous", *, encoded: bool = True,
        adapters: Sequence[str] = (),
    ) -> None:  # fmt: skip
        capacity = runner.capacity
        self._core = SchedulerCore(limits, policy)
        self._limits = limits
        self._model = capacity.model
        self._encoded = encoded
        self._adapters = adapters
        self._done: queue.SimpleQueue[Executed] = queue.SimpleQueue()
        batch = Batch(
            capacity.block_size, capacity.num_blocks, capacity.max_model_len, frozenset(capacity.eos_token_ids)
        )
        self._loop = StepLoop(runner, batch, lambda plan: True, self._done.put, lambda reset, pages: None)
        self._core.worker_up(WORKER, 1, capacity, time.monotonic_ns())
        self._in_flight: list[StepPlan] = []
        self._step_began_s = 0.0
        self._open: dict[str, Taken] = {}
        self.seen = Observer()
        self.tokens: dict[str, list[int]] = {}  # of each request, as they came
        self._loop.start()

    def close(self) -> None:
        self._loop.stop()

    def serve(
        self, shots: Iterable[Shot], concurrency: int, *, lasting_s: float = float("inf"), temperature: float = 0.0
    ) -> tuple[list[Taken], float]:
        """Keep ``concurrency`` requests open until ``shots`` are through, or for ``lasting_s``.

        Returns what each request took that has ended, and the seconds in all. Raises ServingFailed.
        """
        left = iter(shots)
        ended: list[Taken] = []
        self.seen.recording = True
        began = time.perf_counter()
        number = len(self.tokens)
        for _ in range(concurrency):
            number = self._submit_next(left, number, temperature)
        while self._open and time.perf_counter() - began < lasting_s:
            self._send_plans()
            executed = self._next_result()
            if executed is None:
                continue
            self._apply(executed)
            for request_id in self._note(executed):
                ended.append(self._open.pop(request_id))
                number = self._submit_next(left, number, temperature)
        seconds = time.perf_counter() - began
        self.seen.recording = False
        self._give_up()
        return ended, seconds

    def forget(self) -> None:
        """What was seen so far is not counted."""
        self.seen = Observer()

    # --- requests -----------------------------------------------------------------------------------------------------

    def _submit_next(self, left: Iterator[Shot], number: int, temperature: float) -> int:
        shot = next(left, None)
        if shot is None:
            return number
        request_id = f"check-{number}"
        now_s = time.perf_counter()
        sampling = Sampling(seed=number, max_tokens=shot.max_tokens, temperature=temperature, ignore_eos=True)
        prompt = pack_tokens(shot.prompt)
        adapter = self._adapters[number % len(self._adapters)] if self._adapters else ""
        submit = Submit(
            request_id, 1, GATEWAY, self._model, prompt, sampling, time.monotonic_ns(), adapter=adapter
        )  # fmt: skip
        reply = self._core.submit(submit, time.monotonic_ns())
        if reply.outcome is not Outcome.ACCEPTED:
            raise ServingFailed(f"a request was refused: {reply.outcome.value}: {reply.reason}")
        self._open[request_id] = Taken(shot.max_tokens, now_s, sent_s=now_s, status=200)
        self.tokens[request_id] = []
        return number + 1

    def _note(self, executed: Executed) -> list[str]:
        """Note when each request had its tokens; those that ended."""
        now_s = time.perf_counter()
        ended = []
        for entry in executed.entries.get(GATEWAY, []):
            taken = self._open.get(entry.request_id)
            if taken is None:
                continue
            self.tokens[entry.request_id] += entry.tokens
            taken.text_s += [now_s] * len(entry.tokens)
            taken.completion_tokens += len(entry.tokens)
            if entry.end:
                taken.ended_s = now_s
                ended.append(entry.request_id)
        return ended

    def _give_up(self) -> None:
        """Cancel what is open, and run on until the worker is idle."""
        for request_id in list(self._open):
            self._watch(self._core.cancel(request_id, 1, -1, time.monotonic_ns()))
        self._open.clear()
        while self._in_flight or self._send_plans():
            executed = self._next_result()
            if executed is not None:
                self._apply(executed)

    # --- plans and results --------------------------------------------------------------------------------------------

    def _send_plans(self) -> bool:
        """Send what is due; whether anything is in flight."""
        while len(self._in_flight) < self._limits.run_ahead and time.monotonic() >= self._due_s():
            plan, events = self._core.plan(WORKER, time.monotonic_ns())
            self._watch(events)
            if plan is None:
                break
            if self._encoded:
                encode(plan)
            if not self._in_flight:
                self._step_began_s = time.monotonic()
            self._in_flight.append(plan)
            if self.seen.recording:
                self.seen.see(plan)
            self._loop.put(plan)
        return bool(self._in_flight)

    def _due_s(self) -> float:
        """When the next plan leaves: at once where nothing is in flight, else shortly before the running step's end."""
        if not self._in_flight:
            return 0.0
        predicted_s = self._core.workers[WORKER].predicted_us / 1e6
        return self._step_began_s + predicted_s - max(MARGIN_S, MARGIN_SHARE * predicted_s)

    def _next_result(self) -> Executed | None:
        """The next one; None if a plan is due before it, or nothing has come for a while."""
        now_s = time.monotonic()
        wait_s = TICK_S
        if len(self._in_flight) < self._limits.run_ahead and self._due_s() > now_s:
            wait_s = min(wait_s, self._due_s() - now_s)
        if self._in_flight and now_s - self._step_began_s > STALL_S:
            raise ServingFailed(f"step {self._in_flight[0].step} has been running for {STALL_S:.0f} s")
        try:
            return self._done.get(timeout=wait_s)
        except queue.Empty:
            if not self._in_flight:  # the dynamic policy waits for company
                self._watch(self._core.tick(time.monotonic_ns()))
            return None

    def _apply(self, executed: Executed) -> None:
        if executed.fault:
            raise ServingFailed(f"step {executed.plan.step}: {executed.fault}")
        if self._encoded:
            encode(executed.result)
        if self.seen.recording:
            self.seen.see(executed.result)
        self._watch(self._core.apply(executed.result, time.monotonic_ns()))
        self._in_flight.pop(0)
        self._step_began_s = time.monotonic()

    def _watch(self, events: Sequence[CoreEvent]) -> None:
        for event in events:
            if isinstance(event, Failed):
                raise ServingFailed(f"{event.sequence.request_id} failed: {event.reason}")
