"""Compile the C++ kernels of this folder to one shared library beside them, with a plain C ABI.

    python -m kernels.cpu.build

``pip install`` does the same through ``setup.py``; so nothing beyond the standard library is needed here. ``isa.cpp``
is compiled once for each instruction set in :data:`ISAS`, every other ``.cpp`` once without any: which set is used is
decided at run time. Objects are kept in ``build/kernels-cpu`` under the hash of all that went into them, so that what
has not changed is not compiled again, and what has is never taken for what it was.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
KEPT_OBJECTS = FOLDER.parents[1] / "build" / "kernels-cpu"
LIBRARY_NAME = "libheadrace_cpu.so"

ISA_SOURCE = "isa.cpp"
ISAS: dict[str, tuple[str, ...]] = {"generic": ()}
"""Instruction sets, each a subset of the next, and what the compiler (GCC from 10 on, clang from 9 on) is told for
each. ``generic`` is what the compiler takes for granted by itself."""

if platform.machine().lower() in ("x86_64", "amd64"):
    ISAS["avx2"] = ("-mavx2", "-mfma", "-mf16c")
    ISAS["avx512"] = (*ISAS["avx2"], "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq")
    # Cooper Lake, which has the first of these without the second, takes the set before.
    ISAS["avx512bf16"] = (*ISAS["avx512"], "-mavx512bf16", "-mavx512vbmi")

FLAGS = (
    "-std=c++17", "-O3", "-fPIC", "-fvisibility=hidden", "-ffp-contract=off", "-fno-math-errno", "-pthread",
    "-Wall", "-Wextra", "-Wno-unknown-warning-option", "-Wno-maybe-uninitialized", "-Wno-uninitialized",
)  # fmt: skip
"""Of every file. Never -march=native: a library must run on another machine than the one that built it. CXXFLAGS are
not asked: flags such as -ffast-math would change results. GCC takes its own AVX-512 headers for uninitialised
(https://gcc.gnu.org/bugzilla/show_bug.cgi?id=105593), hence the last two; clang does not know the first of them."""

LINK_FLAGS = ("-shared", "-pthread", *(("-Wl,-z,defs",) if sys.platform == "linux" else ()))

COMPILERS = ("c++", "g++", "clang++")
REMEDY = "install a C++ compiler (Debian, Ubuntu: apt-get install g++) and reinstall Headrace"
DAY_S = 86400.0


class BuildError(Exception):
    """There is no library; the message is one line that says why. ``output`` is what the compiler said."""

    def __init__(self, message: str, output: str = "") -> None:
        super().__init__(message)
        self.output = output


@dataclass(frozen=True)
class Built:
    """What a build made."""

    isas: tuple[str, ...]
    compiled: int  # files; 0: nothing had changed
    warnings: str


def sources(folder: Path = FOLDER) -> list[Path]:
    """All that the library is made of. Empty where Headrace is installed from a wheel."""
    return sorted(path for path in folder.iterdir() if path.suffix in (".cpp", ".h"))


def sources_hash(folder: Path = FOLDER) -> str:
    """Tells one state of the sources from another; a library knows that of its own (``headrace_sources``)."""
    return _hash({path.name: path.read_bytes() for path in sources(folder)})


def _hash(texts: Mapping[str, bytes]) -> str:
    digest = hashlib.sha256()
    for name, text in texts.items():
        digest.update(f"{name} {len(text)}\n".encode() + text)
    return digest.hexdigest()


def find_compiler(environ: Mapping[str, str] | None = None) -> list[str] | None:
    """The command of the C++ compiler: ``$CXX`` (which may hold arguments), else the first one there is."""
    environ = os.environ if environ is None else environ
    given = environ.get("CXX", "")
    if given.strip():
        try:
            return shlex.split(given)
        except ValueError:  # quotes that do not pair
            return [given]
    found = next((name for name in COMPILERS if shutil.which(name, path=environ.get("PATH"))), None)
    return None if found is None else [found]


def build(
    target: Path,
    folder: Path = FOLDER,
    objects: Path = KEPT_OBJECTS,
    environ: Mapping[str, str] | None = None,
    announce: Callable[[str], None] = lambda line: None,
) -> Built:
    """Make ``target`` from the sources in ``folder``. Raises BuildError; then there is no file ``target`` either, but
    where there are no sources. ``announce`` gets a line before anything that takes long."""
    if not (folder / ISA_SOURCE).exists():
        raise BuildError(f"no sources in {folder}")
    try:
        return _Build(folder, objects, os.environ if environ is None else environ).run(target, announce)
    except (BuildError, OSError) as error:
        with contextlib.suppress(OSError):
            target.unlink()  # of other sources, perhaps: none is better
        raise error if isinstance(error, BuildError) else BuildError(str(error)) from None


class _Build:
    """One build. Several may run at once: a file appears under its name only when it is whole."""

    def __init__(self, folder: Path, objects: Path, environ: Mapping[str, str]) -> None:
        compiler = find_compiler(environ)
        if os.name != "posix":
            raise BuildError(f"not built on {sys.platform}")
        if compiler is None:
            raise BuildError(f"no C++ compiler found ({', '.join(COMPILERS)}, or CXX)")
        self.compiler = compiler
        self.environ = {**environ, "LC_ALL": "C"}  # its messages are looked at
        self.objects = self.folder = objects.resolve()
        self.objects.mkdir(parents=True, exist_ok=True)
        self.texts = {path.name: path.read_bytes() for path in sources(folder)}
        self.hash = _hash(self.texts)
        version = self._call("--version", about="--version")
        self.identity = f"{shlex.join(compiler)}\n{version}\n{FLAGS}\n{platform.machine()}"

    def run(self, target: Path, announce: Callable[[str], None]) -> Built:
        isas = [(ISA_SOURCE, isa) for isa in ISAS]
        others = [(name, "") for name in self.texts if name.endswith(".cpp") and name != ISA_SOURCE]
        # From a copy: what is edited meanwhile is not half in.
        with tempfile.TemporaryDirectory(prefix=".sources-", dir=self.objects) as copied:
            self.folder = Path(copied)
            for name, text in self.texts.items():
                (self.folder / name).write_bytes(text)
            # The linker keeps the first of equal inline functions (of std, say), whatever they were compiled for: so
            # the files that need least of the processor come first.
            parts = [*others, *isas]
            made = [self._object(*part) for part in parts]
            missing = [(path, *part) for path, part in zip(made, parts, strict=True) if not path.exists()]
            if missing:
                announce("compiling the C++ CPU kernels (half a minute on two cores)")
            with ThreadPoolExecutor(_cores()) as pool:
                done = [pool.submit(self._compile, *one) for one in reversed(missing)]  # those that take longest first
                warnings = "".join(one.result() for one in done)
            made.append(self._text_object(self.hash))
            library = self._link(made)
        if not target.exists() or target.read_bytes() != library.read_bytes():
            target.parent.mkdir(parents=True, exist_ok=True)
            with _appearing(target) as path:
                shutil.copy(library, path)
        self._forget_all_but({*made, library})
        return Built(tuple(ISAS), len(missing), warnings)

    def _object(self, source: str, isa: str) -> Path:
        headers = (text for name, text in self.texts.items() if name.endswith(".h"))
        key = self._key(self.texts[source], *headers, *(flag.encode() for flag in _flags(isa)))
        return self.objects / f"{'-'.join(filter(None, (Path(source).stem, isa)))}-{key}.o"

    def _compile(self, made: Path, source: str, isa: str) -> str:
        with _appearing(made) as path:
            return self._call(*FLAGS, *_flags(isa), "-c", source, "-o", str(path), about=source)

    def _text_object(self, text: str) -> Path:
        made = self.objects / f"sources-{self._key(text.encode())}.o"
        if not made.exists():
            code = '#define PUBLIC __attribute__((visibility("default")))\n'
            code += f'extern "C" PUBLIC const char* headrace_sources() {{ return "{text}"; }}\n'
            with _appearing(made) as path:
                self._call(*FLAGS, "-x", "c++", "-c", "-", "-o", str(path), about="sources", given=code)
        return made

    def _link(self, made: Sequence[Path]) -> Path:
        names = (path.name for path in made)
        library = self.objects / f"{self._key(*(part.encode() for part in (*LINK_FLAGS, *names)))}.so"
        if not library.exists():
            with _appearing(library) as path:
                self._call(*(str(part) for part in made), *LINK_FLAGS, "-o", str(path), about="linking")
        return library

    def _forget_all_but(self, used: set[Path]) -> None:
        """Remove what has not been used for a day; another build may be about to use what is newer."""
        for path in self.objects.iterdir():
            with contextlib.suppress(OSError):
                if path in used:
                    os.utime(path)
                elif path.stat().st_mtime < time.time() - DAY_S:
                    shutil.rmtree(path) if path.is_dir() else path.unlink()

    def _key(self, *parts: bytes) -> str:
        digest = hashlib.sha256(self.identity.encode())
        for part in parts:
            digest.update(b"%d\n" % len(part) + part)
        return digest.hexdigest()[:24]

    def _call(self, *argv: str, about: str, given: str = "") -> str:
        """What the compiler printed."""
        try:
            done = subprocess.run(
                [*self.compiler, *argv], cwd=self.folder, env=self.environ, input=given, text=True, errors="replace",
                stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            )  # fmt: skip
        except OSError as error:
            raise BuildError(f"{self.compiler[0]}: {error.strerror}") from None
        if done.returncode:
            lines = done.stdout.splitlines()
            errors = [line.strip() for line in lines if "error" in line.lower()]
            reason = errors[0] if errors else f"exit {done.returncode}"
            called = shlex.join(self.compiler)
            raise BuildError(f"{called} failed at {about}: {reason}", done.stdout if errors else "")
        return done.stdout


def _flags(isa: str) -> tuple[str, ...]:
    return (*ISAS[isa], f"-DHEADRACE_ISA={isa}") if isa else ()


@contextlib.contextmanager
def _appearing(path: Path) -> Iterator[Path]:
    """A file that gets its name only when it is whole; a library in use is not written over but replaced."""
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        yield partial
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def warning(error: BuildError) -> str:
    """The one line for who builds."""
    return f"warning: the C++ CPU kernels are not built, so torch's slower reference will be used: {error}"


def main() -> int:
    """Build into the tree. Exit 1 if there is no library afterwards."""
    began = time.monotonic()
    try:
        built = build(FOLDER / LIBRARY_NAME, announce=lambda line: print(line, flush=True))
    except BuildError as error:
        print(error.output, end="", file=sys.stderr)
        print(warning(error), file=sys.stderr)
        return 1
    print(built.warnings, end="", file=sys.stderr)
    if built.compiled:
        print(f"built the C++ CPU kernels for {', '.join(built.isas)} in {time.monotonic() - began:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
