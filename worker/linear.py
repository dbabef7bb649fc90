"""Matrix products whose rows keep their bits whatever rows stand beside them, and that are quick on a CPU.

oneDNN with prepacked weights gives a row the same bits at every row count from 2 on (a single row takes another path);
MKL, behind ``torch.nn.functional.linear`` in float32, splits sums differently for few rows. So on a CPU every linear
layer is replaced by :class:`PackedLinear`, and the runner fills its rows up (see :mod:`worker.row_widths` too).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

MIN_ROWS = 4
"""Rows of a matrix product are filled up to this, and to a multiple of it."""


def can_pack(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether oneDNN runs this type natively here."""
    if device.type != "cpu" or not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    if dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    if dtype == torch.float16:
        return bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())
    return dtype == torch.float32


class PackedWeight:
    """A ``[out, in]`` weight in oneDNN's blocked layout."""

    __slots__ = ("bias", "out_features", "packed")

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self.out_features = weight.shape[0]
        self.packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach().contiguous())
        self.bias = None if bias is None else bias.detach()

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """``[..., in]`` to ``[..., out]``."""
        return torch.ops.mkldnn._linear_pointwise(x, self.packed, self.bias, "none", [], "")  # type: ignore[no-any-return]


class PackedLinear(nn.Module):
    """Stands in for ``nn.Linear`` and ``Conv1D``."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self._weight = PackedWeight(weight, bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._weight(x)


class _RoutedWeight(torch.Tensor):
    """A weight that answers ``torch.nn.functional.linear`` with its packed form: for routers, which call it."""

    packed: PackedWeight

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func is nn.functional.linear and len(args) >= 2 and isinstance(args[1], cls):
            x, weight = args[:2]
            bias = args[2] if len(args) > 2 else kwargs.get("bias")
            if x.dtype == weight.dtype:
                out = weight.packed(x)
                return out if bias is None else out + bias
        return super().__torch_function__(func, types, args, kwargs)  # type: ignore[no-untyped-call]


def with_hooks_of(replaced: nn.Module, replacement: nn.Module) -> nn.Module:
    """``replacement`` with what is done before and after ``replaced`` (see :mod:`worker.parallel.sharding`)."""
    replacement._forward_pre_hooks = replaced._forward_pre_hooks
    replacement._forward_hooks = replaced._forward_hooks
    return replacement


def pack_linears(model: nn.Module) -> None:
    """Replace, in place, every linear layer's weight by its packed form, and those of routers too."""
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if type(child) is nn.Linear:
                setattr(module, name, with_hooks_of(child, PackedLinear(child.weight, child.bias)))
            elif isinstance(child, Conv1D):
                setattr(module, name, with_hooks_of(child, PackedLinear(child.weight.t(), child.bias)))
        weight = getattr(module, "weight", None)
        if "Router" in type(module).__name__ and isinstance(weight, nn.Parameter) and weight.dim() == 2:
            routed = weight.detach().as_subclass(_RoutedWeight)
            routed.packed = PackedWeight(weight)
            del module.weight
            module.weight = routed
