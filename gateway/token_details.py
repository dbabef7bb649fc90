"""What is kept of each token where a client asks for more than text: its id, its place in the text, log-probabilities.

Only requests that ask have any of this; the others keep nothing for a token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import repeat

from gateway.detokenizer import Detokenizer, Vocabulary
from shared.messages import TokenLogprob


@dataclass(frozen=True, slots=True)
class TokenDetail:
    """``offset``: where its text begins, in characters of the text that the client gets."""

    token: int
    offset: int
    logprob: TokenLogprob | None


@dataclass(slots=True)
class PromptReport:
    """A prompt about which the client wants to know something. Shared by the choices that continue it."""

    ids: Sequence[int]
    echo: str = ""  # the text that precedes each choice's own
    logprobs: list[TokenLogprob] = field(default_factory=list)  # if asked for, from the second token on, as they come

    def details(self, detokenizer: Detokenizer, vocabulary: Vocabulary) -> list[TokenDetail]:
        """The tokens of the echoed prompt. The first has no log-probability: nothing precedes it."""
        details = []
        offset = 0
        logprobs = (None, *(self.logprobs or repeat(None, len(self.ids) - 1)))
        for token, logprob in zip(self.ids, logprobs, strict=True):
            details.append(TokenDetail(token, min(offset, len(self.echo)), logprob))
            offset += len(detokenizer.feed((token,)))
            spelling = vocabulary.special_tokens.get(token, "")
            if spelling and self.echo.startswith(spelling, offset):  # decoding leaves it out, the client's text has it
                offset += len(spelling)
        return details


class TokenBook:
    """The details of one choice's tokens: each is handed out once, together with the end of its text.

    A token whose text is held back (half a character, what may become a stop string) is held with it; so is a token
    without text, until the text goes on or ends.
    """

    __slots__ = ("_held", "_ready", "_settled")

    def __init__(self, offset: int = 0) -> None:
        """``offset``: characters that precede the choice's own text."""
        self._settled = offset  # characters that the detokenizer has settled
        self._held: list[tuple[int, TokenDetail]] = []  # (the text's length that lets it out, ...)
        self._ready: list[TokenDetail] = []

    def add(self, token: int, piece: str, logprob: TokenLogprob | None) -> None:
        """``piece``: the text that the token settled."""
        start = self._settled
        self._settled += len(piece)
        self._held.append((max(self._settled, start + 1), TokenDetail(token, start, logprob)))

    def let_out(self, length: int) -> None:
        """The client's text has ``length`` characters now."""
        count = 0
        while count < len(self._held) and self._held[count][0] <= length:
            self._ready.append(self._held[count][1])
            count += 1
        del self._held[:count]

    def finish(self) -> None:
        self._ready += [detail for _, detail in self._held]
        self._held.clear()

    def take(self) -> list[TokenDetail]:
        """What has been let out since the last call."""
        ready, self._ready = self._ready, []
        return ready
