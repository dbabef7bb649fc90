"""Steps of a real model as the worker runs them: a plan as bytes in, a result and token batches as bytes out."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from headrace.profile.phases import by_kind, own_phases, traced
from shared.messages import Sampling, SlotStart, StepPlan, StepResult, TokenBatch, decode, encode, pack_tokens
from worker.batch import Batch
from worker.service import split_entries
from worker.torch_runner import TorchRunner

MESSAGES, HOST = "messages", "host Python"

MAX_PAYLOAD = 1 << 20
TRACED_STEPS = 3
LARGEST_CHUNK = 512
WORKER, GATEWAY = "worker-0", "gateway-0"


@dataclass(frozen=True, slots=True)
class Load:
    """What a step runs: ``rows`` sequences that decode a token each behind ``context``, or a prompt's chunk."""

    rows: int
    context: int
    chunk: int = 0  # tokens; 0: a decode

    @property
    def name(self) -> str:
        return f"chunk {self.chunk}" if self.chunk else f"batch {self.rows}"

    @property
    def tokens(self) -> int:
        return self.chunk or self.rows

    def most_tokens(self, steps: int) -> int:
        """The longest sequence of so many steps."""
        return self.chunk + 1 if self.chunk else self.context + steps + 1


@dataclass(frozen=True, slots=True)
class Profiled:
    """Medians over the steps of one load, in seconds."""

    load: Load
    total: float
    parts: dict[str, float]  # messages, host Python and the kinds of phases; they add up to ``total``


class Steps:
    """One load on one runner. Uses the pool's first pages."""

    def __init__(self, runner: TorchRunner, load: Load, temperature: float, steps: int) -> None:
        self.runner = runner
        self.load = load
        self._temperature = temperature
        self._longest = load.most_tokens(steps + TRACED_STEPS + 1)
        capacity = runner.capacity
        self._block_size = capacity.block_size
        self._batch = Batch(capacity.block_size, capacity.num_blocks, capacity.max_model_len, frozenset())
        self._number = 0

    def prepare(self) -> None:
        """Compute the context of every sequence."""
        if self.load.chunk:
            return
        for slot in range(self.load.rows):
            length, starts = self.load.context, [self._start(slot, self.load.context)]
            while length:
                count = min(length, LARGEST_CHUNK)
                self.run(self._plan(starts=starts, chunks=[(slot, count)]))
                length, starts = length - count, []

    def next_plan(self) -> bytes:
        if self.load.chunk:  # a new sequence each time, in the pages of the one before
            drops = [0] if self._number else []
            return self._plan(drops=drops, starts=[self._start(0, self.load.chunk)], chunks=[(0, self.load.chunk)])
        return self._plan(decodes=list(range(self.load.rows)))

    def run(self, payload: bytes) -> tuple[float, float, float]:
        """(whole step, messages, forward pass) in seconds: as ``worker.step_loop`` and ``worker.service`` do it."""
        began = time.perf_counter()
        plan = decode(payload)
        decoded = time.perf_counter()
        assert isinstance(plan, StepPlan)
        step = self._batch.stage(plan)
        forward = time.perf_counter()
        sampled = self.runner.forward(self._batch, step)
        forwarded = time.perf_counter()
        settled = self._batch.settle(step, sampled)
        result = StepResult(plan.epoch, plan.worker, plan.incarnation, plan.step, settled.tokens, settled.ended)
        entries = [entry for _, entry in settled.entries]
        encoding = time.perf_counter()
        encode(result)
        for part in split_entries(entries, MAX_PAYLOAD) if entries else ():
            encode(TokenBatch(plan.epoch, plan.worker, plan.incarnation, plan.step, part))
        ended = time.perf_counter()
        return ended - began, decoded - began + ended - encoding, forwarded - forward

    def _start(self, slot: int, tokens: int) -> SlotStart:
        vocabulary = self.runner.capacity.vocab_size
        pages = -(-self._longest // self._block_size)
        prompt = [(7 + 31 * slot + 97 * index) % vocabulary for index in range(tokens)]
        sampling = Sampling(seed=slot, max_tokens=1 << 20, temperature=self._temperature, ignore_eos=True)
        return SlotStart(
            slot, f"profile-{slot}", 0, 0, GATEWAY, pack_tokens(prompt), tokens,
            list(range(1 + slot * pages, 1 + (slot + 1) * pages)), sampling,
        )  # fmt: skip

    def _plan(self, **what: object) -> bytes:
        self._number += 1
        return encode(StepPlan(1, WORKER, 1, self._number, **what))  # type: ignore[arg-type]


def blocks_needed(loads: list[Load], steps: int, block_size: int) -> int:
    return max(load.rows * -(-load.most_tokens(steps + TRACED_STEPS + 1) // block_size) for load in loads)


def profile_load(runner: TorchRunner, load: Load, temperature: float, steps: int) -> Profiled:
    """Run ``steps`` steps of ``load``, after one to warm up, and say where their time went."""
    driver = Steps(runner, load, temperature, steps)
    driver.prepare()
    driver.run(driver.next_plan())
    native = own_phases(runner) is not None
    taken: list[tuple[float, float, dict[str, float]]] = []
    for _ in range(steps):
        total, messages, _ = driver.run(driver.next_plan())
        taken.append((total, messages, by_kind(own_phases(runner) or {}) if native else {}))
    total = _median([one[0] for one in taken])
    messages = _median([one[1] for one in taken])
    kinds = [one[2] for one in taken] if native else [traced(runner, _once(driver)) for _ in range(TRACED_STEPS)]
    parts = {name: _median([one[name] for one in kinds]) for name in kinds[0]}
    # What nobody accounts for is the host's; the profiler's own cost can make the ops look longer than the step.
    known = messages + sum(parts.values())
    scale = min(1.0, (total - messages) / (known - messages)) if known > messages else 1.0
    parts = {name: seconds * scale for name, seconds in parts.items()}
    host = max(0.0, total - messages - sum(parts.values()))
    return Profiled(load, total, {MESSAGES: messages, HOST: host, **parts})


def _once(driver: Steps) -> Callable[[], object]:
    payload = driver.next_plan()
    return lambda: driver.run(payload)


def _median(values: list[float]) -> float:
    ordered = sorted(values)
    middle = len(ordered) // 2
    return ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2
