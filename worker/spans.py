"""The spans that a worker records: its sequences' prefill and decode, and iterations. On the event loop, from
timestamps that the step loop took: nothing of OpenTelemetry runs there."""

from __future__ import annotations

import time

from observability import conventions as names
from observability.tracing import StepSampler, Tracing
from shared.messages import EndReason
from worker.batch import Slot
from worker.step_loop import Executed

LEFT = "left"
"""End reason of a sequence that the scheduler took out of the batch; the scheduler's own spans say why."""


class WorkerSpans:
    def __init__(self, tracing: Tracing, worker: str) -> None:
        self._tracing = tracing
        self._worker = worker
        self._steps = StepSampler(tracing.sampling)

    def executed(self, executed: Executed) -> None:
        """Record what ended in this step, and the step itself if it is sampled or slow."""
        for slot in executed.dropped:
            if slot.traced:
                self._sequence(slot, executed.began_ns, LEFT)
        if executed.finished:
            now = time.time_ns()
            for slot in executed.finished:
                if slot.traced:
                    self._sequence(slot, now, slot.ended)
        result, plan = executed.result, executed.plan
        if not executed.rows:
            return
        kept, slow, usual_us = self._steps.look(result.forward_us, bool(plan.chunks))
        if kept:
            began_ns = executed.began_ns
            self._tracing.record_linked(
                names.STEP, began_ns, began_ns + 1000 * result.forward_us,
                dict.fromkeys(row.slot.traceparent for row in executed.rows),
                {
                    names.WORKER: self._worker,
                    names.STEP_NUMBER: plan.step,
                    names.DECODES: len(plan.decodes),
                    names.PREFILL_TOKENS: sum(count for _, count in plan.chunks),
                    names.PADDING_TOKENS: result.padding_rows,
                    names.IDLE_GAP_US: result.gap_us,
                    names.USUAL_US: usual_us,
                    names.SLOW: slow,
                },
            )  # fmt: skip

    def _sequence(self, slot: Slot, ended_ns: int, reason: str) -> None:
        """One stay in the batch. A sequence that comes back after a preemption computes its tokens again first."""
        if not (slot.first_row_ns or slot.first_token_ns):
            return  # it never ran
        common: dict[str, str | int | bool] = {
            names.REQUEST_ID: slot.request_id, names.CHOICE: slot.choice, names.WORKER: self._worker,
        }  # fmt: skip
        failed = EndReason.FAILED if reason == EndReason.FAILED else ""
        prefilled_ns = slot.first_token_ns or ended_ns
        if slot.first_row_ns and slot.first_row_ns <= prefilled_ns:  # else it is a fork
            chunks = [
                (names.CHUNK, at, {names.STEP_NUMBER: step, names.TOKENS: count}) for at, step, count in slot.chunks
            ]
            end = {} if slot.first_token_ns else {names.END_REASON: reason}
            self._tracing.record(
                names.PREFILL, slot.first_row_ns, prefilled_ns, slot.traceparent,
                {**common, **end, names.INPUT_TOKENS: slot.prompt_len, names.CACHED_INPUT_TOKENS: max(0, slot.cached),
                 names.RECOMPUTES: slot.cached < 0},
                chunks, "" if slot.first_token_ns else failed,
            )  # fmt: skip
        if slot.first_token_ns:
            self._tracing.record(
                names.DECODE, slot.first_token_ns, ended_ns, slot.traceparent,
                {**common, names.OUTPUT_TOKENS: slot.generated, names.END_REASON: reason}, error=failed,
            )  # fmt: skip
