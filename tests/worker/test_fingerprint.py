"""Whether weights under one name are told from others."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tiny_adapters import make_adapter

from kernels.cpu.library import Library, find
from shared.capacity import Capacity
from worker.torch_runner import TorchRunner


def told(folder: Path, **how: Any) -> Capacity:
    return TorchRunner.load(folder, num_blocks=8, **how).capacity


def test_the_same_weights_say_the_same_and_others_something_else(
    tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    folders = {name: make_adapter(tmp_path / name, tiny_model("llama"), seed=seed) for seed, name in enumerate("ab")}
    first = told(tiny_model("llama"), adapters={"x": str(folders["a"]), "y": str(folders["b"])})
    again = told(tiny_model("llama"), adapters={"x": str(folders["b"]), "y": str(folders["b"])})
    assert first.weights and first.weights == again.weights
    assert first.weights != told(tiny_model("llama", seed=1)).weights
    assert first.adapter_weights[1] == again.adapter_weights[0] == again.adapter_weights[1]
    assert first.adapter_weights[0] != again.adapter_weights[0]


@pytest.mark.skipif(not isinstance(find(), Library), reason="int8 takes the C++ library")
def test_rounded_weights_are_others(tiny_model: Callable[..., Path]) -> None:
    """Their KV blocks hold other numbers in the same type."""
    plain, rounded = (
        told(tiny_model("llama", hidden_size=64), dtype="bfloat16", quantize=how) for how in ("none", "int8")
    )
    assert (plain.dtype, plain.kv_dtype) == (rounded.dtype, rounded.kv_dtype)
    assert plain.weights != rounded.weights
