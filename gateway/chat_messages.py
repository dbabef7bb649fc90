"""A conversation, and how it becomes a prompt: messages in the forms in which clients send them, and the template's
switches."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from gateway.errors import ApiError, invalid
from gateway.fields import Fields, unsupported
from gateway.tools import NO_TOOLS, ToolUse, read_arguments, read_tools


@dataclass(frozen=True, slots=True)
class PastCall:
    """A tool call of an earlier message of the assistant."""

    id: str
    name: str
    arguments: dict[str, Any]


@dataclass(frozen=True, slots=True)
class ChatMessage:
    role: Literal["system", "user", "assistant", "tool"]
    content: str
    tool_calls: tuple[PastCall, ...] = ()  # of the assistant
    tool_call_id: str = ""  # of a tool's result
    name: str = ""  # of the tool, if the client tells it

    def for_template(self) -> dict[str, Any]:
        """As chat templates take it."""
        message: dict[str, Any] = {"role": self.role, "content": self.content}
        if self.tool_calls:
            message["tool_calls"] = [
                {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                for call in self.tool_calls
            ]
        if self.role == "tool":
            message["tool_call_id"] = self.tool_call_id
            if self.name:
                message["name"] = self.name
        return message


@dataclass(frozen=True, slots=True)
class Chat:
    """What is rendered by the model's chat template."""

    messages: tuple[ChatMessage, ...]
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    template_kwargs: tuple[tuple[str, bool | str], ...] = ()
    tools: ToolUse = NO_TOOLS

    def texts(self) -> Iterator[str]:
        """What goes into the prompt, for a first look at its length."""
        for message in self.messages:
            yield message.content
            for call in message.tool_calls:
                yield msgspec.json.encode(call.arguments).decode()
        for tool in self.tools.tools:
            yield msgspec.json.encode(tool.definition()).decode()


MAX_TEMPLATE_KWARGS = 8
_SWITCH_NAME = re.compile(r"[a-z][a-z0-9_]{0,63}")
_SWITCH_TEXT = re.compile(r"[A-Za-z0-9_.-]{0,64}")
# What a template is given besides switches, and the parameters of transformers' apply_chat_template.
_TEMPLATE_NAMES = frozenset({
    "messages", "conversation", "conversations", "tools", "documents", "chat_template", "tokenize", "padding",
    "truncation", "max_length", "return_tensors", "return_dict", "return_assistant_tokens_mask", "tokenizer_kwargs",
    "add_generation_prompt", "continue_final_message", "bos_token", "eos_token", "unk_token", "pad_token", "sep_token",
    "cls_token", "mask_token", "additional_special_tokens", "raise_exception", "strftime_now",
})  # fmt: skip

# Fields of a message that may be absent, or present and empty, as in answers that clients send back.
_EMPTY_MESSAGE_FIELDS = {"tool_calls": ([],), "annotations": ([],), "refusal": ("",)}
_ROLES: dict[str, Literal["system", "user", "assistant", "tool"]] = {
    "system": "system",
    "developer": "system",  # OpenAI's newer name; templates know the older one
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
}
MAX_NAME_CHARS = 256  # of a tool's name, or a call's id, in a message


def read_chat(fields: Fields) -> Chat:
    messages = _messages(fields.required("messages"))
    continue_final_message = fields.boolean("continue_final_message", False)
    add_generation_prompt = fields.boolean("add_generation_prompt", not continue_final_message)
    if continue_final_message and add_generation_prompt:
        raise invalid(
            "'add_generation_prompt' and 'continue_final_message' exclude each other", "continue_final_message"
        )
    if continue_final_message and messages[-1].role != "assistant":
        raise invalid("'continue_final_message' needs a final message of the assistant", "continue_final_message")
    return Chat(messages, add_generation_prompt, continue_final_message, _template_kwargs(fields), read_tools(fields))


def _template_kwargs(fields: Fields) -> tuple[tuple[str, bool | str], ...]:
    """Switches for the model's own template, such as ``enable_thinking``. Nothing that could be a template, or text
    that spells a control token."""
    value = fields.raw("chat_template_kwargs")
    if value is None:
        return ()
    name = "chat_template_kwargs"
    if not isinstance(value, dict) or len(value) > MAX_TEMPLATE_KWARGS:
        raise invalid(f"'{name}' must be an object of at most {MAX_TEMPLATE_KWARGS} entries", name)
    for key, switch in value.items():
        if not _SWITCH_NAME.fullmatch(key) or key in _TEMPLATE_NAMES:
            raise invalid(f"'{name}' may not set {key!r:.40}", name)
        if not isinstance(switch, bool) and not (isinstance(switch, str) and _SWITCH_TEXT.fullmatch(switch)):
            raise invalid(f"'{name}.{key}' must be true, false or a word", name)
    return tuple(value.items())


def _messages(value: Any) -> tuple[ChatMessage, ...]:
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
    tool_calls: tuple[PastCall, ...] = ()
    tool_call_id = name = ""
    if role == "assistant":
        tool_calls = _past_calls(fields.raw("tool_calls"), f"{where}.tool_calls")
    elif role == "tool":
        tool_call_id = _label(fields.raw("tool_call_id"), f"{where}.tool_call_id")
        name = _label(fields.raw("name") or "", f"{where}.name")
    # A message that calls tools needs no text.
    empty = bool(tool_calls) and fields.raw("content") in (None, [])
    content = "" if empty else _content(fields.raw("content"), f"{where}.content")
    try:
        fields.finish(("name",), _EMPTY_MESSAGE_FIELDS)
    except ApiError as error:
        raise unsupported(f"{where}.{error.param}") from None
    return ChatMessage(_ROLES[role], content, tool_calls, tool_call_id, name)


def _past_calls(value: Any, where: str) -> tuple[PastCall, ...]:
    if value is None:
        return ()
    if not isinstance(value, list):
        raise invalid(f"'{where}' must be a list", where)
    return tuple(_past_call(item, f"{where}[{index}]") for index, item in enumerate(value))


def _past_call(value: Any, where: str) -> PastCall:
    if not isinstance(value, dict) or value.get("type", "function") != "function":
        raise invalid(f"'{where}' must be a call of type 'function'", where)
    function = value.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        raise invalid(f"'{where}.function' must have a 'name' and 'arguments', a JSON text", f"{where}.function")
    name = _label(function.get("name"), f"{where}.function.name")
    arguments = read_arguments(function["arguments"], f"{where}.function.arguments")
    return PastCall(_label(value.get("id"), f"{where}.id"), name, arguments)


def _label(value: Any, where: str) -> str:
    if not isinstance(value, str) or len(value) > MAX_NAME_CHARS:
        raise invalid(f"'{where}' must be a string of at most {MAX_NAME_CHARS} characters", where)
    return value


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
