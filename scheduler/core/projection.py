"""Used blocks over the coming steps: the one projection that admission, shadow time and spare all read (DESIGN 6).

In steps, since each running sequence grows by one token a step. A sequence's blocks grow with it and come back when it
is expected to end; a block that several share comes back with the last of them; a prompt that is partly computed
counts whole, since its blocks are held.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(slots=True)
class Growing:
    """A sequence that runs, or would. ``tokens`` it holds room for soon (the whole prompt), ``left`` steps to its end,
    ``own`` blocks that come back when it ends, ``blocks`` in its table now. ``forks`` others are to share its full
    blocks soon, each with a copy of the rest and growth of its own."""

    tokens: int
    left: int
    own: int
    blocks: int
    forks: int = 0

    def room(self, block_size: int) -> int:
        """Tokens that still fit in its blocks. A whole block or more: its worst case is reserved, it does not grow."""
        return max(0, self.blocks * block_size - self.tokens)

    def extra(self, steps: int, block_size: int) -> int:
        """Blocks it needs beside those it has, ``steps`` from now (it grows no more after its end)."""
        grown = min(steps, self.left)
        needs = max(0, -(-(self.tokens + grown) // block_size) - self.blocks)
        if self.forks:
            needs += self.forks * -(-(self.tokens % block_size + grown) // block_size)
        return needs

    def fork(self, block_size: int) -> Growing:
        """One of its forks, as a sequence that shares nothing."""
        tail = self.tokens % block_size
        return Growing(tail, self.left, tail > 0, tail > 0)


@dataclass(slots=True, frozen=True)
class _Segment:
    """Between two ends: ``held`` blocks of those alive, of whom ``alive`` grow, with room for ``room[s]`` times s."""

    until: int  # the step of the next end
    held: int
    alive: int
    room: tuple[int, ...]

    def used(self, step: int) -> int:
        # After q * block_size + r steps, a sequence with room for s < block_size more tokens in the blocks it has needs
        # q more blocks, and one beyond if s < r: a histogram of the rooms counts the growth of all exactly.
        whole, rest = divmod(step, len(self.room))
        return self.held + self.alive * whole + sum(self.room[:rest])


class Projection:
    """``used_now`` blocks are held by ``running``; nothing joins but what is added."""

    def __init__(self, running: Sequence[Growing], used_now: int, block_size: int) -> None:
        self._block_size = block_size
        if any(one.forks for one in running):
            forks = [one.fork(block_size) for one in running for _ in range(one.forks)]
            running = [*running, *forks]
            used_now += sum(one.blocks for one in forks)
        rooms = [one.room(block_size) for one in running]
        room = [0] * block_size
        for free in rooms:
            if free < block_size:
                room[free] += 1
        alive = sum(room)
        held = used_now
        self._segments: list[_Segment] = []
        lefts = [one.left for one in running]
        last = -1
        for index in sorted(range(len(lefts)), key=lefts.__getitem__):
            if lefts[index] > last:
                last = lefts[index]
                self._segments.append(_Segment(last, held, alive, tuple(room)))
            held -= running[index].own
            if rooms[index] < block_size:
                room[rooms[index]] -= 1
                alive -= 1
        self._segments.append(_Segment(1 << 62, held, alive, tuple(room)))
        self._ends = [segment.until for segment in self._segments[:-1]]
        # At each end, whether of the running or of an added one: use just before those that end there leave, and after.
        self._untils = list(self._ends)
        self._before = [segment.used(segment.until) for segment in self._segments[:-1]]
        self._after = [
            following.used(until) for until, following in zip(self._ends, self._segments[1:], strict=True)
        ]  # fmt: skip
        self._added: list[tuple[Growing, int]] = []

    @property
    def peak(self) -> int:
        """Most blocks used at any time if nothing more joins. Use only grows between two ends."""
        return max(self._before, default=0)

    def add(self, one: Growing, takes: int) -> None:
        """``one`` joins now, taking ``takes`` blocks."""
        size = self._block_size
        for index, until in enumerate(self._untils):
            if until > one.left:
                break
            holds = takes + one.extra(until, size)
            self._before[index] += holds
            if until < one.left:
                self._after[index] += holds
        at = bisect_left(self._untils, one.left)
        if at == len(self._untils) or self._untils[at] != one.left:
            without = self.used(one.left)
            self._untils.insert(at, one.left)
            self._before.insert(at, without + takes + one.extra(one.left, size))
            self._after.insert(at, without)
        self._added.append((one, takes))

    def used(self, step: int) -> int:
        """Blocks used after ``step`` steps, those that end then not yet gone."""
        of_added = sum(takes + one.extra(step, self._block_size) for one, takes in self._added if one.left >= step)
        return self._segments[bisect_left(self._ends, step)].used(step) + of_added

    def fits_with(self, candidate: Growing, takes: int, limit: int) -> bool:
        """True if, with ``candidate`` taking ``takes`` blocks now, use never exceeds ``limit`` until it ends."""
        size = self._block_size
        for until, before in zip(self._untils, self._before, strict=True):
            if until >= candidate.left:
                break
            if before + takes + candidate.extra(until, size) > limit:
                return False
        return self.used(candidate.left) + takes + candidate.extra(candidate.left, size) <= limit

    def shadow(self, need: int, limit: int) -> tuple[int, int]:
        """(step at which ``need`` blocks can be had under ``limit``, blocks to spare then beyond the need).

        The shadow time and the extra nodes of EASY backfilling (Lifka 1995; Mu'alem and Feitelson 2001).
        """
        for until, after in zip(self._untils, self._after, strict=True):
            if after + need <= limit:
                return until, limit - after - need
        return (self._untils[-1] if self._untils else 0), 0
