"""The stages, in their order. Named here without importing them: they need torch."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass

UNUSED_WEIGHT = 1.0
"""Of a stage whose package is not there: it says so, and that is all."""


@dataclass(frozen=True)
class Stage:
    """``weight``: its share of the time. ``correctness``: it answers whether results are right, not how soon."""

    name: str
    title: str
    weight: float
    correctness: bool = False
    package: str = ""  # which it can't do without

    @property
    def module(self) -> str:
        return f"headrace.gpu_check.stages.{self.name}"


STAGES = (
    Stage("environment", "environment", 20),  # and importing torch, starting CUDA
    Stage("limits", "what this card can do, measured", 15),
    Stage("contract", "kernels against their contract", 120, correctness=True),
    Stage("parity", "greedy tokens against transformers' generate", 50, correctness=True),
    Stage("kernels", "kernels against their floors, and against PyTorch's", 90),
    Stage("throughput", "decoding, against the time to read weights and KV", 65),
    Stage("steps", "where the time of a step goes, and the gap between steps", 65),
    Stage("serving", "continuous against static batching, workload chat", 60),
    Stage("vllm", "vLLM beside it", 120, package="vllm"),
)


MEASURED_BY = ("environment", "limits")
"""What stages of speed are held against."""

HELD_AGAINST = ("kernels", "throughput")


def chosen(only: str) -> list[Stage]:
    """``contract,steps`` -> those stages in their order; empty: all. Raises ValueError for a name that is none.

    What a stage is held against is measured with it.
    """
    names = [name.strip() for name in only.split(",") if name.strip()]
    known = [stage.name for stage in STAGES]
    for name in names:
        if name not in known:
            raise ValueError(f"--only: {name!r} is no stage; stages are {', '.join(known)}")
    if any(name in HELD_AGAINST for name in names):
        names += MEASURED_BY
    return [stage for stage in STAGES if not names or stage.name in names]


def weights(stages: Sequence[Stage]) -> list[float]:
    return [
        UNUSED_WEIGHT if stage.package and importlib.util.find_spec(stage.package) is None else stage.weight
        for stage in stages
    ]
