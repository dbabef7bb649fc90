"""Which of the machine's GPUs each worker of ``headrace up`` has: none is two workers', who would each take its memory.

Nobody imports torch for that: the driver's own tool tells how many there are.
"""

from __future__ import annotations

import functools
import importlib.metadata
import subprocess
from collections.abc import Mapping
from typing import Any

from shared.config import ConfigError

VISIBLE = "CUDA_VISIBLE_DEVICES"
ASKING_S = 20.0
"""A driver that has just been loaded takes a while."""


def shares(worker: Any, workers: int, environ: Mapping[str, str]) -> list[dict[str, str]]:
    """What each worker's environment has besides ``environ`` so that it sees its own GPUs alone; nothing where one
    worker has what there is, or none has a GPU. Raises ConfigError, one line, if there are too few."""
    nothing: list[dict[str, str]] = [{} for _ in range(workers)]
    if workers == 1 or worker.simulate or worker.device == "cpu" or (worker.device == "auto" and _torch_has_none()):
        return nothing
    names = visible(environ)
    if not names:  # or nobody can tell: a worker that needs one will
        return nothing
    each = worker.tensor_parallel
    if workers * each > len(names):
        asked = f"--workers {workers}" + (f" with --tensor-parallel {each}" if each > 1 else "")
        there = "there is 1" if len(names) == 1 else f"there are {len(names)}"
        raise ConfigError(f"{asked}: {workers * each} GPUs are needed, and {there}")
    return [{VISIBLE: ",".join(names[first : first + each])} for first in range(0, workers * each, each)]


def visible(environ: Mapping[str, str]) -> list[str]:
    """The GPUs that a process of this environment sees, as CUDA_VISIBLE_DEVICES names them."""
    there = [str(index) for index in range(_count())]
    if VISIBLE not in environ:
        return there
    named = [name.strip() for name in environ[VISIBLE].split(",")]
    seen = []
    for name in named:  # as CUDA does: nothing counts from the first on that is no GPU
        if not name or name == "-1" or (name.isdecimal() and there and name not in there):
            break
        seen.append(name)
    return seen


@functools.cache
def _count() -> int:
    """0 where there is no driver."""
    try:
        done = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=ASKING_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return 0
    return sum(line.startswith("GPU ") for line in done.stdout.splitlines())


def _torch_has_none() -> bool:
    """Whether torch is a build for CPUs."""
    try:
        return importlib.metadata.version("torch").endswith("+cpu")
    except importlib.metadata.PackageNotFoundError:
        return True
