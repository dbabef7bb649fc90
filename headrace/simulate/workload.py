"""Workloads: what is asked, when, and how long the answers turn out. Pure functions of a seed.

No text exists here. A prompt is a list of segments (content, length): equal segments in equal places are equal tokens,
which is all that the prefix cache can see. An answer's true length is the simulated worker's secret; the scheduler
knows ``max_tokens`` only.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from shared.messages import pack_tokens

OWN = 0
"""Content of a segment that no other request shares."""

Segment = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Request:
    """One request. ``outputs`` has the true length of each choice; its length is ``n``."""

    at_ns: int
    segments: tuple[Segment, ...]
    max_tokens: int
    outputs: tuple[int, ...]
    tenant: str = ""
    priority: int = 0
    deadline_ns: int = 0  # from arrival; 0: none
    cancel_ns: int = 0  # from arrival; 0: the client stays
    cache_salt: str = ""
    beam_width: int = 0  # > 0: beam search for ``max_tokens`` tokens; ``outputs`` has one entry
    recorded: bytes = b""  # a recorded prompt (packed token ids) instead of segments

    @property
    def prompt_len(self) -> int:
        return len(self.recorded) // 4 or sum(length for _, length in self.segments)

    def prompt(self, own: int) -> bytes:
        """Packed token ids; ``own`` stands for the content that only this request has."""
        if self.recorded:
            return self.recorded
        return b"".join(pack_tokens((content or own,)) * length for content, length in self.segments)


@dataclass(frozen=True)
class Lengths:
    """What one kind of request looks like: ``draw(rng)`` gives (segments, max_tokens, true output length)."""

    name: str
    text: str
    draw: Callable[[random.Random], tuple[tuple[Segment, ...], int, int]]


def lognormal(rng: random.Random, mean: float, sigma: float, low: int, high: int) -> int:
    """A heavy-tailed length with the given mean (before clipping to [low, high])."""
    return max(low, min(high, round(rng.lognormvariate(math.log(mean) - sigma * sigma / 2, sigma))))


def _chat(rng: random.Random) -> tuple[tuple[Segment, ...], int, int]:
    return ((OWN, lognormal(rng, 161, 1.1, 4, 1024)),), 1024, lognormal(rng, 338, 1.0, 4, 1024)


def _mixed(rng: random.Random) -> tuple[tuple[Segment, ...], int, int]:
    return ((OWN, lognormal(rng, 80, 1.0, 4, 600)),), 1000, lognormal(rng, 90, 1.2, 5, 1000)


def _instruct(rng: random.Random) -> tuple[tuple[Segment, ...], int, int]:
    return ((OWN, lognormal(rng, 19, 0.6, 4, 256)),), 512, lognormal(rng, 58, 1.0, 2, 512)


def _saturated(rng: random.Random) -> tuple[tuple[Segment, ...], int, int]:
    output = round(rng.uniform(4000, 6000))
    return ((OWN, round(rng.uniform(800, 1200))),), 6000, output


def _document(rng: random.Random) -> tuple[tuple[Segment, ...], int, int]:
    return ((OWN, lognormal(rng, 12_000, 0.5, 4_000, 30_000)),), 512, lognormal(rng, 208, 0.6, 16, 512)


def _rag(rng: random.Random) -> tuple[tuple[Segment, ...], int, int]:
    return _document(rng) if rng.random() < 0.1 else _chat(rng)


def uniform(prompt: int, output: int) -> Lengths:
    return Lengths(
        "uniform", f"every prompt {prompt} and every output {output} tokens",
        lambda _: (((OWN, prompt),), output, output),
    )  # fmt: skip


def prefixed(groups: int, prefix: int, suffix: int, output: int) -> Lengths:
    """Prompts that begin with one of ``groups`` prefixes; the own part and the output vary by half."""

    def draw(rng: random.Random) -> tuple[tuple[Segment, ...], int, int]:
        group = 1 + rng.randrange(groups)
        own = round(rng.uniform(0.5, 1.5) * suffix)
        length = max(1, round(rng.uniform(0.5, 1.5) * output))
        return ((group, prefix), (OWN, max(1, own))), max(1, round(1.5 * output)), length

    text = f"{groups} shared prefixes of {prefix} tokens, own part around {suffix}, output around {output}"
    return Lengths("prefix", text, draw)


LENGTHS = {
    lengths.name: lengths
    for lengths in (
        Lengths("chat", "ShareGPT-like: prompts around 161 tokens, outputs around 338, heavy tails up to 1024", _chat),
        Lengths("mixed", "mixed chat: prompts around 80 tokens, outputs 5 to 1000 around 90, heavy tails", _mixed),
        Lengths("instruct", "Alpaca-like: prompts around 19 tokens, outputs around 58", _instruct),
        Lengths("saturated", "prompts 800 to 1200 tokens, outputs 4000 to 6000", _saturated),
        Lengths("document", "prompts of 4k to 30k tokens around 12k, outputs around 208", _document),
        Lengths("rag", "chat, and every tenth request a document of 4k to 30k tokens", _rag),
        uniform(256, 256),
        prefixed(8, 2000, 100, 100),
    )
}


# --- arrivals -------------------------------------------------------------------------------------------------------


def poisson(rng: random.Random, rate: float) -> Iterator[int]:
    """Times in ns, ``rate`` a second on average, independent of one another."""
    at = 0.0
    while True:
        at += rng.expovariate(rate) * 1e9
        yield int(at)


def bursty(rng: random.Random, rate: float, shape: float = 0.1) -> Iterator[int]:
    """Gamma-distributed gaps; ``shape`` 0.1 gives a coefficient of variation of 3.2."""
    at = 0.0
    while True:
        at += rng.gammavariate(shape, 1 / (shape * rate)) * 1e9
        yield int(at)


def steady(rng: random.Random, rate: float) -> Iterator[int]:
    at = 0.0
    while True:
        at += 1e9 / rate
        yield int(at)


def at_once(rng: random.Random, rate: float) -> Iterator[int]:
    """All at the start; with a closed loop, the clients pace them."""
    while True:
        yield 0


ARRIVALS: dict[str, Callable[[random.Random, float], Iterator[int]]] = {
    "poisson": poisson,
    "bursty": bursty,
    "steady": steady,
    "at-once": at_once,
}


def stream(
    lengths: Lengths, count: int, seed: int, rate: float = 0.0, arrivals: str = "poisson", *, n: int = 1,
    tenant: str = "", priority: int = 0, deadline_ns: int = 0, start_ns: int = 0, longest: int = 1 << 30,
) -> list[Request]:  # fmt: skip
    """``count`` requests; ``rate`` 0: all at once. Prompts and outputs are cut so that both fit ``longest`` tokens."""
    rng = random.Random(f"{seed}/{lengths.name}/{tenant}")
    clock = random.Random(f"{seed}/arrivals/{tenant}")
    times = ARRIVALS[arrivals if rate > 0 else "at-once"](clock, rate)
    made = []
    for at in (next(times) for _ in range(count)):
        segments, max_tokens, output = lengths.draw(rng)
        outputs = [output]
        while len(outputs) < n:
            outputs.append(lengths.draw(rng)[2])
        segments = _cut(segments, longest - 1)
        max_tokens = min(max_tokens, longest - sum(length for _, length in segments))
        outputs = [min(one, max_tokens) for one in outputs]
        made.append(Request(start_ns + at, segments, max_tokens, tuple(outputs), tenant, priority, deadline_ns))
    return made


def _cut(segments: tuple[Segment, ...], longest: int) -> tuple[Segment, ...]:
    kept, left = [], longest
    for content, length in segments:
        if left > 0:
            kept.append((content, min(length, left)))
            left -= length
    return tuple(kept)


def merged(*streams: list[Request]) -> list[Request]:
    """Several streams in order of arrival."""
    return sorted((request for one in streams for request in one), key=lambda request: request.at_ns)
