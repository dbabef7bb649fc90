"""A device's memory divides as measured, and what does not fit is refused with the figures."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from ragged_steps import CPU

from kernels.contract import DeviceBatch, Geometry, LayerCache
from shared.lifecycle import StartupError
from worker.device.memory import GIB, MARGIN, PROFILED_ROWS, Split, check_weights, largest_step, measure
from worker.device.trial import DenseAttention


@dataclass
class FakeMemory:
    """A card of 80 GiB, of which others use 1. This process's context takes half a GiB more."""

    weights: int = 16 * GIB
    highest: int = 0
    loaded: bool = True

    def allocated(self) -> int:
        return self.weights

    def peak(self) -> int:
        return self.highest

    def reset_peak(self) -> None:
        self.highest = self.weights

    def free_and_total(self) -> tuple[int, int]:
        return 80 * GIB - 3 * GIB // 2 - (self.weights if self.loaded else 0), 80 * GIB


def test_what_is_left_after_weights_activations_graphs_and_others_is_for_pages() -> None:
    memory = FakeMemory()

    def step() -> None:
        memory.highest += 3 * GIB

    split = measure(memory, 0.9, GIB, 8192, step)
    assert (split.weights, split.activations, split.graphs, split.others) == (16 * GIB, 3 * GIB, GIB, 3 * GIB // 2)
    used = split.pages + split.weights + split.activations + split.graphs + split.others + MARGIN
    assert used == int(0.9 * 80 * GIB)
    assert split.describe() == (
        "90% of the GPU's 80.00 GiB: weights 16.00 GiB, activations of 8,192 tokens 3.00 GiB, graphs 1.00 GiB, "
        "other use 1.50 GiB, margin 0.25 GiB; 50.25 GiB for keys and values"
    )


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 8.00 GiB"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    ],
)
def test_a_step_that_does_not_fit_is_named(error: RuntimeError) -> None:
    def step() -> None:
        raise error

    with pytest.raises(StartupError, match=r"activations of 8,192 tokens beside 16.00 GiB of weights; lower --max-b"):
        measure(FakeMemory(), 0.9, 0, 8192, step)


def test_nothing_left_for_pages_is_refused_with_all_figures() -> None:
    split = Split(24 * GIB, 0.9, 16 * GIB, 5 * GIB, 8192, GIB, GIB // 2)
    assert split.pages < 0
    words = split.refusal(2 << 20)
    for figure in ("90% of the GPU's 24.00 GiB leave -1.15 GiB", "0.00 at least", "weights 16.00", "8,192 tokens 5.00"):
        assert figure in words
    assert "\n" not in words


def test_weights_that_do_not_fit_are_refused_before_they_are_loaded() -> None:
    memory = FakeMemory(loaded=False)
    check_weights(memory, 70 * GIB, 0.9)
    with pytest.raises(StartupError, match=r"weights take 71.00 GiB, and 90% of .* have room for 70.2"):
        check_weights(memory, 71 * GIB, 0.9)


@pytest.mark.parametrize(("tokens", "longest"), [(40, 64), (300, 128), (300, 300)])
def test_the_largest_step_is_as_large_as_any(tokens: int, longest: int) -> None:
    geometry = Geometry(4, 2, 16, 16)
    kernel = DenseAttention(geometry, torch.float32, CPU)
    seen: list[tuple[int, ...]] = []

    class Model:
        caches: list[LayerCache] = []
        vocab_size = 7
        graph_tokens = 0

        def forward(
            self,
            token_ids: torch.Tensor,
            positions: torch.Tensor,
            batch: DeviceBatch,
            keep: torch.Tensor,
            adapters: torch.Tensor | None = None,
        ) -> torch.Tensor:
            assert adapters is None
            assert len(self.caches) == 3 and batch.host is None
            plan = kernel.plan_device(batch)
            query = torch.randn(len(token_ids), 4, 16)
            kernel.write(plan, self.caches[0], query[:, :2], query[:, :2])
            per_sequence = batch.query_start.diff()
            seen.append((len(token_ids), int(per_sequence.max()), int(batch.visible.max()), len(keep)))
            assert int(per_sequence.max()) <= batch.max_query and int(positions.max()) < longest
            assert int(batch.query_start[-1]) == tokens and batch.block_tables.shape[1] * 16 >= batch.max_keys
            return torch.zeros(len(keep), 7)

    model = Model()
    sampled: list[torch.Size] = []
    largest_step(model, kernel, 3, 16, tokens, longest, CPU, lambda logits: sampled.append(logits.shape))
    most = min(tokens, longest)
    assert seen == [(tokens, most, most, min(tokens, PROFILED_ROWS))]
    assert sampled == [(min(tokens, PROFILED_ROWS), 7)] and not model.caches
