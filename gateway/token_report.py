"""The shapes in which answers tell of single tokens: OpenAI's two kinds of ``logprobs``, vLLM's ``prompt_logprobs``.

Strict JSON has no infinity: what is impossible is told as -9999.0, as OpenAI and vLLM do. A token that is no whole
character has no text of its own; it is spelled by its bytes, as OpenAI spells it (``\\xe2\\x80``, in text completions
with ``bytes:`` before it), so that different tokens keep different names.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from gateway.detokenizer import Vocabulary
from gateway.flight import Choice
from gateway.report import Report
from gateway.token_details import PromptReport, TokenDetail
from shared.messages import TokenLogprob

IMPOSSIBLE = -9999.0

_json = msgspec.json.Encoder().encode


class TokenReport:
    """Renders what one request asked for."""

    def __init__(self, report: Report, vocabulary: Vocabulary) -> None:
        self.wanted = report
        self._vocabulary = vocabulary
        self._echoed: set[int] = set()  # choices whose prompt has been told

    def completion_logprobs(self, details: Sequence[TokenDetail]) -> dict[str, Any] | None:
        """OpenAI's parallel lists for text completions. The chosen token is always among its ``top_logprobs``."""
        if self.wanted.logprobs < 0 or not details:
            return None
        tokens: list[str] = []
        token_logprobs: list[float | None] = []
        top_logprobs: list[msgspec.Raw | None] = []
        for detail in details:
            token = self._completion_name(detail.token)
            tokens.append(token)
            if detail.logprob is None:
                token_logprobs.append(None)
                top_logprobs.append(None)
                continue
            value = _finite(detail.logprob.log_prob)
            token_logprobs.append(value)
            top = {token: value}
            for other, log_prob in self._top(detail.logprob):
                top.setdefault(self._completion_name(other), log_prob)
            top_logprobs.append(_raw(top))
        return {
            "tokens": tokens,
            "token_logprobs": token_logprobs,
            "top_logprobs": top_logprobs,
            "text_offset": [detail.offset for detail in details],
        }

    def chat_logprobs(self, details: Sequence[TokenDetail]) -> dict[str, Any] | None:
        """OpenAI's list of objects for chat."""
        if self.wanted.logprobs < 0 or not details:
            return None
        content = []
        for detail in details:
            assert detail.logprob is not None  # the ledger lets no token in without
            entry = self._chat_entry(detail.token, _finite(detail.logprob.log_prob))
            entry["top_logprobs"] = [self._chat_entry(*other) for other in self._top(detail.logprob)]
            content.append(_raw(entry))
        return {"content": content, "refusal": None}

    def prompt_logprobs(self, prompt: PromptReport) -> list[msgspec.Raw | None]:
        """vLLM's: for each token of the prompt an object of ids, the token's own first; null for the first token."""
        answer: list[msgspec.Raw | None] = [None]
        for token, logprob in zip(prompt.ids[1:], prompt.logprobs, strict=True):
            entries = {str(token): self._ranked(token, _finite(logprob.log_prob), logprob.rank)}
            for rank, (other, log_prob) in enumerate(self._top(logprob, self.wanted.prompt_logprobs), 1):
                entries.setdefault(str(other), self._ranked(other, log_prob, rank))
            answer.append(_raw(entries))
        return answer

    def take_details(self, choice: Choice) -> list[TokenDetail]:
        """Of the tokens whose text is handed out now; behind those of the prompt, where it is echoed."""
        details = choice.take_details()
        if self.wanted.echo and choice.prompt is not None and choice.index not in self._echoed:
            self._echoed.add(choice.index)
            detokenizer = self._vocabulary.detokenizer((), self.wanted.special_tokens)
            return choice.prompt.details(detokenizer, self._vocabulary) + details
        return details

    def _top(self, logprob: TokenLogprob, count: int | None = None) -> list[tuple[int, float]]:
        """The alternatives asked for, best first; the worker may have sent more."""
        wanted = self.wanted.logprobs if count is None else count
        values = [_finite(value) for value in logprob.top_log_probs[:wanted]]
        return list(zip(logprob.top_ids, values, strict=False))

    def _chat_entry(self, token: int, log_prob: float) -> dict[str, Any]:
        token_bytes = self._vocabulary.token_bytes(token)
        return {"token": _name(token_bytes), "logprob": log_prob, "bytes": list(token_bytes)}

    def _completion_name(self, token: int) -> str:
        return _name(self._vocabulary.token_bytes(token), "bytes:")

    def _ranked(self, token: int, log_prob: float, rank: int) -> dict[str, Any]:
        text = self._vocabulary.token_bytes(token).decode("utf-8", "replace")
        return {"logprob": log_prob, "rank": rank, "decoded_token": text}


def _raw(tree: Any) -> msgspec.Raw:
    """What is told of one token, written at once: a tree of all tokens would be many times as large as its text."""
    return msgspec.Raw(_json(tree))


def _finite(log_prob: float) -> float:
    return max(log_prob, IMPOSSIBLE)


def _name(token_bytes: bytes, prefix: str = "") -> str:
    try:
        return token_bytes.decode()
    except UnicodeDecodeError:
        return prefix + "".join(f"\\x{byte:02x}" for byte in token_bytes)
