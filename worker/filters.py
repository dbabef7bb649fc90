"""Top-k, top-p and min-p over a batch of scores, in the order of ``transformers``: top-k, top-p, min-p.

Each filter is a count of the largest tokens that pass, so that ties at an edge are settled by id (the lowest stay), and
exactly k tokens pass top-k. Every reduction works row by row: a row's candidates don't depend on the rows beside it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from shared.messages import Sampling
from worker.noise import BLOCK

FIRST_CUT = 128
"""How many of the largest tokens are sorted at first; all are, for rows where those do not settle the matter."""


def apply_filters(scores: torch.Tensor, rows: Sequence[Sampling]) -> None:
    """Set the scores of tokens that do not pass to -inf, in place.

    ``scores`` is ``[rows, width]``, logits over temperature less their maximum; width is a multiple of ``BLOCK``.
    """
    top_k = [row.top_k if 0 < row.top_k < scores.shape[1] else 0 for row in rows]
    todo = [number for number, row in enumerate(rows) if top_k[number] or row.top_p < 1]
    if todo:
        _filter_sorted(scores, rows, top_k, todo)
    if any(row.min_p > 0 for row in rows):
        low = torch.tensor([row.min_p for row in rows], dtype=torch.float64).log_().clamp_max_(0.0)
        scores.masked_fill_(scores < low.to(scores.device, scores.dtype)[:, None], float("-inf"))


def _filter_sorted(scores: torch.Tensor, rows: Sequence[Sampling], top_k: Sequence[int], todo: list[int]) -> None:
    index = torch.tensor(todo, device=scores.device)
    # log_softmax, unlike a plain sum, never splits one row between threads: its bits stay the row's own
    logprobs = torch.log_softmax(scores.index_select(0, index), dim=-1)
    for complete in (False, True):
        values = torch.sort(logprobs, dim=-1, descending=True).values if complete else _largest(logprobs)
        mass = values.to(torch.float64).exp().cumsum(dim=-1)  # in falling order: a prefix keeps its bits when cut
        keep = _count_kept(mass, [rows[n].top_p for n in todo], [top_k[n] for n in todo], complete)
        left = []
        for place, (number, count) in enumerate(zip(todo, keep, strict=True)):
            if count:
                _keep_largest(scores[number], logprobs[place], values[place, count - 1], count)
            else:
                left.append(place)
        if not left:
            return
        logprobs = logprobs[left]
        todo = [todo[place] for place in left]


def _largest(logprobs: torch.Tensor) -> torch.Tensor:
    """The ``FIRST_CUT`` largest of each row, falling. They lie in the blocks with the ``FIRST_CUT`` largest maxima."""
    count, width = logprobs.shape
    if width <= FIRST_CUT * BLOCK:
        return torch.topk(logprobs, min(FIRST_CUT, width), dim=-1).values
    blocks = logprobs.view(count, -1, BLOCK)
    best = torch.topk(blocks.amax(dim=-1), FIRST_CUT, dim=-1).indices
    within = blocks.gather(1, best[:, :, None].expand(-1, -1, BLOCK)).view(count, -1)
    return torch.topk(within, FIRST_CUT, dim=-1).values


def _count_kept(mass: torch.Tensor, top_p: list[float], top_k: list[int], complete: bool) -> list[int]:
    """How many of the largest tokens pass in each row; 0 where ``mass`` (cumulative) is too short to say.

    A token passes top-p if the mass before it, of the mass that top-k leaves, is below top_p; the first always does.
    """
    width = mass.shape[1]
    limit = torch.tensor([min(k, width) if k else width for k in top_k], device=mass.device)
    last = mass.gather(1, limit[:, None] - 1)
    whole = torch.tensor([not k for k in top_k], device=mass.device)[:, None]
    bound = torch.tensor(top_p, dtype=mass.dtype, device=mass.device)[:, None] * torch.where(whole, 1.0, last)
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


def _keep_largest(scores: torch.Tensor, logprobs: torch.Tensor, edge: torch.Tensor, keep: int) -> None:
    """Leave the ``keep`` largest of one row, where ``edge`` is the smallest of them."""
    passing = logprobs >= edge
    if int(passing.sum()) > keep:  # ties at the edge
        passing = logprobs > edge
        ties = (logprobs == edge).nonzero().squeeze(-1)
        passing[ties[: keep - int(passing.sum())]] = True
    scores.masked_fill_(~passing, float("-inf"))
