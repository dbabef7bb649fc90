"""Which workers hold which KV blocks, by content: who of a thousand could go on from a prefix, found at once. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence


class Holders:
    """An index over the pools of many workers, kept by the pools themselves."""

    def __init__(self) -> None:
        self._names: dict[bytes, str | list[str]] = {}  # mostly one: a list for each would be most of the memory

    def __len__(self) -> int:
        return len(self._names)

    def add(self, content: bytes, name: str) -> None:
        known = self._names.get(content)
        if known is None:
            self._names[content] = name
        elif isinstance(known, str):
            self._names[content] = [known, name]
        else:
            known.append(name)

    def discard(self, content: bytes, name: str) -> None:
        """``name``, which was added, no longer holds ``content``."""
        known = self._names[content]
        if isinstance(known, str):
            del self._names[content]
        else:
            known.remove(name)
            if len(known) == 1:
                self._names[content] = known[0]

    def of(self, content: bytes) -> Sequence[str]:
        known = self._names.get(content, ())
        return (known,) if isinstance(known, str) else known

    def best(self, chain: Sequence[bytes], most: int, start: int, able: Callable[[str], bool]) -> dict[str, None]:
        """Some ``most`` workers that hold a long prefix of ``chain``, those with the longest first. Of many that hold
        as much, some from number ``start`` on."""
        found: dict[str, None] = {}
        depth = depth_held(chain, self._names.__contains__)
        while depth and len(found) < most:
            names = self.of(chain[depth - 1])
            for offset in range(min(len(names), 2 * most)):
                name = names[(start + offset) % len(names)]
                if able(name):
                    found[name] = None
                    if len(found) == most:
                        break
            depth //= 2
        return found


def depth_held(chain: Sequence[bytes], holds: Callable[[bytes], bool]) -> int:
    """How many leading blocks are held. By bisection: a block goes before the one that it follows."""
    if not chain or not holds(chain[0]):
        return 0
    low, high = 1, len(chain)
    while low < high:
        middle = (low + high + 1) // 2
        if holds(chain[middle - 1]):
            low = middle
        else:
            high = middle - 1
    return low
