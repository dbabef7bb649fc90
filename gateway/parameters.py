"""Bodies in, valid requests out. What has one of these types has been checked; nothing behind asks again.

Policy: a field is honoured, or harmless (it cannot change the answer), or has the value that asks for nothing;
anything else is a 400 that names it. What needs the model's vocabulary or context is checked in :meth:`Decoding.bind`.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from typing import Any, Literal

from gateway.config import GatewayConfig
from gateway.errors import ApiError, invalid
from gateway.fields import Fields, unsupported
from shared.messages import ModelInfo, Sampling

Prompt = str | tuple[int, ...]
"""Text to tokenise, or token ids as they stand."""

DEFAULT_MAX_TOKENS = 16
"""OpenAI's and vLLM's default for completions."""

MAX_TOKENS_CEILING = 1 << 31  # larger integers are no lengths; below it the model's own limit is named
MAX_STOP_CHARS = 1024
MAX_STOP_TOKEN_IDS = 256
_INT64 = 1 << 63

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
class Decoding:
    """How the answer is generated, as the client asked; what depends on the model is settled by :meth:`bind`."""

    n: int
    max_tokens: int | None  # None: the endpoint's default
    seed: int  # 0 <= seed < 2**63, the client's or drawn at arrival
    temperature: float
    top_p: float
    top_k: int  # 0: off
    min_p: float
    min_tokens: int
    ignore_eos: bool
    stop: tuple[str, ...]
    stop_token_ids: tuple[int, ...]
    include_stop: bool
    best_of: int  # choices made, of which the best n are given
    beam_width: int  # 0: no beam search
    length_penalty: float

    @property
    def samples(self) -> int:
        """Choices that the mesh makes for each prompt."""
        return self.n if self.beam_width else self.best_of

    def bind(self, model: ModelInfo, longest_prompt: int, default_max_tokens: int) -> Sampling:
        """The sampling parameters for ``model``; a 400 where they exceed its vocabulary or its context.

        Where the client named no limit it is ``default_max_tokens``, capped by the room the longest prompt leaves.
        """
        room = model.max_model_len - longest_prompt
        if room < 1:
            raise ApiError(
                400,
                f"the prompt has {longest_prompt} tokens; the model's context is {model.max_model_len} tokens, "
                "which must hold the prompt and at least one more",
                code="context_length_exceeded",
            )
        max_tokens = self.max_tokens
        if max_tokens is None:
            max_tokens = min(default_max_tokens, room)
        if max_tokens > room:
            raise ApiError(
                400,
                f"{longest_prompt} prompt tokens and max_tokens {max_tokens} exceed the model's context of "
                f"{model.max_model_len} tokens",
                param="max_tokens",
                code="context_length_exceeded",
            )
        if self.min_tokens > max_tokens:
            raise invalid(f"'min_tokens' {self.min_tokens} is more than max_tokens {max_tokens}", "min_tokens")
        for token in self.stop_token_ids:
            if token >= model.vocab_size:
                raise invalid(f"'stop_token_ids' has {token}; ids end at {model.vocab_size - 1}", "stop_token_ids")
        return Sampling(
            seed=self.seed,
            max_tokens=max_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=0 if self.top_k >= model.vocab_size else self.top_k,
            min_p=self.min_p,
            min_tokens=self.min_tokens,
            ignore_eos=self.ignore_eos,
            stop_token_ids=list(self.stop_token_ids),
            beam_width=self.beam_width,
            length_penalty=self.length_penalty,
            want_score=self.best_of > self.n and not self.beam_width,
        )


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
class ChatMessage:
    role: Literal["system", "user", "assistant"]
    content: str


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
    decoding = _decoding(fields, limits, len(prompts), fields.raw("max_tokens"), "max_tokens")
    stream, include_usage = _streaming(fields)
    request = CompletionRequest(
        _model(fields), prompts, decoding, stream, include_usage, fields.string("cache_salt", "", 256)
    )
    _check_ranked(decoding, stream)
    fields.finish(HARMLESS, NEUTRAL)
    return request


def parse_generate(body: dict[str, Any], limits: GatewayConfig) -> CompletionRequest:
    """The body of vLLM's plain server: one text prompt, vLLM's names and defaults."""
    fields = Fields(body)
    prompt = fields.required("prompt")
    if not isinstance(prompt, str):
        raise invalid("'prompt' must be a string", "prompt")
    decoding = _decoding(fields, limits, 1, fields.raw("max_tokens"), "max_tokens")
    request = CompletionRequest(_model(fields), (prompt,), decoding, fields.boolean("stream", False), False, "")
    _check_ranked(decoding, request.stream)
    fields.finish(HARMLESS, NEUTRAL)
    return request


def parse_chat(body: dict[str, Any], limits: GatewayConfig) -> ChatRequest:
    fields = Fields(body)
    messages = _messages(fields.required("messages"))
    limit_name = "max_tokens" if fields.raw("max_completion_tokens") is None else "max_completion_tokens"
    if limit_name != "max_tokens":
        _max_tokens(fields.raw("max_tokens"), "max_tokens")  # overruled, yet it must make sense
    decoding = _decoding(fields, limits, 1, fields.raw(limit_name), limit_name)
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
    _check_ranked(decoding, stream)
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


def _decoding(fields: Fields, limits: GatewayConfig, prompts: int, max_tokens: Any, max_tokens_name: str) -> Decoding:
    n = fields.integer("n", 1, 1, limits.max_n)
    best_of = n if fields.raw("best_of") is None else fields.integer("best_of", n, 1, limits.max_n)
    if best_of < n:
        raise invalid(f"'best_of' {best_of} is less than n {n}", "best_of")
    if prompts * best_of > limits.max_choices:
        raise invalid(f"{prompts} prompts times {best_of} choices is more than {limits.max_choices}", "n")
    beam_search = fields.boolean("use_beam_search", False)
    seed = fields.optional_integer("seed", -_INT64, _INT64 - 1)
    return Decoding(
        n=n,
        max_tokens=_max_tokens(max_tokens, max_tokens_name),
        seed=secrets.randbits(63) if seed is None else seed & (_INT64 - 1),
        temperature=fields.number("temperature", 1.0, 0.0, 2.0),
        top_p=fields.number("top_p", 1.0, 0.0, 1.0, above=True),
        top_k=max(0, fields.integer("top_k", 0, -1, MAX_TOKENS_CEILING)),
        min_p=fields.number("min_p", 0.0, 0.0, 1.0),
        min_tokens=fields.integer("min_tokens", 0, 0, MAX_TOKENS_CEILING),
        ignore_eos=fields.boolean("ignore_eos", False),
        stop=_stop_strings(fields.raw("stop"), limits.max_stop_strings),
        stop_token_ids=_stop_token_ids(fields.raw("stop_token_ids")),
        include_stop=fields.boolean("include_stop_str_in_output", False),
        best_of=best_of,
        beam_width=best_of if beam_search else 0,
        length_penalty=fields.number("length_penalty", 1.0, -10.0, 10.0),
    )


def _check_ranked(decoding: Decoding, stream: bool) -> None:
    """Choices that are ranked at their end cannot be streamed before it."""
    if stream and decoding.beam_width:
        raise invalid("'use_beam_search' cannot be streamed: which beam is best shows at the end", "stream")
    if stream and decoding.best_of > decoding.n:
        raise invalid("'best_of' over n cannot be streamed: which choice is best shows at the end", "stream")


def _max_tokens(value: Any, name: str) -> int | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int):
        raise invalid(f"'{name}' must be an integer", name)
    if value < 1:
        raise invalid(f"'{name}' must be at least 1", name)
    return min(value, MAX_TOKENS_CEILING)


def _stop_strings(value: Any, most: int) -> tuple[str, ...]:
    if value is None:
        return ()
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or not all(isinstance(stop, str) for stop in stops):
        raise invalid("'stop' must be a string or a list of strings", "stop")
    if len(stops) > most:
        raise invalid(f"'stop' must have at most {most} strings", "stop")
    if not all(0 < len(stop) <= MAX_STOP_CHARS for stop in stops):
        raise invalid(f"each string of 'stop' must have 1 to {MAX_STOP_CHARS} characters", "stop")
    return tuple(dict.fromkeys(stops))


def _stop_token_ids(value: Any) -> tuple[int, ...]:
    if value is None:
        return ()
    if not isinstance(value, list) or not all(_is_token_id(token) for token in value):
        raise invalid("'stop_token_ids' must be a list of token ids", "stop_token_ids")
    if len(value) > MAX_STOP_TOKEN_IDS:
        raise invalid(f"'stop_token_ids' must have at most {MAX_STOP_TOKEN_IDS} ids", "stop_token_ids")
    return tuple(dict.fromkeys(value))


def _is_token_id(value: Any) -> bool:
    return type(value) is int and 0 <= value < 1 << 32


def _prompts(value: Any, limits: GatewayConfig) -> tuple[Prompt, ...]:
    """A text, a list of texts, one list of token ids, or a list of such lists."""
    if isinstance(value, str):
        return (value,)
    if not isinstance(value, list):
        raise invalid("'prompt' must be a string, a list of strings, or token ids", "prompt")
    if not value:
        raise invalid("'prompt' is empty", "prompt")
    if all(_is_token_id(item) for item in value):
        return (tuple(value),)
    if len(value) > limits.max_prompts:
        raise invalid(f"'prompt' has {len(value)} entries; at most {limits.max_prompts} are taken", "prompt")
    if all(isinstance(item, str) for item in value):
        return tuple(value)
    if all(isinstance(item, list) and all(_is_token_id(token) for token in item) for item in value):
        if not all(value):
            raise invalid("'prompt' has an empty list of token ids", "prompt")
        return tuple(tuple(item) for item in value)
    raise invalid("'prompt' must be a string, a list of strings, or lists of token ids (integers from 0)", "prompt")


# Fields of a message that may be absent, or present and empty, as in answers that clients send back.
_EMPTY_MESSAGE_FIELDS = {"tool_calls": ([],), "annotations": ([],), "refusal": ("",)}
_ROLES: dict[str, Literal["system", "user", "assistant"]] = {
    "system": "system",
    "developer": "system",  # OpenAI's newer name; templates know the older one
    "user": "user",
    "assistant": "assistant",
}


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
