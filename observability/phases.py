"""An explanation at a glance: its intervals folded by stage, and the longest gaps between tokens with what was in them.

A long prompt makes hundreds of intervals and a long answer thousands. Whoever asks why a request was slow wants the
few that matter first, and the rest on demand.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from observability.explanation import SLOW, Interval, by_cause
from shared.flight_record import StepTrace

FOLD = 3
"""A phase of so many intervals or fewer needs no folding."""


@dataclass(frozen=True, slots=True)
class Phase:
    """Consecutive intervals of one stage."""

    stage: str
    intervals: list[Interval]

    @property
    def begin_ns(self) -> int:
        return self.intervals[0].begin_ns

    @property
    def ms(self) -> float:
        return sum(one.ms for one in self.intervals)

    @property
    def steps(self) -> int:
        return sum(one.steps for one in self.intervals)

    @property
    def folds(self) -> bool:
        return len(self.intervals) > FOLD

    @property
    def summary(self) -> str:
        """How much of what, and the causes that took most of it."""
        tokens = sum(one.tokens for one in self.intervals)
        said = [f"{tokens:,} tokens"] if tokens else []
        if self.steps:
            said.append(f"{self.steps:,} step{'s' if self.steps > 1 else ''}")
        total = self.ms or 1.0
        for _, cause, ms in by_cause(self.intervals)[:3]:
            if cause:
                said.append(f"{ms / total:.0%} {cause}")
        notes = dict.fromkeys(one.note for one in self.intervals if one.note)
        return "; ".join([*said, *notes])


def phases(intervals: Sequence[Interval]) -> list[Phase]:
    """In order, each as long as the stage stays the same."""
    found: list[Phase] = []
    for one in intervals:
        if found and found[-1].stage == one.stage:
            found[-1].intervals.append(one)
        else:
            found.append(Phase(one.stage, [one]))
    return found


@dataclass(frozen=True, slots=True)
class Gap:
    """The time between two tokens of the request, as the scheduler saw their results come."""

    begin_ns: int
    end_ns: int
    cause: str
    by: str
    step: StepTrace | None  # None: more than one step lay in it

    @property
    def ms(self) -> float:
        return (self.end_ns - self.begin_ns) / 1e6


def slow_gaps(pieces: Sequence[Interval], most: int = 10) -> list[Gap]:
    """Gaps of ``SLOW`` times the usual (median) gap and more, the longest first."""
    found: list[Gap] = []
    within: list[Interval] = []
    begin_ns = 0  # of the gap; 0: no token has come yet
    for one in pieces:
        within.append(one)
        if not one.token:
            continue
        if begin_ns:
            longest = max(within, key=lambda inner: inner.ms)
            cause = longest.cause
            if len(within) > 1:
                cause = "; ".join(f"{stage} {ms:,.1f} ms" + (f" ({why})" if why else "") for stage, why, ms in
                                  by_cause(within)[:3])  # fmt: skip
            by = next((inner.by for inner in within if inner.by), "")
            found.append(Gap(begin_ns, one.end_ns, cause, by, one.step if len(within) == 1 else None))
        begin_ns, within = one.end_ns, []
    if not found:
        return []
    usual_ms = statistics.median(gap.ms for gap in found)
    slow = [gap for gap in found if gap.ms >= SLOW * usual_ms and gap.ms > 0.1]
    return sorted(slow, key=lambda gap: -gap.ms)[:most]


def usual_gap_ms(pieces: Sequence[Interval]) -> float:
    """The median time between two tokens; 0 with fewer than two."""
    ends = [one.end_ns for one in pieces if one.token]
    return statistics.median(b - a for a, b in pairwise(ends)) / 1e6 if len(ends) > 1 else 0.0


def contents(step: StepTrace) -> str:
    """What an iteration had in it, in words."""
    said = [f"{step.decodes:,} decode{'s' if step.decodes != 1 else ''}"]
    if step.prefill:
        most = sorted(step.chunks, key=lambda chunk: -chunk[2])[:3]
        names = ", ".join(f"{name} {tokens:,}" for name, _, tokens in most)
        more = f" and {len(step.chunks) - 3} more" if len(step.chunks) > 3 else ""
        said.append(f"{step.prefill:,} prompt tokens ({names}{more})")
    if step.recompute:
        said.append(f"{step.recompute:,} of them computed again")
    if step.preempted:
        said.append("preempted " + ", ".join(f"{name} ({cause})" for name, cause, _ in step.preempted[:3]))
    if step.padding:
        said.append(f"{step.padding:,} rows of padding")
    if step.wait_us >= 1000:
        said.append(f"{step.wait_us / 1000:,.1f} ms of waiting for the plan")
    return f"step {step.step:,} on {step.worker}: {'; '.join(said)}; {step.forward_us / 1000:,.1f} ms on the device"
