"""Choosing tokens from logits, for a whole batch at once.

A token is the argmax of ``logits / temperature + noise`` over the candidates that the filters leave (the Gumbel-max
trick), with the noise of :mod:`worker.noise`: a function of the logits and of (seed, prompt index, choice, position),
so it survives any change of batch, worker or schedule. What comes before the temperature is in
:mod:`worker.processors`, with the order of everything.

On a CPU the C++ kernels choose where they can (:mod:`kernels.cpu.sampling`): the same tokens, in a tenth of the time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kernels.cpu.library import load
from kernels.cpu.sampling import RowChoice, can_choose, choose_tokens
from shared.messages import Sampling
from worker.filters import apply_filters
from worker.noise import BLOCK, block_noise, row_keys, token_noise
from worker.processors import Shape, open_up, process

GREEDY_TEMPERATURE = 1e-5
"""Below this, temperature means greedy: the quotients would say the same, but for ties."""


@dataclass(frozen=True, slots=True)
class SampleRow:
    """One row of logits: how to choose, and where in which sequence the chosen token goes."""

    sampling: Sampling
    prompt_index: int
    choice: int
    position: int
    shape: Shape | None = None  # what changes the logits before the temperature, where something does

    @property
    def greedy(self) -> bool:
        return self.sampling.temperature < GREEDY_TEMPERATURE

    @property
    def key(self) -> tuple[int, int, int, int]:
        return self.sampling.seed, self.prompt_index, self.choice, self.position


@torch.inference_mode()
def sample(logits: torch.Tensor, rows: Sequence[SampleRow]) -> list[int]:
    """One token id per row of ``logits`` ``[rows, vocabulary]`` (any float type; may be changed in place).

    Greedy ties go to the lowest id. A NaN counts as impossible and +inf as the largest finite number, so that a broken
    row harms nobody else. A row with nothing finite gives id 0, or one of the tokens that its grammar and its ban
    leave: never another.
    """
    shapes = {number: row.shape for number, row in enumerate(rows) if row.shape is not None}
    if shapes:
        logits = process(logits, shapes)
    library = load() if can_choose(logits) else None
    if library is None:
        return choose_in_torch(logits, rows)
    chosen: list[int] = choose_tokens(library, logits, [_row_choice(row) for row in rows]).tolist()
    for number, token in enumerate(chosen):
        if token < 0:
            chosen[number] = choose_in_torch(logits[number : number + 1], [rows[number]])[0]
    return chosen


def _row_choice(row: SampleRow) -> RowChoice:
    how = row.sampling
    return RowChoice(0.0 if row.greedy else how.temperature, how.top_p, how.min_p, how.top_k, row.key)


@torch.inference_mode()
def choose_in_torch(logits: torch.Tensor, rows: Sequence[SampleRow]) -> list[int]:
    """:func:`sample` of logits that are processed already, on any device: the reference."""
    best, tokens = logits.max(dim=-1)
    broken = ~torch.isfinite(best)
    if bool(broken.any()):
        limits = torch.finfo(logits.dtype)
        logits[broken] = logits[broken].nan_to_num(nan=float("-inf"), posinf=limits.max, neginf=float("-inf"))
        hopeless = (logits[broken].amax(dim=-1) == float("-inf")).tolist()
        for number, nothing in zip(broken.nonzero().squeeze(-1).tolist(), hopeless, strict=True):
            shape = rows[number].shape
            if nothing and shape is not None:
                open_up(logits[number], shape)
        best, tokens = logits.max(dim=-1)
        best = best.clamp_min(limits.min)
    chosen: list[int] = tokens.tolist()
    drawn = [number for number, row in enumerate(rows) if not row.greedy]
    if drawn:
        if len(drawn) < len(rows):
            index = torch.tensor(drawn, device=logits.device)
            logits, best = logits.index_select(0, index), best.index_select(0, index)
        for number, token in zip(drawn, _draw(logits, best, [rows[number] for number in drawn]), strict=True):
            chosen[number] = token
    return chosen


def _draw(logits: torch.Tensor, best: torch.Tensor, rows: Sequence[SampleRow]) -> list[int]:
    """Gumbel-max, looking only into the blocks of tokens that can hold a row's winner."""
    count, vocabulary = logits.shape
    num_blocks = -(-vocabulary // BLOCK)
    exact = torch.promote_types(logits.dtype, torch.float32)
    scores = logits.new_full((count, num_blocks * BLOCK), float("-inf"), dtype=exact)
    # Less the best, so that the best scores exactly 0 and no temperature overflows.
    torch.sub(logits.to(exact), best.to(exact)[:, None], out=scores[:, :vocabulary])
    temperature = torch.tensor([row.sampling.temperature for row in rows], dtype=torch.float64)
    scores.div_(temperature.to(logits.device, exact)[:, None])
    apply_filters(scores, [row.sampling for row in rows])

    keys = torch.from_numpy(row_keys([row.key for row in rows])).to(logits.device)
    largest, place = block_noise(keys, num_blocks)
    blocks = scores.view(count, num_blocks, BLOCK)
    reached = (blocks.gather(2, place[:, :, None]).squeeze(2).to(torch.float64) + largest).amax(dim=-1)
    bound = blocks.amax(dim=-1).to(torch.float64) + largest
    row, block = ((bound >= reached[:, None]) & torch.isfinite(bound)).nonzero(as_tuple=True)
    noisy = blocks[row, block].to(torch.float64)
    noisy += token_noise(keys[row], block, largest[row, block], place[row, block])
    value, within = noisy.max(dim=-1)
    winners = torch.full((count, num_blocks), float("-inf"), dtype=torch.float64, device=logits.device)
    winners[row, block] = value
    tokens = torch.zeros((count, num_blocks), dtype=torch.int64, device=logits.device)
    tokens[row, block] = block * BLOCK + within
    return tokens.gather(1, winners.argmax(dim=-1, keepdim=True)).squeeze(1).tolist()
