"""A recorded run measured like a simulated one, and turned into a workload and a step-time model for the simulator."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from headrace.simulate.measure import Measurements
from headrace.simulate.report import Figures, Slo, figures
from headrace.simulate.step_time import LinearStepTime, StepWork
from headrace.simulate.worker import Executed, Population
from headrace.simulate.workload import Request
from headrace.trace.recorded import Header, Outcome, Watcher, feed
from headrace.trace.stream import BadTrace
from scheduler.core.core import SchedulerCore
from scheduler.core.events import CoreEvent, Ended, Failed
from shared.messages import Capacity, StepPlan, StepResult, Submit

Choice = tuple[str, int]


@dataclass
class Recorded:
    """``requests`` are in order of arrival, with the output lengths that the recorded run had."""

    outcome: Outcome
    figures: Figures
    requests: list[Request]
    capacities: list[Capacity]
    step_time: LinearStepTime


@dataclass(frozen=True)
class _Step:
    result: StepResult
    plan: StepPlan
    got_token: list[Choice]
    ended_ns: int


class _Notes(Watcher):
    """What a feed passes by. Only first attempts are requests; a resumed one goes on under its number."""

    def __init__(self) -> None:
        self.submits: dict[str, tuple[Submit, int]] = {}
        self.capacities: dict[str, Capacity] = {}
        self.starts: list[tuple[Choice, int]] = []
        self.steps: list[_Step] = []
        self.ends: dict[Choice, tuple[str, int, int]] = {}  # reason, tokens, time; the last one counts
        self._in_flight: dict[tuple[str, int], tuple[StepPlan, list[Choice]]] = {}

    def capacity(self, worker: str, capacity: Capacity) -> None:
        self.capacities[worker] = capacity

    def submit(self, submit: Submit, now: int) -> None:
        self.submits.setdefault(submit.request_id, (submit, now))

    def plan(self, core: SchedulerCore, plan: StepPlan, now: int) -> None:
        sampled = core.workers[plan.worker].in_flight[-1].sampled
        choices = [(sequence.request_id, sequence.choice) for _, sequence in sampled]
        self._in_flight[plan.worker, plan.step] = (plan, choices)
        self.starts += [((start.request_id, start.choice), now) for start in plan.starts]

    def result(self, result: StepResult, now: int) -> None:
        planned = self._in_flight.pop((result.worker, result.step), None)
        if planned is not None:  # else: a repeated result
            plan, choices = planned
            got = [choice for choice, token in zip(choices, result.tokens, strict=True) if token >= 0]
            self.steps.append(_Step(result, plan, got, now))

    def events(self, events: list[CoreEvent]) -> None:
        for event in events:
            if isinstance(event, Ended | Failed):
                reason = event.reason if isinstance(event, Ended) else event.kind
                sequence = event.sequence
                end = (reason, sequence.generated, event.now_ns)
                self.ends[sequence.request_id, sequence.choice] = end


def measure(path: Path, recorded: Header, slo: Slo | None = None) -> Recorded:
    """Feed the trace to a core as it was configured, and measure what happens there.

    Raises BadTrace if nothing ran in it.
    """
    notes = _Notes()
    core = SchedulerCore(recorded.limits, recorded.policy, recorded.epoch)
    outcome = feed(path, core, notes)
    if not notes.submits or not notes.steps:
        raise BadTrace(f"{path}: no request and no step in it")
    requests = _requests(notes, outcome.first_ns)
    shown = figures("recorded", core, _measurements(notes, requests, outcome.first_ns), slo)
    return Recorded(outcome, shown, requests, list(notes.capacities.values()), _fitted(notes.steps))


def _requests(notes: _Notes, first_ns: int) -> list[Request]:
    """Clients that left after some tokens (a stop string, mostly) wanted just those; before any, they leave again."""
    made = []
    for submit, now in notes.submits.values():
        limit = submit.sampling.max_tokens
        ends = [notes.ends.get((submit.request_id, choice)) for choice in range(submit.n)]
        outputs = tuple(max(1, min(limit, end[1])) if end and end[1] else limit for end in ends)
        left = [end[2] - now for end in ends if end and end[0] == "cancelled" and not end[1]]
        made.append(
            Request(
                now - first_ns, (), limit, outputs, submit.tenant, submit.priority,
                max(1, submit.deadline_ns - now) if submit.deadline_ns else 0,
                max(1, min(left)) if len(left) == submit.n else 0, submit.cache_salt, recorded=submit.prompt,
            )
        )  # fmt: skip
    return made


def _measurements(notes: _Notes, requests: list[Request], first_ns: int) -> Measurements:
    population = Population(requests)
    measured = Measurements(population)
    numbers: dict[Choice, int] = {}
    for index, (request_id, (submit, now)) in enumerate(notes.submits.items()):
        for place in range(submit.n):
            number = numbers[request_id, place] = population.first_of[index] + place
            measured.arrived_ns[number] = now - first_ns
    for choice, now in notes.starts:
        measured.admitted(numbers[choice], now - first_ns)
    for step in notes.steps:
        rows = step.result.rows
        prefill = sum(count for _, count in step.plan.chunks)
        got = np.array([numbers[choice] for choice in step.got_token], np.int64)
        occupied = len(step.plan.decodes) + len(step.plan.chunks) + len(step.plan.padding)
        decodes = rows - prefill - step.result.padding_rows
        measured.step(
            Executed(
                step.result, StepWork(rows), step.result.forward_us * 1000, got, occupied, prefill,
                step.result.padding_rows, max(0, decodes),
            )
        )  # fmt: skip
        measured.tokens_at(got, step.ended_ns - first_ns)
    for choice, (reason, _, now) in notes.ends.items():
        measured.ended(numbers[choice], reason, now - first_ns)
    return measured


def _fitted(steps: list[_Step]) -> LinearStepTime:
    """Least squares of duration, idle gap included, over rows; a slope below 0 (noise) is 0."""
    rows = np.array([step.result.rows for step in steps], float)
    durations = np.array([(step.result.forward_us + step.result.gap_us) * 1e3 for step in steps], float)
    spread = rows - rows.mean()
    slope = max(0.0, float(spread @ (durations - durations.mean()) / max(1e-9, spread @ spread)))
    return LinearStepTime(max(0.0, float(durations.mean() - slope * rows.mean())), slope)
