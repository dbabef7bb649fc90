"""The wheel, installed into an environment of its own, away from the clone."""

from __future__ import annotations

import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("gateway", "headrace", "kernels", "observability", "scheduler", "shared", "worker")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy: setuptools writes into the tree that it builds."""
    source, built = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("built")
    for name in PACKAGES:
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    # Without isolation: torch has brought setuptools, and nothing need be downloaded.
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    subprocess.run([*command, "--wheel-dir", built, source], check=True)
    return next(built.glob("headrace-*.whl"))


@pytest.fixture(scope="module")
def headrace(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The command as installed from the wheel. Its dependencies are looked up in this Python's packages."""
    environment = tmp_path_factory.mktemp("environment")
    venv.create(environment, symlinks=True, with_pip=False)
    packages = environment / "lib" / f"python3.{sys.version_info.minor}" / "site-packages"
    command = [sys.executable, "-m", "pip", "--python", environment / "bin" / "python", "install", "--quiet"]
    subprocess.run([*command, "--no-deps", "--no-index", wheel], check=True)
    # A plain path: the .pth files there, and with them an editable Headrace, are not followed.
    (packages / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return environment / "bin" / "headrace"


def run(command: Path, folder: Path, *argv: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([command, *argv], cwd=folder, capture_output=True, text=True, timeout=120)


def test_holds_every_module_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
    modules = {str(path.relative_to(ROOT)) for package in PACKAGES for path in (ROOT / package).rglob("*.py")}
    assert {name for name in names if name.endswith(".py")} == modules
    assert {name.split("/")[0] for name in names} == set(PACKAGES)


def test_runs_away_from_the_clone(headrace: Path, tmp_path: Path) -> None:
    assert run(headrace, tmp_path, "version").stdout.startswith("headrace ")
    help_text = run(headrace, tmp_path, "up", "--help").stdout
    assert "--max-num-seqs" in help_text
    assert "--kv-cache-memory" in help_text
    report = run(headrace, tmp_path, "doctor").stdout
    assert f"import names are ours, from {headrace.parents[1]}" in report


def test_gateway_and_scheduler_need_no_torch(headrace: Path, tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('no torch here')\n")
    program = (
        "import sys; sys.path.insert(0, sys.argv[1]); import gateway.__main__, scheduler.__main__, headrace.__main__"
    )
    done = run(headrace.with_name("python"), tmp_path, "-c", program, str(tmp_path))
    assert done.returncode == 0, done.stderr
