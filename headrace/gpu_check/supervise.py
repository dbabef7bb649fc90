"""Runs the stages through a child, each within its time, and starts another child where a stage ends it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from headrace.gpu_check.budget import Budget
from headrace.gpu_check.conversation import Conversation, Event
from headrace.gpu_check.document import CUT, FAILED, PASSED, SKIPPED, Checked, StageReport, known_to_later_stages
from headrace.gpu_check.plan import Stage, weights


class Supervisor:
    """``start`` makes a child, ``show`` tells whoever waits how far it is, ``options`` go to every stage."""

    def __init__(
        self, start: Callable[[], Conversation], budget: Budget, show: Callable[[str], None], options: dict[str, Any],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        self._start = start
        self._budget = budget
        self._show = show
        self._options = options
        self._clock = clock
        self._child: Conversation | None = None

    def run(self, stages: Sequence[Stage]) -> list[StageReport]:
        reports: list[StageReport] = []
        try:
            for number, stage in enumerate(stages):
                report = StageReport(stage.name, stage.title, stage.correctness)
                allotted_s = self._budget.allot(weights(stages[number:]))
                self._show(f"{stage.name}: {stage.title} (up to {allotted_s:.0f} s)")
                began = self._clock()
                self._run(report, allotted_s, known_to_later_stages(reports))
                report.seconds = round(self._clock() - began, 2)
                reports.append(report)
                self._show(f"{stage.name}: {report.state}{': ' + report.note if report.note else ''}")
        finally:
            self._end_child()
        return reports

    def _run(self, report: StageReport, allotted_s: float, known: dict[str, dict[str, Any]]) -> None:
        if self._budget.left_s <= 0:
            report.state, report.note = CUT, "no time was left for it"
            return
        deadline = self._clock() + self._budget.stop_after(allotted_s)
        try:
            if self._child is None:
                self._child = self._start()
            self._child.ask({"stage": report.name, "seconds": allotted_s, "known": known, **self._options})
        except OSError as error:
            self._lost(report, FAILED, f"its process cannot be had: {error}")
            return
        while True:
            try:
                event = self._child.next_event(deadline - self._clock())
            except TimeoutError:
                # Of a correctness stage it may be a kernel that hangs: nothing is shown by what came before.
                state = FAILED if report.correctness else CUT
                self._lost(report, state, f"it went on past its {allotted_s:.0f} s and was stopped")
                return
            if event is None:
                self._lost(report, FAILED, "")
                return
            if self._take(report, event):
                return

    def _take(self, report: StageReport, event: Event) -> bool:
        """Note what the child says; True once the stage is over."""
        if "row" in event:
            report.rows.append(event["row"])
        elif "check" in event:
            report.checks.append(Checked(**event["check"]))
        elif "facts" in event:
            report.facts |= event["facts"]
        elif "progress" in event:
            self._show(f"{report.name}: {event['progress']}")
        elif "end" in event:
            report.state, report.note = event["end"], event.get("note", "")
            if report.state == PASSED and report.failed_checks:
                report.state = FAILED
            if report.state not in (PASSED, FAILED, CUT, SKIPPED):
                report.state, report.note = FAILED, f"no such state: {event['end']}"
            if event.get("leave"):  # it said that its process is not fit for another stage
                self._end_child()
            return True
        return False

    def _lost(self, report: StageReport, state: str, note: str) -> None:
        reason = self._end_child()
        report.state, report.note = state, note or reason or "its process ended"

    def _end_child(self) -> str:
        child, self._child = self._child, None
        return child.stop() if child is not None else ""
