"""One choice's way from tokens to text: detokenising, stop strings, and the count that usage reports."""

from __future__ import annotations

from collections.abc import Sequence

from gateway.detokenizer import Detokenizer
from gateway.stop_strings import StopMatcher
from gateway.token_details import TokenBook, TokenDetail
from shared.messages import EndReason, TokenLogprob


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

    def feed(self, tokens: Sequence[int], end: str = "", logprobs: Sequence[TokenLogprob] = ()) -> str:
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

    def take_details(self) -> list[TokenDetail]:
        """Of the tokens whose text came out since the last call; nothing where nothing is kept of a token."""
        return []


class DetailedChoiceText(ChoiceText):
    """Keeps what there is to tell of each token that is counted, the one that stops the choice included."""

    __slots__ = ("_book", "_length")

    def __init__(
        self, detokenizer: Detokenizer, stops: Sequence[str], include_stop: bool, min_tokens: int, offset: int = 0
    ) -> None:
        """``offset``: characters that precede the choice's own text (an echoed prompt)."""
        super().__init__(detokenizer, stops, include_stop, min_tokens)
        self._book = TokenBook(offset)
        self._length = offset  # of the text that was let out

    def feed(self, tokens: Sequence[int], end: str = "", logprobs: Sequence[TokenLogprob] = ()) -> str:
        """As ``ChoiceText.feed``; ``logprobs``: one for each token, or none at all."""
        pieces = []
        for index, token in enumerate(tokens):
            self.num_tokens += 1
            stops_here = end == EndReason.STOP and index == len(tokens) - 1
            piece = "" if stops_here else self._detokenizer.feed((token,))
            self._book.add(token, piece, logprobs[index] if logprobs else None)
            pieces.append(self._let_out(piece))
            if self.stopped_here:
                self.finish_reason = EndReason.STOP.value
                break
        if end and self.finish_reason is None:
            pieces.append(self._let_out(self._detokenizer.finish()))
            if self._stops is not None:
                pieces.append(self._stops.finish())
            self.finish_reason = EndReason.STOP.value if self.stopped_here else end
        if self.finish_reason is not None:
            self._book.finish()
        return "".join(pieces)

    def take_details(self) -> list[TokenDetail]:
        return self._book.take()

    def _let_out(self, piece: str) -> str:
        out = piece
        if self._stops is not None:
            out = self._stops.feed(piece, may_match=self.num_tokens > self._min_tokens)
        self._length += len(out)
        self._book.let_out(self._length)
        return out


class NoText(ChoiceText):
    """Of a request that only looks at its prompt: the one token that the forward pass gives is nobody's."""

    __slots__ = ()

    def feed(self, tokens: Sequence[int], end: str = "", logprobs: Sequence[TokenLogprob] = ()) -> str:
        self.finish_reason = EndReason.LENGTH.value
        return ""
