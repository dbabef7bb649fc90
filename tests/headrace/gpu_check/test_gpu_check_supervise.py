"""How stages share their time, and what becomes of one that runs over it, raises, or takes its process with it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest

from headrace.gpu_check import main as command
from headrace.gpu_check.budget import GRACE_S, REPORT_S, Budget
from headrace.gpu_check.document import CUT, FAILED, PASSED, SKIPPED, Document
from headrace.gpu_check.plan import STAGES, chosen, weights

HANGS = {"hangs": True}
CHECK = {"check": {"name": "one", "passed": True, "detail": ""}}
WRONG = {"check": {"name": "one", "passed": False, "detail": "off by 3"}}
END = {"end": PASSED, "note": ""}

Script = dict[str, list[dict[str, Any]]]


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


class Scripted:
    """A child that says, of each stage, what its script says; an event may take time (``takes_s``)."""

    def __init__(self, clock: Clock, script: Script, asked: list[dict[str, Any]]) -> None:
        self._clock, self._script, self._asked = clock, script, asked
        self._events: list[dict[str, Any]] = []
        self._gone = False

    def ask(self, request: dict[str, Any]) -> None:
        if self._gone:
            raise BrokenPipeError("no reader")
        self._asked.append(request)
        self._events = list(self._script.get(request["stage"], [END]))

    def next_event(self, timeout_s: float) -> dict[str, Any] | None:
        if not self._events:
            self._gone = True
            return None
        event = self._events.pop(0)
        if event is HANGS or event.get("takes_s", 0) > timeout_s:
            self._clock.now_s += timeout_s
            raise TimeoutError
        self._clock.now_s += event.get("takes_s", 0)
        return {key: value for key, value in event.items() if key != "takes_s"}

    def stop(self) -> str:
        return "its process ended (SIGSEGV) at the third kernel" if self._gone else ""


class Run:
    """One check of ``names`` by scripted children."""

    def __init__(self, script: Script, names: Iterable[str], seconds: float = 480.0) -> None:
        self.clock = Clock()
        self.asked: list[dict[str, Any]] = []
        self.children = 0

        def start() -> Scripted:
            self.children += 1
            return Scripted(self.clock, script, self.asked)

        self.document: Document = command.check(
            start, list(names), seconds, {"rehearsal": True, "nats": False}, clock=self.clock
        )

    def state(self, name: str) -> str:
        stage = self.document.stage(name)
        assert stage is not None
        return stage.state


def test_what_a_stage_leaves_is_divided_among_those_after_it() -> None:
    clock = Clock()
    budget = Budget(103.0, clock)
    assert budget.allot([1, 1, 2]) == pytest.approx((103 - REPORT_S) / 4)
    clock.now_s = 10
    assert budget.allot([1, 2]) == pytest.approx((103 - REPORT_S - 10) / 3)
    assert budget.allot([2]) == pytest.approx(103 - REPORT_S - 10)
    assert budget.stop_after(20) == 20 + GRACE_S
    assert budget.stop_after(90) == pytest.approx(103 - REPORT_S - 10)  # never past the end
    clock.now_s = 200
    assert budget.left_s == 0


def test_all_stages_together_keep_to_the_budget_even_if_all_hang() -> None:
    names = [stage.name for stage in STAGES]
    run = Run({name: [HANGS] for name in names}, names, seconds=480)
    assert run.clock.now_s <= 480 - REPORT_S + 1e-6
    assert {stage.state for stage in run.document.stages} == {CUT, FAILED}
    for stage in run.document.stages:
        assert stage.state == (FAILED if stage.correctness else CUT), stage.name
        assert "was stopped" in stage.note or "no time was left" in stage.note


def test_a_quick_stage_leaves_its_time_to_the_next() -> None:
    run = Run({"limits": [{**END, "takes_s": 1}]}, ["limits", "kernels"], seconds=103)
    limits, kernels = run.asked
    share = weights([stage for stage in STAGES if stage.name in ("limits", "kernels")])
    assert limits["seconds"] == pytest.approx(100 * share[0] / sum(share))
    assert kernels["seconds"] == pytest.approx(99)


def test_later_stages_are_told_what_earlier_ones_measured() -> None:
    run = Run({"limits": [{"facts": {"copy_bytes_s": 4e12}}, END]}, ["limits", "kernels"])
    assert run.asked[1]["known"] == {"limits": {"copy_bytes_s": 4e12}}
    assert (run.asked[1]["rehearsal"], run.asked[1]["nats"]) == (True, False)


def test_a_stage_that_takes_its_process_with_it_fails_alone() -> None:
    rows = [{"row": {"kernel": "norm"}}]
    run = Run({"contract": [CHECK, END], "kernels": rows, "steps": [END]}, ["contract", "kernels", "steps"])
    assert [run.state(name) for name in ("contract", "kernels", "steps")] == [PASSED, FAILED, PASSED]
    stage = run.document.stage("kernels")
    assert stage is not None
    assert stage.rows == [{"kernel": "norm"}]  # what it had found stands
    assert stage.note == "its process ended (SIGSEGV) at the third kernel"
    assert run.children == 2
    assert run.document.exit_code == 0  # speed fails nothing


def test_a_process_that_is_not_fit_for_more_is_replaced() -> None:
    broken = {"end": FAILED, "note": "AcceleratorError: an illegal memory access", "leave": True}
    run = Run({"kernels": [broken]}, ["kernels", "steps"])
    assert run.state("kernels") == FAILED and run.state("steps") == PASSED
    assert run.children == 2


@pytest.mark.parametrize(
    ("events", "state", "code"),
    [
        ([CHECK, END], PASSED, 0),
        ([CHECK, {"end": CUT, "note": "its time was up"}], CUT, 0),
        ([CHECK, WRONG, END], FAILED, 1),
        ([CHECK, WRONG, {"end": CUT, "note": ""}], CUT, 1),
        ([{"end": CUT, "note": ""}], CUT, 1),  # nothing was shown
        ([CHECK, HANGS], FAILED, 1),  # it may be a kernel that hangs
        ([CHECK], FAILED, 1),  # its process ended
        ([CHECK, {"end": FAILED, "note": "OutOfMemoryError"}], FAILED, 1),
    ],
)
def test_the_exit_code_is_that_of_the_correctness_stages(events: list[dict[str, Any]], state: str, code: int) -> None:
    run = Run({"contract": events}, ["contract", "kernels"])
    assert run.state("contract") == state
    assert run.document.exit_code == code
    assert run.state("kernels") == PASSED  # whatever came of the one before


def test_a_skipped_stage_says_why() -> None:
    run = Run({"vllm": [{"end": SKIPPED, "note": "vLLM is not installed"}]}, ["vllm"])
    stage = run.document.stage("vllm")
    assert stage is not None and stage.note == "vLLM is not installed"
    assert run.document.exit_code == 0


def test_a_child_that_cannot_be_had_fails_the_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    def start() -> Scripted:
        raise OSError("no more processes")

    document = command.check(start, ["limits"], 60, {"rehearsal": True, "nats": False})
    assert document.stages[0].state == FAILED
    assert "no more processes" in document.stages[0].note


def test_stages_are_chosen_by_name_in_their_order() -> None:
    assert [stage.name for stage in chosen("steps, contract")] == ["contract", "steps"]
    assert [stage.name for stage in chosen("kernels")] == ["environment", "limits", "kernels"]
    assert chosen("") == list(STAGES)
    with pytest.raises(ValueError, match="'speed' is no stage; stages are environment, limits"):
        chosen("speed")


def test_without_its_package_a_stage_gets_hardly_any_time(monkeypatch: pytest.MonkeyPatch) -> None:
    def installed(found: object) -> Callable[[str], object]:
        return lambda name: found

    for found, weight in ((None, 1.0), (object(), STAGES[-1].weight)):
        monkeypatch.setattr("importlib.util.find_spec", installed(found))
        assert weights(STAGES)[-1] == weight
