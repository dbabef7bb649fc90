"""Which tokens a sequence has, and how often its output has each: what penalties look at.

A pure function of the sequence's token ids, kept up to date token by token: a step costs what is new, and a sequence
that starts again in the middle (a preemption, a resume) counts once more from its ids.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt


class TokenCounts:
    """``ids`` are distinct, in no order that matters; ``counts`` says how often the output has each.

    Ids of the prompt are among them only ``with_prompt``, with a count of 0 unless the output has them too.
    """

    __slots__ = ("__weakref__", "_counts", "_ids", "_place", "_prompt_len", "_seen", "_with_prompt")

    def __init__(self, prompt_len: int, with_prompt: bool) -> None:
        self._prompt_len = prompt_len
        self._with_prompt = with_prompt
        self._seen = 0
        self._ids = np.empty(0, dtype=np.int64)
        self._counts = np.empty(0, dtype=np.float32)
        self._place: dict[int, int] = {}

    @property
    def ids(self) -> npt.NDArray[np.int64]:
        return self._ids[: len(self._place)]

    @property
    def counts(self) -> npt.NDArray[np.float32]:
        return self._counts[: len(self._place)]

    def follow(self, tokens: Sequence[int]) -> None:
        """Take in what ``tokens`` (prompt, then output) has more than at the last call."""
        if not self._seen and self._with_prompt:
            prompt = np.unique(np.asarray(tokens[: self._prompt_len], dtype=np.int64))
            self._ids = prompt
            self._counts = np.zeros(len(prompt), dtype=np.float32)
            self._place = {token: place for place, token in enumerate(prompt.tolist())}
        for token in tokens[max(self._seen, self._prompt_len) :]:
            place = self._place.get(token)
            if place is None:
                place = self._add(token)
            self._counts[place] += 1
        self._seen = len(tokens)

    def _add(self, token: int) -> int:
        place = len(self._place)
        if place == len(self._ids):
            room = max(64, place // 2)
            self._ids = np.concatenate([self._ids, np.empty(room, dtype=np.int64)])
            self._counts = np.concatenate([self._counts, np.zeros(room, dtype=np.float32)])
        self._ids[place] = token
        self._place[token] = place
        return place
