"""The worker's metrics, declared once."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

_STEP_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4)
_GAP_BUCKETS = (0.00005, 0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.5)


class WorkerMetrics:
    def __init__(self, registry: CollectorRegistry) -> None:
        self.step_seconds = Histogram(
            "headrace_step_seconds", "Duration of an iteration, from plan to sampled tokens",
            buckets=_STEP_BUCKETS, registry=registry,
        )  # fmt: skip
        self.idle_gap_seconds = Histogram(
            "headrace_idle_gap_seconds", "How long the step loop was blocked for want of a plan while work waited",
            buckets=_GAP_BUCKETS, registry=registry,
        )  # fmt: skip
        self.busy_seconds = Counter("headrace_worker_busy_seconds", "Time spent in iterations", registry=registry)
        self.step_tokens = Counter(
            "headrace_step_tokens", "Rows of the forward passes by kind", ["kind"], registry=registry
        )
        self.slots = Gauge("headrace_worker_slots", "Sequences in the batch that have not ended", registry=registry)
        self.kv_bytes_copied = Gauge(
            "headrace_kv_bytes_copied", "KV bytes copied since start; joining and leaving copy none", registry=registry
        )
        self.stale_plans = Counter(
            "headrace_stale_plans", "Plans ignored: of an older epoch or another incarnation", registry=registry
        )
        self.plan_gaps = Counter("headrace_plan_gaps", "Times a plan was missing and asked for", registry=registry)
        self.results_resent = Counter("headrace_results_resent", "Results sent again on request", registry=registry)
        self.faults = Counter("headrace_step_faults", "Iterations that failed and lost their batch", registry=registry)
        self.bad_messages = Counter("headrace_bad_messages", "Bytes on the bus that were no message", registry=registry)
