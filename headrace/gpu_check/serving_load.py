"""The load of the serving stages, the same for everybody, and the figures that are made of it."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from headrace.bench.report import percentile
from headrace.bench.taken import Taken
from headrace.bench.workload import WORKLOADS, Shot, endless_shots
from headrace.gpu_check.rig import CannotRun, Rig
from headrace.gpu_check.shapes import LLAMA_1B, LLAMA_8B, TINY, Shape, largest

SHAPES = {shape.name: shape for shape in (LLAMA_8B, LLAMA_1B, TINY)}
WARM_UP_REQUESTS = 8


@dataclass(frozen=True)
class Load:
    """A closed loop of the workload ``chat``, without sharing of prefixes, for ``seconds``."""

    model: str
    concurrency: int
    longest: int  # prompt and output
    seconds: float
    seed: int = 11

    @property
    def shape(self) -> Shape:
        return SHAPES[self.model]

    def shots(self) -> Iterator[Shot]:
        return endless_shots(WORKLOADS["chat"], self.seed, self.shape.sizes.vocab_size, 0, self.longest)

    def warm_up(self) -> Iterator[Shot]:
        """A few short ones, of other contents."""
        few = endless_shots(WORKLOADS["chat"], self.seed + 1, self.shape.sizes.vocab_size, 0, min(64, self.longest))
        return itertools.islice(few, WARM_UP_REQUESTS)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> Load:
        return cls(**fields)

    def lasting(self, seconds: float) -> Load:
        return replace(self, seconds=seconds)


def load_for(rig: Rig) -> Load:
    """What this card has the memory for. Raises CannotRun."""
    if rig.rehearsal:
        return Load(TINY.name, concurrency=3, longest=48, seconds=0.2)
    shape = largest((LLAMA_8B, LLAMA_1B), rig.served_dtype, rig.free_bytes())
    if shape is None:
        raise CannotRun("too little memory is free for a model of 1B")
    return Load(shape.name, concurrency=64, longest=2048, seconds=20.0)


def figures(policy: str, taken: Sequence[Taken], tokens: int, seconds: float) -> dict[str, Any]:
    """A row: ``tokens`` of all requests in ``seconds``, latencies of those that ended."""
    first = [one.ttft_s * 1e3 for one in taken if one.text_s]
    between = [gap * 1e3 for one in taken for gap in one.itl_s]
    return {
        "policy": policy,
        "requests": len(taken),
        "seconds": seconds,
        "tokens_s": tokens / seconds if seconds else 0.0,
        "ttft_p50_ms": percentile(first, 0.5),
        "ttft_p99_ms": percentile(first, 0.99),
        "itl_p50_ms": percentile(between, 0.5),
        "itl_p99_ms": percentile(between, 0.99),
    }
