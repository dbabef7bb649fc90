"""What this machine can do, measured: matrix products with packed weights, and reading memory. And what a step needs.

The model's bound is that of Williams et al. (2009): a step takes no less than its arithmetic at the best rate, nor than
reading its weights and its keys and values at the memory's.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open

from headrace.profile.steps import Load
from worker.linear import PackedWeight, can_pack

CPU = torch.device("cpu")
SHAPE = (1536, 1536)
"""Output and input features of the products: some 5 MB in bfloat16, of which there are as many as no cache holds."""

MATRICES = 24
READ_BYTES = 256 << 20
ROUNDS = 5


@dataclass(frozen=True)
class Machine:
    """``gemm[dtype][rows]`` in FLOP/s, ``bandwidth`` in bytes/s, with torch's threads."""

    threads: int
    gemm: dict[str, dict[int, float]]
    bandwidth: float

    def peak(self, dtype: str) -> float:
        return max(self.gemm[dtype].values())


@dataclass(frozen=True)
class Weights:
    """Weights that a token is multiplied with: those of the layers, and those of the head."""

    layers: int
    head: int
    item_bytes: int = 0  # of each, as it is kept; 0: the dtype's


def measure(rows: Sequence[int], dtypes: Sequence[torch.dtype]) -> Machine:
    """Rates of this process's threads at these row counts. A second or two."""
    gemm = {}
    for dtype in dtypes:
        weights = [torch.randn(SHAPE).to(dtype) for _ in range(MATRICES)]
        products: list[Callable[[torch.Tensor], torch.Tensor]]
        if can_pack(dtype, CPU):
            products = [PackedWeight(weight) for weight in weights]
        else:
            products = [lambda x, weight=weight: torch.nn.functional.linear(x, weight) for weight in weights]  # type: ignore[misc]
        gemm[str(dtype).removeprefix("torch.")] = {count: _gemm(products, count, dtype) for count in rows}
    return Machine(torch.get_num_threads(), gemm, _bandwidth())


def weights_of(folder: Path, item_bytes: int = 0) -> Weights:
    """Counted in the model's own files: matrices but embeddings, and what stands for the head."""
    layers = head = embedding = 0
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, "pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118  no mapping
                shape = tensors.get_slice(name).get_shape()
                size = shape[0] * shape[1] if len(shape) == 2 else 0
                if "lm_head" in name or "embed_out" in name:
                    head = size
                elif "embed" in name or ".wte." in name or ".wpe." in name:
                    embedding = max(embedding, size)
                else:
                    layers += size
    return Weights(layers, head or embedding, item_bytes)


def bound_s(load: Load, weights: Weights, machine: Machine, dtype: str, kv_bytes_per_token: int) -> float:
    """The least seconds of a step on ``machine``."""
    item: int = weights.item_bytes or getattr(torch, dtype).itemsize
    sampled = 1 if load.chunk else load.rows
    flops = 2 * (weights.layers * load.tokens + weights.head * sampled)
    moved = (weights.layers + weights.head) * item
    moved += kv_bytes_per_token * (load.chunk or load.rows * load.context)
    return max(flops / machine.peak(dtype), moved / machine.bandwidth)


def gemm_flops(load: Load, weights: Weights) -> int:
    """Of the layers' products; the head's are counted with the logits."""
    return 2 * weights.layers * load.tokens


def _gemm(products: Sequence[Callable[[torch.Tensor], torch.Tensor]], rows: int, dtype: torch.dtype) -> float:
    x = torch.randn(rows, SHAPE[1]).to(dtype)
    flops = 2.0 * rows * SHAPE[0] * SHAPE[1] * len(products)

    def once() -> None:
        for product in products:
            product(x)

    return flops / _best_s(once)


def _bandwidth() -> float:
    memory = torch.ones(READ_BYTES // 8, dtype=torch.float64)
    return READ_BYTES / _best_s(memory.sum)


def _best_s(work: Callable[[], object]) -> float:
    """The quickest of a few rounds: what the machine can, not what others on it leave."""
    with torch.inference_mode():
        work()
        best = float("inf")
        for _ in range(ROUNDS):
            began = time.perf_counter()
            work()
            best = min(best, time.perf_counter() - began)
    return best
