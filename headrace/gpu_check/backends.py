"""The attention kernels that there are to check and to measure on this machine."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from headrace.gpu_check.rig import Rig
from kernels.contract import DeviceKernel, Geometry
from kernels.flash.attention import FlashAttention
from kernels.flash.libraries import GENERATIONS, Library, installed
from kernels.flash.parts import Use

REHEARSED_SMS = 4
"""Multiprocessors that a rehearsal pretends to have."""


class Refused(Exception):
    """A kernel does not serve this shape or type here, and says why."""


@dataclass(frozen=True)
class Kind:
    """A kernel for any geometry, computing in ``dtype`` with pages in ``storage``."""

    name: str
    dtype: torch.dtype
    storage: torch.dtype
    make: Callable[[Geometry], DeviceKernel] = field(repr=False)
    library_calls: Callable[[], int | None] = lambda: None  # of a foreign library, where there is one behind it
    brief: bool = False  # a further type of a kernel that has had all cases in another

    @property
    def types(self) -> str:
        name = str(self.dtype).removeprefix("torch.")
        return name if self.storage == self.dtype else f"{name}, pages {str(self.storage).removeprefix('torch.')}"

    def __str__(self) -> str:
        return f"{self.name} in {self.types}"


def capability(rig: Rig) -> tuple[int, int]:
    return (9, 0) if rig.rehearsal else torch.cuda.get_device_capability(rig.device)


def multiprocessors(rig: Rig) -> int:
    return REHEARSED_SMS if rig.rehearsal else torch.cuda.get_device_properties(rig.device).multi_processor_count


def triton_kind(
    rig: Rig, dtype: torch.dtype, storage: torch.dtype | None = None, *, invariant: bool = False, brief: bool = False
) -> Kind:
    """Ours. Raises ImportError where triton is not installed."""
    from kernels.triton.attention import TritonAttention, refusal

    stored = storage or dtype

    def make(geometry: Geometry) -> DeviceKernel:
        if reason := refusal(geometry, dtype, stored, capability(rig)):
            raise Refused(reason)
        return TritonAttention(
            geometry, dtype, rig.device, storage=stored, num_sms=multiprocessors(rig), batch_invariant=invariant
        )

    return Kind("triton, batch-invariant" if invariant else "triton", dtype, stored, make, brief=brief)


def attention_kinds(rig: Rig) -> list[Kind]:
    """All, the one that serves by default first."""
    return [*_ours(rig), *_with_libraries(rig)]


def _ours(rig: Rig) -> Iterator[Kind]:
    served = rig.dtype
    yield triton_kind(rig, served)
    yield triton_kind(rig, served, invariant=True)
    if not rig.rehearsal:  # the interpreter rounds fp8 wrongly
        yield triton_kind(rig, served, torch.float8_e4m3fn, brief=True)
    yield triton_kind(rig, served, torch.int8, brief=True)
    for other in (torch.float16, torch.float32):
        if other != served and not rig.rehearsal:
            yield triton_kind(rig, other, brief=True)


def _with_libraries(rig: Rig) -> Iterator[Kind]:
    """Each installed flash-attn for all that it can serve, beside ours. Its calls are counted."""
    if rig.rehearsal:
        return
    for number, version in installed():
        yield _library_kind(rig, GENERATIONS[number], version)


def _library_kind(rig: Rig, generation: type[Library], version: str) -> Kind:
    counted = _Counted(generation.module)
    library = generation(version, capability(rig), counted)
    paged = triton_kind(rig, rig.dtype)

    def make(geometry: Geometry) -> DeviceKernel:
        refused = {use: library.refusal(use, geometry, rig.dtype, rig.dtype) for use in Use}
        served: dict[Use, Library] = {use: library for use in Use if not refused[use]}
        if not served:
            raise Refused("; ".join(f"{use.value}: {reason}" for use, reason in refused.items()))
        return FlashAttention(geometry, rig.dtype, rig.device, paged.make(geometry), served)

    return Kind(f"triton + {library.name}", rig.dtype, rig.dtype, make, lambda: counted.calls)


class _Counted:
    """A library's module whose functions are counted as they are called."""

    def __init__(self, module: str) -> None:
        self.calls = 0
        self._module = module

    def __getattr__(self, name: str) -> Any:
        function = getattr(importlib.import_module(self._module), name)

        def counting(*args: Any, **kwargs: Any) -> Any:
            self.calls += 1
            return function(*args, **kwargs)

        return counting
