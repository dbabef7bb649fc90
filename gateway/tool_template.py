"""What a chat template knows of tools: whether it shows them to the model, and how the model is to call them."""

from __future__ import annotations

import functools
from typing import Any

from gateway.chat_messages import Chat
from gateway.errors import invalid
from gateway.tool_parsers import MARKERS, family_of

_PROBE = {"type": "function", "function": {"name": "probe_tool_4711", "description": "", "parameters": {}}}


class ToolTemplate:
    """The template of one tokenizer."""

    def __init__(self, tokenizer: Any, family: str = "auto") -> None:
        """``tokenizer``: of transformers. ``family``: a parser's name, or ``auto`` to tell it by the template."""
        self._tokenizer = tokenizer
        template = tokenizer.chat_template or ""
        texts = template.values() if isinstance(template, dict) else (template,)
        self.family = family_of("\n".join(texts)) if family == "auto" else family
        self.markers = MARKERS.get(self.family, ())
        self.hidden: tuple[str, ...] = ()  # markers that are special tokens: their text is never shown

    def check(self, chat: Chat) -> None:
        """Refuse tools that the model would not be shown, and calls that nobody could read. Renders at first need."""
        wanted = "tools" if chat.tools.tools else ""
        for index, message in enumerate(chat.messages):
            if not wanted and (message.tool_calls or message.role == "tool"):
                wanted = f"messages[{index}]"
        if not wanted:
            return
        if not self._shows_tools:
            raise invalid(f"'{wanted}': the chat template of this model does not define tools", wanted)
        if chat.tools.choice == "auto" and not self.family:
            raise invalid(
                "'tool_choice' auto: it is not known how this model writes tool calls; --tool-call-parser tells",
                "tool_choice",
            )

    @functools.cached_property
    def _shows_tools(self) -> bool:
        if not self._tokenizer.chat_template:
            return False
        try:
            shown = self._tokenizer.apply_chat_template(
                [{"role": "user", "content": "x"}], tools=[_PROBE], tokenize=False, add_generation_prompt=True
            )
        except Exception:  # noqa: BLE001 - templates raise what they like
            return False
        return _PROBE["function"]["name"] in shown  # type: ignore[index]
