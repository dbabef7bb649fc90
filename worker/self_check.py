"""At start: does a row really have the same bits alone, in company, and with its prompt cut into chunks?

DESIGN's first invariant rests on what matrix libraries do on the machine at hand; this looks instead of trusting.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from shared.messages import Capacity, Sampling, SlotStart, StepPlan, pack_tokens
from worker.batch import Batch, Row


class Passes(Protocol):
    """What is checked: forward passes of a runner, before it serves."""

    @property
    def capacity(self) -> Capacity: ...

    def logits(self, batch: Batch, rows: Sequence[Row]) -> torch.Tensor:
        """``[sampling rows, vocab_size]``, in row order."""
        ...


PROMPT_TOKENS = 150
"""More than one tile of keys (see :mod:`kernels.reference`)."""


def rows_keep_their_bits(runner: Passes, adapters: Sequence[str] = ()) -> bool:
    """Compare one sequence's last logits over three schedules. Uses the pool's first pages: run it before serving.

    ``adapters``: LoRA adapters. The first's rows are looked at too, and what is beside has the last.
    """
    size = runner.capacity
    length = min(PROMPT_TOKENS, size.max_model_len, size.num_blocks // 2 * size.block_size)
    if length < 16:
        return True  # too small to try, and nothing much can run beside anything
    chunks = [5, length // 2, length - length // 2 - 6, 1]
    for adapter in ("", *adapters[:1]):
        company = [adapter, *adapters[-1:]][-1]
        alone = _last_logits(runner, length, [length], [adapter])
        joined = _last_logits(runner, length, [length], [adapter, company])
        chunked = _last_logits(runner, length, chunks, [adapter, company])
        if not (_same(alone, joined) and _same(alone, chunked)):
            return False
    return True


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """A NaN is the same as a NaN: weights that give some say nothing of rows that lean on each other."""
    return torch.equal(one.nan_to_num(), other.nan_to_num())


def _last_logits(runner: Passes, length: int, chunks: list[int], adapters: list[str]) -> torch.Tensor:
    """Of a sequence with the first of ``adapters``; each other one is that of a sequence beside it."""
    size = runner.capacity
    batch = Batch(size.block_size, size.num_blocks, size.max_model_len, frozenset())
    pages = -(-length // size.block_size)
    starts = []
    for slot, adapter in enumerate(adapters):
        tokens = [(7 + 31 * slot + 97 * i) % size.vocab_size for i in range(length)]
        starts.append(
            SlotStart(slot, f"self-check-{slot}", 0, 0, "", pack_tokens(tokens), length,
                      list(range(1 + slot * pages, 1 + (slot + 1) * pages)), Sampling(0, 1), adapter=adapter)
        )  # fmt: skip
    logits = torch.empty(0)
    for number, count in enumerate(chunks):
        rows = [(0, count)]
        if len(adapters) > 1:
            rows.insert(0, (1, length // len(chunks)))
        plan = StepPlan(0, "", 0, number, starts=starts if number == 0 else [], chunks=rows)
        logits = runner.logits(batch, batch.stage(plan).rows)
    return logits[-1]
