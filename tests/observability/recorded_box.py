"""A core in a box, with a flight recorder beside it as the service has."""

from __future__ import annotations

import msgspec
from mesh_in_a_box import MS, Box

from observability.explanation import Interval, explain
from scheduler.recorder import FlightRecorder, Queue
from shared.flight_record import Report
from shared.messages import Outcome, StepPlan, StepResult, Submit, SubmitReply

OFFSET_NS = 10**18


class RecordedBox(Box):
    def __init__(self, *args: object, **kwargs: int) -> None:
        self.recorder = FlightRecorder()
        self._told = 0
        super().__init__(*args, **kwargs)  # type: ignore[arg-type]

    def submit(self, submit: Submit, deadline: int = 0) -> SubmitReply:
        reply = super().submit(submit, deadline)
        if reply.outcome is Outcome.ACCEPTED:
            self.recorder.submitted(submit, self.core.sequences_of(submit.request_id), reply.queue_position, self.now)
        return reply

    def plan(self, worker: str = "w0") -> StepPlan | None:
        before = len(self.events)
        plan = super().plan(worker)
        if plan is not None:
            state = self.core.workers[worker]
            queue = Queue(self.core.num_waiting, *state.lack)
            self.recorder.planned(plan, self.events[before:], queue, self.now)
        self._tell()
        return plan

    def apply(self, result: StepResult) -> None:
        result = msgspec.structs.replace(result, forward_us=50 * result.forward_us)  # long beside what is between steps
        self.now += result.forward_us * 1000
        super().apply(result)
        self.recorder.settled(result, self.now)
        self._tell()

    def lose(self, worker: str = "w0") -> None:
        """The worker dies and is started again at once, with nothing in its pages."""
        capacity = self.core.workers[worker].capacity
        self.recorder.worker_lost(worker)
        self.events += self.core.worker_lost(worker, "its worker is gone", self.now)
        self._tell()
        self.add_worker(worker, capacity, incarnation=2)

    def _tell(self) -> None:
        self.recorder.told(self.events[self._told :])
        self._told = len(self.events)

    def report(self, request_id: str) -> Report:
        return self.recorder.report("s", 1, OFFSET_NS, request_id, self.now)

    def explain(self, request_id: str) -> list[Interval]:
        return explain(self.report(request_id))


__all__ = ["MS", "OFFSET_NS", "RecordedBox"]
