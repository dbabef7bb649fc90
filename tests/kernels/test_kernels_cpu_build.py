"""Compiling the C++ kernels: with sources of their own, small enough to be compiled in a blink."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

import pytest

from kernels.cpu import build as cpu_build
from kernels.cpu.build import ISAS, LIBRARY_NAME, BuildError, Built, build, find_compiler, main, sources_hash

needs_compiler = pytest.mark.skipif(find_compiler() is None, reason="no C++ compiler on this machine")

HEADER = """
struct Table { int (*number)(); int (*instructions)(); };
// Equal in name, not in content: one of them is kept.
inline __attribute__((noinline)) int instructions() {
#if defined(__AVX512BF16__)
    return 3;
#elif defined(__AVX512F__)
    return 2;
#elif defined(__AVX2__)
    return 1;
#else
    return 0;
#endif
}
"""
ISA = """
#include "table.h"
#define JOIN_(a, b) a##b
#define JOIN(a, b) JOIN_(a, b)
namespace HEADRACE_ISA {
#if defined(__AVX512BF16__)
static int number() { return 3; }
#elif defined(__AVX512F__)
static int number() { return 2; }
#elif defined(__AVX2__)
static int number() { return 1; }
#else
static int number() { return 0; }
#endif
}
extern "C" const Table JOIN(headrace_table_, HEADRACE_ISA);
extern "C" const Table JOIN(headrace_table_, HEADRACE_ISA) = {HEADRACE_ISA::number, instructions};
"""
API = """
#include "table.h"
#define EXPORT extern "C" __attribute__((visibility("default")))
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Sources whose library says which build of ``isa.cpp`` a name belongs to. None of it uses what a CPU may lack."""
    made = tmp_path / "sources"
    made.mkdir()
    (made / "table.h").write_text(HEADER)
    (made / "isa.cpp").write_text(ISA)
    api = API + "".join(f'extern "C" const Table headrace_table_{isa};\n' for isa in ISAS)
    for isa in ISAS:
        api += f"EXPORT int number_{isa}() {{ return headrace_table_{isa}.number(); }}\n"
        api += f"EXPORT int instructions_{isa}() {{ return headrace_table_{isa}.instructions(); }}\n"
    (made / "api.cpp").write_text(api)
    return made


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return tmp_path / "made" / LIBRARY_NAME


def built(folder: Path, target: Path, **environ: str) -> Built:
    return build(target, folder, folder.parent / "objects", {**os.environ, **environ})


@needs_compiler
def test_each_instruction_set_is_compiled_for_itself_under_its_own_name(folder: Path, target: Path) -> None:
    assert built(folder, target).isas == tuple(ISAS)
    library = ctypes.CDLL(str(target))
    assert [library[f"number_{isa}"]() for isa in ISAS] == list(range(len(ISAS)))


@needs_compiler
def test_what_several_builds_share_is_taken_from_the_one_that_needs_least(folder: Path, target: Path) -> None:
    built(folder, target)
    library = ctypes.CDLL(str(target))
    assert [library[f"instructions_{isa}"]() for isa in ISAS] == [0] * len(ISAS)


@needs_compiler
def test_only_what_changed_is_compiled_again(folder: Path, target: Path) -> None:
    assert built(folder, target).compiled == len(ISAS) + 1
    first = target.stat()
    assert built(folder, target).compiled == 0
    assert target.stat().st_ino == first.st_ino
    api = folder / "api.cpp"
    api.write_text(api.read_text() + "EXPORT int added() { return 7; }\n")
    assert built(folder, target).compiled == 1
    assert ctypes.CDLL(str(target)).added() == 7
    (folder / "table.h").write_text("#pragma once\n" + HEADER)
    assert built(folder, target).compiled == len(ISAS) + 1
    (folder / "table.h").write_text(HEADER)
    assert built(folder, target).compiled == 0, "what was compiled before is kept"


@needs_compiler
def test_a_library_in_use_is_replaced_not_written_over(folder: Path, target: Path) -> None:
    built(folder, target)
    library = ctypes.CDLL(str(target))
    before = target.stat().st_ino
    api = folder / "api.cpp"
    api.write_text(api.read_text() + "EXPORT int added() { return 7; }\n")
    built(folder, target)
    assert target.stat().st_ino != before
    assert library.number_generic() == 0
    assert [path.name for path in target.parent.iterdir()] == [LIBRARY_NAME]


@needs_compiler
def test_the_library_knows_its_sources_and_exports_no_more_than_it_says(folder: Path, target: Path) -> None:
    built(folder, target)
    library = ctypes.CDLL(str(target))
    library.headrace_sources.restype = ctypes.c_char_p
    assert library.headrace_sources().decode() == sources_hash(folder)
    assert not hasattr(library, "headrace_table_generic")


@needs_compiler
def test_a_mistake_in_the_sources_is_named_and_leaves_no_library(folder: Path, target: Path) -> None:
    built(folder, target)
    (folder / "api.cpp").write_text("int f( {\n")
    with pytest.raises(BuildError, match=r"failed at api.cpp: .*error: ") as caught:
        built(folder, target)
    assert "\n" not in str(caught.value)
    assert "int f(" in caught.value.output
    assert not target.exists(), "the one before is of other sources"


@needs_compiler
def test_what_is_declared_but_nowhere_defined_is_found_when_it_is_built(folder: Path, target: Path) -> None:
    api = folder / "api.cpp"
    api.write_text(api.read_text() + "int nowhere();\nEXPORT int calls() { return nowhere(); }\n")
    with pytest.raises(BuildError, match="failed at linking"):
        built(folder, target)
    assert not target.exists()


@needs_compiler
def test_cxx_may_hold_arguments(folder: Path, target: Path) -> None:
    compiler = find_compiler()
    assert compiler is not None
    api = folder / "api.cpp"
    api.write_text(api.read_text() + "EXPORT int given() { return GIVEN; }\n")
    built(folder, target, CXX=f"{compiler[0]} -DGIVEN=5")
    assert ctypes.CDLL(str(target)).given() == 5
    other = target.with_name("other.so")  # a path that is loaded already would not be loaded again
    built(folder, other, CXX=f"{compiler[0]} -DGIVEN=6")
    assert ctypes.CDLL(str(other)).given() == 6


@pytest.mark.parametrize("compiler", ["/bin/false", "/nowhere/c++", "c++ 'unpaired"])
def test_a_compiler_that_does_not_work_is_named(folder: Path, target: Path, compiler: str) -> None:
    target.parent.mkdir()
    target.write_text("of an earlier build")
    with pytest.raises(BuildError) as caught:
        built(folder, target, CXX=compiler)
    assert compiler in str(caught.value)
    assert not target.exists()


def test_without_a_compiler_the_names_that_were_looked_for_are_given(folder: Path, target: Path) -> None:
    assert find_compiler({"PATH": "/nowhere"}) is None
    with pytest.raises(BuildError, match=r"no C\+\+ compiler found \(c\+\+, g\+\+, clang\+\+, or CXX\)"):
        built(folder, target, CXX="", PATH="/nowhere")


def test_where_there_are_no_sources_the_library_stays(tmp_path: Path, target: Path) -> None:
    target.parent.mkdir()
    target.write_text("from a wheel")
    with pytest.raises(BuildError, match="no sources"):
        build(target, tmp_path, tmp_path / "objects")
    assert target.read_text() == "from a wheel"


def test_a_build_that_fails_is_one_line_and_exit_1(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cpu_build, "FOLDER", folder)
    monkeypatch.setattr(cpu_build, "build", lambda target, announce: build(target, folder, tmp_path / "objects"))
    monkeypatch.setenv("CXX", "/nowhere/c++")
    assert main() == 1
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert lines[0].startswith("warning: the C++ CPU kernels are not built, so torch's slower reference will be used: ")
