"""Writes chat answers in which the model may call tools: content and calls apart, as OpenAI does.

Streamed, a call begins with its index, id and name and goes on with pieces of its arguments, which join to exactly the
arguments of the reply that is not streamed. ``finish_reason`` is ``tool_calls`` where the model ended its answer and
called; ``stop`` if it had to call one named function; ``length`` stays.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from gateway.flight import Choice
from gateway.tool_calls import Event, ToolParser, are_json, assemble, call_id
from gateway.tool_parsers import make_parser
from gateway.tools import ToolUse
from gateway.writers import ChatWriter, Progress
from shared.messages import EndReason


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """How the model writes its calls."""

    family: str
    hidden: tuple[str, ...] = ()  # markers that are special tokens


class ToolWriter(ChatWriter):
    """A :class:`ChatWriter` whose text goes through a parser of tool calls, one for each choice."""

    def __init__(self, use: ToolUse, tool_format: ToolFormat, *args: Any) -> None:
        super().__init__(*args)
        self._use = use
        self._format = tool_format
        self._parsers: dict[int, ToolParser] = {}
        self._called: set[int] = set()  # choices that have called

    def _plain_progress(self, progress: Progress) -> bytes:
        return self._detailed_progress(progress)

    def _detailed_progress(self, progress: Progress) -> bytes:
        frames = []
        for choice, text in progress:
            deltas = [self._delta(choice, event) for event in self._events(choice, text)]
            finish_reason = self._finish_reason(choice)
            # What is told of tokens waits for the next frame.
            details = self._report.take_details(choice) if self._per_token and (deltas or finish_reason) else []
            for delta in deltas:
                frames.append(self._detailed_frame(choice, delta, details, None))
                details = []
            if finish_reason is not None:
                frames.append(self._detailed_frame(choice, {}, details, finish_reason))
        return b"".join(frames)

    def _events(self, choice: Choice, text: str) -> list[Event]:
        parser = self._parsers.get(choice.index)
        if parser is None:
            parser = self._parsers[choice.index] = self._parser()
        events = parser.feed(text)
        if choice.finish_reason is not None:
            events += parser.finish()
        if not self._use.parallel:
            events = [event for event in events if event.call <= 0]
        if any(event.name for event in events):
            self._called.add(choice.index)
        return events

    def _delta(self, choice: Choice, event: Event) -> dict[str, Any]:
        if event.call < 0:
            return {"content": event.text}
        if not event.name:
            return {"tool_calls": [{"index": event.call, "function": {"arguments": event.text}}]}
        function = {"name": event.name, "arguments": event.text}
        call = {"index": event.call, "id": self._id(choice, event.call), "type": "function", "function": function}
        return {"tool_calls": [call]}

    def _finish_reason(self, choice: Choice) -> str | None:
        reason = choice.finish_reason
        if reason == EndReason.STOP and choice.index in self._called and self._use.choice != "named":
            return "tool_calls"
        return reason

    def _whole_choice(self, choice: Choice, text: str) -> dict[str, Any]:
        parser = self._parser()
        parsed = assemble(parser.feed(text) + parser.finish())
        if self._use.choice == "auto" and (parser.broken or not are_json(parsed.calls)):
            for marker in self._format.hidden:
                text = text.replace(marker, "")
            parsed = assemble([Event(text)])
        calls = parsed.calls if self._use.parallel else parsed.calls[:1]
        if calls:
            self._called.add(choice.index)
        tree = super()._whole_choice(choice, parsed.content)
        tree["finish_reason"] = self._finish_reason(choice)
        if calls:
            message = tree["message"]
            message["content"] = parsed.content or None
            message["tool_calls"] = [
                {
                    "id": self._id(choice, index),
                    "type": "function",
                    "function": {"name": call.name, "arguments": call.arguments},
                }
                for index, call in enumerate(calls)
            ]
        return tree

    def _parser(self) -> ToolParser:
        return make_parser(self._format.family, self._use, self._format.hidden)

    def _id(self, choice: Choice, call: int) -> str:
        return call_id(self.answer_id, choice.index, call, short=self._format.family == "mistral")
