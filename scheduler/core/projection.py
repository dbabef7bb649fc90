"""Used blocks over the coming steps: the one projection that admission, shadow time and spare all read (DESIGN 6).

In steps, since each running sequence grows by one token a step. A sequence's blocks grow with it and come back when it
is expected to end; a block that several share comes back with the last of them; a prompt that is partly computed
counts whole, since its blocks are held.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(slots=True, frozen=True)
class Growing:
    """A sequence that runs, or would. ``tokens`` it holds room for soon (the whole prompt), ``left`` steps to its end,
    ``own`` blocks that come back when it ends, ``blocks`` in its table now."""

    tokens: int
    left: int
    own: int
    blocks: int

    def room(self, block_size: int) -> int:
        """Tokens that still fit in its blocks. A whole block or more: its worst case is reserved, it does not grow."""
        return max(0, self.blocks * block_size - self.tokens)

    def extra(self, steps: int, block_size: int) -> int:
        """Blocks it needs beside those it has, ``steps`` from now (it grows no more after its end)."""
        return max(0, -(-(self.tokens + min(steps, self.left)) // block_size) - self.blocks)


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
    """``used_now`` blocks are held by ``running``; nothing else joins."""

    def __init__(self, running: Sequence[Growing], used_now: int, block_size: int) -> None:
        self._block_size = block_size
        room = [0] * block_size
        alive = 0
        for one in running:
            if one.room(block_size) < block_size:
                room[one.room(block_size)] += 1
                alive += 1
        held = used_now
        self._segments: list[_Segment] = []
        ordered = sorted(running, key=lambda one: one.left)
        for index, one in enumerate(ordered):
            if index == 0 or one.left > ordered[index - 1].left:
                self._segments.append(_Segment(one.left, held, alive, tuple(room)))
            held -= one.own
            if one.room(block_size) < block_size:
                room[one.room(block_size)] -= 1
                alive -= 1
        self._last = _Segment(1 << 62, held, alive, tuple(room))
        self._untils = [segment.until for segment in self._segments]
        self._before = [segment.used(segment.until) for segment in self._segments]

    @property
    def peak(self) -> int:
        """Most blocks used at any time if nothing joins. Use only grows between two ends."""
        return max(self._before, default=0)

    def used(self, step: int) -> int:
        """Blocks used after ``step`` steps, those that end then not yet gone."""
        index = bisect_left(self._untils, step)
        return (self._segments[index] if index < len(self._segments) else self._last).used(step)

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
        for index, until in enumerate(self._untils):
            following = self._segments[index + 1] if index + 1 < len(self._segments) else self._last
            after = following.used(until)
            if after + need <= limit:
                return until, limit - after - need
        return (self._untils[-1] if self._untils else 0), 0
