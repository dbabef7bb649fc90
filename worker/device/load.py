"""Loading a model onto a device, up to what runs its steps.

What a card can't do is said before anything is read. Weights go straight to the device; where they are quantised, by
way of the host's memory, layer by layer, so that a model whose own weights don't fit may. A model of the one shape
that :mod:`worker.decoder` knows is run by :class:`~worker.device.decoder.FusedDecoder` once a trial has shown that it
says the same; every other one module by module.
"""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import transformers
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedConfig

from kernels.contract import DeviceKernel, Geometry, LayerAttention
from kernels.device_batch import on_device
from kernels.triton.matmul import linear
from observability.startup import start_up
from shared.config import size_bytes
from shared.lifecycle import StartupError
from shared.messages import Capacity, Sampling
from shared.model_name import model_name
from worker import attention, experts
from worker.admissible import check_config
from worker.assembly import assemble
from worker.attention_backend import attention_kernel
from worker.batch import Batch, Row
from worker.config import WorkerConfig
from worker.decoder import NotThisShape, rotations
from worker.decoder_trial import TRIAL_TOKENS
from worker.device import quantize, trial
from worker.device.cuda_port import CudaPort
from worker.device.decoder import FusedDecoder, FusedWeights, fuse
from worker.device.memory import CudaMemory, DeviceMemory, check_weights, largest_step, measure
from worker.device.model import DeviceModel, ModuleModel, freeze_rotations, graph_tokens, replace_linears, waits
from worker.device.port import Port
from worker.device.runner import DeviceRunner
from worker.device.sampling import DeviceSampler, SamplingParams, Wanted, host_params
from worker.grammar import Grammars, load_engine_tokenizer
from worker.kv_cache import bytes_per_token, pool_size_of_all, storage_dtype
from worker.logprobs import MAX_ROWS
from worker.model import (
    LoadedModel,
    dtype_of,
    end_tokens,
    most_positions,
    read_config,
    read_weights,
    run_trial,
)
from worker.parallel.ranks import mine
from worker.processors import Shape
from worker.sampling import SampleRow
from worker.self_check import rows_keep_their_bits
from worker.token_counts import TokenCounts

log = logging.getLogger("headrace.worker.device")

GRAPH_BYTES = 1 << 30
"""Of a device's memory, at most, for graphs."""

GRAPH_SHARE = 32
"""Nor are they given more than this part of it."""

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
) -> Prepared:
    """``module``, on ``device`` already unless it is to be quantised (``scheme``), becomes a device model.

    ``longest``: the longest sequence that will come, if it is known. Raises StartupError, one line.
    """
    module.eval().requires_grad_(False)
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
        count = min(filter(None, (longest, limit)), default=TRIAL_TOKENS)
        rotary = module.base_model.rotary_emb.to(device)
        turns = rotations(rotary, torch.arange(count, device=device), dtype)
        model = FusedDecoder(weights, kernel, found.layers, turns)
        module = None
    else:
        log.info("%s runs module by module: %s", name, reason)
        _convert_module(name, module, device, scheme, batch_invariant)
        freeze_rotations(module)
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


def weight_bytes(config: PreTrainedConfig, dtype: torch.dtype) -> int:
    """Of a model's weights in ``dtype``, none of which is read or made."""
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(config, dtype=dtype)
    return sum(weight.numel() * weight.element_size() for weight in model.parameters())


def random_model(config: PreTrainedConfig, dtype: torch.dtype, device: torch.device, seed: int = 0) -> Any:
    """A model of ``config`` with random weights that are made on ``device``: no files, for checks and measurements."""
    attention.register()
    experts.register()
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices), torch.device(device):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(
            config,
            dtype=dtype,
            attn_implementation=attention.ATTENTION_NAME,
            experts_implementation=experts.EXPERTS_NAME,
        )
    return model.eval().requires_grad_(False)


@dataclass(frozen=True, slots=True)
class Room:
    """What a runner may take of its device."""

    utilization: float = 0.9  # share of the device's memory
    step_tokens: int = 8192  # of the largest step
    max_model_len: int | None = None
    num_blocks: int | None = None  # None: as many as fit
    swap_space: int = 0  # bytes of host memory
    graph_rows: int = 0  # of the largest graph; 0: none are captured


def device_runner(
    prepared: Prepared,
    port: Port,
    memory: DeviceMemory,
    room: Room,
    served_name: str,
    grammars: Grammars,
    *,
    batch_invariant: bool = False,
    self_check: bool = True,
) -> DeviceRunner:
    """Measure, divide the memory, allocate the pages, and see whether a row has the same bits in any company.

    Raises StartupError, one line, with the figures, where nothing sensible fits, or where bits that are to be kept
    (``batch_invariant``) are not.
    """
    loaded, geometry, kernel = prepared.loaded, prepared.geometry, prepared.kernel
    device = loaded.device
    longest = room.max_model_len or loaded.max_positions or room.step_tokens
    graph_room = 0
    if room.graph_rows and prepared.model.graph_tokens:
        graph_room = min(GRAPH_BYTES, memory.free_and_total()[1] // GRAPH_SHARE)
    sample = _sampling(DeviceSampler(device, lambda packed: torch.from_numpy(packed).to(device)), device)

    def step() -> None:
        largest_step(
            prepared.model, kernel, len(prepared.layers), geometry.block_size, room.step_tokens, longest, device, sample
        )

    split = measure(memory, room.utilization, graph_room, room.step_tokens, step)
    storage: torch.dtype = getattr(kernel, "storage", loaded.dtype)
    token_bytes = bytes_per_token(len(prepared.layers), geometry, storage)
    least = 2 * geometry.block_size * token_bytes  # one page, and one for scratch
    if room.num_blocks is None and split.pages < least:
        raise StartupError(split.refusal(least))
    size = pool_size_of_all(
        split.pages, token_bytes, geometry.block_size, loaded.max_positions, room.max_model_len, room.num_blocks
    )
    try:
        prepared.model.caches = [kernel.allocate(size.num_blocks + 1) for _ in prepared.layers]
    except port.out_of_memory:
        raise StartupError(f"the GPU's memory does not hold {size.num_bytes / (1 << 30):,.2f} GiB of pages") from None
    capacity = Capacity(
        model=served_name,
        max_model_len=size.max_model_len,
        block_size=size.block_size,
        num_blocks=size.num_blocks,
        vocab_size=loaded.vocab_size,
        eos_token_ids=loaded.eos_token_ids,
        device=str(device),
        dtype=str(loaded.dtype).removeprefix("torch."),
        kv_bytes_per_token=token_bytes,
        host_blocks=room.swap_space // (token_bytes * size.block_size),
        kv_dtype="" if storage == loaded.dtype else str(storage).removeprefix("torch."),
        max_batched_tokens=room.step_tokens,
    )
    start_up.ended("KV cache")
    how = "module by module" if loaded.module is not None else "fused"
    log.info("%s on %s, %s, %s attention", capacity.dtype, device, how, kernel.name)
    log.info("%s", split.describe())
    log.info("%s", size.describe())
    if self_check and loaded.dtype != torch.float64:
        _check_bits(prepared, capacity, batch_invariant)
        start_up.ended("self-check")
    runner = DeviceRunner(
        prepared.model, port, capacity, grammars, graph_rows=room.graph_rows, graph_room=graph_room,
        alone=mine() is None,
    )  # fmt: skip
    memory.free_and_total()  # what was only tried is given back
    return runner


def _sampling(sampler: DeviceSampler, device: torch.device) -> Callable[[torch.Tensor], None]:
    """What is done with the logits of the largest step, at most: each row filtered, one shaped, some told of. Whatever
    kernels that takes are compiled by then."""

    def sample(logits: torch.Tensor) -> None:
        rows = [SampleRow(Sampling(seed=1, max_tokens=1, top_p=0.9, top_k=50), 0, 0, row) for row in range(len(logits))]
        penalties = Sampling(seed=1, max_tokens=1, repetition_penalty=1.1)
        counts = TokenCounts(1, with_prompt=True)
        counts.follow([0])
        allowed = np.full(-(-logits.shape[1] // 8), 255, dtype=np.uint8)
        wanted = Wanted({0: Shape(penalties, (0,), counts, allowed)}, dict.fromkeys(range(min(len(rows), MAX_ROWS)), 1))
        params = SamplingParams.of(torch.from_numpy(host_params(rows)).to(device))
        sampler.sample(logits, params)  # in the model's own type, as most steps: with a shaped row all become wider
        sampler.enqueue(logits, params, wanted)

    return sample


@dataclass(frozen=True, slots=True, eq=False)
class _Passes:
    """Implements :class:`worker.self_check.Passes`."""

    prepared: Prepared
    capacity: Capacity

    def logits(self, batch: Batch, rows: Sequence[Row]) -> torch.Tensor:
        tokens, positions, ragged = assemble(batch, rows, 0, self.capacity.max_model_len)
        keep = ragged.query_start[1:][[row.sample for row in rows]] - 1
        device = self.prepared.loaded.device
        token_ids, places, kept = (torch.from_numpy(array).to(device) for array in (tokens, positions, keep))
        return self.prepared.model.forward(token_ids, places, on_device(ragged, device), kept)


def _check_bits(prepared: Prepared, capacity: Capacity, batch_invariant: bool) -> None:
    if rows_keep_their_bits(_Passes(prepared, capacity)):
        return
    why = "a row's bits depend on the rows beside it"
    if batch_invariant:
        raise StartupError(f"batch-invariant: {why} here")
    log.info("%s: tokens may differ between runs (--batch-invariant keeps them)", why)


def load_device_runner(config: WorkerConfig) -> DeviceRunner:
    """The runner on a GPU that a worker's options ask for. Raises StartupError, one line, if it can't be had."""
    device = torch.device("cuda", torch.cuda.current_device())
    dtype = dtype_of(config.dtype, device, None)
    check_options(config, dtype, torch.cuda.get_device_capability(device))
    kv_dtype = storage_dtype(config.kv_cache_dtype, dtype)

    def make_kernel(geometry: Geometry, layers: Sequence[LayerAttention], dtype: torch.dtype) -> DeviceKernel:
        kernel: Any = attention_kernel(
            geometry, layers, dtype, device, config.attention_backend, config.batch_invariant, kv_dtype
        )
        return kernel  # type: ignore[no-any-return]

    return load_on(config, dtype, CudaPort(device), CudaMemory(device), make_kernel)


def check_options(config: WorkerConfig, dtype: torch.dtype, capability: tuple[int, int]) -> None:
    """Of what can't be together, or not on such a card. Raises StartupError."""
    if capability < (8, 0):  # Triton compiles for no older card
        raise StartupError("a GPU needs compute capability 8.0 or more, this one has {}.{}".format(*capability))
    if config.quantize == "none":
        return
    quantize.check(config.quantize, dtype, capability)
    if config.batch_invariant:
        raise StartupError("batch-invariant: products of quantised weights depend on the batch")
    if config.tensor_parallel > 1:
        raise StartupError("--quantize is not for a model that is divided over ranks")


def load_on(
    config: WorkerConfig, dtype: torch.dtype, port: Port, memory: DeviceMemory, make_kernel: MakeKernel
) -> DeviceRunner:
    """As :func:`load_device_runner`, on the device of ``port``."""
    device = port.device
    transformers.utils.logging.disable_progress_bar()
    attention.register()
    experts.register()
    model_config = read_config(config.model)
    check_config(config.model, model_config)
    by_host = config.quantize != "none" or importlib.util.find_spec("accelerate") is None
    if config.quantize == "none" and config.tensor_parallel == 1:
        check_weights(memory, weight_bytes(model_config, dtype), config.gpu_memory_utilization)
    try:
        module = read_weights(config.model, model_config, dtype, None if by_host else device)
        if config.quantize == "none":
            module.to(device)  # nothing to do, unless it came by way of the host
        start_up.ended("weights")
        prepared = prepare(
            config.model,
            module,
            device,
            make_kernel,
            block_size=config.block_size,
            scheme=config.quantize,
            batch_invariant=config.batch_invariant,
            longest=config.max_model_len,
        )
        del module
    except port.out_of_memory:
        raise StartupError(f"model {config.model!r} does not fit into the GPU's memory") from None
    start_up.ended("packing and trial pass")
    loaded = prepared.loaded
    grammars = Grammars(lambda: load_engine_tokenizer(config.model, loaded.vocab_size, loaded.eos_token_ids))
    room = Room(
        utilization=config.gpu_memory_utilization,
        step_tokens=config.max_batched_tokens,
        max_model_len=config.max_model_len,
        swap_space=size_bytes(config.swap_space),
        graph_rows=config.cuda_graph_rows if config.cuda_graphs == "auto" else 0,
    )
    runner = device_runner(
        prepared,
        port,
        memory,
        room,
        model_name(config.model, config.served_model_name),
        grammars,
        batch_invariant=config.batch_invariant,
    )
    grammars.warm()
    return runner
