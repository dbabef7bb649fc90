"""Tool calls out of a model's text while it comes: what is content, which calls are made, with which arguments.

A parser turns pieces of text into *events*. However the text is cut, the joined events are the same, and arguments are
passed on as the model wrote them. A reply that is not streamed is made of the same events, but for one thing: a call
that turns out to be incomplete or malformed makes the whole text content there, as in vLLM; in a stream its beginning
may have been sent by then.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import NamedTuple, Protocol

import msgspec

from gateway.json_scan import WHITESPACE, JsonValue

MAX_NAME_CHARS = 256


class Event(NamedTuple):
    """Content (``call`` -1); or the beginning of call number ``call`` (``name``); or a piece of its arguments."""

    text: str
    call: int = -1
    name: str = ""


class ToolParser(Protocol):
    """One choice's text in the making."""

    broken: bool
    """A call was begun that is malformed, or was incomplete at the end."""

    def feed(self, text: str) -> list[Event]:
        """What is settled now that ``text`` has come."""
        ...

    def finish(self) -> list[Event]:
        """What was held back. The text has ended."""
        ...


class Malformed(Exception):
    """What came cannot be the call that was expected."""


class CallObject:
    """``{"name": ..., "arguments": {...}}`` (or ``parameters``), in any order, in pieces.

    ``name`` and pieces of the arguments come out as soon as both are known.
    """

    def __init__(self, strict_keys: bool = False) -> None:
        """``strict_keys``: an unknown key shows at once that it is some other object."""
        self.name: str | None = None
        self.done = False
        self.bad = False  # what came next cannot be part of a call
        self._strict_keys = strict_keys
        self._expect = "{"  # or: first key, key, :, value, a comma
        self._value = JsonValue()  # the key or value at hand
        self._key = ""
        self._text: list[str] = []  # of the key or the name at hand
        self._early: list[str] = []  # arguments that came before the name, or as a string
        self._has_arguments = False

    def feed(self, text: str) -> tuple[int, str]:
        """Take what belongs to it: how many characters, and what of the arguments can be let out."""
        out: list[str] = []
        at = 0
        while at < len(text) and not self.done and not self.bad:
            if not self._value.kind and text[at] in WHITESPACE:
                at += 1
                continue
            try:
                at = self._next(text, at, out)
            except Malformed:
                self.bad = True
        return at, "".join(out)

    def _next(self, text: str, at: int, out: list[str]) -> int:
        char = text[at]
        if self._expect == "value" or self._value.kind:
            return self._inside(text, at, out)
        if self._expect in ("key", "first key") and char == '"':
            self._expect = "key"
            return self._inside(text, at, out)
        if self._expect in (",", "first key") and char == "}":
            if self.name is None or not self._has_arguments:
                raise Malformed
            self.done = True
            return at + 1
        if char != self._expect:
            raise Malformed
        self._expect = {"{": "first key", ":": "value", ",": "key"}[char]
        return at + 1

    def _inside(self, text: str, at: int, out: list[str]) -> int:
        """In a key or a value."""
        value = self._value
        end = value.feed(text, at)
        piece = text[at:end]
        if self._expect == "key" or self._key == "name":
            self._text.append(piece)
        elif self._is_arguments:
            if value.kind not in ("{", '"'):
                raise Malformed
            (self._early if self.name is None or value.kind == '"' else out).append(piece)
        self.bad = self.bad or value.bad
        if value.done:
            self._end_of_value(out)
        return end

    @property
    def _is_arguments(self) -> bool:
        return self._key in ("arguments", "parameters")

    def _end_of_value(self, out: list[str]) -> None:
        kind = self._value.kind
        self._value = JsonValue()
        if self._expect == "key":
            self._key = _string(self._text)
            self._expect = ":"
            if (self._is_arguments and self._has_arguments) or (self._key == "name" and self.name is not None):
                raise Malformed
            if self._strict_keys and self._key not in ("name", "arguments", "parameters", "type", "id"):
                raise Malformed
            return
        self._expect = ","
        if self._key == "name":
            self.name = _string(self._text)
            if not 0 < len(self.name) <= MAX_NAME_CHARS:
                raise Malformed
        elif self._is_arguments:
            self._has_arguments = True
            if kind == '"':  # some models write the object's JSON text once more as a string
                self._early = [_string(self._early)]
                if not self._early[0].startswith("{"):
                    raise Malformed
        if self.name is not None and self._has_arguments:
            out += self._early
            self._early = []


def _string(pieces: list[str]) -> str:
    text = "".join(pieces)
    pieces.clear()
    try:
        return msgspec.json.decode(text, type=str)
    except (msgspec.MsgspecError, UnicodeError):
        raise Malformed from None


class NamedCall:
    """Of a grammar that forces one function: the whole text is its arguments."""

    def __init__(self, name: str) -> None:
        self.broken = False
        self._name = name
        self._begun = False

    def feed(self, text: str) -> list[Event]:
        if not text:
            return []
        events = [] if self._begun else [Event("", 0, self._name)]
        self._begun = True
        return [*events, Event(text, 0)]

    def finish(self) -> list[Event]:
        return []


@dataclass(slots=True)
class Call:
    """One call as a reply tells it."""

    name: str
    arguments: str = ""
    id: str = ""


@dataclass(slots=True)
class Parsed:
    """The whole of a choice's text."""

    content: str
    calls: list[Call] = field(default_factory=list)


def assemble(events: Iterable[Event]) -> Parsed:
    """What the events of a whole text amount to."""
    content: list[str] = []
    calls: list[Call] = []
    for event in events:
        if event.call < 0:
            content.append(event.text)
        elif event.name:
            calls.append(Call(event.name, event.text))
        else:
            calls[event.call].arguments += event.text
    return Parsed("".join(content), calls)


def are_json(calls: Iterable[Call]) -> bool:
    """Whether the arguments of every call are the JSON text of an object."""
    try:
        return all(isinstance(msgspec.json.decode(call.arguments), dict) for call in calls)
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        return False


def call_id(answer_id: str, choice: int, call: int, short: bool) -> str:
    """An id for a call, as unique as its answer's; ``short``: the nine letters and digits of Mistral's templates."""
    name = blake2b(f"{answer_id} {choice} {call}".encode(), digest_size=12).hexdigest()
    return name[:9] if short else f"call_{name}"
