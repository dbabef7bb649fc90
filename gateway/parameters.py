"""Bodies in, valid requests out. What has one of these types has been checked; nothing behind asks again.

Policy: a field is honoured, or harmless (it cannot change the answer), or has the value that asks for nothing;
anything else is a 400 that names it. What needs the model's vocabulary or context is checked where a request is bound
to its model, in :meth:`gateway.decoding.Decoding.bind`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from gateway.chat_messages import ChatMessage, read_messages
from gateway.config import GatewayConfig
from gateway.decoding import Decoding, check_ranked, is_token_id, read_decoding, read_max_tokens
from gateway.errors import invalid
from gateway.fields import Fields

Prompt = str | tuple[int, ...]
"""Text to tokenise, or token ids as they stand."""

DEFAULT_MAX_TOKENS = 16
"""OpenAI's and vLLM's default for completions."""

# Fields of OpenAI's API that cannot change the text of an answer.
HARMLESS = frozenset({
    "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention",
    "parallel_tool_calls", "request_id",
})  # fmt: skip

# Fields that would change the answer and are not supported yet, with the values that ask for nothing.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "repetition_penalty": (1,),
    "logit_bias": ({},),
    "early_stopping": (False,),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "detokenize": (True,),
    "bad_words": ([],),
    "logprobs": (False,),
    "priority": (0,),
    "return_token_ids": (False,),
    "echo": (False,),
    "suffix": ("",),
    "chat_template_kwargs": ({},),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "top_logprobs": (0,),
}


@dataclass(frozen=True, slots=True)
class CompletionRequest:
    """``POST /v1/completions``, and ``POST /generate`` (always one text prompt)."""

    model: str  # empty: whatever is served
    prompts: tuple[Prompt, ...]
    decoding: Decoding
    stream: bool
    include_usage: bool
    cache_salt: str


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """``POST /v1/chat/completions``."""

    model: str
    messages: tuple[ChatMessage, ...]
    add_generation_prompt: bool
    continue_final_message: bool
    decoding: Decoding
    stream: bool
    include_usage: bool
    cache_salt: str


def parse_completion(body: dict[str, Any], limits: GatewayConfig) -> CompletionRequest:
    fields = Fields(body)
    prompts = _prompts(fields.required("prompt"), limits)
    decoding = read_decoding(fields, limits, len(prompts), fields.raw("max_tokens"), "max_tokens")
    stream, include_usage = _streaming(fields)
    request = CompletionRequest(
        _model(fields), prompts, decoding, stream, include_usage, fields.string("cache_salt", "", 256)
    )
    check_ranked(decoding, stream)
    fields.finish(HARMLESS, NEUTRAL)
    return request


def parse_generate(body: dict[str, Any], limits: GatewayConfig) -> CompletionRequest:
    """The body of vLLM's plain server: one text prompt, vLLM's names and defaults."""
    fields = Fields(body)
    prompt = fields.required("prompt")
    if not isinstance(prompt, str):
        raise invalid("'prompt' must be a string", "prompt")
    decoding = read_decoding(fields, limits, 1, fields.raw("max_tokens"), "max_tokens")
    request = CompletionRequest(_model(fields), (prompt,), decoding, fields.boolean("stream", False), False, "")
    check_ranked(decoding, request.stream)
    fields.finish(HARMLESS, NEUTRAL)
    return request


def parse_chat(body: dict[str, Any], limits: GatewayConfig) -> ChatRequest:
    fields = Fields(body)
    messages = read_messages(fields.required("messages"))
    limit_name = "max_tokens" if fields.raw("max_completion_tokens") is None else "max_completion_tokens"
    if limit_name != "max_tokens":
        read_max_tokens(fields.raw("max_tokens"), "max_tokens")  # overruled, yet it must make sense
    decoding = read_decoding(fields, limits, 1, fields.raw(limit_name), limit_name)
    stream, include_usage = _streaming(fields)
    continue_final_message = fields.boolean("continue_final_message", False)
    add_generation_prompt = fields.boolean("add_generation_prompt", not continue_final_message)
    if continue_final_message and add_generation_prompt:
        raise invalid(
            "'add_generation_prompt' and 'continue_final_message' exclude each other", "continue_final_message"
        )
    if continue_final_message and messages[-1].role != "assistant":
        raise invalid("'continue_final_message' needs a final message of the assistant", "continue_final_message")
    request = ChatRequest(
        _model(fields), messages, add_generation_prompt, continue_final_message, decoding, stream, include_usage,
        fields.string("cache_salt", "", 256),
    )  # fmt: skip
    check_ranked(decoding, stream)
    fields.finish(HARMLESS, NEUTRAL)
    return request


def _model(fields: Fields) -> str:
    return fields.string("model", "", 256)


def _streaming(fields: Fields) -> tuple[bool, bool]:
    """(stream, include_usage)."""
    stream = fields.boolean("stream", False)
    options = fields.raw("stream_options")
    if options is None:
        return stream, False
    if not isinstance(options, dict):
        raise invalid("'stream_options' must be an object", "stream_options")
    if not stream:
        raise invalid("'stream_options' needs 'stream': true", "stream_options")
    inner = Fields(options)
    include_usage = inner.boolean("include_usage", False)
    inner.finish(("include_obfuscation",), {"continuous_usage_stats": (False,)})
    return stream, include_usage


def _prompts(value: Any, limits: GatewayConfig) -> tuple[Prompt, ...]:
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
        raise invalid(f"'prompt' has {len(value)} entries; at most {limits.max_prompts} are taken", "prompt")
    if all(isinstance(item, str) for item in value):
        return tuple(value)
    if all(isinstance(item, list) and all(is_token_id(token) for token in item) for item in value):
        if not all(value):
            raise invalid("'prompt' has an empty list of token ids", "prompt")
        return tuple(tuple(item) for item in value)
    raise invalid("'prompt' must be a string, a list of strings, or lists of token ids (integers from 0)", "prompt")
