"""Pools: the workers of a model, apart by what they are for, each pool with a queue of its own; and the rules by which
a request comes to a pool. Pure text and numbers: which workers there are ``scheduler.core.routing`` looks up.

A worker says which pool it is in. The rules give pools ranges of prompt lengths, say whose requests go where if a pool
has no worker for them (*overflow*), and whose requests an idle pool's workers may take (*lending*).
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

from shared.pool_name import DEFAULT_POOL, POOL_NAME

SHORTER = "shorter"
"""In place of pairs, what may be lent: pools with a range lend to those of shorter prompts."""

_ENTRY = re.compile(rf"({POOL_NAME})(?::([0-9]{{0,12}})-([0-9]{{0,12}}))?")
_ENDLESS = 1 << 62


class QueueKey(NamedTuple):
    """One queue: the requests of a model that go to one of its pools."""

    model: str
    pool: str


@dataclass(frozen=True, slots=True)
class Range:
    """Prompt tokens, both ends included."""

    low: int
    high: int

    def __contains__(self, tokens: int) -> bool:
        return self.low <= tokens <= self.high


@dataclass(frozen=True, slots=True)
class PoolRules:
    """``names`` are the pools that are declared. Of ``overflow`` and ``lent`` the order counts: the first that can."""

    names: tuple[str, ...] = ()
    ranges: dict[str, Range] = field(default_factory=dict)
    overflow: dict[str, tuple[str, ...]] = field(default_factory=dict)  # pool -> where its requests go instead
    lent: dict[str, tuple[str, ...]] = field(default_factory=dict)  # pool -> whose requests its idle workers take

    @classmethod
    def parse(cls, pools: str = "", overflow: str = "", lend: str = "") -> PoolRules:
        """``pools``: ``NAME`` or ``NAME:LOW-HIGH``, either end may be left out, e.g. ``chat:-4096,long:4097-``.

        ``overflow`` and ``lend``: ``FROM>TO`` pairs. Of ``overflow`` the first pool's requests go to the second, of
        ``lend`` the first pool's idle workers take requests of the second. Raises ValueError, one line that names the
        limit, for what can't be read or contradicts itself.
        """
        names: list[str] = []
        ranges: dict[str, Range] = {}
        for entry in _entries(pools):
            found = _ENTRY.fullmatch(entry)
            if found is None:
                raise ValueError(f"pools ({entry}) is no NAME or NAME:LOW-HIGH")
            name, low, high = found[1], found[2], found[3]
            if name in names:
                raise ValueError(f"pools: {name} is declared twice")
            names.append(name)
            if low is not None:
                ranges[name] = made = Range(int(low or 0), int(high or _ENDLESS))
                if made.low > made.high:
                    raise ValueError(f"pools ({entry}) ends before it begins")
        ordered = sorted(ranges, key=lambda name: ranges[name].low)
        for shorter, longer in pairwise(ordered):
            if ranges[longer].low <= ranges[shorter].high:
                raise ValueError(f"pools: {shorter} and {longer} both take prompts of {ranges[longer].low} tokens")
        known = {*names, DEFAULT_POOL}
        if lend == SHORTER:  # the nearest first
            lent = {name: tuple(reversed(ordered[:place])) for place, name in enumerate(ordered) if place}
        else:
            lent = _pairs("pool_lend", lend, known)
        return cls(tuple(names), ranges, _pairs("pool_overflow", overflow, known), lent)

    def by_length(self, tokens: int) -> str | None:
        """The pool whose range a prompt of so many tokens is in."""
        return next((name for name, range_ in self.ranges.items() if tokens in range_), None)

    def lenders_to(self, pool: str) -> list[str]:
        """Pools whose idle workers may take its requests."""
        return [lender for lender, borrowers in self.lent.items() if pool in borrowers]

    def too_long_for(self, pool: str, tokens: int) -> bool:
        """True if the pool is one of shorter prompts: nothing may bring a longer one there."""
        return pool in self.ranges and tokens > self.ranges[pool].high


def _entries(text: str) -> list[str]:
    return [entry for part in text.split(",") if (entry := part.strip())]


def _pairs(option: str, text: str, known: Iterable[str]) -> dict[str, tuple[str, ...]]:
    pairs: dict[str, tuple[str, ...]] = {}
    for entry in _entries(text):
        first, separator, second = (part.strip() for part in entry.partition(">"))
        if not separator or first == second:
            raise ValueError(f"{option} ({entry}) is no FROM>TO of two pools")
        for name in (first, second):
            if name not in known:
                raise ValueError(f"{option} ({entry}): {name or 'nothing'} is none of the declared pools")
        pairs[first] = (*pairs.get(first, ()), second)
    return pairs
