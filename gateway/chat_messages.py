"""The messages of a chat: roles and contents, in the forms in which clients send them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from gateway.errors import ApiError, invalid
from gateway.fields import Fields, unsupported


@dataclass(frozen=True, slots=True)
class ChatMessage:
    role: Literal["system", "user", "assistant"]
    content: str


# Fields of a message that may be absent, or present and empty, as in answers that clients send back.
_EMPTY_MESSAGE_FIELDS = {"tool_calls": ([],), "annotations": ([],), "refusal": ("",)}
_ROLES: dict[str, Literal["system", "user", "assistant"]] = {
    "system": "system",
    "developer": "system",  # OpenAI's newer name; templates know the older one
    "user": "user",
    "assistant": "assistant",
}


def read_messages(value: Any) -> tuple[ChatMessage, ...]:
    if not isinstance(value, list) or not value:
        raise invalid("'messages' must be a list with at least one message", "messages")
    return tuple(_message(item, f"messages[{index}]") for index, item in enumerate(value))


def _message(value: Any, where: str) -> ChatMessage:
    if not isinstance(value, dict):
        raise invalid(f"'{where}' must be an object", where)
    role = value.get("role")
    if not isinstance(role, str) or role not in _ROLES:
        raise invalid(f"'{where}.role' must be one of {', '.join(_ROLES)}", f"{where}.role")
    fields = Fields(value)
    fields.raw("role")
    content = _content(fields.raw("content"), f"{where}.content")
    try:
        fields.finish(("name",), _EMPTY_MESSAGE_FIELDS)
    except ApiError as error:
        raise unsupported(f"{where}.{error.param}") from None
    return ChatMessage(_ROLES[role], content)


def _content(value: Any, where: str) -> str:
    """A text, or a list of text parts, which are joined by line feeds (as vLLM does)."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list) or not value:
        raise invalid(f"'{where}' must be a string or a list of text parts", where)
    texts = []
    for index, part in enumerate(value):
        if not isinstance(part, dict) or part.get("type") != "text":
            kind = part.get("type") if isinstance(part, dict) else None
            raise invalid(f"'{where}[{index}]' must be a part of type 'text', not {kind!r:.40}", f"{where}[{index}]")
        if not isinstance(part.get("text"), str):
            raise invalid(f"'{where}[{index}].text' must be a string", f"{where}[{index}].text")
        texts.append(part["text"])
    return "\n".join(texts)
