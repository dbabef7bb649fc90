"""Loading a model onto a device, up to what runs its steps.

What a card can't do is said before anything is read. Weights go straight to the device; where they are quantised, by
way of the host's memory, layer by layer, so that a model whose own weights don't fit may.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, PreTrainedConfig

from kernels.contract import DeviceKernel, Geometry, LayerAttention
from observability.startup import start_up
from shared.config import size_bytes
from shared.lifecycle import StartupError
from shared.model_name import model_name
from worker import attention, experts
from worker.admissible import check_config
from worker.attention_backend import attention_kernel
from worker.config import WorkerConfig
from worker.device import quantize
from worker.device.cuda_port import CudaPort, told_apart
from worker.device.memory import CudaMemory, DeviceMemory, check_weights
from worker.device.port import Port
from worker.device.prepare import MakeKernel, prepare
from worker.device.provision import Room, device_runner
from worker.device.runner import DeviceRunner
from worker.device.warm_up import warm_up
from worker.grammar import Grammars, load_engine_tokenizer
from worker.kv_cache import storage_dtype
from worker.lora_files import read_adapter
from worker.lora_names import parse_adapters
from worker.model import dtype_of, read_config, read_weights


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
    adapters = [read_adapter(name, path, dtype) for name, path in parse_adapters(config.lora).items()]
    by_host = config.quantize != "none" or importlib.util.find_spec("accelerate") is None
    if config.quantize == "none" and config.tensor_parallel == 1:
        check_weights(memory, weight_bytes(model_config, dtype), config.gpu_memory_utilization)
    try:
        with told_apart():
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
                adapters=adapters,
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
    warm_up(prepared, runner, config.warm_up_s)
    start_up.ended("warm-up")
    return runner
