"""Recognising ``transformers`` models that the C++ decoder (:mod:`kernels.cpu.decoder`) can run, and packing their
weights for it.

A model is told by its parts, not by its name: Llama, Mistral, Qwen2, Qwen3, SmolLM3 and others are made of the same. A
model that has the parts but puts them together in another way (a scaled residual, another rotary layout) is found out
by :func:`agrees`: one pass of each, compared before the model is served.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from kernels.contract import Geometry, LayerAttention, RaggedBatch
from kernels.cpu.attention import CpuAttention, refusal
from kernels.cpu.decoder import CpuDecoder, DecoderLayer, DecoderWeights, PackedMatrix, interleave
from kernels.cpu.library import Library
from worker.attention import answering

_LAYER = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
_ATTENTION = {"q_proj", "k_proj", "v_proj", "o_proj"}
_NORMS = {"q_norm", "k_norm"}
_MLP = {"gate_proj", "up_proj", "down_proj"}

TRIAL_TOKENS = 48
"""Of the pass that is compared: more than a block of keys, and positions far enough apart to see the rotation."""


class NotThisShape(Exception):
    """Why a model is not one that the C++ decoder runs."""


def _need(condition: bool, reason: str) -> None:
    if not condition:
        raise NotThisShape(reason)


def _children(module: nn.Module) -> set[str]:
    return {name for name, child in module.named_children() if next(child.parameters(), None) is not None}


def _eps(norm: Any) -> float:
    _need(type(norm).__name__.endswith("RMSNorm"), f"{type(norm).__name__} is no RMS norm")
    eps = getattr(norm, "variance_epsilon", getattr(norm, "eps", None))
    if not isinstance(eps, float) or norm.weight is None:
        raise NotThisShape("an RMS norm without epsilon or weight")
    return eps


def _activation(mlp: Any) -> str:
    act = getattr(mlp, "act_fn", None)
    name = type(act).__name__
    if name in ("SiLU", "SiLUActivation"):
        return "silu"
    if name in ("GELUTanh", "PytorchGELUTanh"):
        return "gelu_tanh"
    raise NotThisShape(f"the activation {name}")


def check(module: Any, geometry: Geometry, attention: Sequence[LayerAttention], dtype: torch.dtype) -> None:
    """Raises NotThisShape, with the first part that does not fit."""
    reason = refusal(geometry, dtype, torch.device("cpu"))
    _need(not reason, reason)
    base = module.base_model
    _need(_children(module) <= {"model", "lm_head"} and base is not module, "parts beside a decoder and a head")
    _need(_children(base) == {"embed_tokens", "layers", "norm"}, "parts beside an embedding, layers and a norm")
    _need(hasattr(base, "rotary_emb"), "no rotary embedding of its own")
    _need(type(base.embed_tokens) is nn.Embedding, "an embedding of another kind")
    head = module.get_output_embeddings()
    _need(type(head) is nn.Linear and head.bias is None, "a head of another kind")
    _need(all(layer.softcap is None and layer.sinks is None for layer in attention), "soft caps or sinks")
    _need(len({layer.window for layer in attention if layer.window}) <= 1, "windows of several widths")
    eps = _eps(base.norm)
    for layer in base.layers:
        _need(_children(layer) == _LAYER, "a layer of other parts")
        parts = _children(layer.self_attn)
        _need(parts in (_ATTENTION, _ATTENTION | _NORMS), "attention of other parts")
        _need(_children(layer.mlp) == _MLP, "an MLP of other parts")
        _activation(layer.mlp)
        for norm in (layer.input_layernorm, layer.post_attention_layernorm):
            _need(_eps(norm) == eps, "norms of several epsilons")
        for name in parts & _NORMS:
            norm = getattr(layer.self_attn, name)
            _need(_eps(norm) == eps and norm.weight.shape == (geometry.head_dim,), "norms over more than a head")
        linears = [getattr(layer.self_attn, name) for name in _ATTENTION] + [getattr(layer.mlp, name) for name in _MLP]
        _need(all(type(linear) is nn.Linear for linear in linears), "projections of another kind")
        _need(all(linear.in_features % 16 == 0 for linear in linears), "widths that are no multiple of 16")
    _need(base.embed_tokens.embedding_dim % 16 == 0, "a width that is no multiple of 16")
    _need(base.layers[0].mlp.gate_proj.out_features % 16 == 0, "an inner width that is no multiple of 16")


def pack(library: Library, module: Any, dtype: torch.dtype, quantize: bool = False) -> DecoderWeights:
    """The weights of a model that :func:`check` has passed, layer by layer: each layer's own are let go at once.

    The module has no weights in its layers after this.
    """
    base = module.base_model
    head = module.get_output_embeddings()
    tied = head.weight.data_ptr() == base.embed_tokens.weight.data_ptr() and not quantize
    embedding = None if tied else base.embed_tokens.weight.detach().contiguous()
    layers = []
    inner = base.layers[0].mlp.gate_proj.out_features
    hidden = base.embed_tokens.embedding_dim
    activation = _activation(base.layers[0].mlp)
    for layer in base.layers:
        attention, mlp = layer.self_attn, layer.mlp
        projections = [attention.q_proj, attention.k_proj, attention.v_proj]
        halves = [mlp.gate_proj, mlp.up_proj]
        both = interleave(*(half.weight.detach() for half in halves))
        bias = _biases(halves)
        norms = [getattr(attention, name, None) for name in ("q_norm", "k_norm")]
        layers.append(
            DecoderLayer(
                qkv=PackedMatrix(
                    library,
                    torch.cat([p.weight.detach() for p in projections]),
                    _joined(_biases(projections)),
                    quantize,
                ),
                out=PackedMatrix(library, attention.o_proj.weight, attention.o_proj.bias, quantize),
                gate_up=PackedMatrix(library, both, None if bias is None else interleave(*bias), quantize),
                down=PackedMatrix(library, mlp.down_proj.weight, mlp.down_proj.bias, quantize),
                attention_norm=layer.input_layernorm.weight.detach().contiguous(),
                mlp_norm=layer.post_attention_layernorm.weight.detach().contiguous(),
                query_norm=None if norms[0] is None else norms[0].weight.detach().contiguous(),
                key_norm=None if norms[1] is None else norms[1].weight.detach().contiguous(),
                rotary=bool(getattr(attention, "use_rope", True)),
            )
        )
        for linear in (*projections, *halves, attention.o_proj, mlp.down_proj):
            linear.weight = None
    return DecoderWeights(
        layers=layers,
        embedding=embedding,
        final_norm=base.norm.weight.detach().contiguous(),
        head=PackedMatrix(library, head.weight, None, quantize),
        hidden=hidden,
        inner=inner,
        eps=_eps(base.norm),
        activation=activation,
        dtype=dtype,
        vocab_size=base.embed_tokens.num_embeddings,
    )


def _biases(linears: Sequence[nn.Linear]) -> list[torch.Tensor] | None:
    if all(linear.bias is None for linear in linears):
        return None
    return [
        linear.weight.new_zeros(linear.out_features) if linear.bias is None else linear.bias.detach()
        for linear in linears
    ]


def _joined(parts: list[torch.Tensor] | None) -> torch.Tensor | None:
    return None if parts is None else torch.cat(parts)


def rotations(rotary: Any, positions: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin ``[positions, rotated dimensions / 2]``, as the model itself computes them. Raises NotThisShape."""
    x = torch.empty((1, 1, 1), dtype=dtype)
    with torch.inference_mode():
        cos, sin = rotary(x, torch.arange(positions)[None])
    half = cos.shape[-1] // 2
    _need(cos.dim() == 3 and cos.shape[-1] % 2 == 0, "a rotary embedding of another shape")
    _need(torch.equal(cos[..., :half], cos[..., half:]), "a rotary embedding whose halves differ")
    return cos[0, :, :half].clone(), sin[0, :, :half].clone()


# --- does it say the same? -------------------------------------------------------------------------------------------


def _trial_tokens(vocab_size: int) -> torch.Tensor:
    return (7 + 97 * torch.arange(TRIAL_TOKENS)) % vocab_size


def _dense_attention(
    module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, given: dict[str, Any]
) -> torch.Tensor:
    """Answers attention calls of one sequence, shorter than any window that matters here, with torch's own."""
    group = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(group, dim=1), value.repeat_interleave(group, dim=1)
    place = torch.arange(query.shape[2])
    seen = place[None, :] <= place[:, None]
    if given.get("sliding_window"):
        seen &= place[None, :] > place[:, None] - given["sliding_window"]
    out = nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=seen, scale=given.get("scaling"))
    return out.transpose(1, 2).contiguous()


def trial_logits(module: Any, geometry: Geometry) -> torch.Tensor:
    """``[TRIAL_TOKENS, vocabulary]``: what the module itself makes of the trial's tokens."""
    tokens = _trial_tokens(module.get_input_embeddings().num_embeddings)
    positions = torch.arange(TRIAL_TOKENS)[None]
    with torch.inference_mode(), answering(_dense_attention):
        return module(input_ids=tokens[None], position_ids=positions, use_cache=False).logits[0]  # type: ignore[no-any-return]


def difference(
    library: Library,
    weights: DecoderWeights,
    geometry: Geometry,
    attention: Sequence[LayerAttention],
    rotations: Callable[[int], tuple[torch.Tensor, torch.Tensor]],
    wanted: torch.Tensor,
) -> float:
    """How far the C++ decoder's logits are from ``wanted``: the norm of what differs over the norm of their spread."""
    kernel = CpuAttention(library, geometry, weights.dtype)
    pages = -(-TRIAL_TOKENS // geometry.block_size)
    caches = [kernel.allocate(pages + 1) for _ in attention]
    runner = CpuDecoder(library, weights, geometry, attention, caches, *rotations(TRIAL_TOKENS))
    tokens = _trial_tokens(weights.vocab_size).numpy()
    place = np.arange(TRIAL_TOKENS, dtype=np.int64)
    table = np.arange(1, pages + 1, dtype=np.int32)[None]
    batch = RaggedBatch(np.array([0, TRIAL_TOKENS]), place + 1, table, place + geometry.block_size)
    got, want = runner.forward(tokens, place, batch, place).double(), wanted.double()[:, : weights.vocab_size]
    spread = want - want.mean(dim=-1, keepdim=True)
    return float((got - want).norm() / spread.norm().clamp_min(1e-30))


def tolerance(dtype: torch.dtype, quantized: bool) -> float:
    """What :func:`difference` stays below if the two compute the same. Measured: bfloat16 1 to 3 %, float32 1e-6."""
    if quantized:
        return 0.3
    return 0.1 if dtype == torch.bfloat16 else 1e-3
