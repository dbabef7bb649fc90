"""GPUs and models as the step-time model and the capacity arithmetic see them: a few numbers each.

GPU figures are the makers' dense bf16 peak and memory bandwidth; memory is what the device reports as usable. A model
is known by name or read from its ``config.json`` (dense decoder-only models).
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

GIB = 1 << 30


class UnknownHardware(ValueError):
    """No such GPU or model, or a config.json that cannot be read as a dense decoder."""


@dataclass(frozen=True)
class Gpu:
    name: str
    flops: float  # dense bf16, per second
    bandwidth: float  # bytes of device memory per second
    memory: float  # usable bytes
    nominal_gb: int  # as sold, 10**9 bytes


GPUS = {
    gpu.name: gpu
    for gpu in (
        Gpu("a100-40", 312e12, 1.555e12, 40 * GIB, 40),
        Gpu("a100-80", 312e12, 2.039e12, 80 * GIB, 80),
        Gpu("h100", 989e12, 3.35e12, 79.6 * GIB, 80),
        Gpu("h200", 989e12, 4.8e12, 139 * GIB, 141),
    )
}


@dataclass(frozen=True)
class ModelShape:
    name: str
    params: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab_size: int
    max_model_len: int
    bytes_per_value: int = 2

    @property
    def weight_bytes(self) -> int:
        return self.params * self.bytes_per_value

    @property
    def kv_bytes_per_token(self) -> int:
        """Keys and values of one token in every layer."""
        return 2 * self.layers * self.kv_heads * self.head_dim * self.bytes_per_value

    @property
    def attention_flops(self) -> int:
        """Of one token, for each token of its context: a product with the keys and one with the values."""
        return 4 * self.layers * self.heads * self.head_dim


_UNGATED = {"opt", "gpt2", "gpt_neox", "gptj", "gpt_neo", "phi", "falcon", "starcoder2"}
"""Model types whose MLP has two matrices; the others have a gate as third."""


def shape_of_config(config: dict[str, Any], name: str) -> ModelShape:
    """Read a Hugging Face ``config.json``. Raises UnknownHardware for mixtures of experts and missing fields."""
    config = config.get("text_config", config)
    if any(config.get(key) for key in ("num_local_experts", "num_experts", "n_routed_experts")):
        raise UnknownHardware(f"{name}: mixtures of experts are not modelled")
    try:
        hidden = int(config.get("hidden_size") or config["n_embd"])
        layers = int(config.get("num_hidden_layers") or config["n_layer"])
        heads = int(config.get("num_attention_heads") or config["n_head"])
        vocab_size = int(config["vocab_size"])
        inner = int(config.get("intermediate_size") or config.get("ffn_dim") or config.get("n_inner") or 4 * hidden)
        longest = int(config.get("max_position_embeddings") or config.get("n_positions") or 2048)
    except (KeyError, TypeError, ValueError) as error:
        raise UnknownHardware(f"{name}: not a decoder's config.json ({error} is missing or no number)") from None
    kv_heads = int(config.get("num_key_value_heads") or heads)
    head_dim = int(config.get("head_dim") or hidden // heads)
    matrices = 2 if config.get("model_type") in _UNGATED else 3
    layer = hidden * head_dim * (2 * heads + 2 * kv_heads) + matrices * hidden * inner + 2 * hidden
    embeddings = vocab_size * hidden * (1 if config.get("tie_word_embeddings") else 2)
    dtype = str(config.get("torch_dtype") or config.get("dtype") or "bfloat16")
    return ModelShape(
        name, layers * layer + embeddings + hidden, layers, heads, kv_heads, head_dim, vocab_size, longest,
        4 if dtype == "float32" else 2,
    )  # fmt: skip


def _llama(
    name: str, layers: int, hidden: int, inner: int, heads: int, kv_heads: int, vocab: int, length: int
) -> ModelShape:
    return shape_of_config(
        {
            "hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": heads,
            "num_key_value_heads": kv_heads, "intermediate_size": inner, "vocab_size": vocab,
            "max_position_embeddings": length,
        },
        name,
    )  # fmt: skip


MODELS = {
    model.name: model
    for model in (
        _llama("llama-2-7b", 32, 4096, 11008, 32, 32, 32000, 4096),
        _llama("llama-2-13b", 40, 5120, 13824, 40, 40, 32000, 4096),
        _llama("llama-3.1-8b", 32, 4096, 14336, 32, 8, 128256, 131072),
        _llama("llama-3.1-70b", 80, 8192, 28672, 64, 8, 128256, 131072),
        _llama("qwen2.5-7b", 28, 3584, 18944, 28, 4, 152064, 32768),
        ModelShape("opt-13b", 12_853_473_280, 40, 40, 40, 128, 50272, 2048),
    )
}


def gpu_named(name: str) -> Gpu:
    try:
        return GPUS[name.lower()]
    except KeyError:
        raise UnknownHardware(f"unknown GPU {name!r}; known: {', '.join(GPUS)}") from None


def model_named(name: str) -> ModelShape:
    """A model by name, or from a ``config.json`` (or the folder that holds one)."""
    if name.lower() in MODELS:
        return MODELS[name.lower()]
    path = Path(name)
    if path.is_dir():
        path = path / "config.json"
    if not path.is_file():
        raise UnknownHardware(f"unknown model {name!r}: neither a config.json nor one of {', '.join(MODELS)}")
    try:
        config = json.loads(path.read_text("utf-8"))
    except OSError as error:
        raise UnknownHardware(f"{path}: {error.strerror or error}") from None
    except ValueError as error:
        raise UnknownHardware(f"{path} is no config.json: {error}") from None
    if not isinstance(config, dict) or not isinstance(config.get("text_config", {}), dict):
        raise UnknownHardware(f"{path} is no config.json: not a JSON object")
    return shape_of_config(config, path.parent.name if path.name == "config.json" else path.stem)


@dataclass(frozen=True)
class Deployment:
    """A model on ``tp`` GPUs that share each layer (tensor parallelism)."""

    model: ModelShape
    gpu: Gpu
    tp: int = 1
    memory_share: float = 0.9  # of each card that is used at all
    activations: float = 1.5e9  # bytes of each card for activations and the runtime

    def __post_init__(self) -> None:
        """Raises UnknownHardware if so many GPUs cannot share the model."""
        if self.tp < 1 or self.model.heads % self.tp:
            raise UnknownHardware(
                f"--tp {self.tp}: the {self.model.heads} attention heads of {self.model.name} cannot be shared evenly "
                f"by so many GPUs"
            )

    @property
    def kv_bytes(self) -> float:
        """What is left for the KV cache over all cards."""
        return self.tp * (self.memory_share * self.gpu.memory - self.activations) - self.model.weight_bytes

    @property
    def kv_tokens(self) -> int:
        """Raises UnknownHardware if the weights alone do not fit."""
        if self.kv_bytes < self.model.kv_bytes_per_token:
            raise UnknownHardware(
                f"{self.model.name} ({self.model.weight_bytes / 1e9:.1f} GB of weights) does not fit {self.tp} x "
                f"{self.gpu.name}: give more GPUs with --tp"
            )
        return int(self.kv_bytes // self.model.kv_bytes_per_token)
