"""Weights in fewer bits, through torchao: of the linear layers that a step spends its time on, not of the embedding
and the head.

- ``int8``: weights alone, one scale for each output; products in the model's type
- ``int4``: weights alone, one scale and offset for each group of inputs, in the layout of torch's own kernel
- ``fp8`` (e4m3): weights and, row by row as they come, activations; products in fp8
"""

from __future__ import annotations

import importlib.util
from typing import Any

import torch
from torch import nn

from shared.lifecycle import StartupError

SCHEMES = ("int8", "int4", "fp8")

_LEAST_CAPABILITY = {"int8": (7, 5), "int4": (8, 0), "fp8": (8, 9)}
"""Of a card: what its multiplying units must know."""

_GROUPS = (128, 64, 32)
"""Inputs that share a scale in int4: the largest that divides a matrix."""


def check(scheme: str, dtype: torch.dtype, capability: tuple[int, int]) -> None:
    """Before anything is loaded, of a card of that compute capability. Raises StartupError, one line."""
    if importlib.util.find_spec("torchao") is None:
        raise StartupError(f"--quantize {scheme} needs torchao on a GPU: install headrace[gpu]")
    least = _LEAST_CAPABILITY[scheme]
    if capability < least:
        raise StartupError(
            f"--quantize {scheme} needs a GPU of compute capability {least[0]}.{least[1]}; "
            f"this one's is {capability[0]}.{capability[1]}"
        )
    if scheme != "int8" and dtype != torch.bfloat16:
        raise StartupError(f"--quantize {scheme} needs --dtype bfloat16, not {str(dtype).removeprefix('torch.')}")


def quantize(module: nn.Module, scheme: str) -> None:
    """Round, in place, the weights of every linear layer in ``module``. Raises StartupError if one can't be."""
    from torchao.quantization import quantize_

    linears = {name: part for name, part in module.named_modules() if type(part) is nn.Linear}
    if not linears:
        raise StartupError(f"--quantize {scheme}: the model has no linear layers of torch's kind")
    for name, linear in linears.items():
        config = _config(scheme, name, linear)
        quantize_(linear, config, filter_fn=lambda part, _: isinstance(part, nn.Linear))
        if type(linear.weight.data) is torch.Tensor:
            raise StartupError(f"--quantize {scheme}: torchao leaves {name} {_shape(linear)} as it is")


def _config(scheme: str, name: str, linear: nn.Linear) -> Any:
    # What is imported for inductor's settings is not wanted where nothing is compiled.
    from torchao.quantization import (
        Float8DynamicActivationFloat8WeightConfig,
        Int4WeightOnlyConfig,
        Int8WeightOnlyConfig,
        PerRow,
    )

    if scheme == "int8":
        return Int8WeightOnlyConfig(set_inductor_config=False)
    if scheme == "fp8":
        return Float8DynamicActivationFloat8WeightConfig(granularity=PerRow(), set_inductor_config=False)
    group = next((size for size in _GROUPS if linear.in_features % size == 0), None)
    if group is None:
        raise StartupError(f"--quantize int4: {name} {_shape(linear)} has inputs that are no multiple of {_GROUPS[-1]}")
    return Int4WeightOnlyConfig(group_size=group, int4_packing_format="tile_packed_to_4d", set_inductor_config=False)


def _shape(linear: nn.Linear) -> str:
    return f"[{linear.out_features}, {linear.in_features}]"
