"""Find the compiled CPU kernels, choose their instruction set, and declare what can be called.

The library (:mod:`kernels.cpu.build`) has a plain C ABI and is called through ctypes, which lets go of Python's global
lock meanwhile. :data:`FUNCTIONS` mirrors what ``api.cpp`` exports, the structures what ``abi.h`` declares.
``HEADRACE_CPU_ISA`` overrides the choice of instruction set.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import os
from collections.abc import Mapping, Sequence
from ctypes import POINTER, c_char_p, c_float, c_int, c_int32, c_int64, c_uint64, c_void_p
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kernels.cpu.build import FOLDER, ISAS, LIBRARY_NAME, REMEDY, sources, sources_hash

log = logging.getLogger("headrace.kernels.cpu")

ISA_ENV = "HEADRACE_CPU_ISA"
NO_LIBRARY = "none"
"""The value of :data:`ISA_ENV` that turns the library off."""

ABI_VERSION = 1
"""``headrace_abi_version()``: raised with every change to what is declared here."""


class IsaError(ValueError):
    """:data:`ISA_ENV` asks for what cannot be had; the message is one line."""


class Weight(ctypes.Structure):
    """``HrWeight``"""

    _fields_ = [
        ("panels", c_void_p),
        ("scales", c_void_p),
        ("bias", c_void_p),
        ("n", c_int32),
        ("k", c_int32),
        ("format", c_int32),
    ]


class Layer(ctypes.Structure):
    """``HrLayer``"""

    _fields_ = [
        *((name, Weight) for name in ("qkv", "out", "gate_up", "down")),
        *((name, c_void_p) for name in ("attention_norm", "mlp_norm", "query_norm", "key_norm")),
        *((name, c_void_p) for name in ("key_cache", "value_cache")),
        ("scaling", c_float),
        ("window", c_int32),
        ("rotary", c_int32),
    ]


class Model(ctypes.Structure):
    """``HrModel``"""

    _fields_ = [
        *((name, c_int32) for name in ("dtype", "layers", "hidden", "heads", "kv_heads", "head_dim", "inner", "page")),
        ("activation", c_int32),
        ("eps", c_float),
        ("embedding_rows", c_int32),
        *((name, c_void_p) for name in ("embedding", "final_norm", "cos", "sin")),
        ("rotary_stride", c_int32),
        ("positions", c_int32),
        ("head", Weight),
        ("layer", POINTER(Layer)),
    ]


class Batch(ctypes.Structure):
    """``HrBatch``"""

    _fields_ = [
        *(
            (name, c_void_p)
            for name in ("tokens", "positions", "query_start", "visible", "tables", "write_slots", "keep", "logits")
        ),
        ("logits_stride", c_int64),
        *((name, c_int32) for name in ("num_tokens", "num_sequences", "table_stride", "num_keep")),
    ]


class Attention(ctypes.Structure):
    """``HrAttention``"""

    _fields_ = [
        *((name, c_int32) for name in ("dtype", "heads", "kv_heads", "head_dim", "page")),
        ("scaling", c_float),
        ("softcap", c_float),
        ("window", c_int32),
        *((name, c_void_p) for name in ("sinks", "query", "key", "value", "out")),
        *((name, c_int64) for name in ("query_stride", "key_stride", "value_stride", "out_stride")),
        *((name, c_void_p) for name in ("key_cache", "value_cache")),
    ]


class Sample(ctypes.Structure):
    """``HrSample``"""

    _fields_ = [
        ("logits", c_void_p),
        ("logits_stride", c_int64),
        *((name, c_void_p) for name in ("temperature", "top_p", "min_p", "top_k", "place", "tokens")),
        *((name, c_int32) for name in ("dtype", "rows", "vocabulary")),
    ]


FUNCTIONS: Mapping[str, tuple[Any, Sequence[Any]]] = {
    "headrace_abi_version": (c_int, ()),
    "headrace_isa": (c_char_p, ()),
    "headrace_select_isa": (c_int, (c_char_p,)),  # 0: refused
    "headrace_sources": (c_char_p, ()),
    "headrace_set_threads": (None, (c_int,)),
    "headrace_threads": (c_int, ()),
    "headrace_alloc": (c_void_p, (c_uint64,)),  # None if there is no memory
    "headrace_free": (None, (c_void_p, c_uint64)),
    "headrace_decoder_new": (c_void_p, (c_void_p,)),
    "headrace_decoder_delete": (None, (c_void_p,)),
    "headrace_decoder_forward": (None, (c_void_p, c_void_p)),
    "headrace_decoder_seconds": (None, (c_void_p, ctypes.POINTER(ctypes.c_double))),
    "headrace_attention": (None, (c_void_p, c_void_p)),
    "headrace_linear": (None, (c_void_p, c_int, c_void_p, c_int64, c_int, c_void_p, c_int64)),
    "headrace_pack": (None, (c_int, c_void_p, c_int64, c_int, c_int, c_int, c_void_p, c_void_p)),
    "headrace_sample": (None, (c_void_p,)),
}
"""What is called: name -> (type of the result, types of the arguments)."""


@dataclass(frozen=True, eq=False)
class Library:
    """The loaded library. ``c`` has the functions of :data:`FUNCTIONS` as its attributes."""

    c: ctypes.CDLL

    @property
    def isa(self) -> str:
        """The instruction set in use, one of :data:`~kernels.cpu.build.ISAS`."""
        return str(self.c.headrace_isa().decode())

    def select(self, isa: str) -> bool:
        """Use another instruction set from now on, in this whole process. False, and no change, if this processor or
        this library has none of that name."""
        return bool(self.c.headrace_select_isa(isa.encode()))


@dataclass(frozen=True)
class Missing:
    """There is no library to use. ``reason`` is one line for people, with what helps."""

    reason: str
    wanted: bool = False  # :data:`ISA_ENV` says so


def load() -> Library | None:
    """The library, or None, for which the log has the reason (once). Raises IsaError."""
    found = find()
    if isinstance(found, Library):
        return found
    _tell(found)
    return None


@functools.cache
def find() -> Library | Missing:
    """Look for the library beside this file, once in the life of the process. Raises IsaError."""
    asked = os.environ.get(ISA_ENV, "")
    if asked == NO_LIBRARY:
        return Missing(f"{ISA_ENV} is {NO_LIBRARY}", wanted=True)
    if asked and asked not in ISAS:
        raise IsaError(f"{ISA_ENV}: {asked!r} is none of {', '.join((*ISAS, NO_LIBRARY))}")
    found = open_library(FOLDER / LIBRARY_NAME)
    if isinstance(found, Library) and asked and not found.select(asked):
        raise IsaError(f"{ISA_ENV}: this processor (or this build) has no {asked}; the best is {found.isa}")
    return found


def open_library(path: Path) -> Library | Missing:
    """Load ``path`` if it fits this code, and the sources beside it where they are."""
    if not path.exists():
        return Missing(f"not built; {REMEDY}")
    try:
        c = ctypes.CDLL(str(path))
        for name, (result, arguments) in FUNCTIONS.items():
            function = getattr(c, name)
            function.restype, function.argtypes = result, arguments
            if name == "headrace_abi_version" and (version := function()) != ABI_VERSION:
                return Missing(f"{path} has ABI version {version}, and {ABI_VERSION} is needed; reinstall Headrace")
    except OSError as error:
        return Missing(f"{error}; reinstall Headrace")
    except AttributeError:
        return Missing(f"{path} has no function {name}; reinstall Headrace")
    if sources(path.parent) and c.headrace_sources().decode() != sources_hash(path.parent):
        return Missing(f"{path} is not of the sources beside it; run make, or python -m kernels.cpu.build")
    return Library(c)


@functools.cache
def _tell(missing: Missing) -> None:
    log.log(
        logging.INFO if missing.wanted else logging.WARNING,
        "the CPU runs the torch reference, which is slower than the C++ kernels: %s",
        missing.reason,
    )
