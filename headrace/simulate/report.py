"""The figures of one run, and the table that compares runs."""

from __future__ import annotations

from dataclasses import asdict, dataclass

import numpy as np
import numpy.typing as npt

from headrace.simulate.measure import Measurements
from headrace.text_table import figures_table
from scheduler.core.core import SchedulerCore

SERVED = ("stop", "length")


@dataclass(frozen=True)
class Slo:
    """A request is served well if its first token comes in time, and its further ones at this mean pace."""

    ttft_ms: float = 2000.0
    tpot_ms: float = 100.0


@dataclass(frozen=True)
class Figures:
    """One run. Times in milliseconds unless named otherwise; percentiles over choices, of gaps over all tokens."""

    variant: str
    requests: int
    served: int  # choices that ended by themselves
    refused: int
    dropped: int  # failed, dropped, lost
    cancelled: int
    seconds: float
    tokens_per_s: float
    requests_per_s: float
    goodput_per_s: float  # tokens of requests that met the SLO
    slo_share: float
    ttft_p50: float
    ttft_p99: float
    itl_p50: float
    itl_p99: float
    e2e_p50: float
    e2e_p99: float
    queue_p50: float
    queue_p99: float
    head_worst_s: float  # longest that the oldest waiting sequence stayed the oldest
    preemptions: int
    recomputed_tokens: int
    computed_tokens: int  # prompt tokens and decodes, recomputed ones included
    prefix_hit_share: float
    busy_share: float
    useful_slot_share: float  # occupied slots that yielded a wanted token, over all steps
    padding_share: float  # of all rows computed
    running_mean: float
    kv_usage: float  # pages in use, share of the pool, time mean
    kv_waste: float  # entries of pages in use that hold nothing and are awaited by no prompt, share of those held
    kv_shared: float  # of pages in use, referenced twice or more
    steps: int
    longest_step_ms: float
    moves: int  # of sequences, from worker to worker
    moved_gb: float  # 10**9 bytes of KV blocks, also of moves that came to nothing
    pause_p50: float  # of those that moved, from the last result at one worker to the plan for the other
    pause_p99: float

    def as_dict(self) -> dict[str, object]:
        return asdict(self)


def percentile(values: npt.NDArray[np.int64], share: float) -> float:
    """Nearest-rank percentile of ns in ms; 0 of no values."""
    if not len(values):
        return 0.0
    ordered = np.sort(values)
    return float(ordered[min(len(ordered) - 1, int(share * len(ordered)))]) / 1e6


def within(measured: Measurements, slo: Slo) -> npt.NDArray[np.bool_]:
    """Which choices were served, and in time."""
    population = measured.population
    served = np.isin(np.array(measured.reason, dtype=object), SERVED)
    spread = population.last_ns - population.first_ns
    tpot = spread / np.maximum(population.length - 1, 1)
    ttft = population.first_ns - measured.arrived_ns
    kept: npt.NDArray[np.bool_] = served & (ttft <= slo.ttft_ms * 1e6) & (tpot <= slo.tpot_ms * 1e6)
    return kept


def figures(variant: str, core: SchedulerCore, measured: Measurements, slo: Slo | None = None) -> Figures:
    slo = slo or Slo()
    population, counters = measured.population, core.counters
    reasons = np.array(measured.reason, dtype=object)
    served = np.isin(reasons, SERVED)
    ttft = population.first_ns - measured.arrived_ns
    good = within(measured, slo)
    seconds = max(measured.finished_ns - int(measured.arrived_ns.min(initial=0)), 1) / 1e9
    had_token = population.first_ns > 0
    was_admitted = measured.admitted_ns >= 0
    waited = measured.admitted_ns - measured.arrived_ns
    samples = [sample for sample in measured.samples if sample.running] or measured.samples
    held = sum(sample.slots_held for sample in samples)
    wasted = sum(max(0, sample.slots_held - sample.slots_filled - sample.slots_awaited) for sample in samples)
    used = sum(sample.pages_used for sample in samples)
    total = sum(sample.pages_total for sample in samples)
    cancelled = int((reasons == "cancelled").sum())
    refused = int((reasons == "refused").sum())
    return Figures(
        variant=variant,
        requests=len(population.requests),
        served=int(served.sum()),
        refused=refused,
        dropped=int((reasons != "").sum()) - int(served.sum()) - cancelled - refused,
        cancelled=cancelled,
        seconds=seconds,
        tokens_per_s=measured.tokens / seconds,
        requests_per_s=len(set(population.request_of[served].tolist())) / seconds,
        goodput_per_s=float(population.length[good].sum()) / seconds,
        slo_share=float(good.sum()) / max(1, population.size),
        ttft_p50=percentile(ttft[had_token], 0.5),
        ttft_p99=percentile(ttft[had_token], 0.99),
        itl_p50=measured.gaps.quantile_ns(0.5) / 1e6,
        itl_p99=measured.gaps.quantile_ns(0.99) / 1e6,
        e2e_p50=percentile((population.last_ns - measured.arrived_ns)[served], 0.5),
        e2e_p99=percentile((population.last_ns - measured.arrived_ns)[served], 0.99),
        queue_p50=percentile(waited[was_admitted], 0.5),
        queue_p99=percentile(waited[was_admitted], 0.99),
        head_worst_s=measured.worst_head_wait_ns / 1e9,
        preemptions=counters.preemptions,
        recomputed_tokens=counters.recomputed_tokens,
        computed_tokens=measured.prefill_rows + measured.decode_rows,
        prefix_hit_share=counters.prefix_hits / max(1, counters.prefix_queries),
        busy_share=measured.busy_ns / 1e9 / seconds / max(1, len(core.workers)),
        useful_slot_share=measured.tokens / max(1, measured.slot_steps),
        padding_share=measured.padding_rows / max(1, measured.rows),
        running_mean=sum(sample.running for sample in samples) / max(1, len(samples)),
        kv_usage=used / max(1, total),
        kv_waste=wasted / max(1, held),
        kv_shared=sum(sample.pages_shared for sample in samples) / max(1, used),
        steps=measured.steps,
        longest_step_ms=measured.longest_step_ns / 1e6,
        moves=counters.moves,
        moved_gb=counters.fetched_bytes / 1e9,
        pause_p50=percentile(np.array(measured.pauses_ns, np.int64), 0.5),
        pause_p99=percentile(np.array(measured.pauses_ns, np.int64), 0.99),
    )


_COLUMNS = (
    ("variant", "variant", "{}"),
    ("served", "served", "{}"),
    ("tok/s", "tokens_per_s", "{:.0f}"),
    ("req/s", "requests_per_s", "{:.2f}"),
    ("goodput", "goodput_per_s", "{:.0f}"),
    ("SLO", "slo_share", "{:.0%}"),
    ("TTFT p50", "ttft_p50", "{:.0f}"),
    ("TTFT p99", "ttft_p99", "{:.0f}"),
    ("ITL p50", "itl_p50", "{:.1f}"),
    ("ITL p99", "itl_p99", "{:.1f}"),
    ("e2e p50", "e2e_p50", "{:.0f}"),
    ("e2e p99", "e2e_p99", "{:.0f}"),
    ("queue p50", "queue_p50", "{:.0f}"),
    ("queue p99", "queue_p99", "{:.0f}"),
    ("head max s", "head_worst_s", "{:.2f}"),
    ("preempt", "preemptions", "{}"),
    ("recomputed", "recomputed_tokens", "{}"),
    ("hits", "prefix_hit_share", "{:.0%}"),
    ("busy", "busy_share", "{:.0%}"),
    ("useful", "useful_slot_share", "{:.0%}"),
    ("batch", "running_mean", "{:.0f}"),
    ("KV use", "kv_usage", "{:.0%}"),
    ("waste", "kv_waste", "{:.1%}"),
    ("refused", "refused", "{}"),
    ("dropped", "dropped", "{}"),
)

_OF_MOVES = (
    ("moves", "moves", "{}"),
    ("moved GB", "moved_gb", "{:.1f}"),
    ("pause p50", "pause_p50", "{:.1f}"),
    ("pause p99", "pause_p99", "{:.1f}"),
)


def table(runs: list[Figures]) -> str:
    """One row for each run."""
    return figures_table(_COLUMNS + (_OF_MOVES if any(one.moves for one in runs) else ()), runs)
