"""What a row of the figures is, and what the functions that measure them share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path

from headrace.simulate.report import Figures
from headrace.simulate.scenario import Run, Scenario, run
from headrace.simulate.workload import Lengths, Request, stream


class Holds(StrEnum):
    YES = "yes"
    PARTLY = "partly"
    NO = "no"
    NOT_COMPARABLE = "not comparable"


@dataclass(frozen=True)
class Row:
    """One claim. ``why`` says what stands behind the verdict; it is never empty unless the claim simply holds."""

    claim: str
    ours: str
    workload: str  # with hardware, model, arrivals
    baseline: str  # with its batch rule
    holds: Holds
    why: str = ""


@dataclass
class Section:
    """Rows that come from the same runs, with more detail for the document."""

    title: str
    rows: list[Row]
    table: list[list[str]] = field(default_factory=list)  # head first
    note: str = ""
    picture: str = ""  # name of the file, without suffix
    draw: Callable[[Path], None] | None = None


@dataclass(frozen=True)
class Bench:
    """Runs scenarios. ``scale`` shrinks every count of requests; at 1 the whole of the figures takes a few minutes."""

    scale: float = 1.0
    say: Callable[[str], None] = lambda text: None

    def count(self, requests: int, least: int = 24) -> int:
        return max(least, round(requests * self.scale))

    def run(
        self, scenario: Scenario, requests: Sequence[Request], name: str, concurrency: int = 0, until_s: float = 0,
        watch: Callable[[Request], bool] | None = None,
    ) -> Run:  # fmt: skip
        """A closed loop ends when the last request is submitted: its tail would measure the last few sequences."""
        self.say(name)
        return run(
            scenario, requests, name, concurrency=concurrency, until_s=until_s, drain=not concurrency, watch=watch
        )  # fmt: skip

    def sustained(self, scenario: Scenario, lengths: Lengths, rate: float, longest: int) -> Run | None:
        """A minute and a half of Poisson arrivals; None if they are not all served in as long again."""
        seconds = self.seconds(90, 45)
        requests = stream(lengths, max(30, int(rate * seconds)), 12, rate, longest=longest)
        until_s = requests[-1].at_ns / 1e9 + seconds
        one = self.run(scenario, requests, f"{lengths.name} at {rate:.2f}/s", until_s=until_s)
        return one if one.figures.served >= 0.98 * len(requests) else None

    def seconds(self, seconds: float, least: float = 30) -> float:
        """Virtual seconds of arrivals in an open loop."""
        return max(least, seconds * self.scale)


def vllm_v0(scenario: Scenario) -> Scenario:
    """Whole-prompt admission in strict order, 1 % watermark, last in first out preemption, no prefix cache."""
    return replace(scenario, baseline="vllm-v0").with_limits(enable_prefix_caching=False, admission_watermark=0.01)


def first_chunk(scenario: Scenario) -> Scenario:
    """Admission once a first chunk fits, last in first out preemption, no watermark, no prefix cache."""
    return replace(scenario, baseline="first-chunk").with_limits(enable_prefix_caching=False, admission_watermark=0.0)


def contiguous(scenario: Scenario, longest: int) -> Scenario:
    """Each sequence reserves one contiguous area of ``longest`` tokens: a block of that size."""
    return replace(scenario, block_size=longest, max_model_len=longest).with_limits(enable_prefix_caching=False)


def cells(figures: Figures, columns: Sequence[tuple[str, str]]) -> list[str]:
    return [form.format(getattr(figures, name)) for name, form in columns]


def fastest_rate(good_at: Callable[[float], bool], low: float, high: float, steps: int = 5) -> float:
    """Highest request rate at which ``good_at`` holds, by bisection on a logarithmic scale; 0 if not even ``low``.

    Five steps from a range of 64 to 1 find it to within 14 %.
    """
    if not good_at(low):
        return 0.0
    if good_at(high):
        return high
    for _ in range(steps):
        middle = (low * high) ** 0.5
        if good_at(middle):
            low = middle
        else:
            high = middle
    return low
