"""Every kernel on the device that it will serve on, against float64 and plain torch, with fresh random numbers."""

from __future__ import annotations

import secrets
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import torch

from headrace.gpu_check import attention_cases as cases
from headrace.gpu_check import kernel_cases
from headrace.gpu_check.attention_cases import Bench, Found
from headrace.gpu_check.backends import Kind, Refused, attention_kinds
from headrace.gpu_check.rig import Rig

REHEARSAL_SIZE = 60
"""Sequences of a rehearsal are shorter by this factor: Triton's interpreter is slow."""

DETAIL_CHARACTERS = 300

Case = Callable[[Bench, Found], None]


@dataclass
class Checked:
    """One attention kernel in one type, and what its cases have found."""

    kind: Kind
    bench: Bench
    found: Found = field(default_factory=Found)
    note: str = ""


def run(rig: Rig) -> None:
    """What compiles quickly first; then a little of every attention kernel, then the rest of the first ones."""
    seed = secrets.randbelow(1 << 31)
    rig.facts(seed=seed)
    for name, check in kernel_cases.checks(rig).items():
        if rig.more(f"{name} was checked"):
            rig.progress(name)
            _kernel(rig, name, check, seed)
    size = REHEARSAL_SIZE if rig.rehearsal else 1
    checked = [
        Checked(kind, Bench(kind.make, kind.dtype, rig.device, seed + number, size))
        for number, kind in enumerate(attention_kinds(rig))
    ]
    try:
        for one in checked:
            rig.progress(f"attention by {one.kind}")
            _attention(rig, one, _first_cases(rig))
        for one in checked[: 1 if rig.rehearsal else None]:
            if not one.kind.brief:
                rig.progress(f"attention by {one.kind}, the rest")
                _attention(rig, one, _more_cases(rig))
    finally:
        for one in checked:
            _tell(rig, one)


def _attention(rig: Rig, one: Checked, chosen: dict[str, Case]) -> None:
    for name, case in chosen.items():
        if not rig.more(f"all cases of attention by {one.kind} were run"):
            one.note = "not all cases"
            return
        try:
            case(one.bench, one.found)
            one.found.cases += 1
        except Refused as reason:
            one.note = str(reason)
        except Exception as error:
            one.found.failures.append((name, _described(error)))
            if not rig.usable_after(error):
                raise
            traceback.print_exc()


def _tell(rig: Rig, one: Checked) -> None:
    found, kind = one.found, one.kind
    calls = kind.library_calls()
    if not (found.cases or found.failures):
        rig.row(kernel=f"attention by {kind.name}", dtype=kind.types, cases=0, note=one.note or "not reached")
        return
    rig.row(
        kernel=f"attention by {kind.name}", dtype=kind.types, cases=found.cases, error=found.error,
        allowed=cases.ALLOWED[kind.dtype], note=one.note, **({} if calls is None else {"calls": calls}),
    )  # fmt: skip
    rig.check(f"attention by {kind}", not found.failures, _failures(found))


def _first_cases(rig: Rig) -> dict[str, Case]:
    """Of every kernel in every type."""
    layers = cases.layers(rig.device)
    chosen: dict[str, Case] = {"full": partial(cases.ragged, name="full", layer=layers["full"])}
    if rig.rehearsal:
        return chosen
    return chosen | {
        "the 8B's shape": partial(cases.shape, geometry=cases.SHAPES[1]),
        "captured": cases.captured,
        "long contexts": cases.long_contexts,
        "bits, full": partial(cases.bits, name="full", layer=layers["full"]),
        "sinks and window": partial(cases.ragged, name="sinks and window", layer=layers["sinks and window"]),
    }


def _more_cases(rig: Rig) -> dict[str, Case]:
    """Of those that are not brief. A rehearsal checks no bits: the interpreter's depend on where a row stands."""
    layers = cases.layers(rig.device)
    names = ["sinks and window"] if rig.rehearsal else ["window", "softcap", "window and softcap", "sinks"]
    chosen: dict[str, Case] = {"not finite": cases.not_finite}
    chosen |= {name: partial(cases.ragged, name=name, layer=layers[name]) for name in names}
    if rig.rehearsal:
        return chosen
    other = "window and softcap"
    chosen[f"bits, {other}"] = partial(cases.bits, name=other, layer=layers[other])
    for geometry in (*cases.SHAPES[:1], *cases.SHAPES[2:]):
        chosen[f"shape {geometry}"] = partial(cases.shape, geometry=geometry)
    return chosen


def _kernel(rig: Rig, name: str, check: kernel_cases.Check, seed: int) -> None:
    found = Found()
    generator = torch.Generator(rig.device).manual_seed(seed)
    allowed = 0.0
    try:
        allowed = check(rig, found, generator)
    except Exception as error:
        found.failures.append((name, _described(error)))
        if not rig.usable_after(error):
            rig.check(name, False, _failures(found))
            raise
        traceback.print_exc()
    types = ", ".join(str(dtype).removeprefix("torch.") for dtype in kernel_cases.types(rig))
    rig.row(kernel=name, dtype=types, cases=found.cases, error=found.error, allowed=allowed)
    rig.check(name, not found.failures, _failures(found))


def _described(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:DETAIL_CHARACTERS]


def _failures(found: Found) -> str:
    """The first few, each kind of case once."""
    seen = dict(reversed(found.failures))
    text = "; ".join(f"{case}: {wrong}" for case, wrong in list(seen.items())[:4])
    return text if len(seen) <= 4 else f"{text}; and {len(seen) - 4} more"
