"""The table that the bench prints, and the figures behind it."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from headrace.bench.observer import Observer
from headrace.bench.taken import Taken
from headrace.text_table import figures_table


def percentile(values: list[float] | list[int], share: float) -> float:
    """Nearest-rank percentile; 0 of no values."""
    if not values:
        return 0.0
    ordered = sorted(values)
    return float(ordered[min(len(ordered) - 1, int(share * len(ordered)))])


@dataclass(frozen=True)
class Figures:
    """One run. Times in milliseconds unless named otherwise."""

    variant: str
    requests: int
    failed: int
    seconds: float
    output_tokens: int
    output_tokens_per_s: float
    requests_per_s: float
    ttft_p50: float
    ttft_p99: float
    itl_p50: float
    itl_p99: float
    e2e_p50: float
    busy_share: float
    idle_gap_p50: float
    idle_gap_p99: float
    steps: int
    step_p50: float
    rows_per_step: float
    padding_share: float
    useful_slot_share: float
    restarts: int  # sequences that joined a batch again: preemptions that resumed

    def as_dict(self) -> dict[str, object]:
        return asdict(self)


def figures(variant: str, taken: list[Taken], seconds: float, seen: Observer) -> Figures:
    good = [one for one in taken if not one.error]
    itl = [gap * 1e3 for one in good for gap in one.itl_s]
    tokens = sum(one.completion_tokens for one in good)
    steps = len(seen.forward_us)
    return Figures(
        variant=variant,
        requests=len(taken),
        failed=len(taken) - len(good),
        seconds=seconds,
        output_tokens=tokens,
        output_tokens_per_s=tokens / seconds,
        requests_per_s=len(good) / seconds,
        ttft_p50=percentile([one.ttft_s * 1e3 for one in good], 0.5),
        ttft_p99=percentile([one.ttft_s * 1e3 for one in good], 0.99),
        itl_p50=percentile(itl, 0.5),
        itl_p99=percentile(itl, 0.99),
        e2e_p50=percentile([one.e2e_s * 1e3 for one in good], 0.5),
        busy_share=sum(seen.forward_us) / 1e6 / seconds,
        idle_gap_p50=percentile(seen.gap_us, 0.5) / 1e3,
        idle_gap_p99=percentile(seen.gap_us, 0.99) / 1e3,
        steps=steps,
        step_p50=percentile(seen.forward_us, 0.5) / 1e3,
        rows_per_step=seen.rows / steps if steps else 0.0,
        padding_share=seen.padding_rows / seen.rows if seen.rows else 0.0,
        useful_slot_share=1 - seen.idle_slot_steps / seen.slot_steps if seen.slot_steps else 0.0,
        restarts=max(0, seen.starts - len(good)),
    )


_COLUMNS = (
    ("variant", "variant", "{}"),
    ("tok/s", "output_tokens_per_s", "{:.0f}"),
    ("req/s", "requests_per_s", "{:.2f}"),
    ("TTFT p50", "ttft_p50", "{:.0f}"),
    ("TTFT p99", "ttft_p99", "{:.0f}"),
    ("ITL p50", "itl_p50", "{:.1f}"),
    ("ITL p99", "itl_p99", "{:.1f}"),
    ("busy", "busy_share", "{:.0%}"),
    ("idle gap p50", "idle_gap_p50", "{:.2f}"),
    ("idle gap p99", "idle_gap_p99", "{:.2f}"),
    ("step p50 ms", "step_p50", "{:.1f}"),
    ("rows/step", "rows_per_step", "{:.1f}"),
    ("padding", "padding_share", "{:.0%}"),
    ("useful slots", "useful_slot_share", "{:.0%}"),
    ("restarts", "restarts", "{}"),
    ("failed", "failed", "{}"),
)


def table(runs: list[Figures]) -> str:
    return figures_table(_COLUMNS, runs)
