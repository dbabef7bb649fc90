"""Finds stop strings in a text that arrives in pieces, and lets nothing of a match out.

The earliest occurrence wins, whatever the order of the list and however the text was cut into pieces. One automaton
per stop string (Knuth, Morris and Pratt 1977) knows how many characters at the text's end could begin a match; just
those are held back. Cost: O(1) amortised for each character and stop string.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache


@lru_cache(maxsize=1024)
def _failures(pattern: str) -> tuple[int, ...]:
    """``f[k]``: length of the longest proper prefix of ``pattern[:k]`` that is also its suffix."""
    table = [0, 0]
    length = 0
    for char in pattern[1:]:
        while length and char != pattern[length]:
            length = table[length]
        if char == pattern[length]:
            length += 1
        table.append(length)
    return tuple(table)


class StopMatcher:
    """Watches one text. After :attr:`matched` nothing more comes out of it."""

    __slots__ = ("_held", "_held_start", "_include", "_match", "_patterns", "_seen", "_states", "matched")

    def __init__(self, stops: Sequence[str], include: bool = False) -> None:
        """``include``: the match itself belongs to the text that is let out."""
        self._patterns = [(stop, _failures(stop)) for stop in stops]
        self._states = [0] * len(stops)  # per stop: how many of its characters the text ends with
        self._include = include
        self._held = ""
        self._held_start = 0  # position of _held[0] in the text
        self._seen = 0  # characters fed
        self._match: tuple[int, int] | None = None  # (start, end) of the earliest occurrence so far
        self.matched = False

    def feed(self, text: str, may_match: bool = True) -> str:
        """The text that can be let out. A match that ends in this piece does not count unless ``may_match``."""
        if self.matched or not text:
            return ""
        start = self._seen
        self._held += text
        self._seen += len(text)
        for index, (pattern, failures) in enumerate(self._patterns):
            self._advance(index, pattern, failures, text, start, may_match)
        open_from = min((self._seen - state for state in self._states), default=self._seen)
        if self._match is not None and self._match[0] <= open_from:
            return self._stop()
        return self._release(open_from)  # an earlier match may still complete: a later one waits for it

    def finish(self) -> str:
        """The text has ended: what was held back, up to a match that waited."""
        if self.matched:
            return ""
        return self._stop() if self._match is not None else self._release(self._seen)

    def _advance(
        self, index: int, pattern: str, failures: tuple[int, ...], text: str, start: int, may_match: bool
    ) -> None:
        state = self._states[index]
        size = len(pattern)
        if state == 0 and pattern[0] not in text:
            return
        for offset, char in enumerate(text):
            while state and (state == size or char != pattern[state]):
                state = failures[state]
            if char == pattern[state]:
                state += 1
            if state == size and may_match:
                end = start + offset + 1
                if self._match is None or (end - size, end) < self._match:
                    self._match = (end - size, end)
                state = 0  # a later occurrence of this stop cannot come before this one
                break
            if state == size:
                state = failures[state]
        self._states[index] = state

    def _stop(self) -> str:
        assert self._match is not None
        self.matched = True
        return self._release(self._match[1] if self._include else self._match[0])

    def _release(self, position: int) -> str:
        count = position - self._held_start
        out, self._held = self._held[:count], self._held[count:]
        self._held_start = position
        return out
