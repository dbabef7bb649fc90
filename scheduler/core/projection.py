"""Used blocks over the coming steps: the one projection that admission, shadow time and spare all read (DESIGN 6).

In steps, since each running sequence grows by one token a step. A sequence's blocks grow with it and come back when it
is expected to end; a block that several share comes back with the last of them; a prompt that is partly computed
counts whole, since its blocks are held.
"""

from __future__ import annotations

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

    def extra(self, steps: int, block_size: int) -> int:
        """Blocks it needs beside those it has, ``steps`` from now (it grows no more after its end)."""
        return max(0, -(-(self.tokens + min(steps, self.left)) // block_size) - self.blocks)


class Projection:
    """``used_now`` blocks are held by ``running``; nothing else joins."""

    def __init__(self, running: Sequence[Growing], used_now: int, total: int, block_size: int) -> None:
        self._running = sorted(running, key=lambda one: one.left)
        self._total = total
        self._block_size = block_size
        # At the end of each sequence, in order: (step, blocks used just before it leaves, just after).
        self.ends: list[tuple[int, int, int]] = []
        # Growth is summed over those alive, in tokens; half a block each stands for the rounding up.
        alive = len(self._running)
        slack = sum(one.blocks * block_size - one.tokens for one in self._running)  # room in the blocks they have
        held = used_now
        for one in self._running:
            step = one.left
            grown = -(-max(0, alive * step - slack) // block_size) if alive else 0
            before = held + grown + (alive // 2 if grown else 0)
            held -= one.own
            slack -= one.blocks * block_size - one.tokens
            alive -= 1
            # What it grew by is gone with it: the sum over those left is taken afresh at the next end.
            grown_after = -(-max(0, alive * step - slack) // block_size) if alive else 0
            self.ends.append((step, before, held + grown_after + (alive // 2 if grown_after else 0)))

    @property
    def peak(self) -> int:
        """Most blocks used at any time if nothing joins."""
        return max((before for _, before, _ in self.ends), default=0)

    def fits_with(self, candidate: Growing, takes: int, limit: int) -> bool:
        """True if, with ``candidate`` taking ``takes`` blocks now, use never exceeds ``limit`` until it ends."""
        for step, before, _ in self.ends:
            at = min(step, candidate.left)
            if before + takes + candidate.extra(at, self._block_size) > limit and step <= candidate.left:
                return False
        last = max((after for step, _, after in self.ends if step <= candidate.left), default=0)
        return last + takes + candidate.extra(candidate.left, self._block_size) <= limit or not self.ends

    def shadow(self, need: int, limit: int) -> tuple[int, int]:
        """(step at which ``need`` blocks can be had under ``limit``, blocks to spare then beyond the need).

        The shadow time and the extra nodes of EASY backfilling (Lifka 1995; Mu'alem and Feitelson 2001).
        """
        for step, _, after in self.ends:
            if after + need <= limit:
                return step, limit - after - need
        return (self.ends[-1][0] if self.ends else 0), 0
