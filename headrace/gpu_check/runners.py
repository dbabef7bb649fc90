"""Models with random weights behind the runner that serves them."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NoReturn

import torch

from headrace.gpu_check.measured_attention import fill
from headrace.gpu_check.ports import port_of
from headrace.gpu_check.rig import Rig
from headrace.gpu_check.shapes import Shape
from kernels.choice import choose
from kernels.contract import DeviceKernel, Geometry, LayerAttention
from shared.messages import Capacity
from worker.device.load import random_model
from worker.device.prepare import Prepared, prepare
from worker.device.runner import DeviceRunner
from worker.device.trial import DenseAttention
from worker.grammar import Grammars
from worker.kv_cache import bytes_per_token
from worker.lora_files import Adapter

BLOCK_SIZE = 16
GRAPH_ROWS = 128
KV_SHARE = 0.8
"""Of the memory that is free beside the weights and :data:`ACTIVATION_BYTES`."""

ACTIVATION_BYTES = 3 << 30
REHEARSED_BLOCKS = 200


@dataclass
class Made:
    runner: DeviceRunner  # gone once the context has ended
    shape: Shape
    path: str  # what it runs by, for a row


@contextmanager
def made(
    rig: Rig, shape: Shape, *, max_model_len: int, module: Any = None, num_blocks: int | None = None,
    graphs: bool = True, batch_invariant: bool = False, served_name: str = "check", adapters: Sequence[Adapter] = (),
) -> Iterator[Made]:  # fmt: skip
    """A runner of ``module`` (default: new random weights in the type that is served) with pages full of random
    numbers: ``num_blocks``, or as many as fit. Its memory is given back at the end."""
    if module is None:
        module = random_model(shape.config(), rig.served_dtype, rig.device)
    dtype: torch.dtype = module.dtype
    prepared = prepare(
        shape.name, module, rig.device, lambda *task: _kernel(rig, task, batch_invariant), block_size=BLOCK_SIZE,
        batch_invariant=batch_invariant, longest=max_model_len, adapters=adapters,
    )  # fmt: skip
    del module
    runner = _runner(rig, prepared, dtype, max_model_len, num_blocks, graphs, served_name)
    path = ", ".join([prepared.kernel.name, "graphs" if graphs else "no graphs"])
    path += ", batch-invariant" if batch_invariant else ""
    found = Made(runner, shape, path)
    try:
        yield found
    finally:
        del found.runner  # whoever still has it keeps no weights
        runner.port.synchronize()
        runner.graphs.drop()
        prepared.model.caches = []
        del runner, prepared
        gc.collect()
        if not rig.rehearsal:
            torch.cuda.empty_cache()


def _kernel(
    rig: Rig, task: tuple[Geometry, Sequence[LayerAttention], torch.dtype], batch_invariant: bool
) -> DeviceKernel:
    """What a worker would choose here; a rehearsal's is plain torch."""
    geometry, layers, dtype = task
    if rig.rehearsal:
        return DenseAttention(geometry, dtype, rig.device)
    kernel: Any = choose(geometry, layers, dtype, dtype, rig.device, batch_invariant=batch_invariant)
    return kernel  # type: ignore[no-any-return]


def _runner(
    rig: Rig, prepared: Prepared, dtype: torch.dtype, max_model_len: int, num_blocks: int | None, graphs: bool,
    served_name: str,
) -> DeviceRunner:  # fmt: skip
    geometry, model = prepared.geometry, prepared.model
    token_bytes = bytes_per_token(len(prepared.layers), geometry, dtype)
    if num_blocks is None:
        room = int(KV_SHARE * (rig.free_bytes() - ACTIVATION_BYTES))
        num_blocks = REHEARSED_BLOCKS if rig.rehearsal else room // (token_bytes * BLOCK_SIZE) - 1
    model.caches = [prepared.kernel.allocate(num_blocks + 1) for _ in prepared.layers]
    generator = rig.generator(5)
    for cache in model.caches:
        for pages in (cache.key, cache.value):
            fill(pages, generator)
    capacity = Capacity(
        model=served_name,
        max_model_len=min(max_model_len, num_blocks * BLOCK_SIZE),
        block_size=BLOCK_SIZE,
        num_blocks=num_blocks,
        vocab_size=model.vocab_size,
        eos_token_ids=[],
        device=str(rig.device),
        dtype=str(dtype).removeprefix("torch."),
        kv_bytes_per_token=token_bytes,
        grammars=False,
        adapters=list(prepared.loaded.adapters),
    )
    return DeviceRunner(
        model, port_of(rig), capacity, Grammars(_no_tokenizer), graph_rows=GRAPH_ROWS if graphs else 0,
        triton=False if rig.rehearsal else None,
    )  # fmt: skip


def _no_tokenizer() -> NoReturn:
    raise RuntimeError("a model that is only checked has no tokenizer")
