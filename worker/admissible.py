"""Which models the paged attention seam can serve: what a config already tells, before any weight is read, and what a
trial pass shows. Every refusal is one line that says why.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import PreTrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from kernels.contract import LayerAttention
from shared.lifecycle import StartupError

_SERVED_LAYER_TYPES = {"full_attention", "sliding_attention"}

# Keyword arguments of an attention call that either are honoured or cannot matter here.
_KNOWN_ARGUMENTS = {
    "attention_mask", "dropout", "scaling", "sliding_window", "softcap", "s_aux", "position_ids", "use_cache",
    "is_causal", "output_attentions", "output_hidden_states", "output_router_logits", "return_dict", "cache_position",
    "labels", "logits_to_keep", "position_embeddings",
}  # fmt: skip


def check_config(name: str, config: PreTrainedConfig) -> None:
    """Raises StartupError for a model that can't be served, as far as its config tells."""

    def refuse(reason: str) -> None:
        raise StartupError(f"model {name!r} ({config.model_type}) can't be served: {reason}")

    if config.is_encoder_decoder:
        refuse("it is an encoder-decoder; only decoder-only models are")
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        refuse("transformers has no causal language model for it")
    if config.get_text_config() is not config:
        refuse("it has parts beside a language model (images, sound); only text models are")
    if getattr(config, "quantization_config", None):
        refuse("its weights are quantised; only float weights are")
    model_class: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    types = set(getattr(config, "layer_types", None) or ()) - _SERVED_LAYER_TYPES
    if types:
        refuse(f"it has layers of type {', '.join(sorted(types))}, which keep a state that is no paged KV cache")
    if getattr(config, "num_kv_shared_layers", 0):
        refuse("its layers share one another's KV cache")
    if not getattr(model_class, "_supports_attention_backend", False):
        refuse(f"{model_class.__name__} does not route its attention through transformers' AttentionInterface")


def rope_limit(config: PreTrainedConfig) -> int | None:
    """The length up to which the model's rotary embedding is a function of a token's position alone.

    ``dynamic`` and ``longrope`` switch to other frequencies once *any* sequence of a batch is longer, which would let
    one request change another's tokens. None: no such limit.
    """
    rope = getattr(config, "rope_parameters", None) or {}
    limits = []
    for parameters in [rope, *(value for value in rope.values() if isinstance(value, dict))]:
        kind = parameters.get("rope_type", "default")
        if "dynamic" in kind:
            limits.append(config.max_position_embeddings)
        elif kind == "longrope":
            limits.append(
                parameters.get("original_max_position_embeddings")
                or getattr(config, "original_max_position_embeddings", None)
                or config.max_position_embeddings
            )
    return min(limits, default=None)


@dataclass(slots=True, eq=False)
class TrialPass:
    """Answers attention calls with zeros and takes down what each layer asks for."""

    name: str
    config: PreTrainedConfig
    layers: list[LayerAttention] = field(default_factory=list)
    shapes: set[tuple[int, int, int]] = field(default_factory=set)  # (heads, key/value heads, head size)

    def __call__(
        self, module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, given: dict[str, Any]
    ) -> torch.Tensor:
        _, heads, tokens, size = query.shape
        unknown = [name for name, what in given.items() if what is not None and name not in _KNOWN_ARGUMENTS]
        if unknown:
            self.refuse(f"its attention takes {', '.join(sorted(unknown))}, which paged attention does not know")
        if given.get("attention_mask") is not None:
            self.refuse("it builds an attention mask of its own")
        if getattr(module, "is_causal", True) is False or given.get("is_causal") is False:
            self.refuse("its attention is not causal")
        if key.shape != (1, key.shape[1], tokens, size) or value.shape != key.shape or heads % key.shape[1]:
            self.refuse(f"queries {tuple(query.shape)}, keys {tuple(key.shape)}, values {tuple(value.shape)} "
                        "do not fit one paged cache")  # fmt: skip
        self.shapes.add((heads, key.shape[1], size))
        scaling = given.get("scaling")
        sinks = given.get("s_aux")
        self.layers.append(
            LayerAttention(
                scaling=size**-0.5 if scaling is None else float(scaling),
                window=given.get("sliding_window"),
                softcap=given.get("softcap"),
                sinks=None if sinks is None else sinks.detach(),
            )
        )
        return torch.zeros((1, tokens, heads, size), dtype=query.dtype, device=query.device)

    def check(self) -> None:
        """After the pass: did every layer come once, and alike?"""
        layers: int = self.config.num_hidden_layers
        if len(self.layers) != layers:
            self.refuse(f"{len(self.layers)} of its {layers} layers have paged attention")
        if len(self.shapes) != 1:
            self.refuse("its layers differ in their numbers of heads or head sizes")
        types = getattr(self.config, "layer_types", None) or []
        for number, (kind, layer) in enumerate(zip(types, self.layers, strict=False)):
            if (kind == "sliding_attention") != (layer.window is not None):
                self.refuse(f"layer {number} is of type {kind}, but asks for a window of {layer.window}")

    def refuse(self, reason: str) -> None:
        raise StartupError(f"model {self.name!r} ({self.config.model_type}) can't be served: {reason}")
