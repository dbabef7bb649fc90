"""A model that ``transformers`` has read becomes one that runs on a device, and wants nothing more but pages.

A model of the one shape that :mod:`worker.decoder` knows is run by :class:`~worker.device.decoder.FusedDecoder` once a
trial has shown that it says the same; every other one module by module.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from kernels.contract import DeviceKernel, Geometry, LayerAttention
from kernels.triton.matmul import linear
from shared.lifecycle import StartupError
from worker import experts
from worker.decoder import NotThisShape, rotations
from worker.decoder_trial import TRIAL_TOKENS
from worker.device import lora, quantize, trial
from worker.device.decoder import FusedDecoder, FusedWeights, fuse
from worker.device.model import DeviceModel, ModuleModel, freeze_rotations, graph_tokens, replace_linears, waits
from worker.linear import MIN_ROWS
from worker.lora_files import Adapter, check_fits
from worker.model import LoadedModel, end_tokens, most_positions, run_trial
from worker.parallel.ranks import mine

log = logging.getLogger("headrace.worker.device")

MakeKernel = Callable[[Geometry, Sequence[LayerAttention], torch.dtype], DeviceKernel]


@dataclass(frozen=True, slots=True, eq=False)
class Prepared:
    """A model that wants nothing but pages."""

    model: DeviceModel
    kernel: DeviceKernel
    geometry: Geometry
    loaded: LoadedModel  # what is known of it; without its module where the fused decoder runs it

    @property
    def layers(self) -> list[LayerAttention]:
        return self.loaded.layers


class InvariantLinear(nn.Module):
    """A linear layer whose rows keep their bits in any company."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight.detach(), requires_grad=False)
        self.bias = None if bias is None else nn.Parameter(bias.detach(), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return linear(x, self.weight, self.bias)


def prepare(
    name: str,
    module: Any,
    device: torch.device,
    make_kernel: MakeKernel,
    *,
    block_size: int = 16,
    scheme: str = "none",
    batch_invariant: bool = False,
    longest: int | None = None,
    adapters: Sequence[Adapter] = (),
) -> Prepared:
    """``module``, on ``device`` already unless it is to be quantised (``scheme``), becomes a device model.

    ``longest``: the longest sequence that will come, if it is known. Rows may have the ``adapters``, by their number.
    Raises StartupError, one line.
    """
    module.eval().requires_grad_(False)
    check_fits(module, adapters)
    make = InvariantLinear if batch_invariant else lora.product
    dtype: torch.dtype = module.dtype
    found, _ = run_trial(name, module, module.device)
    geometry = Geometry(*next(iter(found.shapes)), block_size)
    kernel = make_kernel(geometry, found.layers, dtype)
    limit = most_positions(module.config)
    vocab_size: int = module.get_input_embeddings().weight.shape[0]
    ends = end_tokens(module)
    weights, reason = _fused(module, geometry, found.layers, kernel, limit, whole=scheme == "none")
    ranks = mine()
    if ranks is not None and not ranks.all_agree(weights is not None):  # all run it the same way
        weights, reason = None, reason or "another rank can't run its part otherwise"
    model: DeviceModel
    if weights is not None:
        _convert_fused(weights, device, scheme, batch_invariant)
        lora.attach_to_fused(module, weights.layers, adapters, make, device)
        count = min(filter(None, (longest, limit)), default=TRIAL_TOKENS)
        rotary = module.base_model.rotary_emb.to(device)
        turns = rotations(rotary, torch.arange(count, device=device), dtype)
        model = FusedDecoder(weights, kernel, found.layers, turns)
        module = None
    else:
        log.info("%s runs module by module: %s", name, reason)
        _convert_module(name, module, device, scheme, batch_invariant)
        lora.attach_to_module(module, adapters, make, device)
        freeze_rotations(module)
        first = torch.zeros(MIN_ROWS, dtype=torch.int64, device=device) if adapters else None
        with lora.running(first):
            waiting = waits(lambda: run_trial(name, module, device))
        model = ModuleModel(module, kernel, found.layers, vocab_size, graph_tokens(module, waiting))
    loaded = LoadedModel(
        module=module,
        layers=found.layers,
        num_heads=geometry.num_heads,
        num_kv_heads=geometry.num_kv_heads,
        head_dim=geometry.head_dim,
        vocab_size=vocab_size,
        max_positions=limit,
        eos_token_ids=ends,
        row_widths=frozenset(),
        logits_capped=False,
        dtype=dtype,
        device=device,
        adapters=tuple(adapter.name for adapter in adapters),
    )
    return Prepared(model, kernel, geometry, loaded)


def _fused(
    module: Any,
    geometry: Geometry,
    layers: Sequence[LayerAttention],
    kernel: DeviceKernel,
    limit: int | None,
    *,
    whole: bool,
) -> tuple[FusedWeights | None, str]:
    """The weights for the fused decoder, or why it can't run the model. ``whole``: they are where the kernel is, so
    that a pass of all of them can be tried too."""
    try:
        trial.check(module, geometry, layers, module.dtype, limit)
        weights = fuse(module, geometry)
        if whole:
            trial.check_whole(module, weights, kernel, layers, limit)
    except NotThisShape as shape:
        return None, str(shape)
    return weights, ""


def _convert_fused(weights: FusedWeights, device: torch.device, scheme: str, batch_invariant: bool) -> None:
    for layer in weights.layers:
        layer.to(device)
        if scheme != "none":
            quantize.quantize(layer, scheme)
        if batch_invariant:
            replace_linears(layer, InvariantLinear)
    head: Any = weights.head
    tied = head.weight.data_ptr() == weights.embedding.data_ptr()
    head.to(device)
    weights.embedding = head.weight.detach() if tied else weights.embedding.to(device)
    weights.final_norm = weights.final_norm.to(device)
    if batch_invariant:
        holder = nn.ModuleList([weights.head])
        replace_linears(holder, InvariantLinear)
        weights.head = holder[0]


def _convert_module(name: str, module: Any, device: torch.device, scheme: str, batch_invariant: bool) -> None:
    asked = "--batch-invariant" if batch_invariant else f"--quantize {scheme}"
    if (scheme != "none" or batch_invariant) and any(experts.is_experts(part) for part in module.modules()):
        raise StartupError(f"model {name!r} can't be served with {asked}: it has a mixture of experts")
    if scheme != "none":
        parts = [
            layer
            for part in module.base_model.children()
            for layer in (part if isinstance(part, nn.ModuleList) else [part])
            if any(type(one) is nn.Linear for one in layer.modules())
        ]
        if not parts:
            raise StartupError(f"model {name!r} can't be served with {asked}: it has no linear layers of torch's kind")
        for part in parts:  # one by one, so that no two of them are there unquantised
            quantize.quantize(part.to(device), scheme)
    module.to(device)
    if batch_invariant:
        replace_linears(module, InvariantLinear)
