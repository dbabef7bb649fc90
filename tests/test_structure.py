"""The rules of the house: who may import whom, what the core must not touch, and what may not be in the repository."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ("gateway", "scheduler", "worker", "kernels", "shared", "observability", "headrace")
MAY_IMPORT = {
    "gateway": {"shared", "observability"},
    "scheduler": {"shared", "observability"},
    "worker": {"shared", "observability", "kernels"},
    "kernels": set(),
    "shared": set(),
    "observability": {"shared"},
    "headrace": {"gateway", "scheduler", "worker", "shared", "observability", "kernels"},
}
PURE = ("scheduler/core", "scheduler/policies")
IMPURE = {
    "asyncio",
    "time",
    "random",
    "secrets",
    "os",
    "io",
    "socket",
    "threading",
    "logging",
    "torch",
    "nats",
    "numpy",
}


def files(package: str) -> Iterator[Path]:
    return (path for path in (ROOT / package).rglob("*.py"))


def imports(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found.add(node.module or "")
    return found


@pytest.mark.parametrize("package", PACKAGES)
def test_import_direction(package: str) -> None:
    for path in files(package):
        ours = {name.split(".")[0] for name in imports(path)} & set(PACKAGES)
        assert ours <= MAY_IMPORT[package] | {package}, f"{path.relative_to(ROOT)} imports {ours}"


def test_the_core_is_pure() -> None:
    for folder in PURE:
        for path in files(folder):
            roots = {name.split(".")[0] for name in imports(path)}
            assert not roots & IMPURE, f"{path.relative_to(ROOT)} imports {roots & IMPURE}"


@pytest.mark.parametrize(
    "module", ["scheduler.__main__", "gateway.__main__", "headrace.__main__", "scheduler.core.core"]
)
def test_runs_without_torch(module: str) -> None:
    code = (
        "import sys; sys.modules['torch'] = None\n"
        f"import importlib; importlib.import_module({module!r})\n"
        "assert 'worker.torch_runner' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT, timeout=120)


@pytest.mark.parametrize("module", ["scheduler.__main__", "gateway.service", "worker.__main__"])
def test_a_start_does_not_import_what_only_traces_or_a_real_model_need(module: str) -> None:
    heavy = {"opentelemetry", "transformers", "torch", "sympy", "pandas"}
    code = f"import sys, {module}; assert not {heavy} & set(sys.modules), {heavy} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT, timeout=120)


def test_the_core_needs_neither_torch_nor_nats() -> None:
    code = (
        "import sys; import scheduler.core.core\n"
        "assert not {'torch', 'nats', 'asyncio', 'numpy'} & set(sys.modules), sorted(sys.modules)"
    )
    subprocess.run(
        [sys.executable, "-S", "-c", f"import sys; sys.path[:0] = {sys.path!r}\n{code}"], check=True, cwd=ROOT
    )


def test_no_pickle_and_no_remote_code() -> None:
    for package in PACKAGES:
        for path in files(package):
            assert not imports(path) & {"pickle", "marshal", "shelve", "dill", "cloudpickle"}, path
            assert "trust_remote_code=True" not in path.read_text("utf-8"), path


def test_files_are_small() -> None:
    for package in PACKAGES:
        for path in files(package):
            lines = len(path.read_text("utf-8").splitlines())
            assert lines <= 450, f"{path.relative_to(ROOT)} has {lines} lines: does it still hold one concept?"
