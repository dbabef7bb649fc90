"""Finding the compiled kernels, and that what Python declares is what the C++ sources say."""

from __future__ import annotations

import ctypes
import logging
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kernels.cpu import library as cpu_library
from kernels.cpu.build import FOLDER, ISAS, LIBRARY_NAME, build, find_compiler
from kernels.cpu.library import FUNCTIONS, ISA_ENV, IsaError, Library, Missing, find, load, open_library

needs_compiler = pytest.mark.skipif(find_compiler() is None, reason="no C++ compiler on this machine")

MIRRORED = {
    "HrWeight": cpu_library.Weight,
    "HrLayer": cpu_library.Layer,
    "HrModel": cpu_library.Model,
    "HrBatch": cpu_library.Batch,
    "HrAttention": cpu_library.Attention,
    "HrSample": cpu_library.Sample,
}


@pytest.fixture(autouse=True)
def asked_anew(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Every test finds the library by its own environment, and leaves others theirs."""
    monkeypatch.delenv(ISA_ENV, raising=False)
    find.cache_clear()
    cpu_library._tell.cache_clear()
    yield
    find.cache_clear()


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small library of the same exported names, in a folder with no sources: as a wheel installs it."""
    folder = tmp_path_factory.mktemp("small")
    code = 'extern "C" {\n' + "".join(
        f'__attribute__((visibility("default"))) long {name}() {{ return 0; }}\n'
        for name in FUNCTIONS
        if name not in ("headrace_abi_version", "headrace_sources")
    )
    version = f"int headrace_abi_version() {{ return {cpu_library.ABI_VERSION}; }}"
    code += f'__attribute__((visibility("default"))) {version}\n'
    sources = folder / "sources"
    sources.mkdir()
    (sources / "api.cpp").write_text(code + "}\n")
    (sources / "isa.cpp").write_text("\n")
    target = folder / "installed" / LIBRARY_NAME
    build(target, sources, folder / "objects")
    return target


def child(code: str, **environ: str) -> str:
    """What a process of its own prints: the choice of an instruction set is a process's."""
    inherited = {name: value for name, value in os.environ.items() if name != ISA_ENV}
    done = subprocess.run(
        [sys.executable, "-c", "from kernels.cpu.library import IsaError, find, load\n" + code],
        env=inherited | environ, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@needs_compiler
def test_the_tree_has_its_library_where_there_is_a_compiler() -> None:
    found = load()
    assert isinstance(found, Library), found
    assert found.isa in ISAS


def test_every_exported_function_is_declared_and_the_reverse() -> None:
    exported = set(re.findall(r"^EXPORT\b[^(]*?\b(headrace_\w+)\(", (FOLDER / "api.cpp").read_text(), re.MULTILINE))
    assert exported | {"headrace_sources"} == set(FUNCTIONS)


@needs_compiler
def test_structures_lie_in_memory_as_the_header_says(tmp_path: Path) -> None:
    header = (FOLDER / "abi.h").read_text()
    assert set(re.findall(r"^struct (\w+)", header, re.MULTILINE)) == set(MIRRORED)
    lines, expected = [], []
    for name, mirror in MIRRORED.items():
        for field in mirror._fields_:
            member = f"{name}::{field[0]}"
            lines.append(f'std::printf("{member} %zu %zu\\n", offsetof({name}, {field[0]}), sizeof({member}));\n')
            place = getattr(mirror, field[0])
            expected.append(f"{member} {place.offset} {place.size}")
        lines.append(f'std::printf("{name} %zu\\n", sizeof({name}));\n')
        expected.append(f"{name} {ctypes.sizeof(mirror)}")
    program = tmp_path / "layout.cpp"
    program.write_text(
        f'#include <cstddef>\n#include <cstdio>\n#include "{FOLDER / "abi.h"}"\nint main() {{\n{"".join(lines)}}}\n'
    )
    compiler = find_compiler()
    assert compiler is not None
    subprocess.run([*compiler, "-std=c++17", program, "-o", tmp_path / "layout"], check=True)
    printed = subprocess.run([tmp_path / "layout"], capture_output=True, text=True, check=True).stdout
    assert printed.splitlines() == expected


@needs_compiler
def test_the_environment_chooses_the_instruction_set() -> None:
    assert child("print(load().isa)", HEADRACE_CPU_ISA="generic") == "generic"
    best = child("print(load().isa)")
    assert child("print(load().isa)", HEADRACE_CPU_ISA=best) == best
    assert child("print(load())", HEADRACE_CPU_ISA="none") == "None"


@needs_compiler
def test_an_instruction_set_that_this_processor_lacks_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Library, "select", lambda self, isa: False)
    monkeypatch.setenv(ISA_ENV, "generic")
    with pytest.raises(IsaError, match=r"HEADRACE_CPU_ISA: this processor \(or this build\) has no generic"):
        load()


@needs_compiler
def test_selecting_an_instruction_set_that_there_is_none_of_changes_nothing() -> None:
    code = "found = load()\nbefore = found.isa\nprint(found.select('sse9'), found.isa == before)"
    assert child(code) == "False True"


def test_a_name_that_is_no_instruction_set_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ISA_ENV, "avx")
    with pytest.raises(IsaError, match=r"'avx' is none of generic, .*none"):
        load()


def test_turned_off_is_no_warning(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv(ISA_ENV, "none")
    with caplog.at_level(logging.WARNING):
        assert load() is None
    assert not caplog.records


def test_a_missing_library_is_one_warning_that_says_what_helps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(cpu_library, "FOLDER", tmp_path)
    assert load() is None
    assert load() is None
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "torch reference" in record.getMessage()
    assert "install a C++ compiler" in record.getMessage()
    assert "reinstall" in record.getMessage()


@needs_compiler
def test_an_installed_library_needs_no_sources_beside_it(built: Path) -> None:
    assert isinstance(open_library(built), Library)


@needs_compiler
def test_a_library_of_another_abi_is_not_used(built: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_library, "ABI_VERSION", cpu_library.ABI_VERSION + 1)
    found = open_library(built)
    assert isinstance(found, Missing)
    assert "ABI version" in found.reason and "reinstall" in found.reason


@needs_compiler
def test_a_library_that_lacks_a_function_is_not_used(built: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_library, "FUNCTIONS", {**FUNCTIONS, "headrace_of_tomorrow": (None, ())})
    found = open_library(built)
    assert isinstance(found, Missing)
    assert "headrace_of_tomorrow" in found.reason and "reinstall" in found.reason


@needs_compiler
def test_a_library_of_other_sources_than_those_beside_it_is_not_used(built: Path, tmp_path: Path) -> None:
    copy = tmp_path / LIBRARY_NAME
    copy.write_bytes(built.read_bytes())
    (tmp_path / "api.cpp").write_text("// edited since\n")
    found = open_library(copy)
    assert isinstance(found, Missing)
    assert "python -m kernels.cpu.build" in found.reason


def test_a_file_that_is_no_library_is_not_used(tmp_path: Path) -> None:
    (tmp_path / LIBRARY_NAME).write_text("no library")
    found = open_library(tmp_path / LIBRARY_NAME)
    assert isinstance(found, Missing)
    assert "reinstall" in found.reason


def test_finding_the_library_takes_neither_torch_nor_numpy() -> None:
    code = "import sys\nload()\nprint({'torch', 'numpy'} & set(sys.modules))"
    assert child(code) == "set()"
