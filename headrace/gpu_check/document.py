"""What a check finds, as the JSON file has it. Torch-free: the process that supervises the stages fills it in."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from headrace import __version__

SCHEMA = 1
"""Of the JSON document. Raised where a field changes its meaning or goes; new fields don't raise it."""

PASSED, FAILED, CUT, SKIPPED = "passed", "failed", "cut short", "skipped"
"""States of a stage. ``cut short``: its time was up, and what it found until then stands. ``skipped``: it could not be
asked for here, and its note says why."""

Row = dict[str, Any]


@dataclass
class Checked:
    """One question with a yes or no."""

    name: str
    passed: bool
    detail: str = ""


@dataclass
class StageReport:
    name: str
    title: str
    correctness: bool  # its failure is the check's failure
    state: str = SKIPPED
    note: str = ""
    seconds: float = 0.0
    facts: dict[str, Any] = field(default_factory=dict)
    checks: list[Checked] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)

    @property
    def failed_checks(self) -> list[Checked]:
        return [check for check in self.checks if not check.passed]

    @property
    def stands(self) -> bool:
        """Whether a correctness stage has shown what it should: something was checked, and nothing failed."""
        return self.state in (PASSED, CUT) and bool(self.checks) and not self.failed_checks


@dataclass
class Goal:
    """A figure that was aimed at, beside what was measured. ``met`` is None where nothing was."""

    name: str
    target: str
    measured: str
    met: bool | None


@dataclass
class Document:
    stages: list[StageReport]
    goals: list[Goal]
    budget_s: float
    seconds: float
    rehearsal: bool
    began: datetime.datetime

    def stage(self, name: str) -> StageReport | None:
        return next((stage for stage in self.stages if stage.name == name), None)

    @property
    def card(self) -> str:
        environment = self.stage("environment")
        return str(environment.facts.get("card", "")) if environment else ""

    @property
    def exit_code(self) -> int:
        """0 if every correctness stage that was asked for stands, else 1. Speed fails nothing."""
        return 0 if all(stage.stands for stage in self.stages if stage.correctness) else 1

    def as_json(self) -> dict[str, Any]:
        return {
            "schema": SCHEMA,
            "headrace": __version__,
            "began": self.began.isoformat(timespec="seconds"),
            "rehearsal": self.rehearsal,
            "budget_s": self.budget_s,
            "seconds": round(self.seconds, 1),
            "card": self.card,
            "exit_code": self.exit_code,
            "goals": [asdict(goal) for goal in self.goals],
            "stages": [asdict(stage) for stage in self.stages],
        }


def known_to_later_stages(reports: Sequence[StageReport]) -> dict[str, dict[str, Any]]:
    """The facts of stages that have run, by stage: what the next ones measure themselves by."""
    return {report.name: report.facts for report in reports if report.facts}
