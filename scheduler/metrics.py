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
        self.prefix_queries = counter("vllm:prefix_cache_queries", "Prompt tokens looked up in the prefix cache")
        self.prefix_hits = counter("vllm:prefix_cache_hits", "Prompt tokens found in the prefix cache")
        self.resumed_hits = counter("headrace_resumed_hits", "Tokens that preempted sequences found again")
        self.bypasses = counter("headrace_bypasses", "Admissions past a head that did not fit in memory")
        self.forks = counter("headrace_forks", "Choices and beams that joined by sharing another's blocks")
        self.page_copies = counter("headrace_page_copies", "Blocks copied on write")
        self.swapped_out = counter("headrace_kv_blocks_swapped_out", "KV blocks moved to host memory")
        self.swapped_in = counter("headrace_kv_blocks_swapped_in", "KV blocks moved back from host memory")
        self.deadline_drops = counter("headrace_deadline_drops", "Sequences dropped: deadline out of reach")
        self.shared_blocks = gauge("headrace_kv_blocks_shared", "KV blocks with two references or more")
        self.cached_blocks = gauge("headrace_kv_blocks_cached", "KV blocks without a reference whose content is kept")
        self.waste = gauge("headrace_kv_waste_ratio", "Share of the token slots in used blocks without a token (0..1)")
        self.head_wait = gauge("headrace_worst_head_wait_seconds", "Longest that a blocked head has waited")
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
