"""Choosing tokens on a device while the host goes on: the tokens of :mod:`worker.sampling`, and nobody waits for them.

What a step asks is known on the host before (:class:`Wanted`). :meth:`DeviceSampler.enqueue` uploads it in one piece
and launches the work; what comes of it lies in a few small tensors (:class:`Pending`) that the caller copies out when
it likes, and :meth:`Pending.finish` makes of them what a runner returns.

The Triton kernels choose where they can (:mod:`kernels.triton.sampling`), :func:`choose` elsewhere, in torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from shared.messages import Sampling, TokenLogprob
from worker.device.shaping import Shaper, ShapeUpload
from worker.device.upload import Packing, Upload
from worker.filters import weights
from worker.logprobs import MAX_ROWS, gather, log_probabilities, tell
from worker.noise import BLOCK, absorb, block_noise, token_noise
from worker.processors import Shape
from worker.sampling import GREEDY_TEMPERATURE, SampleRow

SETTINGS = 5
"""Numbers of 8 bytes in which a row says how it is chosen: temperature, top_p, log of min_p, top_k, key."""

_TEMPERATURE, _TOP_P, _LOW, _TOP_K, _KEY = range(SETTINGS)


def sequence_settings(sampling: Sampling, prompt_index: int, choice: int) -> npt.NDArray[np.int64]:
    """``[SETTINGS]`` bit patterns of a sequence. Its key lacks the position, which :func:`pack_settings` adds."""
    settings = np.empty(SETTINGS, dtype=np.int64)
    floats = settings.view(np.float64)
    floats[_TEMPERATURE] = 0.0 if sampling.temperature < GREEDY_TEMPERATURE else sampling.temperature
    floats[_TOP_P] = sampling.top_p
    floats[_LOW] = min(math.log(sampling.min_p), 0.0) if sampling.min_p > 0 else -math.inf
    settings[_TOP_K] = min(max(sampling.top_k, 0), (1 << 62))
    key = np.zeros(1, dtype=np.int64)
    for number in (sampling.seed, prompt_index, choice):
        key = absorb(key, np.array([number], dtype=np.uint64))
    settings[_KEY] = key[0]
    return settings


def pack_settings(sequences: npt.NDArray[np.int64], positions: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """``[R, SETTINGS]`` of sequences and the position that each one's token goes to, as ``[SETTINGS, R]`` for upload.

    A row of zeros is greedy: it may stand for padding.
    """
    packed = np.ascontiguousarray(sequences.T)
    packed[_KEY] = absorb(packed[_KEY], positions)
    return packed


def host_params(rows: Sequence[SampleRow]) -> npt.NDArray[np.int64]:
    """The same of rows one by one."""
    sequences = [sequence_settings(row.sampling, row.prompt_index, row.choice) for row in rows]
    positions = np.array([row.position for row in rows], dtype=np.int64)
    return pack_settings(np.array(sequences, dtype=np.int64).reshape(-1, SETTINGS), positions)


@dataclass(frozen=True, slots=True, eq=False)
class SamplingParams:
    """How each of ``R`` rows is chosen, on the device: ``[R]`` tensors. The reference multiplies and divides these in
    float64, so they are kept so."""

    temperature: torch.Tensor  # float64; 0: greedy, and nothing below counts
    top_p: torch.Tensor  # float64; from 1 on: off
    low: torch.Tensor  # float64: log of min_p; minus infinity: off
    top_k: torch.Tensor  # int64; off unless between 0 and the vocabulary
    key: torch.Tensor  # int64, see worker.noise.row_keys
    drawn: bool = True  # False: all rows are greedy
    filtered: bool = True  # False: none has top-p or top-k

    @classmethod
    def of(cls, packed: torch.Tensor, drawn: bool = True, filtered: bool = True) -> SamplingParams:
        """Views of what :func:`pack_settings` has packed, once it is there (int64 ``[SETTINGS, R]``)."""
        temperature, top_p, low = (packed[row].view(torch.float64) for row in (_TEMPERATURE, _TOP_P, _LOW))
        return cls(temperature, top_p, low, packed[_TOP_K], packed[_KEY], drawn, filtered)


def what_is_asked(packed: npt.NDArray[np.int64]) -> tuple[bool, bool]:
    """(drawn, filtered) of packed settings, for :class:`SamplingParams`: what need not be launched."""
    floats = packed.view(np.float64)
    drawn = floats[_TEMPERATURE] > 0
    filtered = drawn & ((floats[_TOP_P] < 1) | (packed[_TOP_K] > 0))
    return bool(drawn.any()), bool(filtered.any())


@torch.inference_mode()
def choose(logits: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """The kernels' twin: int64 ``[R]`` of ``logits`` ``[R, V]`` (any float type), without waiting for the device.

    It costs a sort and the noise of all tokens.
    """
    limits = torch.finfo(logits.dtype)
    logits = logits.nan_to_num(nan=float("-inf"), posinf=limits.max, neginf=float("-inf"))
    best, greedy = logits.max(dim=-1)
    if not params.drawn:
        return greedy
    rows, vocabulary = logits.shape
    num_blocks = -(-vocabulary // BLOCK)
    exact = torch.promote_types(logits.dtype, torch.float32)
    scores = logits.new_full((rows, num_blocks * BLOCK), float("-inf"), dtype=exact)
    torch.sub(logits.to(exact), best.clamp_min(limits.min).to(exact)[:, None], out=scores[:, :vocabulary])
    drawn = params.temperature > 0
    scores.div_(torch.where(drawn, params.temperature, 1.0).to(exact)[:, None])
    passes = scores >= params.low.to(exact)[:, None]
    if params.filtered:
        passes &= _passing(scores, params)
    largest, place = block_noise(params.key, num_blocks)
    blocks = torch.arange(num_blocks, device=logits.device).repeat(rows)
    keys = params.key[:, None].expand(-1, num_blocks).reshape(-1)
    noise = token_noise(keys, blocks, largest.flatten(), place.flatten()).view(rows, -1)
    noisy = torch.where(passes, scores.to(torch.float64) + noise, float("-inf"))
    value, token = noisy.max(dim=-1)
    return torch.where(drawn, torch.where(value > float("-inf"), token, 0), greedy)


def _passing(scores: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """Which tokens pass top-k and top-p: see worker/filters.py."""
    width = scores.shape[1]
    ordered, tokens = (scores + 0.0).sort(dim=-1, descending=True, stable=True)  # -0 and 0 are equals, ids decide
    mass = weights(ordered).to(torch.float64).cumsum(dim=-1)
    limited = (params.top_k > 0) & (params.top_k < width)
    limit = torch.where(limited, params.top_k, width)[:, None]
    bound = params.top_p[:, None] * mass.gather(1, limit - 1)
    place = torch.arange(width, device=scores.device)
    before = torch.nn.functional.pad(mass[:, :-1], (1, 0), value=-1.0)  # the first passes whatever the bound
    within = (place < limit) & ((before < bound) | (params.top_p >= 1)[:, None] | (place == 0))
    return torch.zeros_like(within).scatter_(1, tokens, within)


@dataclass(frozen=True, slots=True)
class PromptTokens:
    """Rows of logits, one after another, that speak of a prompt's own tokens."""

    first: int  # row
    tokens: Sequence[int]
    top: int  # alternatives of each


@dataclass(frozen=True, slots=True)
class Wanted:
    """What the rows of one step ask besides a token, by row of the logits."""

    shapes: Mapping[int, Shape] = field(default_factory=dict)
    logprobs: Mapping[int, int] = field(default_factory=dict)  # so many alternatives
    scores: Sequence[int] = ()  # want their token's log-probability
    beams: Mapping[int, tuple[int, Sequence[int]]] = field(default_factory=dict)  # (so many candidates, none of these)
    prompts: Sequence[PromptTokens] = ()  # their rows follow those that are sampled

    @property
    def reports(self) -> bool:
        """Whether the model's own logits are looked at again once they have been shaped."""
        return bool(self.logprobs or self.scores or self.beams or self.prompts)


@dataclass(slots=True)
class Told:
    """What came of a step's rows. See :class:`worker.batch.Sampled`."""

    tokens: list[int]
    logprobs: dict[int, TokenLogprob] = field(default_factory=dict)
    log_probs: dict[int, float] = field(default_factory=dict)
    candidates: dict[int, tuple[list[int], list[float]]] = field(default_factory=dict)
    prompt_logprobs: list[list[TokenLogprob]] = field(default_factory=list)  # in the order of Wanted.prompts


Teller = Callable[[Sequence[npt.NDArray[Any]], Told], None]
"""Puts into the second what the first, some fetched tensors, say."""


class Pending:
    """What a step's sampling comes to, on the device. ``tensors`` are to be fetched, ``tensors[0]`` are the tokens."""

    def __init__(self, tokens: torch.Tensor) -> None:
        self.tokens = tokens  # int64 [R]
        self.tensors = [tokens]
        self._tellers: list[tuple[slice, Teller]] = []

    def add(self, tensors: Sequence[torch.Tensor], teller: Teller) -> None:
        self._tellers.append((slice(len(self.tensors), len(self.tensors) + len(tensors)), teller))
        self.tensors += tensors

    def finish(self, fetched: Sequence[npt.NDArray[Any]]) -> Told:
        """Of ``tensors`` as they are on the host."""
        told = Told(fetched[0].tolist())
        for place, teller in self._tellers:
            teller(fetched[place], told)
        return told


class DeviceSampler:
    """``upload`` takes host memory to the device without waiting; ``triton`` None: where the device is a GPU that has
    it."""

    def __init__(self, device: torch.device, upload: Upload, triton: bool | None = None) -> None:
        self._upload = upload
        self._kernels = _load_kernels() if (device.type == "cuda" if triton is None else triton) else None
        self._shaper = Shaper(device, triton=self._kernels is not None)

    @torch.inference_mode()
    def sample(self, logits: torch.Tensor, params: SamplingParams) -> torch.Tensor:
        """int64 ``[R]`` on the device: one token for each row of ``logits`` ``[R, V]``, which are left as they are."""
        if self._kernels is None or not self._kernels.can_choose(logits):
            return choose(logits, params)
        tokens: torch.Tensor = self._kernels.choose_tokens(
            logits, params.temperature, params.top_p, params.low, params.top_k, params.key, params.drawn,
            params.filtered,
        )  # fmt: skip
        return tokens

    @torch.inference_mode()
    def enqueue(self, logits: torch.Tensor, params: SamplingParams, wanted: Wanted) -> Pending:
        """Everything of one step. ``logits`` ``[K, V]`` begin with the rows that ``params`` speak of; they may be
        changed."""
        rows = len(params.key)
        packing = Packing()
        shaping = self._shaper.pack(wanted.shapes, logits.shape[1], packing)
        asked = [(list(wanted.logprobs.items())[at : at + MAX_ROWS]) for at in range(0, len(wanted.logprobs), MAX_ROWS)]
        places = [packing.add(np.array([row for row, _ in part], dtype=np.int64)) for part in asked]
        scored = packing.add(np.array(wanted.scores, dtype=np.int64))
        prompts = [packing.add(np.array(one.tokens, dtype=np.int64)) for one in wanted.prompts]
        bans = [packing.add(np.array(banned, dtype=np.int64)) for _, banned in wanted.beams.values()]
        uploaded = packing.send(self._upload)

        shaped = self._shaped(logits[:rows], shaping, uploaded, wanted.reports)
        pending = Pending(self.sample(shaped, params))
        for part, place in zip(asked, places, strict=True):
            _gather_logprobs(pending, logits, uploaded[place], part)
        if wanted.scores:
            _gather_scores(pending, logits, uploaded[scored], wanted.scores)
        for (row, (count, _)), place in zip(wanted.beams.items(), bans, strict=True):
            _gather_candidates(pending, logits, row, count, uploaded[place])
        for one, place in zip(wanted.prompts, prompts, strict=True):
            pending.add(*gather_prompt(logits, one, uploaded[place]))
        return pending

    def _shaped(
        self, logits: torch.Tensor, shaping: ShapeUpload | None, uploaded: Sequence[torch.Tensor], keep: bool
    ) -> torch.Tensor:
        """The logits as their rows ask; those of the model stay as they are where they are told of."""
        if shaping is None:
            return logits
        if keep and logits.dtype not in (torch.float16, torch.bfloat16):
            logits = logits.clone()
        return self._shaper.apply(logits, shaping, uploaded)


def _gather_logprobs(
    pending: Pending, logits: torch.Tensor, rows: torch.Tensor, asked: Sequence[tuple[int, int]]
) -> None:
    """Of up to MAX_ROWS (row, alternatives)."""
    tops = [top for _, top in asked]
    log_probs = log_probabilities(logits.index_select(0, rows))
    found = gather(log_probs, pending.tokens.index_select(0, rows), max(tops))

    def tell_them(fetched: Sequence[npt.NDArray[Any]], told: Told) -> None:
        values, ranks, best_values, best_ids = (array.tolist() for array in fetched)
        described = tell(values, ranks, best_values, best_ids, tops)
        told.logprobs.update(zip([row for row, _ in asked], described, strict=True))

    pending.add([found.values, found.ranks, found.best_values, found.best_ids], tell_them)


def _gather_scores(pending: Pending, logits: torch.Tensor, rows: torch.Tensor, asked: Sequence[int]) -> None:
    parts = []
    for part in torch.split(rows, MAX_ROWS):
        log_probs = torch.log_softmax(logits.index_select(0, part).double(), dim=-1)
        parts.append(log_probs.gather(1, pending.tokens.index_select(0, part)[:, None])[:, 0])

    def tell_them(fetched: Sequence[npt.NDArray[Any]], told: Told) -> None:
        told.log_probs.update(zip(asked, fetched[0].tolist(), strict=True))

    pending.add([torch.cat(parts)], tell_them)


def _gather_candidates(pending: Pending, logits: torch.Tensor, row: int, count: int, banned: torch.Tensor) -> None:
    log_probs = torch.log_softmax(logits[row].double(), dim=-1)
    if len(banned):
        log_probs.index_fill_(0, banned, -math.inf)
    best = log_probs.topk(min(count, logits.shape[1]))

    def tell_them(fetched: Sequence[npt.NDArray[Any]], told: Told) -> None:
        values, ids = fetched
        finite = values > -math.inf
        told.candidates[row] = (ids[finite].tolist(), values[finite].tolist())

    pending.add([best.values, best.indices], tell_them)


def gather_prompt(logits: torch.Tensor, one: PromptTokens, tokens: torch.Tensor) -> tuple[list[torch.Tensor], Teller]:
    """What is told of ``one``, in small tensors, and who tells it once they are fetched: for :meth:`Pending.add`."""
    parts = []
    for first in range(0, len(one.tokens), MAX_ROWS):
        part = tokens[first : first + MAX_ROWS]
        rows = logits[one.first + first : one.first + first + len(part)]
        parts.append(gather(log_probabilities(rows), part, one.top))
    columns = [
        torch.cat([getattr(part, name) for part in parts]) for name in ("values", "ranks", "best_values", "best_ids")
    ]

    def tell_them(fetched: Sequence[npt.NDArray[Any]], told: Told) -> None:
        values, ranks, best_values, best_ids = (array.tolist() for array in fetched)
        told.prompt_logprobs.append(tell(values, ranks, best_values, best_ids, [one.top] * len(one.tokens)))

    return columns, tell_them


def _load_kernels() -> Any:
    """The Triton kernels' module; None where triton is not installed."""
    try:
        import kernels.triton.sampling as module
    except ImportError:
        return None
    return module
