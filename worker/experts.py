"""Mixture-of-experts layers, expert by expert, with rows that keep their bits whatever is routed beside them.

``transformers``' own implementations group the rows by expert too, but a matrix product's bits there depend on how many
rows an expert happens to get. Here each expert's rows are padded to the fewest that are safe (see
:mod:`worker.linear`), and a token's experts are added up in the order of their numbers.

That loop waits for the routing, which a GPU's step may not do. There, a step of few tokens takes every token through
every expert and picks what was routed (the weights must all be read anyway once most experts have a token), and a
larger one goes through ``transformers``' grouped products where torch has a kernel for them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, grouped_mm_experts_forward

from kernels.elementwise import aligned_rows
from worker.linear import MIN_ROWS, PackedWeight, can_pack

EXPERTS_NAME = "headrace_experts"

STATIC_TOKENS = 64
"""Up to so many tokens a GPU takes through all experts. Memory, not arithmetic, still bounds it (the ridge of an A100
in bf16 lies at 153 tokens, of an H100 at 295)."""


def register() -> None:
    """Make the implementation known to ``transformers`` under :data:`EXPERTS_NAME`."""
    ALL_EXPERTS_FUNCTIONS.register(EXPERTS_NAME, experts_forward)


def experts_forward(
    module: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """``hidden_states`` ``[T, hidden]``, routing ``[T, k]``; what ``transformers`` calls an experts implementation."""
    if hidden_states.device.type != "cpu":
        if len(hidden_states) <= STATIC_TOKENS:
            return through_all(module, hidden_states, top_k_index, top_k_weights)
        if runs_grouped(module):
            return grouped_mm_experts_forward(module, hidden_states, top_k_index, top_k_weights)
    return one_by_one(module, hidden_states, top_k_index, top_k_weights)


def is_experts(module: nn.Module) -> bool:
    """Whether it is what ``transformers`` asks an experts implementation to run."""
    return hasattr(module, "is_transposed") and hasattr(module, "has_gate")


def runs_grouped(module: Any) -> bool:
    """Whether torch multiplies grouped rows in a kernel that doesn't wait for their numbers."""
    weight = module.down_proj
    if weight.device.type != "cuda" or weight.dtype != torch.bfloat16:
        return False
    return torch.cuda.get_device_capability(weight.device) >= (9, 0)


def through_all(
    module: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """Sizes depend on nothing but the number of tokens; a token's experts are added up in the order of its routing."""
    x = _project_all(module, "gate_up_proj" if module.has_gate else "up_proj", hidden_states.unsqueeze(0))
    x = module._apply_gate(x) if module.has_gate else module.act_fn(x)
    x = _project_all(module, "down_proj", x)
    if getattr(module, "has_post_expert_norm", False):  # transformers 5.17 has no such
        x = module.post_expert_norm(x)
    token = torch.arange(len(hidden_states), device=x.device).unsqueeze(1)
    routed = x[top_k_index, token] * top_k_weights.unsqueeze(-1)  # [T, k, hidden]
    return routed.sum(dim=1).to(hidden_states.dtype)


def _project_all(module: Any, name: str, x: torch.Tensor) -> torch.Tensor:
    """``[1 or experts, T, in]`` to ``[experts, T, out]``."""
    weight = getattr(module, name)
    x = x.expand(len(weight), -1, -1)
    product = torch.bmm(x, weight if module.is_transposed else weight.transpose(1, 2))
    return product + getattr(module, f"{name}_bias").unsqueeze(1) if module.has_bias else product


def one_by_one(
    module: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """Each expert's rows by themselves."""
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
        if getattr(module, "has_post_expert_norm", False):  # transformers 5.17 has no such
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
        if not is_experts(module):
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
