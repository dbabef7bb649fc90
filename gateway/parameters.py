"""Bodies in, valid requests out. What has one of these types has been checked; nothing behind asks again.

Policy: a field is honoured, or harmless (it cannot change the answer), or has the value that asks for nothing;
anything else is a 400 that names it. What needs the model's vocabulary or context is checked where a request is bound
to its model, in :meth:`gateway.decoding.Decoding.bind`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from gateway.chat_messages import Chat, read_chat
from gateway.config import GatewayConfig
from gateway.decoding import Decoding, check_combination, is_token_id, read_decoding, read_max_tokens
from gateway.errors import invalid
from gateway.fields import Fields
from gateway.report import Report, read_chat_report, read_completion_report, read_plain_report

Prompt = str | tuple[int, ...]
"""Text to tokenise, or token ids as they stand."""

DEFAULT_MAX_TOKENS = 16
"""OpenAI's and vLLM's default for completions."""

MAX_PRIORITY = 100
"""Beyond it either way classes would differ for longer than waiting can make good."""

MAX_TIMEOUT_S = 7 * 24 * 3600.0

# Fields of OpenAI's API that cannot change the text of an answer.
HARMLESS = frozenset({
    "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention",
    "parallel_tool_calls", "request_id",
})  # fmt: skip

# Fields that would change the answer and are not supported, or not by every endpoint, with the values that ask for
# nothing.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "early_stopping": (False,),
    "spaces_between_special_tokens": (True,),
    "detokenize": (True,),
    "bad_words": ([],),
    "logprobs": (False,),
    "prompt_logprobs": (),
    "return_token_ids": (False,),
    "echo": (False,),
    "suffix": ("",),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "modalities": (["text"],),
    "top_logprobs": (0,),
}


@dataclass(frozen=True, slots=True)
class Delivery:
    """How the answer is to be sent, and with which right of way it is computed."""

    stream: bool
    include_usage: bool = False  # a last chunk tells the usage
    continuous_usage: bool = False  # every chunk does
    cache_salt: str = ""
    priority: int | None = None  # lower runs first; None: as the client's key has it
    timeout_s: float = 0.0  # by when the answer must be complete, from its arrival; 0: any time


@dataclass(frozen=True, slots=True)
class CompletionRequest:
    """``POST /v1/completions``, and ``POST /generate`` (always one text prompt)."""

    model: str  # empty: whatever is served
    prompts: tuple[Prompt, ...]
    decoding: Decoding
    report: Report
    delivery: Delivery


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """``POST /v1/chat/completions``."""

    model: str
    chat: Chat
    decoding: Decoding
    report: Report
    delivery: Delivery


def parse_completion(body: dict[str, Any], limits: GatewayConfig) -> CompletionRequest:
    fields = Fields(body)
    prompts = read_prompts(fields.required("prompt"), limits)
    delivery = _delivery(fields)
    report = read_completion_report(fields, delivery.stream)
    # Nothing to generate makes sense for those who want to know the prompt's log-probabilities.
    max_tokens = read_max_tokens(fields, "max_tokens", least=0 if report.echo and report.logprobs >= 0 else 1)
    decoding = read_decoding(fields, limits, len(prompts), max_tokens, report)
    check_combination(decoding, delivery.stream)
    request = CompletionRequest(read_model(fields), prompts, decoding, report, delivery)
    fields.finish(HARMLESS, NEUTRAL)
    return request


def parse_generate(body: dict[str, Any], limits: GatewayConfig) -> CompletionRequest:
    """The body of vLLM's plain server: one text prompt, vLLM's names and defaults."""
    fields = Fields(body)
    prompt = fields.required("prompt")
    if not isinstance(prompt, str):
        raise invalid("'prompt' must be a string", "prompt")
    delivery = Delivery(fields.boolean("stream", False), priority=_priority(fields), timeout_s=_timeout_s(fields))
    report = read_plain_report(fields)
    decoding = read_decoding(fields, limits, 1, read_max_tokens(fields, "max_tokens"), report)
    check_combination(decoding, delivery.stream)
    request = CompletionRequest(read_model(fields), (prompt,), decoding, report, delivery)
    fields.finish(HARMLESS, NEUTRAL)
    return request


def parse_chat(body: dict[str, Any], limits: GatewayConfig) -> ChatRequest:
    fields = Fields(body)
    chat = read_chat(fields)
    max_tokens = read_max_tokens(fields, "max_tokens")
    max_completion_tokens = read_max_tokens(fields, "max_completion_tokens")  # the newer name overrules the older one
    delivery = _delivery(fields)
    report = read_chat_report(fields, delivery.stream)
    decoding = read_decoding(
        fields, limits, 1, max_tokens if max_completion_tokens is None else max_completion_tokens, report
    )
    if chat.tools.choice != "none":
        if decoding.constraint.grammar:
            raise invalid(f"'{decoding.constraint.field}' cannot go with 'tools'", decoding.constraint.field)
        decoding = replace(decoding, constraint=chat.tools.constraint)
        report = replace(report, markers=chat.tools.choice == "auto")
    check_combination(decoding, delivery.stream)
    request = ChatRequest(read_model(fields), chat, decoding, report, delivery)
    fields.finish(HARMLESS, NEUTRAL)
    return request


def read_model(fields: Fields) -> str:
    return fields.string("model", "", 256)


def _delivery(fields: Fields) -> Delivery:
    stream = fields.boolean("stream", False)
    options = fields.raw("stream_options")
    include_usage = continuous_usage = False
    if options is not None:
        if not isinstance(options, dict):
            raise invalid("'stream_options' must be an object", "stream_options")
        if not stream:
            raise invalid("'stream_options' needs 'stream': true", "stream_options")
        inner = Fields(options)
        include_usage = inner.boolean("include_usage", False)
        continuous_usage = inner.boolean("continuous_usage_stats", False)
        inner.boolean("include_obfuscation", False)  # padding against traffic analysis, which we never send
        inner.finish((), {})
    return Delivery(
        stream, include_usage, continuous_usage and include_usage, fields.string("cache_salt", "", 256),
        _priority(fields), _timeout_s(fields),
    )  # fmt: skip


def _priority(fields: Fields) -> int | None:
    return fields.optional_integer("priority", -MAX_PRIORITY, MAX_PRIORITY)


def _timeout_s(fields: Fields) -> float:
    return fields.number("timeout", 0.0, 0, MAX_TIMEOUT_S, above=True)


def read_prompts(value: Any, limits: GatewayConfig) -> tuple[Prompt, ...]:
    """A text, a list of texts, one list of token ids, or a list of such lists."""
    if isinstance(value, str):
        return (value,)
    if not isinstance(value, list):
        raise invalid("'prompt' must be a string, a list of strings, or token ids", "prompt")
    if not value:
        raise invalid("'prompt' is empty", "prompt")
    if all(is_token_id(item) for item in value):
        return (tuple(value),)
    if len(value) > limits.max_prompts:
        message = f"'prompt' has {len(value)} entries; at most {limits.max_prompts} are taken (--max-prompts)"
        raise invalid(message, "prompt")
    if all(isinstance(item, str) for item in value):
        return tuple(value)
    if all(isinstance(item, list) and all(is_token_id(token) for token in item) for item in value):
        if not all(value):
            raise invalid("'prompt' has an empty list of token ids", "prompt")
        return tuple(tuple(item) for item in value)
    raise invalid("'prompt' must be a string, a list of strings, or lists of token ids (integers from 0)", "prompt")
