"""KV blocks of one worker: which are free, and how many sequences refer to each. Pure bookkeeping.

Blocks are numbered 1 .. num_blocks; page 0 is the worker's scratch page and is never handed out (see Capacity in
shared.messages).
"""

from __future__ import annotations

from collections.abc import Iterable


class BlockPool:
    """Ref-counted blocks. Freed blocks are handed out again last-in first-out: recently used memory is warm."""

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 1:
            raise ValueError(f"a pool of {num_blocks} blocks")
        self.num_blocks = num_blocks
        self._free = list(range(num_blocks, 0, -1))
        self._refs = [0] * (num_blocks + 1)

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_used(self) -> int:
        return self.num_blocks - len(self._free)

    def allocate(self, count: int) -> list[int] | None:
        """``count`` blocks with one reference each, or None (and nothing taken) if so many are not free."""
        if count > len(self._free):
            return None
        if count == 0:
            return []
        taken = self._free[-count:]
        del self._free[-count:]
        taken.reverse()
        for block in taken:
            self._refs[block] = 1
        return taken

    def share(self, block: int) -> None:
        """One more reference to a block that is in use."""
        if self._refs[block] < 1:
            raise ValueError(f"block {block} is free")
        self._refs[block] += 1

    def release(self, blocks: Iterable[int]) -> int:
        """Drop one reference to each block; returns how many became free."""
        freed = 0
        for block in blocks:
            if self._refs[block] < 1:
                raise ValueError(f"block {block} is free already")
            self._refs[block] -= 1
            if self._refs[block] == 0:
                self._free.append(block)
                freed += 1
        return freed

    def check(self, holders: Iterable[Iterable[int]]) -> None:
        """Raise AssertionError unless free + referenced = total and the references are exactly those of ``holders``."""
        counted = [0] * (self.num_blocks + 1)
        for blocks in holders:
            for block in blocks:
                counted[block] += 1
        assert counted == self._refs, "block references differ from the block tables"
        free = set(self._free)
        assert len(free) == len(self._free), "a block is free twice"
        assert all((block in free) == (self._refs[block] == 0) for block in range(1, self.num_blocks + 1))
        assert 0 not in free and self._refs[0] == 0, "the scratch page was handed out"
