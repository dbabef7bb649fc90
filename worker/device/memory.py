"""How a GPU's memory divides: weights and a step's activations are measured, what is left holds keys and values.

The largest step that the worker takes is run once, on random numbers, before there are any pages to speak of; the
scheduler is told how large it was (:attr:`shared.messages.Capacity.max_batched_tokens`).
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from kernels.contract import DeviceBatch, DeviceKernel
from shared.lifecycle import StartupError
from worker.device.cuda_port import told_apart
from worker.device.model import DeviceModel

GIB = 1 << 30

PROFILED_ROWS = 256
"""Rows of the largest step whose logits are wanted, at most: sequences that decode, or end a prompt."""

MARGIN = 256 << 20
"""Bytes kept for what torch's allocator loses between its blocks, and for what libraries take only later."""


class DeviceMemory(Protocol):
    """What is asked of a device's memory, in bytes."""

    def allocated(self) -> int:
        """In this process's tensors."""
        ...

    def peak(self) -> int:
        """The most that :meth:`allocated` has been since :meth:`reset_peak`."""
        ...

    def reset_peak(self) -> None: ...

    def free_and_total(self) -> tuple[int, int]:
        """Of the whole device, whoever uses it; what this process merely keeps for later is given back first."""
        ...


class CudaMemory:
    def __init__(self, device: torch.device) -> None:
        self._device = device

    def allocated(self) -> int:
        return torch.cuda.memory_allocated(self._device)

    def peak(self) -> int:
        torch.cuda.synchronize(self._device)
        return torch.cuda.max_memory_allocated(self._device)

    def reset_peak(self) -> None:
        torch.cuda.reset_peak_memory_stats(self._device)

    def free_and_total(self) -> tuple[int, int]:
        gc.collect()
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info(self._device)


@dataclass(frozen=True, slots=True)
class Split:
    """Bytes of a device. ``others``: other processes, and what the driver keeps for this one."""

    total: int
    utilization: float
    weights: int
    activations: int
    step_tokens: int  # of the step that the activations are of
    graphs: int
    others: int

    @property
    def pages(self) -> int:
        """What is left for keys and values; below 0 where the rest is too much already."""
        return int(self.total * self.utilization) - self.weights - self.activations - self.graphs - self.others - MARGIN

    def describe(self) -> str:
        """The line printed at start."""
        return f"{self._of()}: {self._parts()}; {self.pages / GIB:,.2f} GiB for keys and values"

    def refusal(self, least: int) -> str:
        """Why nothing can be served: ``least`` bytes for keys and values are not there."""
        return (
            f"{self._of()} leave {self.pages / GIB:,.2f} GiB for keys and values, which take {least / GIB:,.2f} at "
            f"least: {self._parts()}; raise --gpu-memory-utilization or lower --max-batched-tokens"
        )

    def _of(self) -> str:
        return f"{self.utilization:.0%} of the GPU's {self.total / GIB:,.2f} GiB"

    def _parts(self) -> str:
        parts = {
            "weights": self.weights,
            f"activations of {self.step_tokens:,} tokens": self.activations,
            "graphs": self.graphs,
            "other use": self.others,
            "margin": MARGIN,
        }
        return ", ".join(f"{name} {size / GIB:,.2f} GiB" for name, size in parts.items())


def check_weights(memory: DeviceMemory, needed: int, utilization: float) -> None:
    """Before they are loaded. Raises StartupError if ``needed`` bytes of weights don't fit."""
    free, total = memory.free_and_total()
    room = int(total * utilization) - (total - free) - MARGIN
    if needed > room:
        raise StartupError(
            f"the weights take {needed / GIB:,.2f} GiB, and {utilization:.0%} of the GPU's {total / GIB:,.2f} GiB have "
            f"room for {max(0, room) / GIB:,.2f} ({(total - free) / GIB:,.2f} are in use already)"
        )


def measure(
    memory: DeviceMemory, utilization: float, graphs: int, step_tokens: int, step: Callable[[], object]
) -> Split:
    """Run ``step``, the largest one, once all weights are there, and see what it takes. ``graphs``: bytes that captured
    graphs may take. Raises StartupError if the step itself does not fit."""
    weights = memory.allocated()
    memory.reset_peak()
    try:
        with told_apart():
            step()
    except torch.OutOfMemoryError:
        raise StartupError(
            f"the GPU's memory does not hold the activations of {step_tokens:,} tokens beside {weights / GIB:,.2f} GiB "
            "of weights; lower --max-batched-tokens"
        ) from None
    activations = memory.peak() - weights
    free, total = memory.free_and_total()
    return Split(total, utilization, weights, activations, step_tokens, graphs, max(0, total - free - weights))


def largest_step(
    model: DeviceModel,
    kernel: DeviceKernel,
    layers: int,
    block_size: int,
    step_tokens: int,
    longest: int,
    device: torch.device,
    sample: Callable[[torch.Tensor], object],
    adapters: bool = False,
) -> None:
    """A step of ``step_tokens`` prompt tokens in sequences of up to ``longest``, with as many sampled rows as there may
    be. Every key goes to the scratch page, and is read from there. ``adapters``: every row has a LoRA adapter."""
    rows = min(step_tokens, PROFILED_ROWS)
    longest = min(longest, step_tokens)
    starts = torch.arange(0, step_tokens, longest, dtype=torch.int32)
    place = torch.arange(step_tokens) % longest
    model.caches = [kernel.allocate(1) for _ in range(layers)]
    batch = DeviceBatch(
        query_start=torch.cat([starts, torch.tensor([step_tokens], dtype=torch.int32)]).to(device),
        visible=(place + 1).to(torch.int32).to(device),
        block_tables=torch.zeros((len(starts), -(-longest // block_size)), dtype=torch.int32, device=device),
        write_slots=torch.zeros(step_tokens, dtype=torch.int64, device=device),
        max_query=longest,
        max_keys=longest,
    )
    tokens = torch.zeros(step_tokens, dtype=torch.int64, device=device)
    keep = torch.arange(step_tokens - rows, step_tokens, device=device)
    try:
        sample(model.forward(tokens, place.to(device), batch, keep, torch.zeros_like(tokens) if adapters else None))
    finally:
        model.caches = []
