"""One choice's way from tokens to text: detokenising, stop strings, and the count that usage reports."""

from __future__ import annotations

from collections.abc import Sequence

from gateway.detokenizer import Detokenizer
from gateway.stop_strings import StopMatcher
from shared.messages import EndReason


class ChoiceText:
    """``finish_reason`` is set once the choice has ended, by its worker or by a stop string found here."""

    __slots__ = ("_detokenizer", "_min_tokens", "_stops", "finish_reason", "num_tokens")

    def __init__(self, detokenizer: Detokenizer, stops: Sequence[str], include_stop: bool, min_tokens: int) -> None:
        self._detokenizer = detokenizer
        self._stops = StopMatcher(stops, include_stop) if stops else None
        self._min_tokens = min_tokens
        self.num_tokens = 0
        self.finish_reason: str | None = None

    @property
    def stopped_here(self) -> bool:
        """A stop string ended it: the worker may not know yet."""
        return self._stops is not None and self._stops.matched

    def feed(self, tokens: Sequence[int], end: str = "") -> str:
        """The text that ``tokens`` settle. Tokens behind a stop string are neither shown nor counted."""
        if self._stops is None:
            self.num_tokens += len(tokens)
            if not end:
                return self._detokenizer.feed(tokens)
            self.finish_reason = end
            visible = tokens[:-1] if end == EndReason.STOP else tokens  # the last one is EOS or a stop id: never shown
            return self._detokenizer.feed(visible) + self._detokenizer.finish()
        pieces = []
        for index, token in enumerate(tokens):
            self.num_tokens += 1
            if end == EndReason.STOP and index == len(tokens) - 1:
                break
            piece = self._detokenizer.feed((token,))
            pieces.append(self._stops.feed(piece, may_match=self.num_tokens > self._min_tokens))
            if self._stops.matched:
                self.finish_reason = EndReason.STOP.value
                return "".join(pieces)
        if end:
            pieces.append(self._stops.feed(self._detokenizer.finish(), may_match=self.num_tokens > self._min_tokens))
            pieces.append(self._stops.finish())
            self.finish_reason = EndReason.STOP.value if self._stops.matched else end
        return "".join(pieces)
