"""Top-k, top-p and min-p over a batch of scores, in the order of ``transformers``: top-k, top-p, min-p.

Each filter is a count of the largest tokens that pass, so that ties at an edge are settled by id (the lowest stay), and
exactly k tokens pass top-k. The counts are exact: a token's weight is made of single IEEE operations and lies on a grid
on which sums are exact (:func:`weights`), so what passes depends neither on the rows beside it, nor on the order of a
sum, nor on who computes it. ``kernels/cpu/sampling.h`` does the same with the same bits.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from shared.messages import Sampling
from worker.noise import BLOCK

FIRST_CUT = 128
"""How many of the largest tokens are sorted at first; all are, for rows where those do not settle the matter."""

LEAST_WEIGHTY = -25.0
"""A score whose weight rounds to 0."""

EXP_POLYNOMIAL = (
    1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1,
)  # fmt: skip
"""(exp(r) - 1 - r) / r ** 2 for abs(r) <= log(2) / 2, from Moshier's Cephes library, as the two parts of log(2) are."""

GRID = 1.5 / 2048
"""Added to a float32 number up to 1 and taken off again, it leaves a multiple of 2 ** -34."""


def apply_filters(scores: torch.Tensor, rows: Sequence[Sampling]) -> None:
    """Set the scores of tokens that do not pass to -inf, in place.

    ``scores`` is ``[rows, width]``, logits over temperature less their maximum; width is a multiple of ``BLOCK``.
    """
    top_k = [row.top_k if 0 < row.top_k < scores.shape[1] else 0 for row in rows]
    todo = [number for number, row in enumerate(rows) if top_k[number] or row.top_p < 1]
    if todo:
        _filter_sorted(scores, rows, top_k, todo)
    if any(row.min_p > 0 for row in rows):
        logs = [min(math.log(row.min_p), 0.0) if row.min_p > 0 else -math.inf for row in rows]
        low = torch.tensor(logs, dtype=torch.float64)
        scores.masked_fill_(scores < low.to(scores.device, scores.dtype)[:, None], float("-inf"))


def weights(scores: torch.Tensor) -> torch.Tensor:
    """exp(scores) of scores up to 0, in float32, within 1e-7 and to a multiple of 2 ** -34.

    Sums of up to 2 ** 19 of them are exact in float64. Only additions, products and roundings, each an operation of its
    own, so that the bits are the same on every machine, as those of a library's exp are not.
    """
    clamped = scores.to(torch.float32).clamp_min(LEAST_WEIGHTY)
    power = (clamped * 1.44269504088896341).round_()
    rest = clamped.sub_(power * 0.693359375).add_(power * 2.12194440e-4)
    sum_ = torch.full_like(rest, EXP_POLYNOMIAL[0])
    for coefficient in EXP_POLYNOMIAL[1:]:
        sum_.mul_(rest).add_(coefficient)
    sum_.mul_(rest * rest).add_(rest.add_(1.0))
    sum_.mul_(power.to(torch.int32).add_(127).bitwise_left_shift_(23).view(torch.float32))
    return sum_.add_(GRID).sub_(GRID)


def _filter_sorted(scores: torch.Tensor, rows: Sequence[Sampling], top_k: Sequence[int], todo: list[int]) -> None:
    candidates = scores[torch.tensor(todo, device=scores.device)]
    whole = [not top_k[number] for number in todo]
    total = torch.ones(len(todo), dtype=torch.float64, device=scores.device)
    if any(whole):
        alone = torch.tensor(whole, device=scores.device)
        total[alone] = weights(candidates[alone]).sum(dim=-1, dtype=torch.float64)
    for complete in (False, True):
        values = torch.sort(candidates, dim=-1, descending=True).values if complete else _largest(candidates)
        mass = weights(values).to(torch.float64).cumsum(dim=-1)
        keep = _count_kept(mass, total, [rows[n].top_p for n in todo], [top_k[n] for n in todo], complete)
        left = []
        for place, (number, count) in enumerate(zip(todo, keep, strict=True)):
            if count:
                _keep_largest(scores[number], values[place, count - 1], count)
            else:
                left.append(place)
        if not left:
            return
        candidates, total = candidates[left], total[left]
        todo = [todo[place] for place in left]


def _largest(scores: torch.Tensor) -> torch.Tensor:
    """The ``FIRST_CUT`` largest of each row, falling. They lie in the blocks with the ``FIRST_CUT`` largest maxima."""
    count, width = scores.shape
    if width <= FIRST_CUT * BLOCK:
        return torch.topk(scores, min(FIRST_CUT, width), dim=-1).values
    blocks = scores.view(count, -1, BLOCK)
    best = torch.topk(blocks.amax(dim=-1), FIRST_CUT, dim=-1).indices
    within = blocks.gather(1, best[:, :, None].expand(-1, -1, BLOCK)).view(count, -1)
    return torch.topk(within, FIRST_CUT, dim=-1).values


def _count_kept(
    mass: torch.Tensor, total: torch.Tensor, top_p: list[float], top_k: list[int], complete: bool
) -> list[int]:
    """How many of the largest tokens pass in each row; 0 where ``mass`` (cumulative) is too short to say.

    A token passes top-p if the mass before it, of the mass that top-k leaves (of ``total`` without top-k), is below
    top_p; the first always does.
    """
    width = mass.shape[1]
    limit = torch.tensor([min(k, width) if k else width for k in top_k], device=mass.device)
    last = mass.gather(1, limit[:, None] - 1).squeeze(1)
    whole = torch.tensor([not k for k in top_k], device=mass.device)
    bound = (torch.tensor(top_p, dtype=mass.dtype, device=mass.device) * torch.where(whole, total, last))[:, None]
    place = torch.arange(width - 1, device=mass.device)
    no_top_p = torch.tensor([p >= 1 for p in top_p], device=mass.device)[:, None]
    below = ((mass[:, :-1] < bound) | no_top_p) & (place < limit[:, None] - 1)
    kept: list[int] = below.sum(dim=-1).add_(1).tolist()
    if complete:
        return kept
    return [
        0 if (k > width or (not k and count == width)) else count
        for k, count in zip(top_k, kept, strict=True)
    ]  # fmt: skip


def _keep_largest(scores: torch.Tensor, edge: torch.Tensor, keep: int) -> None:
    """Leave the ``keep`` largest of one row, where ``edge`` is the smallest of them."""
    passing = scores >= edge
    if int(passing.sum()) > keep:  # ties at the edge
        passing = scores > edge
        ties = (scores == edge).nonzero().squeeze(-1)
        passing[ties[: keep - int(passing.sum())]] = True
    scores.masked_fill_(~passing, float("-inf"))
