"""The ways in which model families write tool calls, and which of them a chat template teaches.

* ``hermes`` (Hermes 2 and 3, Qwen 2.5 and 3): ``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``
* ``llama3_json`` (Llama 3.1 to 3.3): the whole answer is ``{"name": ..., "parameters": {...}}``, several with ``;``
  between them, maybe behind ``<|python_tag|>``
* ``mistral``: ``[TOOL_CALLS][{"name": ..., "arguments": {...}}, ...]``, or ``[TOOL_CALLS]name[ARGS]{...}`` for each
  call (``[ARGS]`` may be missing, ``[CALL_ID]...`` may precede it)

Names as vLLM's ``--tool-call-parser``. Text around calls is content; whitespace next to them is dropped.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection

from gateway.json_scan import WHITESPACE, JsonValue
from gateway.tool_calls import MAX_NAME_CHARS, CallObject, Event, Malformed, NamedCall, ToolParser
from gateway.tools import ToolUse

MARKERS = {
    "hermes": ("<tool_call>", "</tool_call>"),
    "llama3_json": ("<|python_tag|>",),
    "mistral": ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"),
}
"""Spellings that a family's parser must see, special tokens or not."""

PARSERS = tuple(MARKERS)

_Step = Callable[[], bool]


class _TextParser:
    """What the families share: content, the search for the marker, calls that are begun, and their decay to content.

    ``_step`` is the state: it takes what it can of ``_text`` and says whether that may have opened the way for more.
    Of a call nothing is told before its name and the beginning of its arguments are known; until then its text is
    kept, so that it can be read again as content if it turns out to be no call.
    """

    marker = ""

    def __init__(self, names: Collection[str], hidden: Collection[str]) -> None:
        """``names`` of the tools; ``hidden``: markers that are special tokens, whose text is never shown."""
        self.broken = False
        self._names = names
        self._hidden = hidden
        self._text = ""  # not taken yet
        self._events: list[Event] = []
        self._calls = 0
        self._space = ""  # whitespace at the beginning, or behind a call: dropped if a call follows, or the end
        self._may_drop = True
        self._lead = ""  # the marker of the open call
        self._raw = ""  # what was taken of it behind the marker, as long as nothing was told
        self._told = False
        self._call = CallObject()
        self._step: _Step = self._content

    def feed(self, text: str) -> list[Event]:
        self._text += text
        self._run()
        return self._take()

    def finish(self) -> list[Event]:
        self._run()
        while self._open():
            self._give_up()
            self._run()
        if self._step == self._content:
            self._show(self._text)
        if not self._calls:
            self._show_space()
        return self._take()

    def _run(self) -> None:
        while self._text:
            try:
                if not self._step():
                    return
            except Malformed:
                self._give_up()

    def _take(self) -> list[Event]:
        events, self._events = self._events, []
        return events

    def _open(self) -> bool:
        """A call is begun and not complete."""
        return self._step == self._object

    # --- content

    def _content(self) -> bool:
        at = self._text.find(self.marker)
        if at >= 0:
            self._show(self._text[:at])
            self._text = self._text[at + len(self.marker) :]
            self._begin(self.marker)
            return True
        settled = len(self._text) - max(_overlap(self._text, marker) for marker in (self.marker, *self._hidden))
        self._show(self._text[:settled])
        self._text = self._text[settled:]
        return False

    def _show(self, text: str) -> None:
        for marker in self._hidden:
            text = text.replace(marker, "")
        if self._may_drop:
            rest = text.lstrip(WHITESPACE)
            self._space += text[: len(text) - len(rest)]
            if not rest:
                return
            self._show_space()
            text = rest
        if text:
            self._events.append(Event(text))

    def _show_space(self) -> None:
        if self._space:
            self._events.append(Event(self._space))
        self._space = ""
        self._may_drop = False

    # --- calls

    def _begin(self, lead: str) -> None:
        """A call, or what looks like one, begins behind ``lead``."""
        self._lead = lead
        self._raw = ""
        self._told = False
        self._call = CallObject()
        self._step = self._object

    def _object(self) -> bool:
        end, arguments = self._call.feed(self._text)
        self._took(end)
        if arguments:
            assert self._call.name is not None
            self._tell(self._call.name, arguments)
        if self._call.bad:
            raise Malformed
        if self._call.done:
            self._end_call()
        return True

    def _took(self, count: int) -> None:
        if not self._told:
            self._raw += self._text[:count]
        self._text = self._text[count:]

    def _tell(self, name: str, arguments: str) -> None:
        if not self._told:
            self._told = True
            self._space = ""
            self._events.append(Event("", self._calls, name))
            self._calls += 1
        self._events.append(Event(arguments, self._calls - 1))

    def _end_call(self) -> None:
        self._may_drop = True
        self._after_call()

    def _after_call(self) -> None:
        self._step = self._content

    def _give_up(self) -> None:
        """It is no call. What was told of it is told; what was not is content, in which calls may be found."""
        self.broken = True
        self._step = self._content
        if not self._told:
            self._show(self._lead)
            self._text = self._raw + self._text


class HermesParser(_TextParser):
    marker = "<tool_call>"
    _close = "</tool_call>"

    def _after_call(self) -> None:
        self._step = self._closing

    def _closing(self) -> bool:
        """Between the object and the closing tag, which may be missing at the end of the text."""
        text = self._text = self._text.lstrip(WHITESPACE)
        if text.startswith(self._close):
            self._text = text[len(self._close) :]
        elif self._close.startswith(text):
            return False
        else:
            self.broken = True
        self._step = self._content
        return True


class LlamaParser(_TextParser):
    marker = "<|python_tag|>"

    def __init__(self, names: Collection[str], hidden: Collection[str]) -> None:
        super().__init__(names, hidden)
        self._step = self._start

    def finish(self) -> list[Event]:
        if self._step == self._start:  # nothing but whitespace came
            self._step = self._content
        return super().finish()

    def _start(self) -> bool:
        """At the beginning: an answer that begins with a brace is a call, if it turns out to look like one."""
        text = self._text.lstrip(WHITESPACE)
        self._show(self._text[: len(self._text) - len(text)])
        self._text = text
        if text.startswith("{"):
            self._begin("")
        elif text:
            self._step = self._content
        return bool(text)

    def _begin(self, lead: str) -> None:
        super()._begin(lead)
        self._call = CallObject(strict_keys=True)

    def _tell(self, name: str, arguments: str) -> None:
        if not self._told and name not in self._names:
            raise Malformed
        super()._tell(name, arguments)

    def _after_call(self) -> None:
        self._step = self._next

    def _next(self) -> bool:
        """Behind a call: another one, with or without a semicolon, or content."""
        text = self._text.lstrip(WHITESPACE)
        rest = text[1:].lstrip(WHITESPACE) if text.startswith(";") else text
        if rest.startswith("{"):
            self._text = rest
            self._begin("")
        elif rest:
            self._step = self._content
        elif not text:
            self._show(self._text)
            self._text = ""
        return bool(rest)


class MistralParser(_TextParser):
    marker = "[TOOL_CALLS]"
    _name = re.compile(r"\s*([A-Za-z0-9_.-]+)\s*(?:\[CALL_ID\][^\[{]*)?(?:\[ARGS\])?\s*\Z")
    _in_list = False
    _called = ""
    _value = JsonValue()

    def _open(self) -> bool:
        return self._step in (self._object, self._first, self._named, self._bare_arguments)

    def _begin(self, lead: str) -> None:
        super()._begin(lead)
        self._in_list = False
        self._step = self._first

    def _first(self) -> bool:
        """Behind the marker: a list of calls, one call, or a name."""
        space = len(self._text) - len(self._text.lstrip(WHITESPACE))
        if space == len(self._text):
            self._took(space)
            return False
        first = self._text[space]
        self._in_list = first == "["
        self._took(space + self._in_list)
        self._step = self._object if first in "[{" else self._named
        return True

    def _named(self) -> bool:
        at = self._text.find("{", 0, 2 * MAX_NAME_CHARS)
        if at < 0:
            if len(self._text) >= 2 * MAX_NAME_CHARS:
                raise Malformed
            return False
        found = self._name.match(self._text[:at])
        if found is None:
            raise Malformed
        self._took(at)
        self._called = found.group(1)
        self._value = JsonValue()
        self._step = self._bare_arguments
        return True

    def _bare_arguments(self) -> bool:
        end = self._value.feed(self._text, 0)
        arguments = self._text[:end]
        self._took(end)
        self._tell(self._called, arguments)
        if self._value.bad:
            raise Malformed
        if self._value.done:
            self._end_call()
        return True

    def _after_call(self) -> None:
        self._step = self._in_the_list if self._in_list else self._content

    def _in_the_list(self) -> bool:
        """Behind a call of a list: a comma and another one, or the list's end."""
        text = self._text = self._text.lstrip(WHITESPACE)
        if not text:
            return False
        self._text = text[1:]
        if text[0] == ",":
            _TextParser._begin(self, "")
        elif text[0] == "]":
            self._step = self._content
        else:
            self._text = text
            self.broken = True
            self._step = self._content
        return True


class ListParser(MistralParser):
    """Of a grammar that forces calls: the whole text is their list."""

    def __init__(self, names: Collection[str], hidden: Collection[str]) -> None:
        super().__init__(names, hidden)
        self._begin("")


_FAMILIES: dict[str, type[_TextParser]] = {
    "hermes": HermesParser,
    "llama3_json": LlamaParser,
    "mistral": MistralParser,
}


def make_parser(family: str, use: ToolUse, hidden: Collection[str] = ()) -> ToolParser:
    """The parser of one choice's text. ``hidden``: markers of the family that are special tokens."""
    if use.choice == "named":
        return NamedCall(use.name)
    names = frozenset(tool.name for tool in use.tools)
    if use.choice == "required":
        return ListParser(names, ())
    return _FAMILIES[family](names, hidden)


def family_of(template: str) -> str:
    """Which family's calls a chat template teaches; empty if none that is known."""
    if "[TOOL_CALLS]" in template:
        return "mistral"
    if "<tool_call>" in template and "<function=" not in template:  # Qwen3-Coder's calls are XML
        return "hermes"
    if "<|python_tag|>" in template or re.search(r'\\?"parameters\\?": ', template):
        return "llama3_json"
    return ""


def _overlap(text: str, marker: str) -> int:
    """How many characters at the end of ``text`` may be the beginning of ``marker``."""
    for size in range(min(len(text), len(marker) - 1), 0, -1):
        if marker.startswith(text[len(text) - size :]):
            return size
    return 0
