"""Does a decoder (the C++ one, or a GPU's) say the same as the model that it has the weights of?

A model that has the decoder's parts may still put them together in another way: a scaled residual, another rotary
layout, queries that are scaled by their position. So two passes are compared before a model is served:

- a *cutting* of the model, one layer of each kind, in float32: there two ways to compute the same differ by 1e-6, and a
  residual that is scaled by 0.9 by 2e-2;
- the whole model in its own type, for what a cutting can't show. In bfloat16 roundings alone make 1 to 5 % there, so
  that by itself this would let small multipliers pass.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from kernels.contract import Geometry, LayerAttention, RaggedBatch
from kernels.cpu.attention import CpuAttention
from kernels.cpu.decoder import CpuDecoder, DecoderWeights
from kernels.cpu.library import Library
from worker.attention import answering
from worker.decoder import NotThisShape, Rotations, pack, rotations

TRIAL_TOKENS = 48
"""More than a block of keys, and positions far enough apart to see the rotation."""

CUTTING_TOLERANCE = 1e-4
"""What :func:`difference` of a cutting stays below. Measured over the families that are served: up to 2e-6."""


def check_cutting(
    library: Library, module: Any, geometry: Geometry, attention: Sequence[LayerAttention], limit: int | None
) -> None:
    """Compare passes of a cutting of a model that :func:`worker.decoder.check` has passed. The model stays as it is.

    ``limit``: positions that the model has, if it says. Raises NotThisShape if they don't agree.
    """
    layers = kinds_of_layers(module, attention)
    small = cutting(module, layers)
    attention = [attention[index] for index in layers]
    _, differs = packed(library, small, geometry, attention, torch.float32, False, trial_positions(limit))
    refuse_if_apart(differs, CUTTING_TOLERANCE, "the C++ decoder")


def checked_weights(
    library: Library,
    module: Any,
    geometry: Geometry,
    attention: Sequence[LayerAttention],
    dtype: torch.dtype,
    quantize: bool,
    limit: int | None,
) -> DecoderWeights:
    """The packed weights of the whole model, once passes of it agree too. Raises NotThisShape if they don't; the
    module has no weights of its own then."""
    weights, differs = packed(library, module, geometry, attention, dtype, quantize, trial_positions(limit))
    refuse_if_apart(differs, tolerance(dtype), "the C++ decoder")
    return weights


def packed(
    library: Library,
    module: Any,
    geometry: Geometry,
    attention: Sequence[LayerAttention],
    dtype: torch.dtype,
    quantize: bool,
    positions: torch.Tensor,
) -> tuple[DecoderWeights, float]:
    """The weights, which the module lets go of, and the :func:`difference` of the passes. Raises NotThisShape."""
    turns = rotations(module.base_model.rotary_emb, positions, dtype)
    wanted = None if quantize else trial_logits(module, positions)
    weights = pack(library, module, dtype, quantize)
    if wanted is None:  # with the rounded weights: what rounding does is wanted, and would hide what is not
        wanted = trial_logits(module, positions)
    return weights, difference(library, weights, geometry, attention, turns, wanted)


def kinds_of_layers(module: Any, attention: Sequence[LayerAttention]) -> list[int]:
    """The first layer of each kind: with the same classes and the same plain attributes, down to every part of it."""
    kinds: dict[Any, int] = {}
    for index, (layer, how) in enumerate(zip(module.base_model.layers, attention, strict=True)):
        parts = [
            (name, type(part), *sorted((k, v) for k, v in vars(part).items() if _plain(v) and k != "layer_idx"))
            for name, part in layer.named_modules()
        ]
        kinds.setdefault((how.scaling, how.window, *map(repr, parts)), index)
    return list(kinds.values())


def _plain(value: object) -> bool:
    return value is None or isinstance(value, bool | int | float | str)


def cutting(module: Any, layers: Sequence[int]) -> Any:
    """A copy in float32 with these layers only, and a vocabulary of the trial's tokens."""
    base, head = module.base_model, module.get_output_embeddings()
    tokens = trial_tokens(base.embed_tokens.num_embeddings)
    embedding = nn.Embedding(TRIAL_TOKENS, base.embed_tokens.embedding_dim, _weight=base.embed_tokens.weight[tokens])
    small_head = nn.Linear(1, 1, bias=False)
    rows = tokens % len(head.weight)  # a rank may have a part of it
    small_head.weight = nn.Parameter(head.weight[rows], requires_grad=False)
    known: dict[int, Any] = {id(base.embed_tokens): embedding, id(head): small_head, id(base.layers): nn.ModuleList()}
    small = copy.deepcopy(module, known)
    small.base_model.layers = nn.ModuleList(copy.deepcopy(base.layers[index]) for index in layers)
    return small.float()


def trial_positions(limit: int | None) -> torch.Tensor:
    """``[TRIAL_TOKENS]``: the first ones and the last ones below ``limit``, where a model may do otherwise than at its
    beginning (a scale of the queries that grows with the position, say)."""
    place = torch.arange(TRIAL_TOKENS)
    if limit is not None and limit > TRIAL_TOKENS:
        place[TRIAL_TOKENS // 2 :] += limit - TRIAL_TOKENS
    return place


def trial_tokens(vocab_size: int) -> torch.Tensor:
    """``[TRIAL_TOKENS]``, all over the vocabulary."""
    return (7 + 97 * torch.arange(TRIAL_TOKENS)) % vocab_size


def _dense_attention(
    module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, given: dict[str, Any]
) -> torch.Tensor:
    """Answers attention calls of one sequence, shorter than any window that matters here, with torch's own."""
    group = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(group, dim=1), value.repeat_interleave(group, dim=1)
    place = torch.arange(query.shape[2], device=query.device)
    seen = place[None, :] <= place[:, None]
    if given.get("sliding_window"):
        seen &= place[None, :] > place[:, None] - given["sliding_window"]
    out = nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=seen, scale=given.get("scaling"))
    return out.transpose(1, 2).contiguous()


def trial_logits(module: Any, positions: torch.Tensor) -> torch.Tensor:
    """``[TRIAL_TOKENS, vocabulary]``: what the module itself makes of the trial's tokens at ``positions``, which are
    where it is."""
    tokens = trial_tokens(module.get_input_embeddings().num_embeddings).to(positions.device)
    with torch.inference_mode(), answering(_dense_attention):
        return module(input_ids=tokens[None], position_ids=positions[None], use_cache=False).logits[0]  # type: ignore[no-any-return]


def difference(
    library: Library,
    weights: DecoderWeights,
    geometry: Geometry,
    attention: Sequence[LayerAttention],
    rotations: Rotations,
    wanted: torch.Tensor,
) -> float:
    """:func:`apart` of the C++ decoder's logits from ``wanted``; ``rotations`` are those of the trial's positions."""
    kernel = CpuAttention(library, geometry, weights.dtype)
    pages = -(-TRIAL_TOKENS // geometry.block_size)
    caches = [kernel.allocate(pages + 1) for _ in attention]
    runner = CpuDecoder(library, weights, geometry, attention, caches, *rotations)
    tokens = trial_tokens(weights.vocab_size).numpy()
    place = np.arange(TRIAL_TOKENS, dtype=np.int64)
    table = np.arange(1, pages + 1, dtype=np.int32)[None]
    batch = RaggedBatch(np.array([0, TRIAL_TOKENS]), place + 1, table, place + geometry.block_size)
    return apart(runner.forward(tokens, place, batch, place), wanted)


def apart(got: torch.Tensor, wanted: torch.Tensor) -> float:
    """How far logits are from ``wanted``: the norm of what differs over the norm of their spread."""
    got, want = got.double(), wanted.double()[:, : got.shape[1]]
    spread = want - want.mean(dim=-1, keepdim=True)
    return float((got - want).norm() / spread.norm().clamp_min(1e-30))


def tolerance(dtype: torch.dtype) -> float:
    """What the whole model's :func:`difference` stays below. Measured: float32 1e-6 to 3e-5, bfloat16 up to 5 %;
    float16 rounds an eighth of what bfloat16 does."""
    return {torch.bfloat16: 0.3, torch.float16: 0.05}.get(dtype, 1e-3)


def refuse_if_apart(differs: float, tolerance: float, whose: str) -> None:
    """Raises NotThisShape, with the reason, unless ``differs`` is below ``tolerance``."""
    if math.isnan(differs) or math.isinf(differs):
        raise NotThisShape(f"its own logits, or {whose}'s, are not finite: are its weights?")
    if not differs < tolerance:
        raise NotThisShape(f"{whose}'s logits differ from its own by {differs:.2%}")
