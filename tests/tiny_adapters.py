"""Random LoRA adapters for tiny models, in PEFT's layout, and the models that merging one makes."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.pytorch_utils import Conv1D

EVERY_PROJECTION = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def make_adapter(
    folder: Path, model: Path, targets: tuple[str, ...] = EVERY_PROJECTION, *, rank: int = 4, seed: int = 0,
    size: float = 0.3, ranks: dict[str, int] | None = None, **config: Any,
) -> Path:  # fmt: skip
    """Write an adapter that changes each linear layer of ``model`` whose name is in ``targets``; returns the folder.

    ``size``: standard deviation of its numbers. ``ranks``: by a layer's name, where it is not ``rank``.
    """
    folder.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for path, linear in AutoModelForCausalLM.from_pretrained(model).named_modules():
        name = path.rpartition(".")[2]
        if name not in targets:
            continue
        outputs, inputs = linear.weight.shape[::-1] if isinstance(linear, Conv1D) else linear.weight.shape
        count = (ranks or {}).get(name, rank)
        for part, shape in (("A", (count, inputs)), ("B", (outputs, count))):
            tensors[f"base_model.model.{path}.lora_{part}.weight"] = size * torch.randn(shape, generator=generator)
    save_file(tensors, folder / "adapter_model.safetensors")
    settings = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "target_modules": list(targets), "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps({**settings, **config}))
    return folder


def merged_model(model: Path, adapter: Path | None, dtype: torch.dtype = torch.float64) -> Any:
    """The model with the adapter's changes added to its weights. Knows alpha and rank, no patterns."""
    merged = AutoModelForCausalLM.from_pretrained(model, dtype=dtype)
    if adapter is None:
        return merged
    config = json.loads((adapter / "adapter_config.json").read_text())
    tensors = load_file(adapter / "adapter_model.safetensors")
    for key in [key for key in tensors if "lora_A" in key]:
        down, up = tensors[key].double(), tensors[key.replace("lora_A", "lora_B")].double()
        root = math.sqrt(len(down)) if config.get("use_rslora") else len(down)
        change = config["lora_alpha"] / root * up @ down
        linear: nn.Module = merged.get_submodule(key.removeprefix("base_model.model.").removesuffix(".lora_A.weight"))
        with torch.no_grad():
            linear.weight += (change.t() if isinstance(linear, Conv1D) else change).to(dtype)  # type: ignore[operator]
    return merged
