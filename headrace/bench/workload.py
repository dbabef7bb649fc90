"""Synthetic workloads: prompts as token ids, output lengths, arrival times. Pure functions of a seed."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class Shot:
    """One request: it is sent ``at_s`` after the start (open loop) or when a place is free (closed loop)."""

    at_s: float
    prompt: list[int]
    max_tokens: int


@dataclass(frozen=True)
class Workload:
    name: str
    text: str
    lengths: Callable[[random.Random], tuple[int, int]]  # (prompt tokens, output tokens)


def _lognormal(rng: random.Random, mean: float, sigma: float, low: int, high: int) -> int:
    """A heavy-tailed length with the given mean (before clipping to [low, high])."""
    return max(low, min(high, round(rng.lognormvariate(math.log(mean) - sigma * sigma / 2, sigma))))


def _chat(rng: random.Random) -> tuple[int, int]:
    return _lognormal(rng, 80, 1.0, 4, 600), _lognormal(rng, 90, 1.2, 5, 1000)


def _uniform(_: random.Random) -> tuple[int, int]:
    return 64, 64


def _longmix(rng: random.Random) -> tuple[int, int]:
    return (1500, 32) if rng.random() < 0.1 else _chat(rng)


WORKLOADS = {
    workload.name: workload
    for workload in (
        Workload("chat", "heavy-tailed lengths: prompts around 80 tokens, outputs 5 to 1000 around 90", _chat),
        Workload("uniform", "every prompt and every output 64 tokens", _uniform),
        Workload("longmix", "chat, and every tenth request a prompt of 1,500 tokens", _longmix),
    )
}


def endless_shots(
    workload: Workload, seed: int, vocab_size: int, rate_per_s: float, longest: int, variation: int = 0
) -> Iterator[Shot]:
    """Requests without end. ``rate_per_s`` > 0: Poisson arrivals; 0: all at once (the client paces them).

    Prompts are random ids of the upper part of the vocabulary; no two share a prefix, so no cache flatters anybody.
    Another ``variation`` has other prompts of the same lengths, in the same order, at times that only scale with the
    rate: two loads differ in what is to be compared, not in what they ask.
    """
    rng = random.Random(seed)
    ids = random.Random(f"{seed} {variation}")
    vocabulary = range(min(1000, vocab_size // 2), vocab_size)
    at = 0.0
    while True:
        prompt_len, max_tokens = _clipped(workload, rng, longest)
        gap = rng.expovariate(1.0)
        if rate_per_s > 0:
            at += gap / rate_per_s
        yield Shot(at, ids.choices(vocabulary, k=prompt_len), max_tokens)


def shots(workload: Workload, count: int, seed: int, vocab_size: int, rate_per_s: float, longest: int) -> list[Shot]:
    """The first ``count`` of :func:`endless_shots`."""
    return list(itertools.islice(endless_shots(workload, seed, vocab_size, rate_per_s, longest), count))


def mean_output_tokens(workload: Workload, seed: int, longest: int, samples: int = 20_000) -> float:
    """Output tokens that a request asks for, on average, where none is longer than ``longest`` with its prompt."""
    rng = random.Random(seed)
    return sum(_clipped(workload, rng, longest)[1] for _ in range(samples)) / samples


def _clipped(workload: Workload, rng: random.Random, longest: int) -> tuple[int, int]:
    prompt_len, max_tokens = workload.lengths(rng)
    prompt_len = min(prompt_len, longest - 1)
    return prompt_len, min(max_tokens, longest - prompt_len)
