"""What every engine is asked: lengths and prompts as token ids, a pure function of the load's name and the seed.

Each load draws from a seed of its own, so that no prompt of one recurs in another: a prefix cache would flatter
whichever engine keeps one. Lengths are stratified where the load is a mixture (one long prompt in every ten, each
shared prefix once in every eight requests), so that runs of different lengths are still runs of the same load.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from headrace.bench.workload import Shot

SIGMA = 0.8
"""Of the lognormal lengths of chat: the mean is 1.38 times the median before clipping."""

FIRST_ID = 1000
"""Prompts are of ids from here on: below lie control tokens and single bytes."""

PREFIXES, PREFIX_TOKENS, OWN_TOKENS, PREFIX_OUTPUT = 8, 512, 32, 32
LONG_EVERY, LONG_LOW, LONG_HIGH = 10, 2000, 4000
WARM_OUTPUT = 8

Lengths = Iterator[tuple[int, int]]
"""(prompt tokens, output tokens) without end."""


@dataclass(frozen=True)
class Load:
    """A workload in a closed loop of ``concurrency`` users; ``requests`` are enough for a figure."""

    name: str
    text: str
    concurrency: int
    requests: int
    shots: Callable[[random.Random, range], Iterator[Shot]]


def _lognormal(rng: random.Random, median: float, low: int, high: int) -> int:
    return max(low, min(high, round(rng.lognormvariate(math.log(median), SIGMA))))


def _chat_lengths(rng: random.Random) -> Lengths:
    while True:
        yield _lognormal(rng, 60, 10, 400), _lognormal(rng, 40, 5, 300)


def _uniform_lengths(_: random.Random) -> Lengths:
    return itertools.repeat((64, 50))


def _longmix_lengths(rng: random.Random) -> Lengths:
    chat = _chat_lengths(rng)
    while True:
        long_one = rng.randrange(LONG_EVERY)
        for place in range(LONG_EVERY):
            prompt, output = next(chat)
            yield (rng.randint(LONG_LOW, LONG_HIGH) if place == long_one else prompt), output


def _apart(lengths: Callable[[random.Random], Lengths]) -> Callable[[random.Random, range], Iterator[Shot]]:
    """Prompts that share nothing."""

    def shots(rng: random.Random, vocabulary: range) -> Iterator[Shot]:
        ids = random.Random(rng.random())  # of its own: the lengths do not depend on the vocabulary
        for prompt, output in lengths(rng):
            yield Shot(0.0, ids.choices(vocabulary, k=prompt), output)

    return shots


def _prefix_shots(rng: random.Random, vocabulary: range) -> Iterator[Shot]:
    prefixes = [rng.choices(vocabulary, k=PREFIX_TOKENS) for _ in range(PREFIXES)]
    while True:
        for prefix in rng.sample(prefixes, PREFIXES):
            yield Shot(0.0, prefix + rng.choices(vocabulary, k=OWN_TOKENS), PREFIX_OUTPUT)


_CHAT = "prompts lognormal, median 60, 10 to 400; outputs lognormal, median 40, 5 to 300"

LOADS = {
    load.name: load
    for load in (
        Load("chat1", _CHAT, 1, 24, _apart(_chat_lengths)),
        Load("chat16", _CHAT, 16, 192, _apart(_chat_lengths)),
        Load("chat32", _CHAT, 32, 320, _apart(_chat_lengths)),
        Load("uniform32", "64 in, 50 out", 32, 256, _apart(_uniform_lengths)),
        Load("prefix16", "8 shared prefixes of 512 and 32 own in, 32 out", 16, 128, _prefix_shots),
        Load("longmix16", f"{_CHAT}; one prompt in ten 2,000 to 4,000", 16, 120, _apart(_longmix_lengths)),
    )
}


def shots_of(load: Load, seed: int, vocab_size: int, count: int) -> list[Shot]:
    """The first ``count`` requests of ``load``; with a larger count the same and more."""
    rng = random.Random(f"{load.name} {seed}")
    return list(itertools.islice(load.shots(rng, range(min(FIRST_ID, vocab_size // 2), vocab_size)), count))


def warm_up_of(load: Load, seed: int, vocab_size: int) -> list[Shot]:
    """One short answer for each user, of the load's shape but with prompts of its own."""
    rng = random.Random(f"warm-up {load.name} {seed}")
    shots = load.shots(rng, range(min(FIRST_ID, vocab_size // 2), vocab_size))
    return [Shot(0.0, one.prompt, min(one.max_tokens, WARM_OUTPUT))
            for one in itertools.islice(shots, load.concurrency)]  # fmt: skip
