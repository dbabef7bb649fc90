"""What a mesh did in one window of offered load: pure functions of what clients took and what the mesh said."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

from headrace.bench.probe import CLIENT, Sample
from headrace.bench.report import percentile
from headrace.bench.taken import Taken
from headrace.text_table import figures_table

REFUSALS = (429, 503)
MIB = 1 << 20


@dataclass(frozen=True)
class Window:
    """``samples``: of the measured part, which begins with the first and ends with the last. ``load``: multiple."""

    load: float
    offered_per_s: float
    taken: Sequence[Taken]
    before: Sample  # as the first request was sent
    samples: Sequence[Sample]


@dataclass(frozen=True)
class LoadFigures:
    """One load. Everything counts what *happened* in the measured part, whenever its request had been sent."""

    load: float  # multiple of the capacity; 0: the closed loop
    offered_per_s: float
    seconds: float
    sent: int
    tokens_per_s: float  # new tokens that reached clients
    goodput_per_s: float  # of them, those of requests that did not fail
    finished_per_s: float
    ttft_p50_ms: float
    ttft_p99_ms: float
    itl_p99_ms: float
    refused_429: int
    refused_503: int
    refusal_p99_ms: float
    retry_after_share: float  # of the refusals, those with a Retry-After; 1 of none
    failed: int  # neither whole nor refused nor given up by us
    preemptions: int
    restarts: int  # preempted sequences that resumed
    recomputed_tokens: int
    most_waiting: int
    gateway_rss_before_mib: float  # as the first request was sent
    gateway_rss_after_mib: float
    client_cpu: float  # share of one core
    worker_cpu: float  # cores the workers had: where it differs between loads, something else had the machine
    late_p99_ms: float  # how late the client sent what was due
    # What the mesh was busy with
    busy_share: float  # of the workers' time
    step_mean_ms: float
    rows_per_step: float
    prefill_share: float  # of the rows computed
    kv_usage: float  # mean share of the KV blocks in use
    tokens_per_piece: float  # of text, in answers that are whole
    gateway_tokens_per_s: float  # by the gateway's own count
    cpu: dict[str, float]  # service -> share of one core
    errors: list[str]  # up to three

    def as_dict(self) -> dict[str, object]:
        return asdict(self)


def load_figures(window: Window) -> LoadFigures:
    first, last = window.samples[0], window.samples[-1]
    since, until = first.at_s, last.at_s
    seconds = until - since

    def inside(at_s: float) -> bool:
        return since <= at_s <= until

    def grown(name: str) -> float:
        return last.metrics.get(name, 0.0) - first.metrics.get(name, 0.0)

    whole = [one for one in window.taken if one.ended_s and not one.error]
    refused = [one for one in window.taken if one.status in REFUSALS and inside(one.ended_s)]
    failed = [one for one in window.taken if one.error and one.status not in REFUSALS and inside(one.ended_s)]
    pieces = sum(len(one.text_s) for one in whole)
    per_piece = sum(one.completion_tokens for one in whole) / pieces if pieces else 1.0

    def tokens(one: Taken) -> float:
        # A piece of text may hold several tokens, and a token may wait for the rest of its character.
        mine = one.completion_tokens / len(one.text_s) if one.completion_tokens and one.text_s else per_piece
        return mine * sum(map(inside, one.text_s))

    gaps_ms = [
        (after - before) * 1e3
        for one in window.taken
        for before, after in zip(one.text_s, one.text_s[1:], strict=False)
        if inside(after)
    ]
    ttft_ms = [one.ttft_s * 1e3 for one in window.taken if one.text_s and inside(one.text_s[0])]
    steps = grown("headrace_step_seconds_count")
    rows = grown("headrace_worker_rows_total")
    workers = max(1.0, last.metrics.get("headrace_workers", 1.0))
    cpu = {name: (last.cpu_s[name] - first.cpu_s.get(name, 0.0)) / seconds for name in last.cpu_s}
    preemptions = grown("vllm:num_preemptions_total")
    return LoadFigures(
        load=window.load,
        offered_per_s=window.offered_per_s,
        seconds=seconds,
        sent=sum(inside(one.sent_s) for one in window.taken),
        tokens_per_s=sum(map(tokens, window.taken)) / seconds,
        goodput_per_s=sum(tokens(one) for one in window.taken if not one.error) / seconds,
        finished_per_s=sum(inside(one.ended_s) for one in whole) / seconds,
        ttft_p50_ms=percentile(ttft_ms, 0.5),
        ttft_p99_ms=percentile(ttft_ms, 0.99),
        itl_p99_ms=percentile(gaps_ms, 0.99),
        refused_429=sum(one.status == 429 for one in refused),
        refused_503=sum(one.status == 503 for one in refused),
        refusal_p99_ms=percentile([one.e2e_s * 1e3 for one in refused], 0.99),
        retry_after_share=sum(one.retry_after for one in refused) / len(refused) if refused else 1.0,
        failed=len(failed),
        preemptions=round(preemptions),
        restarts=round(preemptions - grown("headrace_num_requests_preempted")),
        recomputed_tokens=round(grown('headrace_step_tokens_total{kind="recompute"}')),
        most_waiting=round(max(sample.metrics.get("vllm:num_requests_waiting", 0.0) for sample in window.samples)),
        gateway_rss_before_mib=window.before.gateway_rss_bytes / MIB,
        gateway_rss_after_mib=last.gateway_rss_bytes / MIB,
        client_cpu=cpu.get(CLIENT, 0.0),
        worker_cpu=cpu.get("worker", 0.0),
        late_p99_ms=percentile([(one.sent_s - one.since_s) * 1e3 for one in window.taken if inside(one.sent_s)], 0.99),
        busy_share=grown("headrace_step_seconds_sum") / seconds / workers,
        step_mean_ms=grown("headrace_step_seconds_sum") / steps * 1e3 if steps else 0.0,
        rows_per_step=rows / steps if steps else 0.0,
        prefill_share=grown('headrace_worker_rows_total{kind="prefill"}') / rows if rows else 0.0,
        kv_usage=sum(sample.metrics.get("vllm:kv_cache_usage_perc", 0.0) for sample in window.samples)
        / len(window.samples),
        tokens_per_piece=per_piece,
        gateway_tokens_per_s=grown("vllm:generation_tokens_total") / seconds,
        cpu=cpu,
        errors=sorted({one.error for one in failed})[:3],
    )


_COLUMNS = (
    ("load", "load", "{:g}x"),
    ("offered/s", "offered_per_s", "{:.2f}"),
    ("tok/s", "tokens_per_s", "{:.1f}"),
    ("goodput", "goodput_per_s", "{:.1f}"),
    ("done/s", "finished_per_s", "{:.2f}"),
    ("TTFT p50", "ttft_p50_ms", "{:.0f}"),
    ("TTFT p99", "ttft_p99_ms", "{:.0f}"),
    ("ITL p99", "itl_p99_ms", "{:.0f}"),
    ("429", "refused_429", "{}"),
    ("503", "refused_503", "{}"),
    ("refusal p99", "refusal_p99_ms", "{:.0f}"),
    ("Retry-After", "retry_after_share", "{:.0%}"),
    ("failed", "failed", "{}"),
    ("preempted", "preemptions", "{}"),
    ("restarts", "restarts", "{}"),
    ("recomputed", "recomputed_tokens", "{}"),
    ("waiting", "most_waiting", "{}"),
    ("RSS MiB", "gateway_rss_before_mib", "{:.0f}"),
    ("after", "gateway_rss_after_mib", "{:.0f}"),
    ("busy", "busy_share", "{:.0%}"),
    ("prefill", "prefill_share", "{:.0%}"),
    ("worker CPU", "worker_cpu", "{:.0%}"),
    ("client CPU", "client_cpu", "{:.0%}"),
)


def load_table(runs: Sequence[LoadFigures]) -> str:
    return figures_table(_COLUMNS, runs)


def of_the_peak(runs: Sequence[LoadFigures]) -> str:
    """Each load's goodput relative to the best: ``goodput: 1x: 100%, 3x: 97% of the peak``."""
    best = max(run.goodput_per_s for run in runs)
    shares = ", ".join(f"{run.load:g}x: {run.goodput_per_s / best if best else 0:.0%}" for run in runs)
    return f"goodput: {shares} of the peak, {best:.1f} tok/s"
