"""Every kernel on the device that it will serve on, against float64 and plain torch, with fresh random numbers."""

from __future__ import annotations

import secrets
import traceback
from collections.abc import Callable
from functools import partial

import torch

from headrace.gpu_check import attention_cases as cases
from headrace.gpu_check import kernel_cases
from headrace.gpu_check.attention_cases import Bench, Found
from headrace.gpu_check.backends import Kind, Refused, attention_kinds
from headrace.gpu_check.rig import Rig

REHEARSAL_SIZE = 30
"""Sequences of a rehearsal are shorter by this factor: Triton's interpreter is slow."""

Case = Callable[[Bench, Found], None]


def run(rig: Rig) -> None:
    seed = secrets.randbelow(1 << 31)
    rig.facts(seed=seed)
    kinds = attention_kinds(rig)
    for number, kind in enumerate(kinds):
        if not rig.more(f"attention by {kind} was checked"):
            return
        rig.progress(f"attention by {kind}")
        _attention(rig, kind, seed + number, brief=number > 0 and (kind.brief or rig.rehearsal))
    for name, check in kernel_cases.checks(rig).items():
        if not rig.more(f"{name} was checked"):
            return
        rig.progress(name)
        _kernel(rig, name, check, seed)


def _attention(rig: Rig, kind: Kind, seed: int, brief: bool) -> None:
    found = Found()
    size = REHEARSAL_SIZE if rig.rehearsal else 1
    bench = Bench(kind.make, kind.dtype, rig.device, seed, size)
    note = ""
    for name, case in _cases(rig, brief):
        if not rig.more(f"all cases of attention by {kind} were run"):
            note = "not all cases"
            break
        try:
            case(bench, found)
            found.cases += 1
        except Refused as reason:
            found.cases += name == "full"
            note = str(reason)
        except Exception as error:
            if not rig.usable_after(error):
                rig.check(f"attention by {kind}: {name}", False, f"{type(error).__name__}: {error}"[:300])
                raise
            traceback.print_exc()
            found.failures.append((name, f"{type(error).__name__}: {error}"[:300]))
    calls = kind.library_calls()
    rig.row(
        kernel=f"attention by {kind.name}", dtype=kind.types, cases=found.cases, error=found.error,
        allowed=cases.ALLOWED[kind.dtype], note=note, **({} if calls is None else {"calls": calls}),
    )  # fmt: skip
    rig.check(f"attention by {kind}", not found.failures and found.cases > 0, _failures(found))


def _cases(rig: Rig, brief: bool) -> list[tuple[str, Case]]:
    """``brief``: for the second and later types of a kernel that has passed all in its first."""
    layers = cases.layers(rig.device)
    chosen: list[tuple[str, Case]] = [("full", partial(cases.ragged, name="full", layer=layers["full"]))]
    rest = [name for name in layers if name != "full"]
    shapes = cases.SHAPES[1:2] if brief else cases.SHAPES
    chosen += [(name, partial(cases.ragged, name=name, layer=layers[name])) for name in (rest[-1:] if brief else rest)]
    chosen += [(f"shape {geometry}", partial(cases.shape, geometry=geometry)) for geometry in shapes]
    chosen += [("long contexts", cases.long_contexts), ("captured", cases.captured), ("not finite", cases.not_finite)]
    exact = ("full",) if brief else ("full", "window and softcap")
    chosen += [(f"bits, {name}", partial(cases.bits, name=name, layer=layers[name])) for name in exact]
    if rig.rehearsal:  # no bits: the interpreter's products depend on where a row stands
        few = ("full",) if brief else ("full", "sinks and window", "long contexts", "not finite")
        return [case for case in chosen if case[0] in few]
    return chosen


def _kernel(rig: Rig, name: str, check: kernel_cases.Check, seed: int) -> None:
    found = Found()
    generator = torch.Generator(rig.device).manual_seed(seed)
    note, allowed = "", 0.0
    try:
        allowed = check(rig, found, generator)
    except Refused as reason:
        rig.row(kernel=name, dtype="", cases=0, note=str(reason))
        return
    except Exception as error:
        if not rig.usable_after(error):
            rig.check(name, False, f"{type(error).__name__}: {error}"[:300])
            raise
        traceback.print_exc()
        found.failures.append((name, f"{type(error).__name__}: {error}"[:300]))
    rig.row(kernel=name, dtype="all", cases=found.cases, error=found.error, allowed=allowed, note=note)
    rig.check(name, not found.failures, _failures(found))


def _failures(found: Found) -> str:
    """The first few, each kind of case once."""
    seen = dict(reversed(found.failures))
    text = "; ".join(f"{case}: {wrong}" for case, wrong in list(seen.items())[:4])
    return text if len(seen) <= 4 else f"{text}; and {len(seen) - 4} more"
