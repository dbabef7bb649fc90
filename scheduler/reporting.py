"""What the scheduler tells others about its decisions: events to gateways, metrics, spans. Decides nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import msgspec

from observability.tracing import Tracing
from scheduler.core.admissible import max_model_len
from scheduler.core.core import SchedulerCore
from scheduler.core.events import CoreEvent, Counters, Ended, Failed, Found, Preempted
from scheduler.core.figures import memory_figures
from scheduler.core.sequence import Sequence
from scheduler.metrics import SchedulerMetrics
from shared.messages import ModelInfo, RequestEvent, SchedulerBeat, TokenBatch, TokenEntry, encode
from shared.subjects import Subjects


class Reporter:
    """``post(subject, payload)`` sends; ``unix_offset_ns`` turns the core's monotonic times into unix times."""

    def __init__(
        self, core: SchedulerCore, subjects: Subjects, post: Callable[[str, bytes], None], metrics: SchedulerMetrics,
        tracing: Tracing, unix_offset_ns: int,
    ) -> None:  # fmt: skip
        self._core = core
        self._subjects = subjects
        self._post = post
        self._metrics = metrics
        self._tracing = tracing
        self._unix_offset_ns = unix_offset_ns
        self._counted = Counters()

    def carry_out(self, events: Iterable[CoreEvent]) -> None:
        """Tell whoever must know what the core's events say."""
        for event in events:
            if isinstance(event, Failed):
                submit = event.sequence.submit
                choice = -1 if event.sequence.group is not None else event.sequence.choice  # a search fails as one
                message = RequestEvent(
                    self._core.epoch, event.kind, submit.request_id, submit.attempt, choice, event.reason
                )
                self._post(self._subjects.event(submit.gateway), encode(message))
                self._metrics.ended.labels("failed").inc()
                self._trace(event.sequence, event.now_ns)
            elif isinstance(event, Found):
                self._post(self._subjects.tokens(event.submit.gateway), encode(self._found(event)))
            elif isinstance(event, Ended):
                self._metrics.ended.labels(event.reason).inc()
                self._trace(event.sequence, event.now_ns)
            elif isinstance(event, Preempted):
                self._metrics.preemptions.inc()
                self._metrics.preemptions_by_cause.labels(event.cause).inc()

    def _found(self, found: Found) -> TokenBatch:
        """A search's result in the form in which a worker's tokens come: a gateway need not know the difference."""
        submit = found.submit
        entries = [
            TokenEntry(
                submit.request_id, submit.attempt, choice, 0, one.tokens, one.end, len(one.tokens), one.log_prob
            )
            for choice, one in enumerate(found.hypotheses)
        ]  # fmt: skip
        return TokenBatch(self._core.epoch, "", 0, 0, entries)

    def _trace(self, sequence: Sequence, now: int) -> None:
        admitted = sequence.admitted_ns or now
        self._metrics.queue_seconds.observe((admitted - sequence.submitted_ns) / 1e9)
        self._tracing.record(
            "queue", sequence.submitted_ns + self._unix_offset_ns, admitted + self._unix_offset_ns,
            sequence.submit.traceparent,
            {
                "headrace.request_id": sequence.request_id,
                "headrace.choice": sequence.choice,
                "headrace.preemptions": sequence.preemptions,
            },
        )  # fmt: skip

    def beat(self, scheduler: str, draining: bool) -> SchedulerBeat:
        """The scheduler's presence: epoch, models with their limits and queues, load.

        The bounds of the queue are over all models: each is told what the others leave to it.
        """
        core = self._core
        models: dict[str, ModelInfo] = {}
        for worker in core.workers.values():
            capacity = worker.capacity
            known = models.get(capacity.model)
            pool_tokens = capacity.num_blocks * capacity.block_size + 1
            longest = min(max_model_len(capacity, core.limits), pool_tokens)
            models[capacity.model] = ModelInfo(
                capacity.model,
                max(longest, known.max_model_len if known else 0),
                min(capacity.vocab_size, known.vocab_size if known else capacity.vocab_size),
                (known.workers if known else 0) + (not worker.draining),
            )
        for name, info in models.items():
            queue = core.queue_of(name)
            room = core.limits.max_num_queued_reqs - core.num_waiting
            room_tokens = core.limits.max_num_queued_tokens - core.waiting_tokens
            models[name] = msgspec.structs.replace(
                info,
                waiting=queue.waiting,
                waiting_tokens=queue.tokens,
                max_waiting=max(1, queue.waiting + room),
                max_waiting_tokens=max(1, queue.tokens + room_tokens) if core.limits.max_num_queued_tokens else 0,
                service_rate=round(queue.service_rate, 3),
            )
        pools = [worker.pool for worker in core.workers.values()]
        return SchedulerBeat(
            scheduler=scheduler,
            epoch=core.epoch,
            models=[models[name] for name in sorted(models)],
            waiting=core.num_waiting + core.num_preempted,
            running=core.num_running,
            free_blocks=sum(pool.num_free for pool in pools),
            total_blocks=sum(pool.num_blocks for pool in pools),
            draining=draining,
        )

    def observe(self) -> None:
        """Bring gauges and counters up to date."""
        core, metrics = self._core, self._metrics
        metrics.running.set(core.num_running)
        metrics.waiting.set(core.num_waiting)
        metrics.preempted.set(core.num_preempted)
        metrics.workers.set(len(core.workers))
        total = sum(worker.pool.num_blocks for worker in core.workers.values())
        used = sum(worker.pool.num_used for worker in core.workers.values())
        figures = [memory_figures(worker) for worker in core.workers.values()]
        metrics.shared_blocks.set(sum(one.shared for one in figures))
        metrics.cached_blocks.set(sum(one.cached for one in figures))
        metrics.waste.set(max((one.waste_share for one in figures), default=0.0))
        metrics.head_wait.set(core.counters.worst_head_wait_ns / 1e9)
        metrics.kv_usage.set(used / total if total else 0.0)
        for counter, name in (
            (metrics.new_tokens, "new_tokens"),
            (metrics.prefill_tokens, "prefill_tokens"),
            (metrics.recomputed_tokens, "recomputed_tokens"),
            (metrics.padding_tokens, "padding_tokens"),
            (metrics.idle_slots, "idle_slot_iterations"),
            (metrics.prefix_queries, "prefix_queries"),
            (metrics.prefix_hits, "prefix_hits"),
            (metrics.resumed_hits, "resumed_hits"),
            (metrics.bypasses, "bypasses"),
            (metrics.forks, "forks"),
            (metrics.page_copies, "page_copies"),
            (metrics.deadline_drops, "deadline_drops"),
            (metrics.swapped_out, "swapped_out"),
            (metrics.swapped_in, "swapped_in"),
        ):
            total_now = getattr(core.counters, name)
            counter.inc(total_now - getattr(self._counted, name))
            setattr(self._counted, name, total_now)
