"""Mixture-of-experts layers, expert by expert, with rows that keep their bits whatever is routed beside them.

``transformers``' own implementations group the rows by expert too, but a matrix product's bits there depend on how many
rows an expert happens to get. Here each expert's rows are padded to the fewest that are safe (see
:mod:`worker.linear`), and a token's experts are added up in the order of their numbers.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from kernels.elementwise import aligned_rows
from worker.linear import MIN_ROWS, PackedWeight, can_pack

EXPERTS_NAME = "headrace_experts"


def register() -> None:
    """Make the implementation known to ``transformers`` under :data:`EXPERTS_NAME`."""
    ALL_EXPERTS_FUNCTIONS.register(EXPERTS_NAME, experts_forward)


def experts_forward(
    module: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """``hidden_states`` ``[T, hidden]``, routing ``[T, k]``; what ``transformers`` calls an experts implementation."""
    out = torch.zeros(hidden_states.shape, dtype=top_k_weights.dtype, device=hidden_states.device)
    order = torch.argsort(top_k_index.reshape(-1), stable=True)
    counts = torch.bincount(top_k_index.reshape(-1), minlength=module.num_experts).tolist()
    tokens = order // top_k_index.shape[1]
    weights = top_k_weights.reshape(-1)[order].unsqueeze(-1)
    width, threads = _inner_width(module), torch.get_num_threads()
    start = 0
    for expert, count in enumerate(counts[: module.num_experts]):
        if not count:
            continue
        rows = tokens[start : start + count]
        x = hidden_states[rows]
        fill = aligned_rows(count, MIN_ROWS, [width], threads) - count
        if fill:
            x = torch.cat([x, x.new_zeros(fill, x.shape[1])])
        x = _project(module, "gate_up_proj" if module.has_gate else "up_proj", expert, x)
        x = module._apply_gate(x) if module.has_gate else module.act_fn(x)
        x = _project(module, "down_proj", expert, x)
        if module.has_post_expert_norm:
            x = module.post_expert_norm(x)
        out.index_add_(0, rows, x[:count] * weights[start : start + count])
        start += count
    return out.to(hidden_states.dtype)


def _inner_width(module: Any) -> int:
    name = "gate_up_proj" if module.has_gate else "up_proj"
    packed: list[PackedWeight] | None = getattr(module, f"_packed_{name}", None)
    if packed is not None:
        width = packed[0].out_features
    else:
        width = getattr(module, name).shape[2 if module.is_transposed else 1]
    return width // 2 if module.has_gate else width


def _project(module: Any, name: str, expert: int, x: torch.Tensor) -> torch.Tensor:
    packed: list[PackedWeight] | None = getattr(module, f"_packed_{name}", None)
    if packed is not None:
        return packed[expert](x)
    weight = getattr(module, name)[expert]
    bias = getattr(module, f"{name}_bias")[expert] if module.has_bias else None
    return nn.functional.linear(x, weight.t() if module.is_transposed else weight, bias)


def pack_experts(model: nn.Module) -> None:
    """Prepack, in place, the weights of every experts module in ``model``."""
    for module in model.modules():
        if not hasattr(module, "is_transposed") or not hasattr(module, "has_gate"):
            continue
        for name in ("gate_up_proj", "up_proj", "down_proj"):
            weight = getattr(module, name, None)
            if not isinstance(weight, nn.Parameter) or not can_pack(weight.dtype, weight.device):
                continue
            biases = getattr(module, f"{name}_bias", None) if module.has_bias else None
            packed = [
                PackedWeight(expert.t() if module.is_transposed else expert, None if biases is None else biases[number])
                for number, expert in enumerate(weight)
            ]
            setattr(module, f"_packed_{name}", packed)
            delattr(module, name)
