"""How an answer is generated: the sampling parameters of a body, and their binding to the model that is served."""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from typing import Any

from gateway.config import GatewayConfig
from gateway.errors import ApiError, invalid
from gateway.fields import Fields
from shared.messages import ModelInfo, Sampling

MAX_TOKENS_CEILING = 1 << 31  # larger integers are no lengths; below it the model's own limit is named
MAX_STOP_CHARS = 1024
MAX_STOP_TOKEN_IDS = 256
_INT64 = 1 << 63


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


def read_decoding(
    fields: Fields, limits: GatewayConfig, prompts: int, max_tokens: Any, max_tokens_name: str
) -> Decoding:
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
        max_tokens=read_max_tokens(max_tokens, max_tokens_name),
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


def check_ranked(decoding: Decoding, stream: bool) -> None:
    """Choices that are ranked at their end cannot be streamed before it."""
    if stream and decoding.beam_width:
        raise invalid("'use_beam_search' cannot be streamed: which beam is best shows at the end", "stream")
    if stream and decoding.best_of > decoding.n:
        raise invalid("'best_of' over n cannot be streamed: which choice is best shows at the end", "stream")


def read_max_tokens(value: Any, name: str) -> int | None:
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
    if not isinstance(value, list) or not all(is_token_id(token) for token in value):
        raise invalid("'stop_token_ids' must be a list of token ids", "stop_token_ids")
    if len(value) > MAX_STOP_TOKEN_IDS:
        raise invalid(f"'stop_token_ids' must have at most {MAX_STOP_TOKEN_IDS} ids", "stop_token_ids")
    return tuple(dict.fromkeys(value))


def is_token_id(value: Any) -> bool:
    return type(value) is int and 0 <= value < 1 << 32
