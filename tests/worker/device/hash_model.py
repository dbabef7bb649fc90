"""A model whose logits are a hash of all tokens so far and of their places, through pages: a wrong page, token, place
or length changes what comes out. Written once in tensors, as a device model, and once plainly."""

from __future__ import annotations

import functools

import torch
from llguidance import LLTokenizer, TokenizerWrapper

from kernels.contract import DeviceBatch, LayerCache
from shared.messages import Sampling
from worker.device.model import ANY_NUMBER
from worker.grammar import Grammars
from worker.processors import Shape, asks_for_counts, bias_of
from worker.sampling import SampleRow, sample
from worker.token_counts import TokenCounts

PRIME = 10_007
VOCAB = 29
EOS = 5
ADAPTERS = ["x", "y"]
"""Names by their numbers. With one of them, a row's token stands for another one."""


def _code(token: torch.Tensor, place: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return (token + 1) * (place * place + 31 * place + 7) % PRIME, (token * token + 3) * (place + 11) % PRIME


def _logits(state: torch.Tensor) -> torch.Tensor:
    tokens = torch.arange(VOCAB, device=state.device)
    mixed = (state[:, None] * (tokens * tokens * 5 + tokens * 77 + 13)) % PRIME
    return (mixed * mixed % PRIME).float() / PRIME * 6


class HashModel:
    """Implements :class:`~worker.device.model.DeviceModel`."""

    vocab_size = VOCAB

    def __init__(self, num_blocks: int, block_size: int, graph_tokens: int = ANY_NUMBER) -> None:
        self.graph_tokens = graph_tokens
        shape = (num_blocks + 1, block_size, 1, 1)
        self.caches = [LayerCache(torch.zeros(shape, dtype=torch.int64), torch.zeros(shape, dtype=torch.int64))]
        self.shapes: list[tuple[int, int]] = []  # (tokens, bound on keys) of each pass
        self.kept = [0]  # rows whose logits were wanted, of each pass
        self.waits = False  # for the device, in a pass
        self.faults = 0  # so many passes fail

    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        batch: DeviceBatch,
        keep: torch.Tensor,
        adapters: torch.Tensor | None = None,
    ) -> torch.Tensor:
        self.shapes.append((len(token_ids), batch.max_keys))
        self.kept.append(len(keep))
        if self.faults:
            self.faults -= 1
            raise RuntimeError("an illegal memory access was encountered")
        if self.waits:
            positions.max().item()
        if adapters is not None:
            token_ids = token_ids + (adapters + 1) * 101
        [cache] = self.caches
        for pages, code in zip((cache.key, cache.value), _code(token_ids, positions), strict=True):
            pages.view(-1).index_copy_(0, batch.write_slots, code)
        row = torch.arange(batch.num_tokens, dtype=torch.int32)
        sequence = torch.searchsorted(batch.query_start[1:], row, right=True).clamp_max(batch.num_sequences - 1)
        tables = batch.block_tables[sequence].long()
        seen = torch.arange(tables.shape[1] * cache.key.shape[1]) < batch.visible[:, None]
        sums = [(pages[tables].flatten(1) * seen).sum(dim=1) for pages in (cache.key, cache.value)]
        return _logits((sums[0] + 3 * sums[1])[keep] % PRIME)


@functools.cache
def _state(tokens: tuple[int, ...]) -> int:
    if not tokens:
        return 0
    codes = _code(torch.tensor(tokens[-1]), torch.tensor(len(tokens) - 1))
    return _state(tokens[:-1]) + int(codes[0]) + 3 * int(codes[1])


def logits_after(tokens: list[int], adapter: str = "") -> torch.Tensor:
    """``[1, VOCAB]``."""
    number = ADAPTERS.index(adapter) + 1 if adapter else 0
    return _logits(torch.tensor([_state(tuple(token + number * 101 for token in tokens)) % PRIME]))


class Letters:
    """The model's tokens as a grammar sees them: a letter each, and its end."""

    eos_token_id = EOS
    bos_token_id = None
    special_token_ids = [EOS]
    tokens = [b"<end>" if token == EOS else chr(ord("A") + token).encode() for token in range(VOCAB)]

    def __call__(self, text: str | bytes) -> list[int]:
        return [byte - ord("A") for byte in (text.encode() if isinstance(text, str) else text)]


GRAMMARS = Grammars(lambda: LLTokenizer(TokenizerWrapper(Letters()), VOCAB))


def expected(prompt: list[int], sampling: Sampling, choice: int = 0, adapter: str = "") -> list[int]:
    """What must come of a prompt, end tokens included."""
    tokens = list(prompt)
    guide = GRAMMARS.guide(sampling.grammar, []) if sampling.grammar else None
    counts = TokenCounts(len(prompt), with_prompt=sampling.repetition_penalty != 1)
    bias = bias_of(sampling, VOCAB)
    for generated in range(sampling.max_tokens):
        counts.follow(tokens)
        banned = [EOS] if generated < sampling.min_tokens and not sampling.ignore_eos else []
        allowed = guide.mask() if guide is not None else None
        shape = Shape(sampling, banned, counts if asks_for_counts(sampling) else None, allowed, bias)
        [token] = sample(logits_after(tokens, adapter), [SampleRow(sampling, 0, choice, len(tokens), shape)])
        tokens.append(token)
        if guide is not None and guide.accept(token):
            break
        if token == EOS and not sampling.ignore_eos:
            break
    return tokens[len(prompt) :]
