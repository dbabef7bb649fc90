"""How long one iteration takes on a GPU: a roofline of weights and of attention.

    T = t0 + max(2·P·N / (F·ef), W / (B·eb)) + max(FLOP_attention / (F·ef), KV bytes read / (B·eb)) + copies

N tokens are in the iteration (prompt tokens, one per decode, padding); P parameters of W bytes; F and B are FLOP/s and
bytes/s summed over the tensor-parallel group; ef and eb are the shares of the peaks that kernels reach; t0 is launch,
Python and bus. The same model for every policy: a ratio shows the scheduler, not the hardware.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from headrace.simulate.hardware import Deployment


@dataclass(slots=True)
class StepWork:
    """What an iteration computes. ``context`` sums, over its tokens, the context each attends to; ``kv_tokens`` sums,
    over its sequences, the KV entries that are read."""

    rows: int = 0
    context: int = 0
    kv_tokens: int = 0
    copied_tokens: int = 0
    swapped_tokens: int = 0

    def add_rows(self, before: int, count: int) -> None:
        """``count`` tokens of a sequence that has ``before`` already."""
        self.rows += count
        self.context += count * before + count * (count + 1) // 2
        self.kv_tokens += before + count


class StepTime(Protocol):
    def ns(self, work: StepWork) -> int:
        """How long the step takes, swaps included."""

    def swap_ns(self, work: StepWork) -> int:
        """How much of that is swapping."""


class Roofline:
    def __init__(self, deployment: Deployment, t0_ms: float = 2.0, ef: float = 0.6, eb: float = 0.75) -> None:
        model, gpu = deployment.model, deployment.gpu
        flops = deployment.tp * gpu.flops * ef
        bandwidth = deployment.tp * gpu.bandwidth * eb
        self._t0 = t0_ms * 1e6
        self._weights = model.weight_bytes / bandwidth * 1e9
        self._row = 2 * model.params / flops * 1e9
        self._context = model.attention_flops / flops * 1e9
        self._kv = model.kv_bytes_per_token / bandwidth * 1e9
        self._swap = model.kv_bytes_per_token / (deployment.tp * 25e9) * 1e9  # PCIe 4 x16, one way

    def ns(self, work: StepWork) -> int:
        weights = max(self._row * work.rows, self._weights)
        attention = max(self._context * work.context, self._kv * work.kv_tokens)
        copies = 2 * self._kv * work.copied_tokens  # read and written
        return int(self._t0 + weights + attention + copies) + self.swap_ns(work)

    def swap_ns(self, work: StepWork) -> int:
        return int(self._swap * work.swapped_tokens)


@dataclass(frozen=True)
class LinearStepTime:
    """``base_ns + row_ns · rows``: what a trace's durations are fitted to."""

    base_ns: float
    row_ns: float

    def ns(self, work: StepWork) -> int:
        return int(self.base_ns + self.row_ns * work.rows)

    def swap_ns(self, work: StepWork) -> int:
        return 0
