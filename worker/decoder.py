"""Recognising ``transformers`` models of the one shape that is run without their own code, by the C++ decoder
(:mod:`kernels.cpu.decoder`) or a GPU's (:mod:`worker.device.decoder`), and packing their weights for the former.

A model is told by its parts, not by its name: Llama, Mistral, Qwen2, Qwen3, SmolLM3 and others are made of the same. A
model that has the parts but puts them together in another way (a scaled residual, another rotary layout) is found out
by :mod:`worker.decoder_trial`: one pass of each, compared before the model is served.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from kernels.contract import Geometry, LayerAttention
from kernels.cpu.attention import refusal
from kernels.cpu.decoder import DecoderLayer, DecoderWeights, PackedMatrix, WeightMemory, interleave
from kernels.cpu.library import Library
from worker.heap import give_back

_LAYER = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
_ATTENTION = {"q_proj", "k_proj", "v_proj", "o_proj"}
_NORMS = {"q_norm", "k_norm"}
_MLP = {"gate_proj", "up_proj", "down_proj"}

Rotations = tuple[torch.Tensor, torch.Tensor]
"""cos and sin ``[positions, rotated dimensions / 2]``."""


class NotThisShape(Exception):
    """Why a model is not one that a decoder of ours runs."""


def _need(condition: bool, reason: str) -> None:
    if not condition:
        raise NotThisShape(reason)


def _children(module: nn.Module) -> set[str]:
    return {name for name, child in module.named_children() if next(child.parameters(), None) is not None}


def norm_epsilon(norm: Any) -> float:
    """Raises NotThisShape for what is no RMS norm with a weight."""
    _need(type(norm).__name__.endswith("RMSNorm"), f"{type(norm).__name__} is no RMS norm")
    eps = getattr(norm, "variance_epsilon", getattr(norm, "eps", None))
    if not isinstance(eps, float) or norm.weight is None:
        raise NotThisShape("an RMS norm without epsilon or weight")
    return eps


def _like(module: nn.Module, dtype: torch.dtype) -> bool:
    return all(weight.dtype == dtype for weight in module.parameters())


def activation_of(mlp: Any) -> str:
    """``silu`` or ``gelu_tanh``. Raises NotThisShape."""
    act = getattr(mlp, "act_fn", None)
    name = type(act).__name__
    if name in ("SiLU", "SiLUActivation"):
        return "silu"
    if name in ("GELUTanh", "PytorchGELUTanh"):
        return "gelu_tanh"
    raise NotThisShape(f"the activation {name}")


def check(module: Any, geometry: Geometry, attention: Sequence[LayerAttention], dtype: torch.dtype) -> None:
    """Whether the C++ decoder can run it. Raises NotThisShape, with the first part that does not fit."""
    reason = refusal(geometry, dtype, torch.device("cpu"))
    _need(not reason, reason)
    check_shape(module, geometry, attention, dtype)
    _need(len({layer.window for layer in attention if layer.window}) <= 1, "windows of several widths")
    base = module.base_model
    inner = base.layers[0].mlp.gate_proj.out_features
    _need(base.embed_tokens.embedding_dim % 16 == 0 and inner % 16 == 0, "widths that are no multiple of 16")


def check_shape(module: Any, geometry: Geometry, attention: Sequence[LayerAttention], dtype: torch.dtype) -> None:
    """Whether a model has the parts of the one shape, whatever the device. Raises NotThisShape, as :func:`check`."""
    base = module.base_model
    _need(_children(module) <= {"model", "lm_head"} and base is not module, "parts beside a decoder and a head")
    _need(_children(base) == {"embed_tokens", "layers", "norm"}, "parts beside an embedding, layers and a norm")
    _need(hasattr(base, "rotary_emb"), "no rotary embedding of its own")
    _need(type(base.embed_tokens) is nn.Embedding, "an embedding of another kind")
    head = module.get_output_embeddings()
    _need(type(head) is nn.Linear and head.bias is None, "a head of another kind")
    _need(head.out_features == base.embed_tokens.num_embeddings, "a head of other rows than the embedding")
    _need(_like(module, dtype), f"weights that are not in {str(dtype).removeprefix('torch.')}")
    _need(len(base.layers) == len(attention), "layers without attention of their own")
    _need(all(layer.softcap is None and layer.sinks is None for layer in attention), "soft caps or sinks")
    eps = norm_epsilon(base.norm)
    for layer in base.layers:
        _need(_children(layer) == _LAYER, "a layer of other parts")
        parts = _children(layer.self_attn)
        _need(parts in (_ATTENTION, _ATTENTION | _NORMS), "attention of other parts")
        _need(_children(layer.mlp) == _MLP, "an MLP of other parts")
        _need(activation_of(layer.mlp) == activation_of(base.layers[0].mlp), "several activations")
        for norm in (layer.input_layernorm, layer.post_attention_layernorm):
            _need(norm_epsilon(norm) == eps, "norms of several epsilons")
        for name in parts & _NORMS:
            norm = getattr(layer.self_attn, name)
            fits = norm_epsilon(norm) == eps and norm.weight.shape == (geometry.head_dim,)
            _need(fits, "norms over more than a head")
        inner = base.layers[0].mlp.gate_proj.out_features
        _check_projections(layer, base.embed_tokens.embedding_dim, inner, geometry)


def _check_projections(layer: Any, hidden: int, inner: int, geometry: Geometry) -> None:
    """What a decoder takes for granted of a layer's products: wrong, and the C++ one would read past their ends."""
    queries, keys = geometry.num_heads * geometry.head_dim, geometry.num_kv_heads * geometry.head_dim
    attention, mlp = layer.self_attn, layer.mlp
    wanted = {
        attention.q_proj: (queries, hidden),
        attention.k_proj: (keys, hidden),
        attention.v_proj: (keys, hidden),
        attention.o_proj: (hidden, queries),
        mlp.gate_proj: (inner, hidden),
        mlp.up_proj: (inner, hidden),
        mlp.down_proj: (hidden, inner),
    }
    for linear, shape in wanted.items():
        _need(type(linear) is nn.Linear, "projections of another kind")
        _need(linear.weight.shape == shape, "projections of other shapes")


class _Joint:
    """A packed matrix of several linear layers, which are given the same rows one after the other: multiplied once."""

    def __init__(self, matrix: PackedMatrix, layers: int) -> None:
        self._matrix, self._layers = matrix, layers
        self._rows: torch.Tensor | None = None  # of the last product, as long as not every layer has come for it
        self._product = torch.empty(0)
        self._left = 0

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """``[..., in]`` to ``[rows, out]``, of all layers."""
        if self._rows is not x:
            self._product, self._left = self._matrix(x.flatten(0, -2)), self._layers
        product, self._left = self._product, self._left - 1
        self._rows = x if self._left else None
        if not self._left:
            self._product = torch.empty(0)
        return product


class _StandIn(nn.Module):
    """Some rows of a packed matrix in place of the linear layer that they come from."""

    def __init__(self, matrix: _Joint, rows: torch.Tensor) -> None:
        super().__init__()
        self._matrix, self._rows = matrix, rows

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._matrix(x)[:, self._rows].view(*x.shape[:-1], -1)


def pack(library: Library, module: Any, dtype: torch.dtype, quantize: bool = False) -> DecoderWeights:
    """The weights of a model that :func:`check` has passed, layer by layer: each layer's own are let go at once.

    The module stays able to run, with the packed matrices in the places of its linear layers.
    """
    base = module.base_model
    head = module.get_output_embeddings()
    tied = head.weight.data_ptr() == base.embed_tokens.weight.data_ptr() and not quantize
    embedding = None if tied else base.embed_tokens.weight.detach().contiguous()
    memory = WeightMemory(library)
    layers = []
    inner = base.layers[0].mlp.gate_proj.out_features
    hidden = base.embed_tokens.embedding_dim
    activation = activation_of(base.layers[0].mlp)
    for layer in base.layers:
        attention, mlp = layer.self_attn, layer.mlp
        projections = [attention.q_proj, attention.k_proj, attention.v_proj]
        halves = [mlp.gate_proj, mlp.up_proj]
        both = interleave(*(half.weight.detach() for half in halves))
        bias = biases(halves)
        norms = [getattr(attention, name, None) for name in ("q_norm", "k_norm")]
        qkv = PackedMatrix(
            library,
            torch.cat([p.weight.detach() for p in projections]),
            joined(biases(projections)),
            quantize,
            memory,
        )
        out = PackedMatrix(library, attention.o_proj.weight, attention.o_proj.bias, quantize, memory)
        gate_up = PackedMatrix(library, both, None if bias is None else interleave(*bias), quantize, memory)
        down = PackedMatrix(library, mlp.down_proj.weight, mlp.down_proj.bias, quantize, memory)
        layers.append(
            DecoderLayer(
                qkv=qkv,
                out=out,
                gate_up=gate_up,
                down=down,
                attention_norm=layer.input_layernorm.weight.detach().contiguous(),
                mlp_norm=layer.post_attention_layernorm.weight.detach().contiguous(),
                query_norm=None if norms[0] is None else norms[0].weight.detach().contiguous(),
                key_norm=None if norms[1] is None else norms[1].weight.detach().contiguous(),
                rotary=bool(getattr(attention, "use_rope", True)),
            )
        )
        rows = torch.split(torch.arange(qkv.struct.n), [p.out_features for p in projections])
        three, two = _Joint(qkv, 3), _Joint(gate_up, 2)
        attention.q_proj, attention.k_proj, attention.v_proj = (_StandIn(three, part) for part in rows)
        attention.o_proj, mlp.down_proj = (_StandIn(_Joint(one, 1), torch.arange(hidden)) for one in (out, down))
        place = interleave(torch.arange(inner), inner + torch.arange(inner)).argsort()
        mlp.gate_proj, mlp.up_proj = (_StandIn(two, half) for half in torch.split(place, inner))
        del projections, halves, both
        give_back()
    packed_head = PackedMatrix(library, head.weight, None, quantize, memory)
    module.set_output_embeddings(_StandIn(_Joint(packed_head, 1), torch.arange(head.out_features)))
    return DecoderWeights(
        layers=layers,
        embedding=embedding,
        final_norm=base.norm.weight.detach().contiguous(),
        head=packed_head,
        hidden=hidden,
        inner=inner,
        eps=norm_epsilon(base.norm),
        activation=activation,
        dtype=dtype,
        vocab_size=base.embed_tokens.num_embeddings,
    )


def biases(linears: Sequence[nn.Linear]) -> list[torch.Tensor] | None:
    """Those of all, zeros where one has none; None if none has any."""
    if all(linear.bias is None for linear in linears):
        return None
    return [
        linear.weight.new_zeros(linear.out_features) if linear.bias is None else linear.bias.detach()
        for linear in linears
    ]


def joined(parts: list[torch.Tensor] | None) -> torch.Tensor | None:
    """In one tensor."""
    return None if parts is None else torch.cat(parts)


def rotations(rotary: Any, positions: torch.Tensor, dtype: torch.dtype) -> Rotations:
    """Those of ``positions`` ``[n]``, as the model itself computes them. Raises NotThisShape."""
    x = torch.empty((1, 1, 1), dtype=dtype, device=positions.device)
    with torch.inference_mode():
        cos, sin = rotary(x, positions[None])
    half = cos.shape[-1] // 2
    _need(cos.dim() == 3 and cos.shape[-1] % 2 == 0, "a rotary embedding of another shape")
    _need(torch.equal(cos[..., :half], cos[..., half:]), "a rotary embedding whose halves differ")
    return cos[0, :, :half].clone(), sin[0, :, :half].clone()
