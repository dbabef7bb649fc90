"""Rows to sample from, of every kind: parameters, ties, and logits that are no numbers."""

from __future__ import annotations

import random
from collections.abc import Mapping

import torch
from hypothesis import strategies as st

from shared.messages import Sampling
from worker.sampling import SampleRow

SPECIALS = (float("nan"), float("inf"), float("-inf"), 3e38, -3e38, -0.0)

HOWS: tuple[dict[str, float], ...] = (
    {}, {"temperature": 0.0}, {"top_k": 1}, {"top_k": 7}, {"top_p": 1e-9}, {"top_p": 0.3}, {"top_p": 0.95},
    {"top_p": 0.9999, "temperature": 1.7}, {"min_p": 0.1}, {"min_p": 1.0}, {"top_k": 50, "top_p": 0.9},
    {"top_k": 300, "top_p": 0.5, "min_p": 0.02, "temperature": 0.6}, {"temperature": 1e-4}, {"temperature": 1e30},
)  # fmt: skip

samplings = st.builds(
    Sampling,
    seed=st.integers(0, 2**63 - 1),
    max_tokens=st.just(16),
    temperature=st.sampled_from([0.0, 1e-8, 1e-5, 1e-4, 0.3, 0.7, 1.0, 2.0, 1e30]),
    top_p=st.one_of(st.sampled_from([1.0, 0.9, 0.5, 0.25, 1e-9, 0.99, 0.9999]), st.floats(1e-6, 1.0)),
    top_k=st.sampled_from([0, 0, 0, -1, 1, 2, 5, 50, 300, 1000, 10**9]),
    min_p=st.sampled_from([0.0, 0.0, 0.0, 0.05, 0.5, 1.0]),
)

sample_rows = st.builds(
    SampleRow, samplings, prompt_index=st.integers(0, 100), choice=st.integers(0, 100), position=st.integers(0, 10**6)
)


def random_logits(count: int, vocabulary: int, spread: float = 3.0, seed: int = 0) -> torch.Tensor:
    return torch.randn(count, vocabulary, generator=torch.Generator().manual_seed(seed)) * spread


def broken_logits(
    count: int, vocabulary: int, spread: float, tied: bool, specials: Mapping[float, float], seed: int
) -> torch.Tensor:
    """Of ``specials`` each takes such a share of the tokens."""
    logits = random_logits(count, vocabulary, spread, seed)
    if tied:
        logits = logits.round()
    places = random.Random(seed)
    for value, share in specials.items():
        generator = torch.Generator().manual_seed(places.getrandbits(32))
        logits[torch.rand(logits.shape, generator=generator) < share] = value
    return logits


def mixed_rows(count: int) -> list[SampleRow]:
    """Rows with all of HOWS, one after another."""
    return [
        SampleRow(Sampling(seed, 16, **HOWS[seed % len(HOWS)]), seed % 3, seed % 2, 7 * seed)  # type: ignore[arg-type]
        for seed in range(count)
    ]
