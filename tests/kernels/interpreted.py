"""Triton's interpreter, which runs the GPU kernels on the CPU, made to compute as GPUs do. It must be on before triton
is imported for the first time: the tests' own ``conftest.py`` sees to that."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter

assert isinstance(tl.cdiv, interpreter.InterpretedFunction), "triton was imported before its interpreter was turned on"


def _nearest(data: np.ndarray, source: tl.dtype, target: tl.dtype, rounding: object) -> np.ndarray:
    """Bits of numbers in another type, rounded to the nearest as GPUs do: the interpreter's own cuts bfloat16 off, and
    lets a carry run out of an fp8 number's fraction."""
    torch_types = {
        tl.float32: torch.float32,
        tl.float16: torch.float16,
        tl.bfloat16: torch.bfloat16,
        tl.float8e4nv: torch.float8_e4m3fn,
    }
    if source not in torch_types or target not in torch_types:
        return _convert_float(data, source, target, rounding)
    signed = np.ascontiguousarray(data).view(f"int{source.primitive_bitwidth}")
    numbers = torch.from_numpy(signed).view(torch_types[source]).to(torch_types[target])
    bits = numbers.view(getattr(torch, f"int{target.primitive_bitwidth}")).numpy()
    return bits.view(f"uint{target.primitive_bitwidth}").reshape(data.shape)


def _dot(self: interpreter.InterpreterBuilder, a: Any, b: Any, total: Any, *how: object) -> Any:
    """Each element by itself, its products added in order, as a GPU's are: numpy's library adds up a row differently
    by where it stands. (And the interpreter multiplies bfloat16's bits as if they were whole numbers.)"""
    if a.data.ndim != 2 or not a.dtype.scalar.is_floating():
        return _create_dot(self, a, b, total, *how)
    left, right = (_nearest(x.data, x.dtype.scalar, tl.float32, None).view(np.float32) for x in (a, b))
    products = (left[:, :, None] * right[None]).sum(axis=1, dtype=np.float32)
    return interpreter.TensorHandle(products + total.data, total.dtype.scalar)


def _call(self: interpreter.InterpretedFunction, *args: object, **kwargs: object) -> object:
    """One kernel function by another. The interpreter searches the whole language for what to patch, each time; the
    launch has done that already, but for the module that the standard functions use."""
    if self.fn.__globals__.get("core") is tl.core and not _patched:
        _patched.append(interpreter._patch_lang(self.fn))
    return self.rewrite()(*args, **kwargs)


_patched: list[object] = []
_convert_float = interpreter._convert_float
_create_dot = interpreter.InterpreterBuilder.create_dot
interpreter._convert_float = _nearest
interpreter.InterpretedFunction.__call__ = _call
interpreter.InterpreterBuilder.create_dot = _dot
