"""What an answer tells beside its text: log-probabilities, token ids, the prompt itself. Which of it a body asks for.

OpenAI's two endpoints ask for log-probabilities in two ways: text completions by a number of alternatives, chat by a
flag and a number. ``prompt_logprobs``, ``return_token_ids`` and ``skip_special_tokens`` are vLLM's.
"""

from __future__ import annotations

from dataclasses import dataclass

from gateway.errors import invalid
from gateway.fields import Fields

MAX_LOGPROBS = 20
"""Most alternatives per token: OpenAI's limit for chat, and vLLM's default for both (OpenAI's for completions is 5)."""


@dataclass(frozen=True, slots=True)
class Report:
    """``-1`` in the two numbers: not asked for; otherwise alternatives per token."""

    logprobs: int = -1
    prompt_logprobs: int = -1
    echo: bool = False  # the text begins with the prompt
    token_ids: bool = False
    special_tokens: bool = False  # their text is shown
    markers: bool = False  # that of tool markers among them is, to the parser of tool calls

    @property
    def per_token(self) -> bool:
        """The answer tells something of each token. Otherwise nothing is kept for a token."""
        return self.logprobs >= 0 or self.token_ids

    @property
    def from_the_mesh(self) -> int:
        """Alternatives that the worker is asked for with each of the prompt's tokens; -1: none."""
        return max(self.prompt_logprobs, self.logprobs if self.echo else -1)


def read_completion_report(fields: Fields, stream: bool) -> Report:
    logprobs = fields.optional_integer("logprobs", 0, MAX_LOGPROBS)
    echo = fields.boolean("echo", False)
    return _report(fields, stream, -1 if logprobs is None else logprobs, echo)


def read_chat_report(fields: Fields, stream: bool) -> Report:
    wanted = fields.boolean("logprobs", False)
    alternatives = fields.integer("top_logprobs", 0, 0, MAX_LOGPROBS)
    if alternatives and not wanted:
        raise invalid("'top_logprobs' needs 'logprobs': true", "top_logprobs")
    return _report(fields, stream, alternatives if wanted else -1, echo=False)


def read_plain_report(fields: Fields) -> Report:
    """Of ``/generate``, whose answers are nothing but text."""
    return Report(special_tokens=not fields.boolean("skip_special_tokens", True))


def _report(fields: Fields, stream: bool, logprobs: int, echo: bool) -> Report:
    prompt_logprobs = fields.optional_integer("prompt_logprobs", 0, MAX_LOGPROBS)
    if prompt_logprobs is not None and stream:
        raise invalid("'prompt_logprobs' is not available in a stream", "prompt_logprobs")
    return Report(
        logprobs=logprobs,
        prompt_logprobs=-1 if prompt_logprobs is None else prompt_logprobs,
        echo=echo,
        token_ids=fields.boolean("return_token_ids", False),
        special_tokens=not fields.boolean("skip_special_tokens", True),
    )
