"""Before a :class:`~worker.device.decoder.FusedDecoder` serves a model: does it say what the model itself says?

As for the C++ decoder (:mod:`worker.decoder_trial`): a cutting in float32, then the whole model in its own type, which
also runs the kernels that will serve it, on the device that they will run on.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from kernels import device_pages
from kernels.contract import DeviceBatch, DeviceKernel, Geometry, LayerAttention, LayerCache, RaggedBatch
from kernels.device_batch import on_device
from worker.decoder import check_shape, rotations
from worker.decoder_trial import (
    CUTTING_TOLERANCE,
    TRIAL_TOKENS,
    apart,
    cutting,
    kinds_of_layers,
    refuse_if_apart,
    tolerance,
    trial_logits,
    trial_positions,
    trial_tokens,
)
from worker.device.decoder import FusedDecoder, FusedWeights, fuse

WHOSE = "the fused decoder"


class DenseAttention(DeviceKernel):
    """Paged attention in a few torch calls, each over every sequence's whole block table: for trials."""

    name = "dense"
    batch_invariant = False

    def __init__(self, geometry: Geometry, dtype: torch.dtype, device: torch.device) -> None:
        self.geometry = geometry
        self.dtype = dtype
        self.device = device

    def allocate(self, num_pages: int) -> LayerCache:
        return device_pages.allocate(self.geometry, self.dtype, num_pages, self.device)

    def plan(self, batch: RaggedBatch) -> DeviceBatch:
        return on_device(batch, self.device)

    def plan_device(self, batch: DeviceBatch) -> DeviceBatch:
        return batch

    def write(self, plan: DeviceBatch, cache: LayerCache, key: torch.Tensor, value: torch.Tensor) -> None:
        for pages, new in ((cache.key, key), (cache.value, value)):
            finite = torch.nan_to_num(new, posinf=1e15, neginf=-1e15).to(pages.dtype)
            pages.flatten(0, 1).index_copy_(0, plan.write_slots, finite)

    def read(self, plan: DeviceBatch, cache: LayerCache, query: torch.Tensor, layer: LayerAttention) -> torch.Tensor:
        g = self.geometry
        place = torch.arange(plan.num_tokens, device=query.device, dtype=torch.int32)
        sequence = torch.searchsorted(plan.query_start[1:], place, right=True).clamp_max(plan.num_sequences - 1)
        tables = plan.block_tables[sequence].long()  # [T, P]
        keys, values = (pages[tables].flatten(1, 2) for pages in (cache.key, cache.value))  # [T, K, kv heads, dim]
        heads = query.view(len(query), g.num_kv_heads, g.group, g.head_dim)
        scores = torch.einsum("tngd,tknd->tngk", heads, keys) * layer.scaling
        if layer.softcap is not None:
            scores = layer.softcap * torch.tanh(scores / layer.softcap)
        key = torch.arange(keys.shape[1], device=query.device)
        seen = key < plan.visible[:, None]
        if layer.window is not None:
            seen &= key >= plan.visible[:, None] - layer.window
        scores = scores.masked_fill(~seen[:, None, None], float("-inf"))
        if layer.sinks is not None:
            sinks = layer.sinks.to(scores.dtype).view(1, g.num_kv_heads, g.group, 1)
            scores = torch.cat([scores, sinks.expand(len(scores), -1, -1, 1)], dim=-1)
        shares = scores.softmax(dim=-1)[..., : keys.shape[1]]
        return torch.einsum("tngk,tknd->tngd", shares, values).flatten(1, 2)


def check(
    module: Any, geometry: Geometry, attention: Sequence[LayerAttention], dtype: torch.dtype, limit: int | None
) -> None:
    """Whether a :class:`FusedDecoder` can run the model, where its weights lie, as far as its parts and a cutting tell;
    the model stays as it is. ``limit``: positions that it has, if it says. Raises NotThisShape."""
    check_shape(module, geometry, attention, dtype)
    layers = kinds_of_layers(module, attention)
    small = cutting(module, layers)
    kernel = DenseAttention(geometry, torch.float32, next(module.parameters()).device)
    differs = difference(small, fuse(small, geometry), kernel, [attention[index] for index in layers], limit)
    refuse_if_apart(differs, CUTTING_TOLERANCE, WHOSE)


def check_whole(
    module: Any, weights: FusedWeights, kernel: DeviceKernel, attention: Sequence[LayerAttention], limit: int | None
) -> None:
    """Compare passes of the whole model over the kernel that will serve it. Raises NotThisShape if they don't agree."""
    dtype = weights.embedding.dtype
    rounds = getattr(kernel, "storage", dtype) != dtype  # pages in fp8 or int8
    differs = difference(module, weights, kernel, attention, limit)
    refuse_if_apart(differs, tolerance(torch.bfloat16 if rounds else dtype), WHOSE)


def difference(
    module: Any, weights: FusedWeights, kernel: DeviceKernel, attention: Sequence[LayerAttention], limit: int | None
) -> float:
    """How far a fused pass of the trial's tokens is from the module's own."""
    device, dtype = weights.embedding.device, weights.embedding.dtype
    positions = trial_positions(limit).to(device)
    with _exact_products():
        wanted = trial_logits(module, positions)
        decoder = FusedDecoder(weights, kernel, attention, rotations(module.base_model.rotary_emb, positions, dtype))
        return apart(_pass(decoder), wanted)


@contextmanager
def _exact_products() -> Iterator[None]:
    """Those of float32 in float32. Some images have them in TF32, which is as far off as a model of another shape."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def _pass(decoder: FusedDecoder) -> torch.Tensor:
    """The logits of the trial's tokens, one sequence, each at its place in the decoder's rotations."""
    block_size = decoder.weights.geometry.block_size
    pages = -(-TRIAL_TOKENS // block_size)
    decoder.caches = [decoder.kernel.allocate(pages + 1) for _ in decoder.attention]
    device = decoder.weights.embedding.device
    place = torch.arange(TRIAL_TOKENS)
    table = torch.arange(1, pages + 1, dtype=torch.int32)[None]
    batch = on_device(
        RaggedBatch(
            torch.tensor([0, TRIAL_TOKENS]).numpy(), (place + 1).numpy(), table.numpy(), (place + block_size).numpy()
        ),
        device,
    )
    place = place.to(device)
    return decoder.forward(trial_tokens(decoder.vocab_size).to(device), place, batch, place)
