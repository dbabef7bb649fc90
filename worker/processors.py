"""What may change a row's logits before the temperature, for the rows that ask and at no cost for the others.

The order is vLLM's (``vllm/v1/sample/sampler.py``):

1. grammar mask: what the grammar does not allow next becomes -inf
2. min_tokens: tokens that would end the sequence become -inf
3. logit_bias: added
4. repetition penalty (Keskar et al., "CTRL", 2019, section 4.1; as ``transformers``): of tokens in prompt or output,
   positive logits are divided by it, the others multiplied
5. frequency penalty: taken off for each time that the output has the token
6. presence penalty: taken off if the output has the token

then, in :mod:`worker.sampling`, temperature, top-k, top-p and min-p. Everything here is a function of the row's own
logits and token ids, element by element: neither batch nor schedule changes a bit of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from shared.messages import Sampling
from worker.batch import Bias
from worker.token_counts import TokenCounts


def bias_of(sampling: Sampling, vocabulary: int) -> Bias | None:
    """Its logit_bias; ids that the model does not have are left out."""
    bias = {token: value for token, value in sampling.logit_bias if 0 <= token < vocabulary}
    if not bias:
        return None
    return np.fromiter(bias, dtype=np.int64, count=len(bias)), np.fromiter(bias.values(), dtype=np.float64)


def asks_for_counts(sampling: Sampling) -> bool:
    """Whether its penalties look at the tokens so far."""
    return sampling.repetition_penalty != 1 or sampling.frequency_penalty != 0 or sampling.presence_penalty != 0


@dataclass(frozen=True, slots=True)
class Shape:
    """What one row asks for. Rows that ask for nothing have none."""

    sampling: Sampling
    banned: Sequence[int] = ()  # ids that may not come now (end tokens before min_tokens)
    counts: TokenCounts | None = None  # up to date; where asks_for_counts
    allowed: npt.NDArray[np.uint8] | None = None  # the grammar's mask: a bit per token, lowest bit first
    bias: Bias | None = None


def process(logits: torch.Tensor, shapes: Mapping[int, Shape]) -> torch.Tensor:
    """``logits`` ``[rows, vocabulary]`` with each row in ``shapes`` as it asks: changed in place, or a wider copy of
    half floats.
    """
    asking = list(shapes.items())
    if logits.dtype in (torch.float16, torch.bfloat16):
        logits = logits.float()
    masked = [(number, shape.allowed) for number, shape in asking if shape.allowed is not None]
    if masked:
        _mask(logits, masked)
    banned = [(number, shape.banned) for number, shape in asking if shape.banned]
    if banned:
        logits[_places(logits, banned)] = float("-inf")
    biased = [(number, shape.bias) for number, shape in asking if shape.bias is not None]
    if biased:
        added = torch.from_numpy(np.concatenate([values for _, (_, values) in biased]))
        places = _places(logits, [(number, ids) for number, (ids, _) in biased])
        logits[places] += added.to(logits.device, logits.dtype)
    counted = [(number, shape.sampling, shape.counts) for number, shape in asking if shape.counts is not None]
    if counted:
        _penalise(logits, counted)
    return logits


def open_up(logits: torch.Tensor, shape: Shape) -> None:
    """``logits`` ``[vocabulary]`` of a row whose every candidate is impossible: whatever may come is equally likely.

    Grammar and ban stay kept, and where both leave nothing the grammar is.
    """
    vocabulary = logits.shape[0]
    allowed = torch.ones(vocabulary, dtype=torch.bool, device=logits.device)
    if shape.allowed is not None:
        allowed = unpack_bits(shape.allowed[None], vocabulary, logits.device)[0]
    within = allowed.clone()
    within[list(shape.banned)] = False
    logits.fill_(float("-inf"))
    logits[within if bool(within.any()) else allowed] = 0.0


def unpack_bits(bits: npt.NDArray[np.uint8], vocabulary: int, device: torch.device) -> torch.Tensor:
    """``[rows, bytes]`` bits to ``[rows, vocabulary]`` booleans; tokens beyond the bits are False."""
    flags = np.unpackbits(bits, axis=1, bitorder="little", count=min(vocabulary, 8 * bits.shape[1]))
    if flags.shape[1] < vocabulary:
        flags = np.pad(flags, ((0, 0), (0, vocabulary - flags.shape[1])))
    return torch.from_numpy(flags.view(np.bool_)).to(device)


def _mask(logits: torch.Tensor, masked: Sequence[tuple[int, npt.NDArray[np.uint8]]]) -> None:
    allowed = unpack_bits(np.stack([bits for _, bits in masked]), logits.shape[1], logits.device)
    for place, (number, _) in enumerate(masked):
        logits[number].masked_fill_(~allowed[place], float("-inf"))


def _places(
    logits: torch.Tensor, tokens: Sequence[tuple[int, Sequence[int] | npt.NDArray[np.int64]]]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Indices into the logits of (row, its tokens): rows, tokens. They may be no contiguous tensor."""
    rows = np.repeat([number for number, _ in tokens], [len(ids) for _, ids in tokens])
    ids = np.concatenate([np.asarray(ids, dtype=np.int64) for _, ids in tokens])
    return torch.from_numpy(rows).to(logits.device), torch.from_numpy(ids).to(logits.device)


def _penalise(logits: torch.Tensor, counted: Sequence[tuple[int, Sampling, TokenCounts]]) -> None:
    settings = np.array(
        [(one.repetition_penalty, one.frequency_penalty, one.presence_penalty) for _, one, _ in counted]
    )
    lengths = [len(counts.ids) for *_, counts in counted]
    repetition, frequency, presence = (
        torch.from_numpy(np.repeat(column, lengths)).to(logits.device, logits.dtype) for column in settings.T
    )
    places = _places(logits, [(number, counts.ids) for number, _, counts in counted])
    times = torch.from_numpy(np.concatenate([counts.counts for *_, counts in counted])).to(logits.device, logits.dtype)
    values = logits[places]
    values = torch.where(values > 0, values / repetition, values * repetition)
    values -= frequency * times
    values -= presence * (times > 0)
    logits[places] = values
