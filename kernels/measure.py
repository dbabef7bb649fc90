"""Which of several attention kernels is right, and which is quick, on the device that they are to serve: told at start,
on small steps made up for it. Waits for the device."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from kernels.contract import DeviceKernel, Geometry, LayerAttention, LayerCache, RaggedBatch

Timer = Callable[[Callable[[], object]], float]
"""Seconds that the device takes for what a function launches."""

ROUNDS = 7
REPEATS = 4
"""Launches of a sample: a single one is hardly longer than the gap before it."""

ERROR = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 6e-2}
"""The largest difference between right answers, of outputs of a size of about 1."""


@dataclass(frozen=True, slots=True)
class Shape:
    """Sequences of a step, all alike."""

    sequences: int
    queries: int  # of each, the last of its tokens
    keys: int


class Scene:
    """A step over pages of its own, with random numbers in them."""

    def __init__(self, kernel: DeviceKernel, geometry: Geometry, dtype: torch.dtype, device: torch.device,
                 shapes: Sequence[Shape]) -> None:  # fmt: skip
        """``kernel`` writes the pages. Any other that shares its layout can :meth:`read` them."""
        self.batch, pages = _batch(geometry.block_size, shapes)
        self.cache: LayerCache = kernel.allocate(pages + 1)
        generator = torch.Generator(device).manual_seed(0)

        def random(tokens: int, heads: int) -> torch.Tensor:
            shape = (tokens, heads, geometry.head_dim)
            return torch.randn(shape, generator=generator, device=device, dtype=torch.float32).to(dtype)

        history, _ = _batch(geometry.block_size, [Shape(s.sequences, s.keys, s.keys) for s in shapes])
        key, value = (random(history.num_tokens, geometry.num_kv_heads) for _ in range(2))
        kernel.write(kernel.plan(history), self.cache, key, value)
        self.query = random(self.batch.num_tokens, geometry.num_heads)

    def read(self, kernel: DeviceKernel, layer: LayerAttention) -> Callable[[], torch.Tensor]:
        """A read by this kernel, planned already."""
        plan = kernel.plan(self.batch)
        return lambda: kernel.read(plan, self.cache, self.query, layer)


def _batch(block_size: int, shapes: Sequence[Shape]) -> tuple[RaggedBatch, int]:
    """(the step, pages that it takes); pages are numbered from 1, and dealt out from the last to the first."""
    each = [shape for shape in shapes for _ in range(shape.sequences)]
    width = max(-(-shape.keys // block_size) for shape in each)
    tables = np.zeros((len(each), width), dtype=np.int32)
    pages = 0
    slots, visible = [], []
    for table, shape in zip(tables, each, strict=True):
        used = -(-shape.keys // block_size)
        table[:used] = np.arange(pages + used, pages, -1)
        pages += used
        position = np.arange(shape.keys - shape.queries, shape.keys)
        visible.append(position + 1)
        slots.append(table[position // block_size].astype(np.int64) * block_size + position % block_size)
    start = np.concatenate([[0], np.cumsum([shape.queries for shape in each])])
    return RaggedBatch(start, np.concatenate(visible), tables, np.concatenate(slots)), pages


def difference(one: DeviceKernel, other: DeviceKernel, scene: Scene, layer: LayerAttention) -> str:
    """In what the second differs from the first on a step; empty where it does not."""
    wanted, got = scene.read(one, layer)(), scene.read(other, layer)()
    if got.shape != wanted.shape or got.dtype != wanted.dtype:
        return f"it answers {tuple(got.shape)} in {got.dtype}"
    error = float((got.float() - wanted.float()).abs().max())
    return "" if error <= ERROR[wanted.dtype] else f"its answers differ by {error:.2g}"


def medians(
    work: Mapping[str, Callable[[], object]],
    timer: Timer,
    deadline: float,
    clock: Callable[[], float] = time.monotonic,
) -> dict[str, float]:
    """Seconds of each, in rounds over all of them so that a device that slows down slows all. Past ``deadline`` (by
    ``clock``) there is no further round; the first, with a launch before it that compiles, is always run."""
    samples: dict[str, list[float]] = {name: [] for name in work}
    for round_ in range(ROUNDS):
        if round_ and clock() >= deadline:
            break
        for name, launch in work.items():
            if not round_:
                timer(launch)
            samples[name].append(timer(launch))
    return {name: statistics.median(own) for name, own in samples.items()}


def device_timer(device: torch.device) -> Timer:
    """By events on a GPU, by the clock on a CPU."""

    def by_events(launch: Callable[[], object]) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        launch()  # the first one is on its way while the others are launched
        start.record()
        for _ in range(REPEATS):
            launch()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) / 1e3 / REPEATS

    def by_clock(launch: Callable[[], object]) -> float:
        start = time.perf_counter()
        launch()
        return time.perf_counter() - start

    return by_events if device.type == "cuda" else by_clock
