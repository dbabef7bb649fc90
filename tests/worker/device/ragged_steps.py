"""Runs a device model over sequences in steps of a test's choosing, and says what ``transformers`` makes of them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from kernels.contract import RaggedBatch
from kernels.device_batch import on_device
from worker.device.model import DeviceModel

CPU = torch.device("cpu")


class RaggedSteps:
    """Pages are handed out in a shuffled order; page 0 is scratch."""

    def __init__(self, model: DeviceModel, kernel: Any, layers: int, block_size: int, lengths: Sequence[int]) -> None:
        self.model = model
        self.block_size = block_size
        generator = torch.Generator().manual_seed(3)
        needed = [-(-length // block_size) for length in lengths]
        pages = 1 + torch.randperm(sum(needed), generator=generator).to(torch.int32).numpy()
        self.tables = np.zeros((len(lengths), max(needed)), dtype=np.int32)
        for row, part in zip(self.tables, np.split(pages, np.cumsum(needed)[:-1]), strict=True):
            row[: len(part)] = part
        self.tokens = [
            torch.randint(3, 296, (length,), generator=generator).tolist() for length in lengths
        ]  # fmt: skip
        self.done = [0] * len(lengths)
        model.caches = [kernel.allocate(1 + sum(needed)) for _ in range(layers)]
        self.logits: list[list[torch.Tensor]] = [[] for _ in lengths]
        self.adapters: list[int] | None = None  # by sequence; a filler has none

    def step(self, counts: dict[int, int], keep_all: bool = True, fillers: int = 0) -> torch.Tensor:
        """``counts[s]`` more tokens of sequence s; ``fillers`` rows behind them stand for nothing."""
        tokens, positions, slots, owners = [], [], [], []
        for sequence, count in counts.items():
            first = self.done[sequence]
            for place in range(first, first + count):
                tokens.append(self.tokens[sequence][place])
                positions.append(place)
                page = self.tables[sequence, place // self.block_size]
                slots.append(int(page) * self.block_size + place % self.block_size)
                owners.append(sequence)
            self.done[sequence] += count
        starts = np.cumsum([0, *counts.values()])
        batch = RaggedBatch(
            starts, np.array(positions + [0] * fillers) + 1, self.tables[list(counts)], np.array(slots + [0] * fillers)
        )
        keep = torch.arange(len(tokens)) if keep_all else torch.tensor([], dtype=torch.int64)
        numbers = None
        if self.adapters is not None:
            numbers = torch.tensor([self.adapters[owner] for owner in owners] + [-1] * fillers)
        out = self.model.forward(
            torch.tensor(tokens + [0] * fillers), torch.tensor(positions + [0] * fillers), on_device(batch, CPU), keep,
            numbers,
        )  # fmt: skip
        for owner, row in zip(owners, out, strict=keep_all):
            self.logits[owner].append(row)
        return out

    def run(self) -> None:
        """All sequences, in chunks of odd sizes that overlap with decodes of others."""
        for sizes in ([5, 0, 9], [1, 3, 0], [1, 20, 1], [1, 1, 1]):
            self.step(
                {s: min(n, len(self.tokens[s]) - self.done[s]) for s, n in enumerate(sizes[: len(self.tokens)]) if n}
            )
        left = {s: len(self.tokens[s]) - done for s, done in enumerate(self.done)}
        self.step({s: count for s, count in left.items() if count})


def reference(folder: Path, tokens: list[list[int]], dtype: torch.dtype) -> list[torch.Tensor]:
    """The logits of every token of each sequence alone."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    if model.config.model_type in ("qwen3_moe", "gpt_oss"):
        model.set_experts_implementation("eager")  # the default has no float64
    with torch.inference_mode():
        return [model(torch.tensor([one])).logits[0] for one in tokens]
