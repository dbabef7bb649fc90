"""The scheduler's metrics, declared once (``docs/metrics.md``). vLLM's names where the meaning is the same."""

from __future__ import annotations

from collections.abc import Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from observability.lean_metrics import LeanHistogram, lean_histogram
from scheduler.core.move import Why
from scheduler.core.pools import QueueKey
from scheduler.core.worker_state import WorkerState
from shared.messages import Outcome, Role

_PAUSE_BUCKETS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
_PLAN_BUCKETS = (0.00005, 0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.05)
_ROUND_TRIP_BUCKETS = (0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.5, 1)
_LATENCY_BUCKETS = (
    0.001, 0.005, 0.01, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80, 160, 320, 640, 1280, 2560,
)  # fmt: skip

NEW, PREFILL, RECOMPUTE, PADDING = "new", "prefill", "recompute", "padding"
"""Kinds of ``headrace_step_tokens_total``."""

MODEL = ("model_name",)
"""vLLM's label: its dashboards select by it."""

POOL = (*MODEL, "pool")


class ModelMetrics:
    """Those of one model, looked up once."""

    def __init__(self, metrics: SchedulerMetrics, model: str) -> None:
        self.running: Gauge = metrics.running.labels(model)
        self.waiting: Gauge = metrics.waiting.labels(model)
        self.kv_usage: Gauge = metrics.kv_usage.labels(model)
        self.prefix_queries: Counter = metrics.prefix_queries.labels(model)
        self.prefix_hits: Counter = metrics.prefix_hits.labels(model)
        self.preemptions: Counter = metrics.preemptions.labels(model)
        self.queue_seconds: Histogram = metrics.queue_seconds.labels(model)
        self.prefill_seconds: Histogram = metrics.prefill_seconds.labels(model)
        self.decode_seconds: Histogram = metrics.decode_seconds.labels(model)


class PoolMetrics:
    """Those of one pool of a model, looked up once."""

    def __init__(self, metrics: SchedulerMetrics, key: QueueKey) -> None:
        self._workers: Gauge = metrics.pool_workers.labels(*key)
        self._running: Gauge = metrics.pool_running.labels(*key)
        self._waiting: Gauge = metrics.pool_waiting.labels(*key)
        self._roles: dict[Role, Gauge] = {role: metrics.role_workers.labels(*key, role.value) for role in Role}

    def observe(self, waiting: int, workers: Sequence[WorkerState]) -> None:
        """``waiting`` sequences, and all that run on its workers, whichever pool's requests they are."""
        self._workers.set(len(workers))
        self._running.set(sum(len(worker.running) for worker in workers))
        self._waiting.set(waiting)
        for role, gauge in self._roles.items():
            gauge.set(sum(worker.role is role for worker in workers))


class SchedulerMetrics:
    def __init__(self, registry: CollectorRegistry) -> None:
        def gauge(name: str, text: str, unit: str = "", labels: tuple[str, ...] = ()) -> Gauge:
            return Gauge(name, text, labels, unit=unit, registry=registry)

        def counter(name: str, text: str, labels: tuple[str, ...] = (), unit: str = "") -> Counter:
            return Counter(name, text, labels, unit=unit, registry=registry)

        def seconds(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(name, text, MODEL, unit="seconds", buckets=buckets, registry=registry)

        def of_steps(name: str, text: str, buckets: tuple[float, ...]) -> LeanHistogram:
            return lean_histogram(registry, name, text, None, buckets)

        self._models: dict[str, ModelMetrics] = {}
        self._pools: dict[QueueKey, PoolMetrics] = {}
        # --- load ---------------------------------------------------------------------------------------------------
        self.running = gauge("vllm:num_requests_running", "Sequences in a worker's batch", labels=MODEL)
        self.waiting = gauge("vllm:num_requests_waiting", "Sequences that wait for admission", labels=MODEL)
        self.preempted = gauge("headrace_num_requests_preempted", "Preempted sequences that wait to resume")
        self.swapped = gauge("headrace_num_requests_swapped", "Of those, sequences whose KV blocks are in host memory")
        self.queue_age = gauge(
            "headrace_queue_age_seconds", "How long the sequence that has waited longest has waited", "seconds"
        )
        self.head_wait = gauge(
            "headrace_worst_head_wait_seconds", "Longest that a head of the queue has been blocked, ever", "seconds"
        )
        self.workers = gauge("headrace_workers", "Ready workers")
        self.pool_workers = gauge("headrace_pool_workers", "Ready workers of the pool", labels=POOL)
        self.pool_running = gauge("headrace_pool_requests_running", "Sequences in the pool's batches", labels=POOL)
        self.pool_waiting = gauge(
            "headrace_pool_requests_waiting", "Sequences that wait for the pool's workers", labels=POOL
        )
        self.role_workers = gauge(
            "headrace_role_workers", "Ready workers of the pool by what they are for now", labels=(*POOL, "role")
        )
        self.role_load = gauge(
            "headrace_role_load",
            "With --plan-roles: workers that prompts (prefill) and decodes keep busy, of those that have a role",
            labels=(*POOL, "role"),
        )  # fmt: skip
        self.role_changes = counter("headrace_role_changes", "Workers given another role, by the new one", ("role",))
        for role in Role:
            self.role_changes.labels(role.value)
        self.desired_workers = gauge(
            "headrace_desired_workers", "Ready workers that the pool should have, for an autoscaler", labels=POOL
        )
        self.desired_workers_reason = gauge(
            "headrace_desired_workers_reason",
            "Why that is more than there are (queue, memory, forecast), fewer (idle) or as many as there are or were "
            "(steady): 1 for the one that holds, 0 for the others",
            labels=(*POOL, "reason"),
        )  # fmt: skip
        self.leading = gauge("headrace_scheduler_leading", "1 if this scheduler leads its mesh, 0 if it stands by")
        self.epoch = gauge("headrace_scheduler_epoch", "Epoch in which this scheduler leads, or last led; 0: none")
        # --- memory -------------------------------------------------------------------------------------------------
        self.kv_usage = gauge("vllm:kv_cache_usage_perc", "Share of the KV blocks in use (0..1)", labels=MODEL)
        self.fragmentation = gauge(
            "headrace_kv_fragmentation_ratio",
            "Share of the token slots in used blocks that hold no token, of the worker with most (0..1)", "ratio",
        )  # fmt: skip
        self.shared_blocks = gauge("headrace_kv_blocks_shared", "KV blocks with two references or more")
        self.cached_blocks = gauge("headrace_kv_blocks_cached", "KV blocks without a reference whose content is kept")
        self.prefix_queries = counter("vllm:prefix_cache_queries", "Prompt tokens looked up in the prefix cache", MODEL)
        self.prefix_hits = counter("vllm:prefix_cache_hits", "Prompt tokens found in the prefix cache", MODEL)
        self.resumed_hits = counter("headrace_resumed_hits", "Tokens that preempted sequences found again")
        self.page_copies = counter("headrace_page_copies", "Blocks copied on write")
        self.swapped_out = counter("headrace_kv_blocks_swapped_out", "KV blocks moved to host memory")
        self.swapped_in = counter("headrace_kv_blocks_swapped_in", "KV blocks moved back from host memory")
        # --- decisions ----------------------------------------------------------------------------------------------
        step_tokens = counter(
            "headrace_step_tokens",
            "What iterations were spent on: tokens generated (new), prompt tokens computed (prefill), tokens computed "
            "again after a preemption (recompute), rows that stand for nothing (padding)",
            ("kind",), "tokens",
        )  # fmt: skip
        self.step_tokens = {kind: step_tokens.labels(kind) for kind in (NEW, PREFILL, RECOMPUTE, PADDING)}
        self.preemptions = counter("vllm:num_preemptions", "Preemptions", MODEL)
        self.preemptions_by_cause = counter("headrace_preemptions", "Preemptions by cause", ("cause",))
        self.moves = counter("headrace_moves", "Sequences that went on at another worker, by why", ("why",))
        self.failed_moves = counter(
            "headrace_failed_moves", "Sequences that were to, and went on where they were instead, by why", ("why",)
        )
        self.fetched_bytes = counter("headrace_fetched", "KV blocks that workers fetched from others", unit="bytes")
        for why in Why:
            self.moves.labels(why.value)
            self.failed_moves.labels(why.value)
        self.bypasses = counter("headrace_bypasses", "Admissions past a head that did not fit in memory")
        self.forks = counter("headrace_forks", "Choices and beams that joined by sharing another's blocks")
        self.idle_slots = counter("headrace_idle_slot_iterations", "Slots that sat idle in a held batch, by iteration")
        self.refusals = counter("headrace_refusals", "Submits by outcome other than accepted", ("outcome",))
        self.ended = counter("headrace_sequences_ended", "Sequences that ended, by reason", ("reason",))
        self.deadline_drops = counter("headrace_deadline_drops", "Sequences dropped: deadline out of reach")
        # --- time ---------------------------------------------------------------------------------------------------
        self.queue_seconds = seconds(
            "vllm:request_queue_time_seconds", "From submit to first admission", _LATENCY_BUCKETS
        )
        self.prefill_seconds = seconds(
            "vllm:request_prefill_time_seconds", "From first admission to the first token", _LATENCY_BUCKETS
        )
        self.decode_seconds = seconds(
            "vllm:request_decode_time_seconds", "From the first token to the last", _LATENCY_BUCKETS
        )
        self.move_pause_seconds = of_steps(
            "headrace_move_pause_seconds",
            "How long a sequence that moved had no step: from its last result at a worker to its first plan at another",
            _PAUSE_BUCKETS,
        )
        self.plan_seconds = of_steps("headrace_plan_seconds", "Time to decide one plan", _PLAN_BUCKETS)
        self.apply_seconds = of_steps("headrace_apply_seconds", "Time to take in one result", _PLAN_BUCKETS)
        self.round_trip_seconds = of_steps(
            "headrace_bus_round_trip_seconds",
            "From a plan sent to an idle worker to its result, less the iteration itself: both ways over the bus, "
            "encoding and event loops included",
            _ROUND_TRIP_BUCKETS,
        )
        # --- losses -------------------------------------------------------------------------------------------------
        self.resent_plans = counter("headrace_plans_resent", "Plans sent again because their result was missing")
        self.workers_lost = counter("headrace_workers_lost", "Workers lost, by cause", ("cause",))
        # At 0 from the start, so that the very first one shows as an increase.
        for cause in ("silence", "gone", "stuck", "restart", "fault"):
            self.workers_lost.labels(cause)
        self.takeovers = counter("headrace_scheduler_takeovers", "How often this scheduler took the lead")
        self.lease_renewals_failed = counter(
            "headrace_lease_renewals_failed", "Renewals of the scheduler's lease that JetStream did not confirm"
        )
        probes = counter(
            "headrace_worker_probes",
            "Silent workers asked whether they are there: somebody listens (there), nobody does (gone), NATS does not "
            "say (unknown)",
            ("outcome",),
        )  # fmt: skip
        self.probes = {outcome: probes.labels(outcome) for outcome in ("there", "gone", "unknown")}
        for cause in ("no_free_block", "stalled_search"):
            self.preemptions_by_cause.labels(cause)
        for outcome in Outcome:
            if outcome not in (Outcome.ACCEPTED, Outcome.DUPLICATE):
                self.refusals.labels(outcome.value)
        self.bad_messages = counter("headrace_bad_messages", "Bytes on the bus that were no message")

    def stands_by(self) -> None:
        """This scheduler does not lead any more: what it had belongs to another one."""
        for gauge in (self.leading, self.workers, self.preempted, self.swapped, self.queue_age, self.fragmentation):
            gauge.set(0)
        for gauge in (self.desired_workers, self.desired_workers_reason, self.role_load):
            gauge.clear()  # who does not lead wants nothing, not even none
        for model in self._models.values():
            for gauge in (model.running, model.waiting, model.kv_usage):
                gauge.set(0)
        for pool in self._pools.values():
            pool.observe(0, ())

    def of_pool(self, key: QueueKey) -> PoolMetrics:
        """Those of a pool of a model."""
        found = self._pools.get(key)
        if found is None:
            found = self._pools[key] = PoolMetrics(self, key)
        return found

    def of(self, model: str) -> ModelMetrics:
        """Those of a model; they are at 0 from the first look on."""
        found = self._models.get(model)
        if found is None:
            found = self._models[model] = ModelMetrics(self, model)
        return found
