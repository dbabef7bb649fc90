"""Which KV pages hold whole blocks of known content: what a worker can offer a scheduler that starts over.

The scheduler's pool knows it better as long as it lives; the book is there for when it does not. Owned by the step
loop's thread. Knows no tensors: a page is trusted from the end of the step whose plan names its hash until a plan gives
it to somebody.
"""

from __future__ import annotations

from collections import OrderedDict
from itertools import islice

from shared.messages import StepPlan, pack_tokens
from shared.page_hash import DIGEST_BYTES


class PageBook:
    def __init__(self, block_size: int, num_blocks: int) -> None:
        self._block_size = block_size
        self._num_blocks = num_blocks
        self._hash_of: OrderedDict[int, bytes] = OrderedDict()  # least recently hashed or hit first

    def __len__(self) -> int:
        return len(self._hash_of)

    def begin(self, plan: StepPlan) -> None:
        """The plan is about to run: what it writes into is trusted no more, whether or not it gets to its end."""
        forget = self._hash_of.pop
        for start in plan.starts:
            whole = start.computed // self._block_size
            for page in start.pages[whole:]:
                forget(page, None)
            for page in reversed(start.pages[:whole]):  # the root is of use to more than the leaf: it counts as newer
                if page in self._hash_of:
                    self._hash_of.move_to_end(page)
        for _, pages in plan.pages:
            for page in pages:
                forget(page, None)
        for _, page in plan.copies:
            forget(page, None)
        for _, page in plan.swap_ins:
            forget(page, None)
        for _, _, page in plan.replaces:
            forget(page, None)
        for fetch in plan.fetches:
            for _, page in fetch.pages:
                forget(page, None)

    def end(self, plan: StepPlan) -> None:
        """The plan has run to its end without a fault."""
        for page, content in reversed(plan.hashes):  # of one prompt the root is to outlive the leaf, as above
            if 0 < page <= self._num_blocks and len(content) == DIGEST_BYTES:
                self._hash_of[page] = content
                self._hash_of.move_to_end(page)

    def packed(self, max_bytes: int) -> tuple[bytes, bytes]:
        """``pages`` and ``hashes`` of a PageSnapshot, in ``max_bytes`` together; the newest are kept."""
        count = min(len(self._hash_of), max_bytes // (4 + DIGEST_BYTES))
        newest = list(islice(self._hash_of.items(), len(self._hash_of) - count, None))
        return pack_tokens(page for page, _ in newest), b"".join(content for _, content in newest)
