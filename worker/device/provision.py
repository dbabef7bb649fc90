"""What a model may take of its device: memory measured and divided, pages, and the runner that uses both."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from kernels.device_batch import on_device
from observability.startup import start_up
from shared.lifecycle import StartupError
from shared.messages import Capacity, Sampling
from worker.assembly import assemble
from worker.batch import Batch, Row
from worker.device.lora import numbers_of
from worker.device.memory import GIB, DeviceMemory, largest_step, measure
from worker.device.port import Port
from worker.device.prepare import Prepared
from worker.device.runner import DeviceRunner
from worker.device.sampling import DeviceSampler, SamplingParams, Wanted, host_params
from worker.grammar import Grammars
from worker.kv_cache import bytes_per_token, pool_size_of_all
from worker.logprobs import MAX_ROWS
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
            prepared.model, kernel, len(prepared.layers), geometry.block_size, room.step_tokens, longest, device,
            sample,
            adapters=bool(loaded.adapters),
        )  # fmt: skip

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
        raise StartupError(f"the GPU's memory does not hold {size.num_bytes / GIB:,.2f} GiB of pages") from None
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
        adapters=list(loaded.adapters),
        weights=loaded.weights,
        adapter_weights=list(loaded.adapter_weights),
    )
    start_up.ended("KV cache")
    how = "module by module" if loaded.module is not None else "fused"
    log.info("%s on %s, %s, %s attention", capacity.dtype, device, how, kernel.name)
    log.info("%s", split.describe())
    log.info("%s", size.describe())
    if self_check and loaded.dtype != torch.float64:
        _check_bits(prepared, capacity, batch_invariant)
        start_up.ended("self-check")
    try:
        runner = DeviceRunner(
            prepared.model, port, capacity, grammars, graph_rows=room.graph_rows, graph_room=graph_room,
            alone=mine() is None,
        )  # fmt: skip
    except port.out_of_memory:
        host = f", nor {room.swap_space / GIB:,.2f} GiB of the host's (--swap-space)" if room.swap_space else ""
        raise StartupError(f"there is no memory of the GPU's for the state of steps{host}") from None
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
        numbers = numbers_of(rows, {name: number for number, name in enumerate(self.capacity.adapters)})
        adapters = None
        if numbers is not None:
            adapters = torch.from_numpy(np.repeat(numbers, [row.count for row in rows])).to(device)
        return self.prepared.model.forward(token_ids, places, on_device(ragged, device), kept, adapters)


def _check_bits(prepared: Prepared, capacity: Capacity, batch_invariant: bool) -> None:
    if rows_keep_their_bits(_Passes(prepared, capacity), capacity.adapters):
        return
    why = "a row's bits depend on the rows beside it"
    if batch_invariant:
        raise StartupError(f"batch-invariant: {why} here")
    log.info("%s: tokens may differ between runs (--batch-invariant keeps them)", why)
