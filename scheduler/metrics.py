"""The scheduler's metrics, declared once. vLLM's names where the meaning is the same."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

_PLAN_BUCKETS = (0.00005, 0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.05)
_QUEUE_BUCKETS = (0.001, 0.005, 0.01, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80, 160)


class SchedulerMetrics:
    def __init__(self, registry: CollectorRegistry) -> None:
        def gauge(name: str, text: str) -> Gauge:
            return Gauge(name, text, registry=registry)

        def counter(name: str, text: str, labels: tuple[str, ...] = ()) -> Counter:
            return Counter(name, text, labels, registry=registry)

        self.running = gauge("vllm:num_requests_running", "Sequences in a worker's batch")
        self.waiting = gauge("vllm:num_requests_waiting", "Sequences that wait for admission")
        self.preempted = gauge("headrace_num_requests_preempted", "Preempted sequences that wait to resume")
        self.kv_usage = gauge("vllm:kv_cache_usage_perc", "Share of the KV blocks in use (0..1)")
        self.preemptions = counter("vllm:num_preemptions", "Preemptions")
        self.preemptions_by_cause = counter("headrace_preemptions", "Preemptions by cause", ("cause",))
        self.refusals = counter("headrace_refusals", "Submits by outcome other than accepted", ("outcome",))
        self.ended = counter("headrace_sequences_ended", "Sequences that ended, by reason", ("reason",))
        self.new_tokens = counter("headrace_new_tokens", "Tokens generated")
        self.prefill_tokens = counter("headrace_prefill_tokens", "Prompt tokens planned, recomputed ones included")
        self.recomputed_tokens = counter("headrace_recomputed_tokens", "Tokens computed again after a preemption")
        self.padding_tokens = counter("headrace_padding_tokens", "Rows planned that stand for nothing")
        self.idle_slots = counter("headrace_idle_slot_iterations", "Slots that sat idle in a held batch")
        self.plan_seconds = Histogram(
            "headrace_plan_seconds", "Time to decide one plan", buckets=_PLAN_BUCKETS, registry=registry
        )
        self.queue_seconds = Histogram(
            "vllm:request_queue_time_seconds", "From submit to admission", buckets=_QUEUE_BUCKETS, registry=registry
        )
        self.resent_plans = counter("headrace_plans_resent", "Plans sent again because their result was missing")
        self.workers = gauge("headrace_workers", "Ready workers")
        self.workers_lost = counter("headrace_workers_lost", "Workers lost, by cause", ("cause",))
        self.bad_messages = counter("headrace_bad_messages", "Bytes on the bus that were no message")
