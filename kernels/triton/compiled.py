"""``python -m kernels.triton.compiled``: every variant of every Triton kernel, compiled ahead of time, without a GPU.

For each: registers and spills of a thread, shared memory of a block, as ptxas reports them for the very PTX that a GPU
would be given. Fails where a bound of the :class:`~kernels.triton.variants.Variant` is passed. Triton's own cache keeps
what is compiled, so that only what has changed takes time.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import inspect
import json
import os
import pkgutil
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import CUDABackend, get_ptxas, sm_arch_from_capability
from triton.compiler import ASTSource
from triton.runtime.cache import get_cache_manager

import kernels.triton
from kernels.triton.variants import EVERY_ARCH, FP8_ARCHS, Variant

_LOG = "ptxas.txt"
"""Beside the compiled kernel in Triton's cache."""


@dataclass(frozen=True, slots=True)
class Usage:
    """What one compiled variant takes of the hardware, and what is wrong with that."""

    module: str
    variant: str
    arch: int
    registers: int = 0  # of a thread
    shared: int = 0  # bytes of a block: static and dynamic
    spills: int = 0  # bytes of a thread: stores and loads
    seconds: float = 0.0
    faults: tuple[str, ...] = ()

    @property
    def title(self) -> str:
        return f"{self.module}/{self.variant} sm_{self.arch}"


Choice = tuple[str, Variant, int]
"""Module, variant, architecture."""


def choices(only: str = "", arch: int | None = None) -> list[Choice]:
    """All variants of this package's modules whose ``module/name`` contains ``only``."""
    found = []
    for info in pkgutil.iter_modules(kernels.triton.__path__):
        if info.name == "compiled":
            continue
        variants: Iterable[Variant] = getattr(
            importlib.import_module(f"{kernels.triton.__name__}.{info.name}"), "VARIANTS", ()
        )
        for variant in variants:
            if only in f"{info.name}/{variant.name}":
                found += [(info.name, variant, one) for one in variant.archs if arch in (None, one)]
    return found


def source(variant: Variant) -> Any:
    """What ``triton.compile`` takes. Raises ValueError where the variant does not name each argument once."""
    names = list(variant.kernel.arg_names)
    given = [*variant.signature, *variant.constexprs]
    if sorted(given) != sorted(names):
        wrong = sorted(set(given) ^ set(names)) or sorted({name for name in given if given.count(name) > 1})
        raise ValueError(f"arguments missing, unknown or given twice: {', '.join(wrong)}")
    signature = {name: variant.signature.get(name, "constexpr") for name in names}
    attrs = {
        (index,): [["tt.divisibility", 16]]
        for index, name in enumerate(names)
        if (signature[name].startswith("*") or name in variant.divisible)
        and not variant.kernel.params[index].do_not_specialize
    }
    return ASTSource(variant.kernel, signature, {(names.index(k),): v for k, v in variant.constexprs.items()}, attrs)


def usage(module: str, variant: Variant, arch: int) -> Usage:
    """Compile one variant. What goes wrong is among the faults."""
    began = time.monotonic()
    try:
        options = {
            "num_warps": variant.num_warps,
            "num_stages": variant.num_stages,
            "enable_fp_fusion": variant.fp_fusion,
        }
        built = triton.compile(source(variant), target=GPUTarget("cuda", arch, 32), options=options)
        log = _ptxas_log(built, arch)
    except Exception as error:  # noqa: BLE001 (whatever the compiler raises is the report)
        reason = next((line for line in reversed(str(error).splitlines()) if line.strip()), type(error).__name__)
        return Usage(module, variant.name, arch, faults=(f"does not compile: {reason.strip()}",))
    registers, spills = _number(r"Used (\d+) registers", log), 0
    spills = _number(r"(\d+) bytes spill stores", log) + _number(r"(\d+) bytes spill loads", log)
    shared = _number(r"(\d+) bytes smem", log) + built.metadata.shared
    bounds = (
        ("registers", registers, variant.max_registers),
        ("bytes of shared memory", shared, variant.max_shared),
        ("bytes spilled", spills, variant.max_spills),
    )
    faults = tuple(f"{value} {what}, at most {bound}" for what, value, bound in bounds if value > bound)
    return Usage(module, variant.name, arch, registers, shared, spills, time.monotonic() - began, faults)


def _number(pattern: str, log: str) -> int:
    found = re.search(pattern, log)
    return int(found[1]) if found else 0


def _ptxas_log(built: Any, arch: int) -> str:
    """Of the compiled kernel's PTX, assembled again: Triton keeps the result and throws this away."""
    cache = get_cache_manager(built.hash)
    kept = cache.get_file(_LOG)
    if kept is not None:
        return Path(kept).read_text("utf-8")
    with tempfile.TemporaryDirectory() as folder:
        ptx = Path(folder) / "kernel.ptx"
        ptx.write_text(built.asm["ptx"], "utf-8")
        command = [get_ptxas(arch).path, "-v", *_ptxas_flags(), f"--gpu-name={sm_arch_from_capability(arch)}", str(ptx)]
        done = subprocess.run(
            [*command, "-o", str(Path(folder) / "kernel.o")], check=True, capture_output=True, text=True
        )
    cache.put(done.stderr, _LOG, binary=False)
    return done.stderr


@functools.cache
def _ptxas_flags() -> list[str]:
    """What this version of Triton gives ptxas of its own accord, and decides on registers."""
    return re.findall(r"--regAllocOptLevel=\d", inspect.getsource(CUDABackend.make_cubin))[:1]


def compile_all(wanted: Sequence[Choice]) -> list[Usage]:
    """In the order given, with a line on stderr for each as it is done."""
    done: dict[int, Usage] = {}
    with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
        places = {pool.submit(usage, *choice): place for place, choice in enumerate(wanted)}
        for future in as_completed(places):
            one = done[places[future]] = future.result()
            print(f"[{len(done)}/{len(wanted)}] {one.title}: {one.seconds:.1f} s", file=sys.stderr, flush=True)
    return [done[place] for place in range(len(wanted))]


def table(rows: Sequence[Usage]) -> str:
    """For people, one row a line; what is wrong with it at the row's end."""
    width = max((len(f"{row.module}/{row.variant}") for row in rows), default=0)
    lines = [f"{'kernel':<{width}}  arch   registers  shared  spills"]
    for row in rows:
        line = f"{row.module + '/' + row.variant:<{width}}  sm_{row.arch}  {row.registers:>9}  {row.shared:>6}"
        lines.append(f"{line}  {row.spills:>6}" + "".join(f"  ! {fault}" for fault in row.faults))
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m kernels.triton.compiled", description=__doc__)
    parser.add_argument("--only", default="", metavar="TEXT", help="those whose module/name contains TEXT")
    archs = [f"sm_{arch}" for arch in sorted({*EVERY_ARCH, *FP8_ARCHS})]
    parser.add_argument("--arch", choices=archs, help="one architecture only")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there too")
    options = parser.parse_args(arguments)
    if os.environ.get("TRITON_INTERPRET", "0") != "0":
        parser.error("TRITON_INTERPRET is set: the interpreter compiles nothing")
    wanted = choices(options.only, int(options.arch[3:]) if options.arch else None)
    if not wanted:
        parser.error("no kernel of that name")
    rows = compile_all(wanted)
    print(table(rows))
    faulty = sum(bool(row.faults) for row in rows)
    print(f"{len(rows)} compiled with Triton {triton.__version__}, {faulty or 'none'} past a bound")
    if options.json:
        report = {"triton": triton.__version__, "kernels": [asdict(row) for row in rows]}
        options.json.write_text(json.dumps(report, indent=1) + "\n", "utf-8")
    return 1 if faulty else 0


if __name__ == "__main__":
    sys.exit(main())
