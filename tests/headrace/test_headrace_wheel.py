"""The wheel, installed into an environment of its own, away from the clone."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

from kernels.cpu.build import FOLDER, KEPT_OBJECTS, LIBRARY_NAME, find_compiler

ROOT = Path(__file__).parents[2]
PACKAGES = ("gateway", "headrace", "kernels", "observability", "scheduler", "shared", "worker")
LIBRARY = f"kernels/cpu/{LIBRARY_NAME}"

needs_compiler = pytest.mark.skipif(find_compiler() is None, reason="no C++ compiler on this machine")


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a copy: setuptools writes into the tree that it builds. The folder as it is unpacked."""
    source, made = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("sdist")
    for name in PACKAGES:
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    program = "import sys, setuptools.build_meta as backend; backend.build_sdist(sys.argv[1])"
    subprocess.run([sys.executable, "-c", program, made], cwd=source, check=True, stdout=subprocess.DEVNULL)
    subprocess.run([sys.executable, "-m", "tarfile", "-e", next(made.glob("headrace-*.tar.gz")), made], check=True)
    return next(path for path in made.iterdir() if path.is_dir())


def build(sdist: Path, built: Path, **environ: str) -> Path:
    """The wheel, in ``built``. Without isolation: torch has brought setuptools, and nothing need be downloaded."""
    if KEPT_OBJECTS.exists():  # what is there compiled is of the same sources, or not used
        shutil.copytree(KEPT_OBJECTS, sdist / KEPT_OBJECTS.relative_to(ROOT), dirs_exist_ok=True)
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    subprocess.run([*command, "--wheel-dir", built, sdist], check=True, env=os.environ | environ)
    return next(built.glob("headrace-*.whl"))


@pytest.fixture(scope="module")
def wheel(sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(sdist, tmp_path_factory.mktemp("built"))


@pytest.fixture(scope="module")
def bare_wheel(wheel: Path, sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built with a compiler that fails, where one that works has left its library."""
    return build(sdist, tmp_path_factory.mktemp("bare"), CXX="/bin/false")


@pytest.fixture(scope="module")
def headrace(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return install(wheel, tmp_path_factory.mktemp("environment"))


def install(wheel: Path, environment: Path) -> Path:
    """The command as installed from the wheel. Its dependencies are looked up in this Python's packages."""
    venv.create(environment, symlinks=True, with_pip=False)
    packages = environment / "lib" / f"python3.{sys.version_info.minor}" / "site-packages"
    command = [sys.executable, "-m", "pip", "--python", environment / "bin" / "python", "install", "--quiet"]
    subprocess.run([*command, "--no-deps", "--no-index", wheel], check=True)
    # A plain path: the .pth files there, and with them an editable Headrace, are not followed.
    (packages / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return environment / "bin" / "headrace"


def run(command: Path, folder: Path, *argv: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([command, *argv], cwd=folder, capture_output=True, text=True, timeout=120)


def contents(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return {name for name in archive.namelist() if ".dist-info/" not in name}


def test_holds_every_module_and_nothing_else(wheel: Path) -> None:
    names = contents(wheel)
    modules = {str(path.relative_to(ROOT)) for package in PACKAGES for path in (ROOT / package).rglob("*.py")}
    assert {name for name in names if name.endswith(".py")} == modules
    assert {name.split("/")[0] for name in names} == set(PACKAGES)
    assert {name for name in names if name.startswith("kernels/")} - modules <= {LIBRARY}


def test_the_sdist_holds_the_sources_of_the_kernels_and_nothing_built(sdist: Path) -> None:
    kernels = {path.name for path in (sdist / "kernels" / "cpu").iterdir()} - {"__pycache__"}
    assert kernels == {path.name for path in FOLDER.iterdir() if path.suffix in (".py", ".cpp", ".h")}


@needs_compiler
def test_with_a_compiler_the_wheel_has_the_kernels_and_is_for_this_platform(wheel: Path) -> None:
    assert LIBRARY in contents(wheel)
    assert wheel.name.startswith("headrace-")
    assert "-py3-none-" in wheel.name
    assert not wheel.name.endswith("-any.whl")


def test_without_a_compiler_the_wheel_has_no_kernels_and_is_for_any_platform(bare_wheel: Path) -> None:
    assert not {name for name in contents(bare_wheel) if name.endswith(".so")}
    assert bare_wheel.name.endswith("-py3-none-any.whl")


@needs_compiler
def test_the_kernels_run_where_the_wheel_is_installed(headrace: Path, tmp_path: Path) -> None:
    report = run(headrace, tmp_path, "doctor").stdout
    assert re.search(r"^ok +kernels +C\+\+ for the CPU, \w+ of ", report, re.MULTILINE), report


def test_without_kernels_doctor_says_so_and_what_helps(bare_wheel: Path, tmp_path: Path) -> None:
    command = install(bare_wheel, tmp_path / "environment")
    report = run(command, tmp_path, "doctor").stdout
    assert re.search(r"^note +kernels +no C\+\+ kernels .*install a C\+\+ compiler", report, re.MULTILINE), report
    assert run(command, tmp_path, "version").stdout.startswith("headrace ")


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
