"""Triton's interpreter runs the GPU kernels on the CPU: it must be on before triton is imported for the first time."""

from __future__ import annotations

import os

os.environ["TRITON_INTERPRET"] = "1"

import triton.language as tl
from triton.runtime.interpreter import InterpretedFunction

assert isinstance(tl.cdiv, InterpretedFunction), "triton was imported before its interpreter was turned on"
