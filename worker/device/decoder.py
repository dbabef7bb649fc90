"""Models of the one shape that :func:`worker.decoder.check_shape` knows, without their own code: products of merged
matrices, and between them kernels that do in one pass what modules do in several.

A layer here is: queries, keys and values in one product; rotated and written to the pages in one kernel; attention;
the output's product; the residual's addition and the norm in one kernel; gate and up in one product; the activation
and its product in one kernel; down; addition and norm. The last layer goes on with the wanted rows only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from kernels.contract import DeviceBatch, DeviceKernel, Geometry, LayerAttention, LayerCache
from kernels.triton.activation import gated
from kernels.triton.norm import add_rms_norm, rms_norm
from kernels.triton.rotary import Rotation, rotate_and_write
from worker.decoder import Rotations, activation_of, biases, joined, norm_epsilon
from worker.device.lora import keep_rows, running
from worker.device.model import ANY_NUMBER

AllReduce = Callable[[torch.Tensor], torch.Tensor]
"""Adds up what the ranks of a tensor-parallel group have, each a part of the sum."""


class FusedLayer(nn.Module):
    """A layer's weights. Its matrices are linear layers, so that what changes those (quantisation) finds them."""

    qkv: nn.Module
    out: nn.Module
    gate_up: nn.Module
    down: nn.Module
    attention_norm: torch.Tensor  # [hidden]
    mlp_norm: torch.Tensor
    query_norm: torch.Tensor | None  # [head_dim]
    key_norm: torch.Tensor | None
    rotary: bool

    def __init__(self, layer: Any) -> None:
        super().__init__()
        attention, mlp = layer.self_attn, layer.mlp
        self.qkv = merged([attention.q_proj, attention.k_proj, attention.v_proj])
        self.out = attention.o_proj
        self.gate_up = merged([mlp.gate_proj, mlp.up_proj])
        self.down = mlp.down_proj
        self.attention_norm = layer.input_layernorm.weight
        self.mlp_norm = layer.post_attention_layernorm.weight
        norms = [getattr(attention, name, None) for name in ("q_norm", "k_norm")]
        self.query_norm, self.key_norm = (None if norm is None else norm.weight for norm in norms)
        self.rotary = bool(getattr(attention, "use_rope", True))


@dataclass(slots=True, eq=False)
class FusedWeights:
    """Those of a whole model. ``geometry`` is of the heads that are here: a rank's, in a tensor-parallel group."""

    layers: list[FusedLayer]
    embedding: torch.Tensor  # [vocab_size, hidden]
    final_norm: torch.Tensor  # [hidden]
    head: nn.Module
    eps: float
    activation: str
    geometry: Geometry

    @property
    def vocab_size(self) -> int:
        return self.embedding.shape[0]


def merged(linears: Sequence[nn.Linear]) -> nn.Linear:
    """One linear layer of several. Their weights become its rows, so the model that they are of goes on to work, and
    nothing is there twice once this returns."""
    first = linears[0].weight
    matrix = first.new_empty((sum(len(linear.weight) for linear in linears), first.shape[1]))
    bias = joined(biases(linears))
    parts = torch.split(matrix, [len(linear.weight) for linear in linears])
    for linear, part in zip(linears, parts, strict=True):
        part.copy_(linear.weight.detach())
        linear.weight = nn.Parameter(part, requires_grad=False)
    whole = nn.Linear(first.shape[1], len(matrix), bias=False, device="meta")
    whole.weight = nn.Parameter(matrix, requires_grad=False)
    if bias is not None:
        whole.bias = nn.Parameter(bias, requires_grad=False)
    return whole


def fuse(module: Any, geometry: Geometry) -> FusedWeights:
    """The weights of a model that :func:`worker.decoder.check_shape` has passed; it stays able to run."""
    base = module.base_model
    return FusedWeights(
        layers=[FusedLayer(layer) for layer in base.layers],
        embedding=base.embed_tokens.weight.detach(),
        final_norm=base.norm.weight.detach(),
        head=module.get_output_embeddings(),
        eps=norm_epsilon(base.norm),
        activation=activation_of(base.layers[0].mlp),
        geometry=geometry,
    )


class FusedDecoder:
    """Implements :class:`~worker.device.model.DeviceModel`. ``rotations`` are those of all positions that may come."""

    def __init__(
        self,
        weights: FusedWeights,
        kernel: DeviceKernel,
        attention: Sequence[LayerAttention],
        rotations: Rotations,
        all_reduce: AllReduce | None = None,
    ) -> None:
        self.weights = weights
        self.kernel = kernel
        self.attention = list(attention)
        self.caches: list[LayerCache] = []
        self.vocab_size = weights.vocab_size
        self.graph_tokens = ANY_NUMBER
        self._rotations = [self._rotation(layer, *rotations) for layer in weights.layers]
        self._all_reduce = all_reduce or (lambda part: part)

    def _rotation(self, layer: FusedLayer, cos: torch.Tensor, sin: torch.Tensor) -> Rotation:
        return Rotation(
            cos if layer.rotary else None,
            sin if layer.rotary else None,
            layer.query_norm,
            layer.key_norm,
            self.weights.eps,
        )

    @torch.inference_mode()
    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        batch: DeviceBatch,
        keep: torch.Tensor,
        adapters: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See :meth:`worker.device.model.DeviceModel.forward`."""
        with running(adapters):
            return self._forward(token_ids, positions, batch, keep)

    def _forward(
        self, token_ids: torch.Tensor, positions: torch.Tensor, batch: DeviceBatch, keep: torch.Tensor
    ) -> torch.Tensor:
        weights = self.weights
        plan = self.kernel.plan_device(batch)
        residual = nn.functional.embedding(token_ids, weights.embedding)
        norms = [*(layer.attention_norm for layer in weights.layers), weights.final_norm]
        x = rms_norm(residual, norms[0], weights.eps)
        last = len(weights.layers) - 1
        for index, layer in enumerate(weights.layers):
            cache = self.caches[index]
            query = rotate_and_write(layer.qkv(x), positions, batch, cache, weights.geometry, self._rotations[index])
            if index == last and not len(keep):  # every row's keys are written
                return x.new_empty((0, self.vocab_size))
            attended = self.kernel.read(plan, cache, query, self.attention[index]).flatten(1)
            if index == last:  # from here on rows go their own ways
                attended, residual = attended.index_select(0, keep), residual.index_select(0, keep)
                keep_rows(keep)
            part = self._all_reduce(layer.out(attended))
            x, residual = add_rms_norm(part, residual, layer.mlp_norm, weights.eps)
            part = self._all_reduce(layer.down(gated(layer.gate_up(x), weights.activation)))
            x, residual = add_rms_norm(part, residual, norms[index + 1], weights.eps)
        logits: torch.Tensor = weights.head(x)
        return logits
