"""What a forward pass spends its time on: told by the runner itself, or by the torch profiler.

A runner whose C++ library runs a whole step in one call has ``phase_times()``: seconds by phase since the last call.
For one that runs op by op, a few more steps go under the torch profiler, which slows them by a few microseconds an op:
the times of the ops are taken from there, and what is left of a step that ran without it is host Python.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch.profiler import ProfilerActivity, profile, record_function

from worker import torch_runner
from worker.torch_runner import TorchRunner

GEMM, ATTENTION, ELEMENTWISE, LOGITS, SAMPLING = "GEMM", "attention", "norm, rope, activation", "logits", "sampling"
UNDIVIDED = "C++ pass, undivided"
"""Of a C++ library that runs the model but does not tell its phases."""

KINDS = (GEMM, ATTENTION, ELEMENTWISE, LOGITS, SAMPLING, UNDIVIDED)

NATIVE_PHASES = {
    "embed": ELEMENTWISE,
    "norm": ELEMENTWISE,
    "rope": ELEMENTWISE,
    "qkv": GEMM,
    "o_proj": GEMM,
    "gate_up": GEMM,
    "down": GEMM,
    "attention": ATTENTION,
    "logits": LOGITS,
    "sample": SAMPLING,
}

MATRIX_PRODUCTS = {"aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "aten::mkldnn_linear"}
MATRIX_LIBRARIES = ("mkldnn::", "mkl::", "onednn::")

_SCOPE = "headrace:"


def by_kind(phases: Mapping[str, float]) -> dict[str, float]:
    """Seconds by kind of a runner's own phases. Raises KeyError for a phase that this table does not know."""
    times = dict.fromkeys(KINDS, 0.0)
    for phase, seconds in phases.items():
        times[NATIVE_PHASES[phase]] += seconds
    return times


def own_phases(runner: TorchRunner) -> dict[str, float] | None:
    """What the runner itself says of the time since this was last asked; None where it runs op by op."""
    tell: Callable[[], dict[str, float] | None] | None = getattr(runner, "phase_times", None)
    return tell() if tell is not None else None


def traced(runner: TorchRunner, step: Callable[[], object]) -> dict[str, float]:
    """Seconds by kind that the ops of ``step()``, one step of ``runner``, take under the torch profiler."""
    with _without_stderr(), _scopes(runner), profile(activities=[ProfilerActivity.CPU]) as profiler:
        step()
    times = dict.fromkeys(KINDS, 0.0)
    for event in profiler.events() or ():
        if event.name == _SCOPE + UNDIVIDED:
            times[UNDIVIDED] += event.cpu_time_total / 1e6
        elif not event.name.startswith(_SCOPE) and (kind := _kind(event)) != UNDIVIDED:
            times[kind] += event.self_cpu_time_total / 1e6
    return times


def _kind(event: Any) -> str:
    above = event.cpu_parent
    while above is not None:
        if above.name.startswith(_SCOPE):
            return str(above.name.removeprefix(_SCOPE))
        above = above.cpu_parent
    product = event.name in MATRIX_PRODUCTS or event.name.startswith(MATRIX_LIBRARIES)
    return GEMM if product else ELEMENTWISE


@contextlib.contextmanager
def _without_stderr() -> Iterator[None]:
    """The profiler's C++ side says there, whatever it is told, that it starts and stops."""
    sys.stderr.flush()
    kept = os.dup(2)
    try:
        with open(os.devnull, "wb") as nowhere:
            os.dup2(nowhere.fileno(), 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)


@contextlib.contextmanager
def _scopes(runner: TorchRunner) -> Iterator[None]:
    """Mark in the trace what attention, the head and the sampler do, whatever ops they are made of."""
    with contextlib.ExitStack() as undo:

        def mark(owner: Any, name: str, kind: str) -> None:
            inner = getattr(owner, name)

            def marked(*args: Any, **given: Any) -> Any:
                with record_function(_SCOPE + kind):
                    return inner(*args, **given)

            own = name in vars(owner)
            setattr(owner, name, marked)
            if own:
                undo.callback(setattr, owner, name, inner)
            else:
                undo.callback(delattr, owner, name)

        mark(runner.kernel, "attend", ATTENTION)
        mark(torch_runner, "sample", SAMPLING)
        if getattr(runner, "decoder", None) is not None:
            mark(runner.decoder, "forward", UNDIVIDED)
        module = runner.model.module
        if module is not None:
            mark(module.get_output_embeddings(), "forward", LOGITS)
        yield
