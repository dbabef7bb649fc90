"""What the scheduler tells others about its decisions: events to gateways, metrics, spans. Decides nothing."""

from __future__ import annotations

import dataclasses
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable

import msgspec

from observability import conventions as names
from observability.context import is_sampled
from observability.logs import about
from observability.tracing import Tracing
from scheduler.core.admissible import longest_sequence
from scheduler.core.core import SchedulerCore
from scheduler.core.events import CoreEvent, Counters, Ended, Failed, Found, Moved, NotMoved, Preempted
from scheduler.core.figures import memory_figures
from scheduler.core.pools import QueueKey
from scheduler.core.sequence import Sequence
from scheduler.metrics import NEW, PADDING, PREFILL, RECOMPUTE, SchedulerMetrics
from scheduler.spans import spans_of
from shared.flight_record import ChoiceTrace
from shared.messages import (
    EndReason,
    ModelInfo,
    PoolInfo,
    RequestEvent,
    SchedulerBeat,
    TokenBatch,
    TokenEntry,
    encode,
)
from shared.subjects import Subjects

log = logging.getLogger("headrace.scheduler")

ChoiceOf = Callable[[str, int], ChoiceTrace | None]
"""What is remembered of a (request, choice)."""


class Reporter:
    """``post(subject, payload)`` sends; ``unix_offset_ns`` turns the core's monotonic times into unix times;
    ``choice_of`` has been told of whatever this is told of."""

    def __init__(
        self, core: SchedulerCore, subjects: Subjects, post: Callable[[str, bytes], None], metrics: SchedulerMetrics,
        tracing: Tracing, unix_offset_ns: int, choice_of: ChoiceOf = lambda request_id, choice: None,
    ) -> None:  # fmt: skip
        self._core = core
        self._subjects = subjects
        self._post = post
        self._metrics = metrics
        self._tracing = tracing
        self._unix_offset_ns = unix_offset_ns
        self._choice_of = choice_of
        self._counted = Counters()
        self._looked_up: dict[str, tuple[int, int]] = {}  # model -> prompt tokens looked up and found, as counted

    def carry_out(self, events: Iterable[CoreEvent]) -> None:
        """Tell whoever must know what the core's events say."""
        interrupted: Counter[tuple[str, str]] = Counter()  # (kind, reason): a worker has many choices, one line will do
        for event in events:
            if isinstance(event, Failed):
                submit = event.sequence.submit
                choice = -1 if event.sequence.group is not None else event.sequence.choice  # a search fails as one
                message = RequestEvent(
                    self._core.epoch, event.kind, submit.request_id, submit.attempt, choice, event.reason
                )
                self._post(self._subjects.event(submit.gateway), encode(message))
                self._metrics.ended.labels("failed").inc()
                resumed = event.kind in ("lost", "moved")
                if resumed:
                    interrupted[event.kind, event.reason] += 1
                log.log(
                    logging.DEBUG if resumed else logging.WARNING,
                    "request %s, choice %d, %s: %s", submit.request_id, choice, event.kind, event.reason,
                    extra=about(submit.request_id, submit.traceparent),
                )  # fmt: skip
                self._book(event.sequence, event.now_ns)
                self._trace(event.sequence, event.now_ns, EndReason.FAILED, event.kind)
            elif isinstance(event, Found):
                self._post(self._subjects.tokens(event.submit.gateway), encode(self._found(event)))
            elif isinstance(event, Ended):
                self._metrics.ended.labels(event.reason).inc()
                self._book(event.sequence, event.now_ns, event.reason)
                self._trace(event.sequence, event.now_ns, event.reason)
            elif isinstance(event, Preempted):
                self._metrics.of(event.sequence.submit.model).preemptions.inc()
                self._metrics.preemptions_by_cause.labels(event.cause).inc()
                if log.isEnabledFor(logging.DEBUG):
                    log.debug(
                        "request %s, choice %d, is preempted (%s) for %s",
                        event.sequence.request_id, event.sequence.choice, event.cause, event.by,
                        extra=about(event.sequence.request_id, event.sequence.submit.traceparent),
                    )  # fmt: skip
            elif isinstance(event, Moved | NotMoved):
                self._moved(event)
        for (kind, reason), choices in interrupted.items():
            log.warning("%d choices %s, to be resumed: %s", choices, kind, reason)

    def _moved(self, event: Moved | NotMoved) -> None:
        sequence = event.sequence
        if isinstance(event, Moved):
            self._metrics.moves.labels(event.why).inc()
            self._metrics.move_pause_seconds.observe(event.paused_ns / 1e9)
            what = f"goes on at {sequence.worker}: {event.bytes:,} bytes in {event.fetch_us / 1000:.1f} ms"
        else:
            self._metrics.failed_moves.labels(event.why).inc()
            what = f"does not go on at {event.target}: {event.reason}"
        log.debug(
            "request %s, choice %d, %s (%s)", sequence.request_id, sequence.choice, what, event.why,
            extra=about(sequence.request_id, sequence.submit.traceparent),
        )  # fmt: skip

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

    def _book(self, sequence: Sequence, now: int, reason: str = "") -> None:
        admitted = sequence.admitted_ns or now
        metrics = self._metrics.of(sequence.submit.model)
        metrics.queue_seconds.observe((admitted - sequence.submitted_ns) / 1e9)
        if reason in (EndReason.STOP, EndReason.LENGTH) and sequence.first_token_ns:
            metrics.prefill_seconds.observe((sequence.first_token_ns - admitted) / 1e9)
            metrics.decode_seconds.observe((now - sequence.first_token_ns) / 1e9)

    def _trace(self, sequence: Sequence, now: int, reason: str, kind: str = "") -> None:
        """``kind``: of a failure."""
        traceparent = sequence.submit.traceparent
        if not self._tracing.enabled or not is_sampled(traceparent):
            return
        common: dict[str, str | int] = {
            names.REQUEST_ID: sequence.request_id,
            names.CHOICE: sequence.choice,
            names.PREEMPTIONS: sequence.preemptions,
            names.END_REASON: kind or reason,
        }
        choice = self._choice_of(sequence.request_id, sequence.choice)
        if choice is None:  # a beam that joined later
            choice = ChoiceTrace(sequence.choice, sequence.causes)
            now = sequence.admitted_ns or now
        offset = self._unix_offset_ns
        for span in spans_of(choice, sequence.submitted_ns, now, kind, lost=kind == "lost"):
            self._tracing.record(
                span.name, span.start_ns + offset, span.end_ns + offset, traceparent, {**common, **span.attributes},
                [(name, at + offset, attributes) for name, at, attributes in span.events], span.error,
            )  # fmt: skip

    def beat(self, scheduler: str, draining: bool) -> SchedulerBeat:
        """The scheduler's presence: epoch, models with their limits and queues, load."""
        core = self._core
        models: dict[str, ModelInfo] = {}
        for worker in core.workers.values():
            capacity = worker.capacity
            known = models.get(capacity.model)
            longest = longest_sequence(capacity, core.limits)
            models[capacity.model] = ModelInfo(
                capacity.model,
                max(longest, known.max_model_len if known else 0),
                min(capacity.vocab_size, known.vocab_size if known else capacity.vocab_size),
                (known.workers if known else 0) + (not worker.draining),
                grammars=capacity.grammars and (known is None or known.grammars),
                adapters=_united(known.adapters if known else [], [] if worker.draining else capacity.adapters),
            )
        for name, info in models.items():
            models[name] = _with_queues(info, core)
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
        waiting = Counter[str]()  # of every model that has ever had a worker
        for key, queue in core.queues.items():
            waiting[key.model] += queue.waiting
            metrics.of_pool(key).observe(queue.waiting, core.workers_of(*key))
        for model, count in waiting.items():
            self._observe_model(model, count)
        metrics.preempted.set(core.num_preempted)
        metrics.swapped.set(core.num_swapped)
        oldest = core.oldest_waiting_ns
        metrics.queue_age.set((time.monotonic_ns() - oldest) / 1e9 if oldest else 0.0)
        metrics.workers.set(len(core.workers))
        figures = [memory_figures(worker) for worker in core.workers.values()]
        metrics.shared_blocks.set(sum(one.shared for one in figures))
        metrics.cached_blocks.set(sum(one.cached for one in figures))
        metrics.fragmentation.set(max((one.waste_share for one in figures), default=0.0))
        metrics.head_wait.set(core.counters.worst_head_wait_ns / 1e9)
        before, now = self._counted, dataclasses.replace(core.counters)
        self._counted = now
        tokens = metrics.step_tokens
        recomputed = now.recomputed_tokens - before.recomputed_tokens
        tokens[NEW].inc(now.new_tokens - before.new_tokens)
        tokens[PREFILL].inc(max(0, now.prefill_tokens - before.prefill_tokens - recomputed))
        tokens[RECOMPUTE].inc(recomputed)
        tokens[PADDING].inc(now.padding_tokens - before.padding_tokens)
        for counter, name in (
            (metrics.idle_slots, "idle_slot_iterations"),
            (metrics.resumed_hits, "resumed_hits"),
            (metrics.bypasses, "bypasses"),
            (metrics.forks, "forks"),
            (metrics.page_copies, "page_copies"),
            (metrics.deadline_drops, "deadline_drops"),
            (metrics.fetched_bytes, "fetched_bytes"),
            (metrics.swapped_out, "swapped_out"),
            (metrics.swapped_in, "swapped_in"),
        ):
            counter.inc(getattr(now, name) - getattr(before, name))

    def _observe_model(self, model: str, waiting: int) -> None:
        metrics, core = self._metrics.of(model), self._core
        workers = [worker for worker in core.workers.values() if worker.capacity.model == model]
        metrics.running.set(sum(len(worker.running) for worker in workers))
        metrics.waiting.set(waiting)
        total = sum(worker.pool.num_blocks for worker in workers)
        metrics.kv_usage.set(sum(worker.pool.num_used for worker in workers) / total if total else 0.0)
        before, now = self._looked_up.get(model, (0, 0)), core.counters.prefix_of.get(model, (0, 0))
        self._looked_up[model] = now
        metrics.prefix_queries.inc(now[0] - before[0])
        metrics.prefix_hits.inc(now[1] - before[1])


def _with_queues(info: ModelInfo, core: SchedulerCore) -> ModelInfo:
    """With the state of its queues. All together are full when each is: whose turn it is a gateway need not know."""
    most, most_tokens = core.limits.max_num_queued_reqs, core.limits.max_num_queued_tokens
    pools = [_pool_info(key, core) for key in sorted(core.queues) if key.model == info.name]
    serving = [pool for pool in pools if pool.workers] or pools
    waiting, tokens = sum(pool.waiting for pool in pools), sum(pool.waiting_tokens for pool in pools)
    room = max(most - pool.waiting for pool in serving)
    room_tokens = max(most_tokens - pool.waiting_tokens for pool in serving)
    return msgspec.structs.replace(
        info,
        waiting=waiting,
        waiting_tokens=tokens,
        max_waiting=max(1, waiting + room),
        queue_size=most,
        max_waiting_tokens=max(1, tokens + room_tokens) if most_tokens else 0,
        service_rate=sum(pool.service_rate for pool in pools),
        pools=pools,
    )


def _pool_info(key: QueueKey, core: SchedulerCore) -> PoolInfo:
    queue, limits, rules = core.queue_of(*key), core.limits, core.pool_rules
    longest = 0
    adapters: dict[str, int] = {}
    for capacity in core.capacities_of(*key):
        takes = longest_sequence(capacity, limits)
        longest = max(longest, takes)
        for adapter in capacity.adapters:
            adapters[adapter] = max(adapters.get(adapter, 0), takes)
    range_ = rules.ranges.get(key.pool)
    return PoolInfo(
        key.pool,
        sum(not worker.draining for worker in core.workers_of(*key)),
        queue.waiting,
        queue.tokens,
        limits.max_num_queued_reqs,
        limits.max_num_queued_tokens,
        round(queue.service_rate, 3),
        longest,
        sorted(adapters.items()),
        range_.low if range_ is not None else 0,
        range_.high if range_ is not None else -1,
        list(rules.overflow.get(key.pool, ())),
    )


def _united(some: list[str], more: list[str]) -> list[str]:
    """Both in order, each name once. The same list where there is nothing to add: beats are many."""
    return sorted({*some, *more}) if more else some
