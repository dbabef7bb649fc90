"""compose/install-torch.sh never brings CUDA unasked. pip is a stand-in here that answers as told and notes calls."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).parents[2] / "compose" / "install-torch.sh"
INDEX = "https://index.example/cpu"
CPU_URL, CUDA_URL = "https://index.example/torch-2.13.0%2Bcpu.whl", "https://other.example/torch-2.13.0.whl"

FAKE_PYTHON = """\
#!{python}
import json, os, runpy, sys
state = json.load(open({state!r}))
if sys.argv[1:3] == ["-m", "pip"]:
    with open({log!r}, "a") as log: log.write(json.dumps(sys.argv[3:]) + "\\n")
    if "--dry-run" in sys.argv:
        answer = state["at_index" if "--index-url" in sys.argv else "configured"]
        if answer is None: sys.exit(1)
        print(json.dumps({{"install": answer}}))
elif "importlib.metadata" in sys.argv[2]:
    sys.exit(0 if state["installed"] else 1)
else:
    os.execv({python!r}, [{python!r}, *sys.argv[1:]])
"""


def package(name: str, url: str = "https://x.example/x.whl", requires: list[str] | None = None) -> dict[str, Any]:
    return {"metadata": {"name": name, "requires_dist": requires or []}, "download_info": {"url": url}}


CPU_TORCH = package("torch", CPU_URL, ["filelock", "sympy>=1.13"])
CUDA_TORCH = package("torch", CUDA_URL, ["filelock", "nvidia-cublas==13.0; platform_system == 'Linux'"])


@dataclass
class Run:
    code: int
    error: str
    installs: list[list[str]]  # what pip was really told to install


def run(
    tmp_path: Path, *, index: str | None = INDEX, at_index: Any = None, configured: Any = None, installed: bool = False
) -> Run:
    state, log, python = tmp_path / "state.json", tmp_path / "log", tmp_path / "python"
    state.write_text(json.dumps({"at_index": at_index, "configured": configured, "installed": installed}))
    log.touch()
    python.write_text(FAKE_PYTHON.format(python=sys.executable, state=str(state), log=str(log)))
    python.chmod(0o755)
    environ = {"PATH": "/usr/bin:/bin"} | ({} if index is None else {"TORCH_INDEX": index})
    done = subprocess.run([SCRIPT, python], env=environ, capture_output=True, text=True, timeout=60)
    calls = [json.loads(line) for line in log.read_text().splitlines()]
    return Run(done.returncode, done.stderr, [call for call in calls if "--dry-run" not in call])


def test_takes_the_cpu_build_of_the_index(tmp_path: Path) -> None:
    done = run(tmp_path, at_index=[CPU_TORCH], configured=[CUDA_TORCH, package("nvidia-cublas")])
    assert done.code == 0, done.error
    assert [call[-1] for call in done.installs] == [f"torch @ {CPU_URL}"]


def test_takes_what_pip_is_configured_for_if_the_index_cannot_be_reached_and_it_is_free_of_cuda(tmp_path: Path) -> None:
    done = run(tmp_path, configured=[CPU_TORCH, package("filelock")])
    assert done.code == 0, done.error
    assert [call[-1] for call in done.installs] == [f"torch @ {CPU_URL}"]


@pytest.mark.parametrize("name", ["nvidia-cublas-cu13", "cuda-bindings", "triton"])
def test_stops_rather_than_bring_cuda(tmp_path: Path, name: str) -> None:
    done = run(tmp_path, configured=[package("torch", CUDA_URL), package("filelock"), package(name)])
    assert (done.code, done.installs) == (1, [])
    announced, error = done.error.splitlines()
    assert announced.startswith("looking for a CPU build") and "set TORCH_INDEX" in error


def test_an_index_that_offers_a_cuda_build_is_not_trusted(tmp_path: Path) -> None:
    done = run(tmp_path, at_index=[CUDA_TORCH], configured=None)
    assert (done.code, done.installs) == (1, [])


def test_an_empty_index_means_what_pip_finds(tmp_path: Path) -> None:
    done = run(tmp_path, index="", configured=None)
    assert done.code == 0
    assert [call[-1] for call in done.installs] == ["torch==2.13.0"]


def test_an_installed_torch_is_left_alone(tmp_path: Path) -> None:
    done = run(tmp_path, installed=True)
    assert (done.code, done.installs) == (0, [])
