"""A Triton kernel with its compile-time choices made: what :mod:`kernels.triton.compiled` builds without a GPU."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

EVERY_ARCH = (80, 90)
"""Ampere and Hopper."""

FP8_ARCHS = (89, 90)
"""Those whose hardware converts to and from fp8 e4m3: Ada and Hopper."""

SHARED_BYTES = 99 << 10
"""Shared memory that a block can have on every card from Ampere on (the least: compute capability 8.6 and 8.9)."""


@dataclass(frozen=True, slots=True, eq=False)
class Variant:
    """One specialisation, as the launcher would ask for it, with what it may use of the hardware.

    A module of this package lists its own as ``VARIANTS``. An argument that the launcher passes as None is a constexpr
    of value None, as it is to Triton.
    """

    name: str  # unique in its module
    kernel: Any  # the function that triton.jit decorates
    signature: Mapping[str, str]  # Triton type of each argument that is no constexpr: "*bf16", "i32", "fp32"
    constexprs: Mapping[str, Any]
    num_warps: int = 4
    num_stages: int = 2
    archs: tuple[int, ...] = EVERY_ARCH
    fp_fusion: bool = True  # products and sums in one rounding, where the compiler likes
    max_registers: int = 255  # of a thread
    max_shared: int = SHARED_BYTES  # bytes of a block, static and dynamic
    max_spills: int = 0  # bytes of a thread, stores and loads together; more than 0 needs a reason beside it
    divisible: frozenset[str] = field(default_factory=frozenset)
    """Integer arguments that are multiples of 16 (strides, mostly). Pointers always are, but those that the kernel is
    not specialised for: torch aligns what it allocates."""
