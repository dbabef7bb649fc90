"""Finds where JSON values end while their text still comes in pieces. It follows the structure, and checks no more."""

from __future__ import annotations

import re

_STRUCTURE = re.compile(r'["{}\[\]]')
_IN_STRING = re.compile(r'["\\]')
_SCALAR_END = re.compile(r"[,}\]\s]")
_CLOSES = {"{": "}", "[": "]"}

WHITESPACE = " \t\n\r"


class JsonValue:
    """One JSON value: an object, a list, a string or a scalar. Its first character must not be whitespace."""

    __slots__ = ("_escaped", "_expected", "_in_string", "bad", "done", "kind")

    def __init__(self) -> None:
        self.kind = ""  # its first character: { [ " or that of a scalar
        self.done = False
        self.bad = False  # what came next cannot belong to it
        self._expected: list[str] = []  # closing brackets, the innermost last
        self._in_string = False
        self._escaped = False

    def feed(self, text: str, at: int) -> int:
        """Take what of ``text`` from ``at`` on belongs to the value; where it stopped."""
        if not self.kind:
            if at >= len(text):
                return at
            self.kind = text[at]
            self.bad = self.kind in ",:}]"
            if self.kind in _CLOSES or self.kind == '"':
                at = self._open(text, at)
        if self.kind in _CLOSES or self.kind == '"':
            while at < len(text) and not self.done and not self.bad:
                at = self._string(text, at) if self._in_string else self._between(text, at)
            return at
        if self.bad:
            return at
        end = _SCALAR_END.search(text, at)
        if end is None:
            return len(text)
        self.done = True
        return end.start()

    def _open(self, text: str, at: int) -> int:
        char = text[at]
        if char == '"':
            self._in_string = True
        else:
            self._expected.append(_CLOSES[char])
        return at + 1

    def _between(self, text: str, at: int) -> int:
        found = _STRUCTURE.search(text, at)
        if found is None:
            return len(text)
        char = found.group()
        if char in '"{[':
            return self._open(text, found.start())
        if self._expected[-1] != char:
            self.bad = True
            return found.start()
        self._expected.pop()
        self.done = not self._expected
        return found.end()

    def _string(self, text: str, at: int) -> int:
        if self._escaped:
            self._escaped = False
            return at + 1
        found = _IN_STRING.search(text, at)
        if found is None:
            return len(text)
        if found.group() == "\\":
            self._escaped = True
        else:
            self._in_string = False
            self.done = not self._expected
        return found.end()
