"""How an answer is generated: the sampling parameters of a body, and their binding to the model that is served."""

from __future__ import annotations

import secrets
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from gateway.config import GatewayConfig
from gateway.errors import ApiError, invalid
from gateway.fields import Fields
from gateway.report import Report
from gateway.structured import FREE, Constraint, check_alone, read_constraint
from shared.messages import ModelInfo, Sampling

MAX_TOKENS_CEILING = 1 << 31  # larger integers are no lengths; below it the model's own limit is named
MAX_STOP_CHARS = 1024
MAX_STOP_TOKEN_IDS = 256
MAX_LOGIT_BIASES = 300  # as OpenAI
_INT64 = 1 << 63


@dataclass(frozen=True, slots=True)
class Decoding:
    """How the answer is generated, as the client asked; what depends on the model is settled by :meth:`bind`."""

    n: int
    max_tokens: int | None  # None: the endpoint's default; 0: only the prompt is looked at
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
    presence_penalty: float
    frequency_penalty: float
    repetition_penalty: float
    logit_bias: tuple[tuple[int, float], ...]
    logprobs: int  # alternatives per output token; -1: no log-probabilities
    prompt_logprobs: int  # the same for the prompt
    constraint: Constraint = FREE  # what the answer must match

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
        _check_ids("stop_token_ids", self.stop_token_ids, model)
        _check_ids("logit_bias", (token for token, _ in self.logit_bias), model)
        return Sampling(
            seed=self.seed,
            max_tokens=max(1, max_tokens),  # a forward pass over the prompt gives one token, wanted or not
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
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            repetition_penalty=self.repetition_penalty,
            logit_bias=list(self.logit_bias),
            logprobs=self.logprobs,
            prompt_logprobs=self.prompt_logprobs,
            grammar=self.constraint.grammar,
        )


def read_decoding(
    fields: Fields, limits: GatewayConfig, prompts: int, max_tokens: int | None, report: Report
) -> Decoding:
    n = fields.integer("n", 1, 1, limits.max_n, "--max-n")
    best_of = fields.integer("best_of", n, 1, limits.max_n, "--max-n")
    if best_of < n:
        raise invalid(f"'best_of' {best_of} is less than n {n}", "best_of")
    if prompts * best_of > limits.max_choices:
        message = f"{prompts} prompts times {best_of} choices is more than {limits.max_choices} (--max-choices)"
        raise invalid(message, "n")
    beam_search = fields.boolean("use_beam_search", False)
    seed = fields.optional_integer("seed", -_INT64, _INT64 - 1)
    return Decoding(
        n=n,
        max_tokens=max_tokens,
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
        presence_penalty=fields.number("presence_penalty", 0.0, -2.0, 2.0),
        frequency_penalty=fields.number("frequency_penalty", 0.0, -2.0, 2.0),
        repetition_penalty=fields.number("repetition_penalty", 1.0, 0.0, 2.0, above=True),
        logit_bias=_logit_bias(fields.raw("logit_bias")),
        logprobs=report.logprobs,
        prompt_logprobs=report.from_the_mesh,
        constraint=read_constraint(fields),
    )


def check_combination(decoding: Decoding, stream: bool) -> None:
    """Refuse what cannot go together, by the name of the field that asks for it."""
    check_alone(decoding.constraint, decoding.beam_width, decoding.min_tokens, decoding.ignore_eos)
    if stream and decoding.beam_width:  # choices that are ranked at their end cannot be streamed before it
        raise invalid("'use_beam_search' cannot be streamed: which beam is best shows at the end", "stream")
    if stream and decoding.best_of > decoding.n:
        raise invalid("'best_of' over n cannot be streamed: which choice is best shows at the end", "stream")
    if not decoding.beam_width:
        return
    for name, asked in (
        ("presence_penalty", decoding.presence_penalty != 0),
        ("frequency_penalty", decoding.frequency_penalty != 0),
        ("repetition_penalty", decoding.repetition_penalty != 1),
        ("logit_bias", bool(decoding.logit_bias)),
        ("logprobs", decoding.logprobs >= 0),
        ("prompt_logprobs", decoding.prompt_logprobs >= 0),
    ):
        if asked:
            raise invalid(f"'{name}' cannot go with 'use_beam_search'", name)


def read_max_tokens(fields: Fields, name: str, least: int = 1) -> int | None:
    value = fields.optional_integer(name, least, None)
    return None if value is None else min(value, MAX_TOKENS_CEILING)


def _stop_strings(value: Any, most: int) -> tuple[str, ...]:
    if value is None:
        return ()
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or not all(isinstance(stop, str) for stop in stops):
        raise invalid("'stop' must be a string or a list of strings", "stop")
    if len(stops) > most:
        raise invalid(f"'stop' must have at most {most} strings (--max-stop-strings)", "stop")
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


def _logit_bias(value: Any) -> tuple[tuple[int, float], ...]:
    """OpenAI's form: an object of token ids, as strings, to numbers from -100 to 100."""
    if value is None:
        return ()
    if not isinstance(value, dict):
        raise invalid("'logit_bias' must be an object of token ids to numbers", "logit_bias")
    if len(value) > MAX_LOGIT_BIASES:
        raise invalid(f"'logit_bias' must have at most {MAX_LOGIT_BIASES} entries", "logit_bias")
    for token, bias in value.items():
        # One spelling for each id, so that no id comes twice.
        if not (token.isascii() and token.isdigit() and len(token) <= 10 and str(int(token)) == token):
            raise invalid(f"'logit_bias' has the key {token!r:.40}, which is no token id", "logit_bias")
        if isinstance(bias, bool) or not isinstance(bias, int | float) or not -100 <= bias <= 100:
            raise invalid(f"'logit_bias' of {token} must be a number from -100 to 100", "logit_bias")
    return tuple((int(token), float(bias)) for token, bias in value.items())


def _check_ids(name: str, ids: Iterable[int], model: ModelInfo) -> None:
    for token in ids:
        if token >= model.vocab_size:
            raise invalid(f"'{name}' has the token id {token}; ids end at {model.vocab_size - 1}", name)
