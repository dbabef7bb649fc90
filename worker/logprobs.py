"""Log-probabilities for the rows that ask: of the model, before anything that sampling parameters do to its logits.

They are a float32 ``log_softmax`` of the raw logits (float64 for a float64 model). Rows are independent of one another.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from shared.messages import TokenLogprob
from worker.noise import BLOCK

FLOOR = -9999.0
"""Stands for minus infinity and for what is no number: every JSON parser can read it (OpenAI's convention)."""

MAX_ROWS = 64
"""How many rows of a prompt are worked on at once: their float32 copies take rows * vocabulary * 4 bytes."""


def log_probabilities(logits: torch.Tensor) -> torch.Tensor:
    """``log_softmax`` of each row in at least float32, in memory of its own."""
    return torch.log_softmax(logits, dim=-1, dtype=torch.promote_types(logits.dtype, torch.float32))


@dataclass(frozen=True, slots=True, eq=False)
class Gathered:
    """What is told of some rows, where their log-probabilities are; finite numbers."""

    values: torch.Tensor  # [rows]: of each one's token
    ranks: torch.Tensor  # int64 [rows]
    best_values: torch.Tensor  # [rows, most], falling
    best_ids: torch.Tensor  # int64 [rows, most]


def gather(log_probs: torch.Tensor, tokens: torch.Tensor, most: int) -> Gathered:
    """The first half of :func:`describe`, for up to ``most`` alternatives of each row: nothing waits for a device."""
    chosen = log_probs.gather(1, tokens[:, None])
    ranks = torch.count_nonzero(log_probs > chosen, dim=-1).add_(1)
    best_values, best_ids = _best(log_probs, min(most, log_probs.shape[1]))
    return Gathered(_finite(chosen[:, 0]), ranks, _finite(best_values), best_ids)


def tell(
    values: Sequence[float],
    ranks: Sequence[int],
    best_values: Sequence[Sequence[float]],
    best_ids: Sequence[Sequence[int]],
    tops: Sequence[int],
) -> list[TokenLogprob]:
    """The second half, of what :class:`Gathered` holds as lists."""
    described = []
    for value, rank, top_values, top_ids, top in zip(values, ranks, best_values, best_ids, tops, strict=True):
        ranked = sorted(zip(top_values, top_ids, strict=True), key=lambda pair: (-pair[0], pair[1]))[:top]
        described.append(
            TokenLogprob(value, rank, [token for _, token in ranked], [log_prob for log_prob, _ in ranked])
        )
    return described


def describe(log_probs: torch.Tensor, tokens: Sequence[int], tops: Sequence[int]) -> list[TokenLogprob]:
    """Of each row of ``log_probs`` ``[rows, vocabulary]``: its token's log-probability and rank, and its best ``tops``.

    Equally probable tokens share the best of their ranks and come in the order of their ids.
    """
    found = gather(log_probs, torch.tensor(tokens, device=log_probs.device), max(tops))
    return tell(found.values.tolist(), found.ranks.tolist(), found.best_values.tolist(), found.best_ids.tolist(), tops)


def describe_prompt(logits: torch.Tensor, tokens: Sequence[int], top: int) -> list[TokenLogprob]:
    """The same for many rows of raw ``logits``, one for each of ``tokens``, a few rows at a time."""
    described: list[TokenLogprob] = []
    for first in range(0, len(tokens), MAX_ROWS):
        part = tokens[first : first + MAX_ROWS]
        described += describe(log_probabilities(logits[first : first + MAX_ROWS]), part, [top] * len(part))
    return described


def _best(log_probs: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Values and ids of the ``count`` largest of each row; of equal ones those with the lowest ids, so that nobody's
    alternatives depend on how many the rows beside it ask for. They lie in the blocks with the largest maxima.
    """
    vocabulary = log_probs.shape[1]
    if not count:
        return log_probs[:, :0], torch.empty((len(log_probs), 0), dtype=torch.int64, device=log_probs.device)
    width = vocabulary // BLOCK * BLOCK
    if width <= 4 * count * BLOCK:
        return _first(log_probs, count)
    maxima = log_probs[:, :width].view(len(log_probs), -1, BLOCK).amax(dim=-1)
    blocks = _first(maxima, count)[1].sort(dim=-1).values  # ids ascend
    within = torch.arange(BLOCK, device=log_probs.device)
    tail = torch.arange(width, vocabulary, device=log_probs.device).expand(len(log_probs), -1)
    ids = torch.cat([(blocks[:, :, None] * BLOCK + within).flatten(1), tail], dim=1)
    values, places = _first(log_probs.gather(1, ids), count)
    return values, ids.gather(1, places)


def _first(values: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The ``count`` largest of each row and their places, the foremost of equal ones: ``topk`` takes any of them."""
    ordered, places = values.sort(dim=-1, descending=True, stable=True)
    return ordered[:, :count], places[:, :count]


def _finite(values: torch.Tensor) -> torch.Tensor:
    return values.nan_to_num(nan=FLOOR, neginf=FLOOR).clamp_min(FLOOR)
