"""Every stage, from the command line to the report, with tiny shapes on the CPU; and what the command says where it
can't run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from headrace import doctor
from headrace.gpu_check import main as command
from headrace.gpu_check import report
from headrace.gpu_check.document import CUT, PASSED, SKIPPED
from headrace.gpu_check.plan import STAGES

ROOT = Path(__file__).resolve().parents[3]

triton = pytest.importorskip("triton", reason="the kernels run in its interpreter")


@pytest.fixture(scope="module")
def rehearsed(tmp_path_factory: pytest.TempPathFactory) -> tuple[int, str, str, dict[str, Any], str]:
    """(exit code, stdout, stderr, the JSON, the Markdown) of one whole rehearsal, run from elsewhere."""
    folder = tmp_path_factory.mktemp("rehearsal")
    done = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / "gpu_check.py"), "--rehearse", "--seconds", "280",
         "--json", "gpu.json", "--markdown", "gpu.md"],
        cwd=folder, capture_output=True, text=True, timeout=300, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    found = json.loads((folder / "gpu.json").read_text()) if (folder / "gpu.json").exists() else {}
    markdown = (folder / "gpu.md").read_text() if (folder / "gpu.md").exists() else ""
    return done.returncode, done.stdout, done.stderr, found, markdown


def test_a_rehearsal_runs_every_stage(rehearsed: tuple[int, str, str, dict[str, Any], str]) -> None:
    code, _, errors, found, _ = rehearsed
    assert code == 0, errors[-3000:]
    states = {stage["name"]: (stage["state"], stage["note"]) for stage in found["stages"]}
    assert list(states) == [stage.name for stage in STAGES]
    for name, (state, note) in states.items():
        if name == "vllm":
            assert state == SKIPPED
        else:
            assert state == PASSED, f"{name}: {state}: {note}"
    assert found["rehearsal"] and found["exit_code"] == 0


def test_every_row_has_what_its_table_shows(rehearsed: tuple[int, str, str, dict[str, Any], str]) -> None:
    _, _, _, found, _ = rehearsed
    for stage in found["stages"]:
        known = {key for _, key, _ in report.COLUMNS.get(stage["name"], ())}
        for row in stage["rows"]:
            assert known & set(row), (stage["name"], row)
        if stage["name"] in ("contract", "parity"):
            assert stage["checks"] and all(check["passed"] for check in stage["checks"]), stage
    kernels = {row["kernel"] for stage in found["stages"] if stage["name"] == "kernels" for row in stage["rows"]}
    for kernel in ("attention, decode", "norm, with the residual's sum", "gated activation", "cache write",
                   "rotary and write", "product", "page copies", "pages in one launch", "swap out", "swap in",
                   "sampling"):  # fmt: skip
        assert kernel in kernels
    policies = [row["policy"] for stage in found["stages"] if stage["name"] == "serving" for row in stage["rows"]]
    assert policies == ["continuous", "static"]
    around = [row["around"] for stage in found["stages"] if stage["name"] == "steps" for row in stage["rows"]]
    assert around == ["nothing", "one process"]


def test_table_and_markdown_say_that_it_was_a_rehearsal(rehearsed: tuple[int, str, str, dict[str, Any], str]) -> None:
    _, output, errors, _, markdown = rehearsed
    for text in (output, markdown):
        assert report.REHEARSAL in text
        for stage in STAGES:
            assert stage.title in text
    assert all(line.startswith("headrace: ") for line in errors.splitlines()), errors


def test_without_a_gpu_it_is_one_line_and_exit_2(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert doctor.main(["--gpu"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("headrace doctor --gpu: no usable GPU (")
    assert captured.err.count("\n") == 1


def test_an_older_card_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Tesla T4")
    for capability, told in (((7, 5), True), ((8, 0), False)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda found=capability: found)
        assert ("Tesla T4 is older" in command.no_gpu()) == told


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        (["--only", "speed"], "--only: 'speed' is no stage"),
        (["--seconds", "1"], "--seconds must be 10 or more"),
        (["--json", "/no/such/folder/file.json"], "--json /no/such/folder/file.json: No such file or directory"),
    ],
)
def test_bad_flags_are_one_line(flags: list[str], complaint: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        doctor.main(["--gpu", *flags])
    assert ended.value.code == 2
    errors = capsys.readouterr().err
    assert errors.startswith(f"headrace doctor --gpu: {complaint}") and errors.count("\n") == 1


def test_products_that_others_are_held_against_are_not_rounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", "1")
    assert not [name for name in command.environment(rehearsal=False) if "TF32" in name]


def test_a_stage_that_is_too_long_for_its_time_is_cut_short_and_says_where() -> None:
    """In a real child, whose stage looks at its own clock."""
    started = command.ChildProcess(command.environment(rehearsal=True))
    document = command.check(lambda: started, ["kernels"], 4.0, {"rehearsal": True, "nats": False})
    (stage,) = document.stages
    assert stage.state == CUT
    assert stage.note
