"""Who is preempted when a running sequence needs a block and none is free."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Candidate:
    index: int  # place in order of seniority; 0 is the most senior
    priority: int  # smaller runs first
    computed: int  # tokens whose KV would have to be recomputed


def choose_victim(candidates: Iterable[Candidate]) -> int | None:
    """Index of the victim: lowest priority, then least computed, then least senior; never the most senior.

    That the most senior is never a victim proves progress: it always runs to its end. Least computed first wastes
    least work than last-in first-out.
    """
    eligible = [c for c in candidates if c.index > 0]
    if not eligible:
        return None
    return min(eligible, key=lambda c: (-c.priority, c.computed, -c.index)).index
