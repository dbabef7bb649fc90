"""LoRA adapters as PEFT keeps them: a folder with ``adapter_config.json`` and ``adapter_model.safetensors``.

Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models", 2021: a linear layer ``W x`` becomes
``W x + scale * B (A x)``. No pickle is read, and no code of the folder is run. What changes more than linear layers of
the decoder's blocks (embeddings, the head, norms, magnitudes of DoRA) is refused, in one line that says why.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn
from transformers.pytorch_utils import Conv1D

from shared.lifecycle import StartupError
from worker.fingerprint import fingerprint
from worker.lora_names import CONFIG, check_folders, refusal

WEIGHTS = "adapter_model.safetensors"

MOST_RANK = 512
"""Of one adapter's matrices. More is another way to say a whole matrix."""

_PREFIX = "base_model.model."
_DOWN, _UP = ".lora_A.weight", ".lora_B.weight"

# Settings of PEFT's LoraConfig under which the adapter is not what is computed here, where they are set.
_REFUSED = {
    "use_dora": "it is a DoRA, which changes the sizes of whole columns",
    "use_qalora": "it is a QALoRA",
    "lora_bias": "its matrices have biases",
    "modules_to_save": "it brings whole layers of its own",
    "target_parameters": "it changes parameters that are no linear layers",
    "trainable_token_indices": "it changes embeddings",
    "layer_replication": "it repeats layers",
    "alora_invocation_tokens": "it begins at certain tokens only (aLoRA)",
    "arrow_config": "it chooses among other adapters (Arrow)",
    "use_bdlora": "its matrices are block-diagonal (BD-LoRA)",
}

_CHANGES_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")
"""Beginnings of PEFT's ``init_lora_weights`` that take from the base model's weights what they give the adapter: as it
was trained it fits no other base. PEFT saves it as one that does, without this setting, if it is asked to
(``path_initial_model_for_weight_conversion``)."""


@dataclass(frozen=True, slots=True, eq=False)
class LowRank:
    """What an adapter adds to one linear layer: ``up @ (down @ x)``."""

    down: torch.Tensor  # [rank, in]
    up: torch.Tensor  # [out, rank]; PEFT's scale is part of it


@dataclass(frozen=True, slots=True, eq=False)
class Adapter:
    name: str
    changes: dict[str, LowRank]  # by the path of the linear layer in the model

    @property
    def rank(self) -> int:
        """The greatest of its matrices."""
        return max(len(change.down) for change in self.changes.values())

    @property
    def fingerprint(self) -> str:
        """Tells its matrices from those of another one under the same name."""
        return fingerprint(
            (f"{path}.{name}", matrix)
            for path, change in sorted(self.changes.items())
            for name, matrix in (("down", change.down), ("up", change.up))
        )


def read_adapter(name: str, path: str, dtype: torch.dtype) -> Adapter:
    """An adapter with its matrices in ``dtype``, on the CPU. Raises StartupError."""
    check_folders({name: path})
    folder = Path(path).expanduser()

    def refuse(reason: str) -> StartupError:
        return refusal(name, path, reason)

    try:
        config = json.loads((folder / CONFIG).read_text())
    except OSError:
        raise refuse(f"it has no {CONFIG} that can be read") from None
    except ValueError:
        raise refuse(f"its {CONFIG} is no JSON") from None
    reason = _unserved(config)
    if reason:
        raise refuse(reason)
    if not (folder / WEIGHTS).is_file():
        pickled = (folder / "adapter_model.bin").exists()
        raise refuse("its weights are a pickle; save it again as safetensors" if pickled else f"it has no {WEIGHTS}")
    try:
        with safe_open(folder / WEIGHTS, framework="pt") as file:
            tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118  it is no dict
    except (OSError, SafetensorError) as error:
        raise refuse(f"its {WEIGHTS} can't be read: {error}") from None
    try:
        changes = _changes(config, tensors, dtype)
    except (ValueError, TypeError) as error:
        raise refuse(str(error)) from None
    return Adapter(name, changes)


def _unserved(config: Any) -> str:
    """Why such an adapter is not served; empty if it is."""
    if not isinstance(config, dict):
        return f"its {CONFIG} is no object"
    if config.get("peft_type") != "LORA":
        return f"it is of the type {config.get('peft_type')!r}; only LORA is served"
    if config.get("bias", "none") != "none":
        return "it changes biases"
    how = config.get("init_lora_weights")
    if isinstance(how, str) and how.lower().startswith(_CHANGES_BASE):
        return f"its initialisation {how!r} has changed the base model's weights; save it converted to plain LoRA"
    return next((reason for setting, reason in _REFUSED.items() if config.get(setting)), "")


def _changes(config: Mapping[str, Any], tensors: Mapping[str, torch.Tensor], dtype: torch.dtype) -> dict[str, LowRank]:
    """Raises ValueError or TypeError, with what is wrong."""
    changes = {}
    paths = {key.removeprefix(_PREFIX).removesuffix(_DOWN) for key in tensors if key.endswith(_DOWN)}
    expected = {f"{_PREFIX}{path}{end}" for path in paths for end in (_DOWN, _UP)}
    if wrong := sorted(set(tensors) ^ expected):
        raise ValueError(f"its weights lack {wrong[0]}" if wrong[0] in expected else f"it has weights for {wrong[0]}")
    if not paths:
        raise ValueError("it has no weights")
    for path in sorted(paths):
        down, up = (tensors[f"{_PREFIX}{path}{end}"] for end in (_DOWN, _UP))
        if down.dim() != 2 or up.dim() != 2 or len(down) != up.shape[1] or not down.is_floating_point():
            raise ValueError(f"its matrices {tuple(down.shape)} and {tuple(up.shape)} for {path} do not fit together")
        if not 1 <= len(down) <= MOST_RANK:
            raise ValueError(f"its rank for {path} is {len(down)}; up to {MOST_RANK} are served")
        if not (down.isfinite().all() and up.isfinite().all()):
            raise ValueError(f"its weights for {path} are not finite")
        scaled = up.double() * _scale(config, path, len(down))  # rounded once
        change = LowRank(down.to(dtype).contiguous(), scaled.to(dtype).contiguous())
        if not (change.down.isfinite().all() and change.up.isfinite().all()):
            raise ValueError(f"its scaled weights for {path} are not finite as {dtype}")
        changes[path] = change
    return changes


def _scale(config: Mapping[str, Any], path: str, rank: int) -> float:
    """PEFT's factor: alpha over the rank, or over its root (rank-stabilised LoRA, Kalajdzievski 2023)."""
    alpha = float(_by_pattern(config.get("alpha_pattern"), path, config.get("lora_alpha", 8)))
    return alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)


def _by_pattern(patterns: Any, path: str, default: Any) -> Any:
    """The value of the first pattern that matches the end of the path, as PEFT chooses it."""
    if patterns and not isinstance(patterns, dict):
        raise ValueError("its alpha_pattern is no object")
    for pattern, value in (patterns or {}).items():
        try:
            if re.match(rf"(.*\.)?({pattern})$", path):
                return value
        except re.error:
            raise ValueError(f"its pattern {pattern!r} is no regular expression") from None
    return default


def check_fits(module: nn.Module, adapters: Sequence[Adapter]) -> None:
    """Whether the model has the linear layers that the adapters change. Raises StartupError."""
    outside: Any = module
    head, base = outside.get_output_embeddings(), outside.base_model
    for adapter in adapters:
        for path, change in adapter.changes.items():
            linear = _at(module, path)
            shape = _shape(linear)
            if linear is head or shape is None or not any(part is linear for part in base.modules()):
                reason = f"{path} is no linear layer in the model's blocks"
            elif shape != (len(change.up), change.down.shape[1]):
                reason = f"its matrices for {path} are for {(len(change.up), change.down.shape[1])}, not for {shape}"
            else:
                continue
            raise StartupError(f"LoRA adapter {adapter.name!r} does not fit the model: {reason}")


def _at(module: nn.Module, path: str) -> nn.Module | None:
    try:
        return module.get_submodule(path)
    except AttributeError:
        return None


def _shape(linear: nn.Module | None) -> tuple[int, int] | None:
    """(outputs, inputs) of a linear layer."""
    if type(linear) is nn.Linear:
        return linear.out_features, linear.in_features
    if isinstance(linear, Conv1D):
        return linear.weight.shape[1], linear.weight.shape[0]
    return None
