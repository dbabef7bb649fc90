"""KV blocks of one worker: which are free, who refers to each, and which hold content that can be used again.

Pure bookkeeping. Blocks are numbered 1 .. num_blocks; page 0 is the worker's scratch page and is never handed out (see
Capacity in shared.messages). A block is in exactly one of three states: *free*, *referenced* (one or more sequences
have it in their block tables), or *cached* (no reference, but its content is indexed by hash). Cached blocks are as
good as free: they are handed out, least recently used first, when no free one is left.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence

from scheduler.core.holders import Holders


class BlockPool:
    """Ref-counted blocks with a content index (PagedAttention, SOSP 2023; automatic prefix caching as in vLLM)."""

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 1:
            raise ValueError(f"a pool of {num_blocks} blocks")
        self.num_blocks = num_blocks
        self._free = list(range(num_blocks, 0, -1))  # handed out last-in first-out: recently used memory is warm
        self._refs = [0] * (num_blocks + 1)
        self._hash_of: dict[int, bytes] = {}
        self._by_hash: dict[bytes, int] = {}
        self._cached: OrderedDict[int, None] = OrderedDict()  # least recently used first
        self._news: dict[int, bytes] = {}  # content indexed since ``take_news``
        self.evictions = 0
        self.releases = 0  # how often blocks were given back
        self.num_shared = 0  # blocks with two references or more
        self._name = ""
        self._holders: Holders | None = None

    @property
    def num_free(self) -> int:
        """Blocks that can be had now: free ones and cached ones."""
        return len(self._free) + len(self._cached)

    @property
    def num_cached(self) -> int:
        return len(self._cached)

    @property
    def num_used(self) -> int:
        return self.num_blocks - self.num_free

    def refs(self, block: int) -> int:
        return self._refs[block]

    def allocate(self, count: int) -> list[int] | None:
        """``count`` blocks with one reference each, or None (and nothing taken) if so many can't be had."""
        if count > self.num_free:
            return None
        taken = []
        for _ in range(count):
            if self._free:
                block = self._free.pop()
            else:
                block, _nothing = self._cached.popitem(last=False)
                self._forget(block)
                self.evictions += 1
            self._refs[block] = 1
            taken.append(block)
        return taken

    def share(self, blocks: Iterable[int]) -> None:
        """One more reference to each block; a cached one is referenced again."""
        for block in blocks:
            if self._refs[block] == 0:
                if block not in self._cached:
                    raise ValueError(f"block {block} is free")
                del self._cached[block]
            self._refs[block] += 1
            if self._refs[block] == 2:
                self.num_shared += 1

    def release(self, blocks: Sequence[int]) -> int:
        """Drop one reference to each block of a table; returns how many can be had again now.

        From the end of the table backwards, so that of one sequence's cached blocks the leaf is the least recently
        used: a parent is never evicted before its child.
        """
        freed = 0
        self.releases += 1
        for block in reversed(blocks):
            if self._refs[block] < 1:
                raise ValueError(f"block {block} is free already")
            self._refs[block] -= 1
            if self._refs[block] == 1:
                self.num_shared -= 1
            elif self._refs[block] == 0:
                freed += 1
                if block in self._hash_of:
                    self._cached[block] = None
                else:
                    self._free.append(block)
        return freed

    # --- content ----------------------------------------------------------------------------------------------------

    def register(self, block: int, content: bytes) -> None:
        """The referenced ``block`` now holds ``content`` whole. A hash that is indexed already stays where it is."""
        if self._refs[block] < 1:
            raise ValueError(f"block {block} is free")
        if content not in self._by_hash and block not in self._hash_of:
            self._by_hash[content] = block
            self._hash_of[block] = self._news[block] = content
            if self._holders is not None:
                self._holders.add(content, self._name)

    def take_news(self) -> list[tuple[int, bytes]]:
        """Blocks with the content that was indexed for them since the last call, and still is."""
        news, self._news = self._news, {}
        return list(news.items())

    def adopt(self, cached: Iterable[tuple[int, bytes]]) -> None:
        """Take over blocks that hold content already, the least recently used first, into an untouched pool.

        A block outside the pool, or named twice, and content that another block has are left out.
        """
        free = set(self._free)
        for block, content in cached:
            if block in free and content not in self._by_hash:
                free.remove(block)
                self._by_hash[content] = block
                self._hash_of[block] = content
                self._cached[block] = None
                if self._holders is not None:
                    self._holders.add(content, self._name)
        self._free = [block for block in self._free if block in free]

    def tell(self, name: str, holders: Holders | None) -> None:
        """Keep this pool's contents in an index of many pools, as those of ``name``; None: in none any more."""
        if self._holders is not None:
            for content in self._by_hash:
                self._holders.discard(content, self._name)
        self._name, self._holders = name, holders
        if holders is not None:
            for content in self._by_hash:
                holders.add(content, name)

    def contents(self) -> Iterable[bytes]:
        """What is indexed here."""
        return self._by_hash.keys()

    def indexed(self, block: int) -> bool:
        """True if the block's content is known, so that it can be hit."""
        return block in self._hash_of

    def holds(self, content: bytes) -> bool:
        """True if some block holds that content."""
        return content in self._by_hash

    def match(self, chain: Sequence[bytes]) -> list[int]:
        """The blocks that hold the longest indexed prefix of ``chain``. Takes no reference."""
        found = []
        for content in chain:
            block = self._by_hash.get(content)
            if block is None:
                break
            found.append(block)
        return found

    def num_unreferenced(self, blocks: Iterable[int]) -> int:
        """How many of ``blocks`` are cached: sharing them takes as many from ``num_free``."""
        return sum(self._refs[block] == 0 for block in blocks)

    def _forget(self, block: int) -> None:
        content = self._hash_of.pop(block)
        del self._by_hash[content]
        self._news.pop(block, None)
        if self._holders is not None:
            self._holders.discard(content, self._name)

    def check(self, holders: Iterable[Iterable[int]]) -> None:
        """Raise AssertionError unless free + referenced + cached = total and references are those of ``holders``."""
        counted = [0] * (self.num_blocks + 1)
        for blocks in holders:
            for block in blocks:
                counted[block] += 1
        assert counted == self._refs, "block references differ from the block tables"
        free = set(self._free)
        assert len(free) == len(self._free), "a block is free twice"
        assert not free & self._cached.keys(), "a block is free and cached"
        for block in range(1, self.num_blocks + 1):
            assert (block in free or block in self._cached) == (self._refs[block] == 0)
        assert all(block in self._hash_of for block in self._cached)
        assert not free & self._hash_of.keys(), "a free block is indexed"
        assert {block: content for content, block in self._by_hash.items()} == self._hash_of
        assert all(self._hash_of.get(block) == content for block, content in self._news.items())
        assert self.num_shared == sum(refs > 1 for refs in self._refs)
        assert 0 not in free and self._refs[0] == 0, "the scratch page was handed out"
