"""One choice token by token, for streams whose events must not depend on how the tokens came.

The text and all that is told beside it are settled as soon as tokens come, so that a stop string is found at once. What
each token settled is kept apart until it is written, however many have gathered behind it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from gateway.choice_text import ChoiceText
from gateway.token_details import TokenDetail
from shared.messages import EndReason, TokenLogprob


class Step(NamedTuple):
    """What one token, or the end, settled."""

    text: str
    finish_reason: str | None
    num_tokens: int  # so far
    details: list[TokenDetail]


class Steps:
    """``finish_reason``, ``num_tokens`` and ``take_details`` are those of the steps that were shown."""

    __slots__ = ("_before", "_details", "_text", "_waiting", "finish_reason", "num_tokens")

    def __init__(self, text: ChoiceText, before: str) -> None:
        """``before``: what the client's text begins with (an echoed prompt)."""
        self._text = text
        self._before = before
        self._waiting: deque[Step] = deque()
        self._details: list[TokenDetail] = []
        self.finish_reason: str | None = None
        self.num_tokens = 0

    def feed(self, tokens: Sequence[int], end: str, logprobs: Sequence[TokenLogprob]) -> str:
        """As ``ChoiceText.feed``.

        An end that is no token's is a step of its own: it may come with the last token or behind it.
        """
        pieces = []
        for index, token in enumerate(tokens):
            stops_here = end == EndReason.STOP and index == len(tokens) - 1
            pieces.append(self._settle([token], end if stops_here else "", logprobs[index : index + 1]))
            if self._text.finish_reason is not None:
                return "".join(pieces)
        if end:
            pieces.append(self._settle([], end, ()))
        return "".join(pieces)

    def _settle(self, tokens: Sequence[int], end: str, logprobs: Sequence[TokenLogprob]) -> str:
        text = self._text.feed(tokens, end, logprobs)
        finish_reason = self._text.finish_reason
        if text or finish_reason is not None:
            step = Step(self._before + text, finish_reason, self._text.num_tokens, self._text.take_details())
            self._waiting.append(step)
            self._before = ""
        return text

    def show(self) -> str | None:
        """Show the next step, and return its text; None if there is none yet."""
        if not self._waiting:
            return None
        text, self.finish_reason, self.num_tokens, details = self._waiting.popleft()
        self._details += details
        return text

    def take_details(self) -> list[TokenDetail]:
        details, self._details = self._details, []
        return details
