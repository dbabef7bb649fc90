"""Beam search: which beams go on, given each beam's best continuations. Pure arithmetic on log-probabilities.

The rules are those of ``transformers``' ``generate(num_beams=..., do_sample=False)``, so that results can be compared:
of the K = (1 + end tokens) * width best continuations, those among the first ``width`` that end become hypotheses,
scored by ``log_prob / length ** length_penalty``; the best ``width`` that do not end go on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shared.beams import candidates_wanted
from shared.messages import EndReason, Sampling


@dataclass(frozen=True, slots=True)
class Continuation:
    """Beam ``parent`` goes on with ``token``."""

    parent: int
    token: int
    log_prob: float  # of the whole beam


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """An ended beam: its generated tokens, the one that ended it included."""

    tokens: list[int]
    score: float
    log_prob: float
    end: str  # an EndReason


class BeamSearch:
    """One search. ``log_probs`` of the running beams; the driver keeps their tokens."""

    def __init__(self, sampling: Sampling, eos_token_ids: Sequence[int]) -> None:
        self._sampling = sampling
        self._ends = set(sampling.stop_token_ids) | (set() if sampling.ignore_eos else set(eos_token_ids))
        self._wanted = candidates_wanted(sampling, eos_token_ids)
        self.log_probs: list[float] = [0.0]
        self.hypotheses: list[Hypothesis] = []  # the best ones, best first, at most ``width``
        self.done = False

    def advance(
        self, generated: Sequence[list[int]], candidates: Sequence[tuple[list[int], list[float]]]
    ) -> list[Continuation]:
        """One step: each running beam's generated tokens and its best continuations (tokens, log-probabilities).

        Returns the beams that go on, best first; none once the search is done.
        """
        width = self._sampling.beam_width
        penalty = self._sampling.length_penalty
        merged = [
            (-(self.log_probs[beam] + log_prob), beam, token)
            for beam, (tokens, log_probs) in enumerate(candidates)
            for token, log_prob in zip(tokens, log_probs, strict=True)
        ]
        merged.sort()
        length = len(generated[0]) + 1
        running: list[Continuation] = []
        for rank, (cost, beam, token) in enumerate(merged[: self._wanted]):
            stops = token in self._ends and length > self._sampling.min_tokens
            if not stops and length < self._sampling.max_tokens:
                if len(running) < width:
                    running.append(Continuation(beam, token, -cost))
            elif rank < width:
                end = EndReason.STOP if stops else EndReason.LENGTH
                score = -cost / length**penalty
                self.hypotheses.append(Hypothesis([*generated[beam], token], score, -cost, end.value))
        self.hypotheses.sort(key=lambda one: -one.score)
        del self.hypotheses[width:]
        full = len(self.hypotheses) == width
        if not running or (full and running[0].log_prob / length**penalty <= self.hypotheses[-1].score):
            self.done = True
            return []
        self.log_probs = [one.log_prob for one in running]
        return running
