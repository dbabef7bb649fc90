"""Kernels compiled ahead of time, without a GPU: in a process of its own, since here Triton interprets."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kernels.triton.compiled import Usage, main, table

ROOT = Path(__file__).parents[3]

A_FEW = """
import dataclasses, json, sys
from kernels.triton.compiled import choices, compile_all, main, source, usage

everything = choices()
for _, variant, _ in everything:
    source(variant)
first = {module: (module, variant, 90) for module, variant, _ in reversed(everything)}
few = compile_all([*first.values(), next(c for c in everything if c[0] == "matmul" and c[2] == 80)])
module, norm, _ = first["norm"]
tight = dataclasses.replace(norm, max_registers=1, max_shared=0)
short = dataclasses.replace(norm, constexprs={})
print(json.dumps({
    "names": [f"{module}/{variant.name} {arch}" for module, variant, arch in everything],
    "few": [dataclasses.asdict(one) for one in few],
    "tight": usage(module, tight, 80).faults,
    "short": usage(module, short, 80).faults,
    "exit": main(["--only", "norm/rms_norm", "--arch", "sm_90", "--json", sys.argv[1]]),
}))
"""


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    file = tmp_path_factory.mktemp("compiled") / "report.json"
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", A_FEW, str(file)], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return {**result, "report": json.loads(file.read_text("utf-8")), "table": done.stdout}


def test_one_of_each_module_is_within_its_bounds(built: dict[str, Any]) -> None:
    assert {"activation", "cache", "matmul", "moves", "norm", "rotary"} <= {one["module"] for one in built["few"]}
    assert [one for one in built["few"] if one["faults"]] == []
    assert all(one["registers"] > 0 and one["spills"] == 0 for one in built["few"])
    assert next(one for one in built["few"] if one["module"] == "matmul")["shared"] > 0


def test_names_are_unique(built: dict[str, Any]) -> None:
    assert len(set(built["names"])) == len(built["names"])


def test_fp8_is_for_cards_that_convert_it(built: dict[str, Any]) -> None:
    assert {name.split()[-1] for name in built["names"] if "fp8" in name} == {"89", "90"}


def test_what_is_past_a_bound_is_said(built: dict[str, Any]) -> None:
    registers, shared = built["tight"]
    assert registers.endswith("registers, at most 1") and shared.endswith("bytes of shared memory, at most 0")


def test_a_variant_names_every_argument(built: dict[str, Any]) -> None:
    assert built["short"] == ["does not compile: arguments missing, unknown or given twice: BLOCK"]


def test_the_report(built: dict[str, Any]) -> None:
    assert built["exit"] == 0
    (kernel,) = built["report"]["kernels"]
    assert kernel["variant"].startswith("rms_norm") and kernel["arch"] == 90
    assert f"{kernel['module']}/{kernel['variant']}  sm_90" in built["table"]


def test_a_table_says_what_is_wrong() -> None:
    rows = [Usage("norm", "one", 80, 40, 16, 0), Usage("attention", "two", 90, faults=("does not compile: x",))]
    lines = table(rows).splitlines()
    assert len({line.index("sm_") for line in lines[1:]}) == 1
    assert lines[1].split() == ["norm/one", "sm_80", "40", "16", "0"]
    assert lines[2].endswith("! does not compile: x")


def test_the_interpreter_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([])
    assert "TRITON_INTERPRET" in capsys.readouterr().err
