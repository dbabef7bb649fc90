"""The worker's metrics, declared once. ``docs/metrics.md`` lists them."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Histogram

from observability.lean_metrics import LeanHistogram, lean_counter, lean_counters, lean_gauge, lean_histogram

_STEP_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4)
_GAP_BUCKETS = (0.00005, 0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.5)
_BATCH_BUCKETS = (1, 2, 4, 8, 16, 32, 48, 64, 96, 128, 192, 256, 384, 512, 1024)
_FETCH_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
_TOKEN_BUCKETS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)


class WorkerMetrics:
    def __init__(self, registry: CollectorRegistry, model: str) -> None:
        def counter(name: str, text: str) -> Counter:
            return Counter(name, text, registry=registry)

        def histogram(
            name: str, text: str, buckets: tuple[float, ...], label: tuple[str, str] | None = None
        ) -> LeanHistogram:
            return lean_histogram(registry, name, text, label, buckets)

        self.step_seconds = histogram(
            "headrace_step_seconds", "Duration of an iteration, from plan to sampled tokens", _STEP_BUCKETS
        )
        self.idle_gap_seconds = histogram(
            "headrace_idle_gap_seconds", "How long the step loop was blocked for want of a plan while work waited",
            _GAP_BUCKETS,
        )  # fmt: skip
        self.busy_seconds = lean_counter(
            registry, "headrace_worker_busy_seconds", "Time spent in iterations; its rate is the busy share"
        )
        self.batch_size = histogram("headrace_batch_size", "Sequences in an iteration", _BATCH_BUCKETS)
        self.iteration_tokens = histogram(
            "vllm:iteration_tokens_total", "Tokens computed in an iteration, padding included", _TOKEN_BUCKETS,
            ("model_name", model),
        )  # fmt: skip
        self.rows = lean_counters(
            registry, "headrace_worker_rows", "Rows of the forward passes by kind", "kind",
            ("prefill", "decode", "padding"),
        )  # fmt: skip
        self.slots = lean_gauge(registry, "headrace_worker_slots", "Sequences in the batch that have not ended")
        self.kv_bytes_copied = lean_gauge(
            registry, "headrace_kv_copied_bytes", "KV bytes copied since start; joining and leaving copy none"
        )
        self.stale_plans = counter("headrace_stale_plans", "Plans ignored: of an older epoch or another incarnation")
        self.plan_gaps = counter("headrace_plan_gaps", "Times a plan was missing and asked for")
        self.results_resent = counter("headrace_results_resent", "Results sent again on request")
        self.faults = counter("headrace_step_faults", "Iterations that failed and lost their batch")
        self.bad_messages = counter("headrace_bad_messages", "Bytes on the bus that were no message")
        self.lacked_memory = lean_counter(
            registry, "headrace_steps_lacked_memory", "Times that a step lacked a GPU's memory and was run again"
        )
        self.fetched_bytes = Counter(
            "headrace_kv_fetched_bytes", "KV blocks fetched from other workers, by transport", ["transport"],
            registry=registry,
        )  # fmt: skip
        self.fetch_seconds = Histogram(
            "headrace_kv_fetch_seconds", "How long fetches of KV blocks took, from the plans that began them",
            ["transport"], registry=registry, buckets=_FETCH_BUCKETS,
        )  # fmt: skip
        self.fetch_failures = Counter(
            "headrace_kv_fetch_failures", "Fetches of KV blocks that failed", ["transport"], registry=registry
        )
        self.served_bytes = Counter(
            "headrace_kv_served_bytes", "KV blocks that other workers fetched from here, by transport", ["transport"],
            registry=registry,
        )  # fmt: skip
        self.fetches_refused = counter(
            "headrace_kv_fetches_refused", "Fetches by others that were refused here, or given up as no longer valid"
        )
