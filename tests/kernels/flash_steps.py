"""Steps of sequences in scattered pages, for flash-attn beside a paged kernel, and libraries that are stand-ins."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from fake_flash import Fake, FakeFlash2, FakeFlash3, FakeFlash4
from torch_pages import TorchPages

from kernels.contract import Geometry, LayerAttention, RaggedBatch
from kernels.device_batch import on_device
from kernels.flash.attention import FlashAttention
from kernels.flash.libraries import FlashAttn2, FlashAttn3, FlashAttn4, Library
from kernels.flash.parts import Use

CPU = torch.device("cpu")
GEOMETRY = Geometry(6, 2, 16, 16)
ERROR = {torch.bfloat16: 2e-2, torch.float16: 3e-3}


def library(generation: int) -> tuple[Library, Fake]:
    """(the library on a card that it is made for, the stand-in behind it)."""
    if generation == 2:
        two = FakeFlash2()
        return FlashAttn2("2.8.3", (8, 0), two), two
    if generation == 3:
        three = FakeFlash3()
        return FlashAttn3("3", (9, 0), three), three
    four = FakeFlash4()
    return FlashAttn4("4", (9, 0), four), four


@dataclass(frozen=True)
class Asked:
    """A sequence of a step: rows that are the last of its tokens, or rows of padding."""

    rows: int
    keys: int  # that its last row sees
    padding: bool = False

    @property
    def use(self) -> Use | None:
        if self.rows == 1:
            return Use.ROWS
        if self.rows == 0 or self.padding:
            return None
        return Use.FRESH if self.rows == self.keys else Use.CHUNKS


class Step:
    """Sequences with keys in scattered pages, and what attention over them is, each alone, in float32."""

    def __init__(
        self,
        asked: Sequence[Asked],
        geometry: Geometry = GEOMETRY,
        dtype: torch.dtype = torch.bfloat16,
        storage: torch.dtype | None = None,
        seed: int = 0,
    ) -> None:
        self.asked = list(asked)
        self.geometry = geometry
        self.paged = TorchPages(geometry, dtype, storage)
        self.generator = torch.Generator().manual_seed(seed)
        size = geometry.block_size
        used = [-(-one.keys // size) for one in asked]
        order = (torch.randperm(sum(used), generator=self.generator) + 1).tolist()
        tables = np.full((len(asked), max(used) + 1), 2**31 - 1, dtype=np.int32)  # junk past the last key
        visible, slots = [], []
        for table, one, pages in zip(tables, asked, used, strict=True):
            table[:pages] = [order.pop() for _ in range(pages)]
            position = np.arange(one.keys - one.rows, one.keys)
            visible.append(np.full(one.rows, one.keys) if one.padding else position + 1)
            own = table[position // size].astype(np.int64) * size + position % size
            slots.append(np.zeros(one.rows, dtype=np.int64) if one.padding else own)
        start = np.concatenate([[0], np.cumsum([one.rows for one in asked])])
        self.batch = RaggedBatch(start, np.concatenate(visible), tables, np.concatenate(slots))
        self.cache = self.paged.allocate(sum(used) + 1)
        self.query, self.key, self.value = (
            torch.randn((self.batch.num_tokens, heads, geometry.head_dim), generator=self.generator).to(dtype)
            for heads in (geometry.num_heads, geometry.num_kv_heads, geometry.num_kv_heads)
        )
        self._fill()

    def _fill(self) -> None:
        """What earlier steps wrote: everywhere, since what a step writes is written by the step."""
        shape = (len(self.cache.key) * self.geometry.block_size, *self.key.shape[1:])
        everything = RaggedBatch(
            np.array([0, shape[0]]), np.ones(shape[0], np.int64), np.zeros((1, 1), np.int32), np.arange(shape[0])
        )
        key, value = (torch.randn(shape, generator=self.generator).to(self.key.dtype) for _ in range(2))
        self.paged.write(on_device(everything, CPU), self.cache, key, value)

    def kernel(self, library: Library, uses: Sequence[Use] = tuple(Use)) -> FlashAttention:
        g = self.geometry
        return FlashAttention(g, self.key.dtype, CPU, self.paged, dict.fromkeys(uses, library))

    def wanted(self, layer: LayerAttention) -> torch.Tensor:
        """By the paged kernel alone, after the step's write; its count is put back."""
        out = self.paged.read(self.paged.plan(self.batch), self.cache, self.query, layer)
        self.paged.tokens = 0
        return out

    def check(self, kernel: FlashAttention, layer: LayerAttention) -> None:
        out = kernel.attend(kernel.plan(self.batch), self.cache, self.query, self.key, self.value, layer)
        counted = self.paged.tokens
        error = (out.float() - self.wanted(layer).float()).abs().max()
        assert error < ERROR[self.key.dtype]
        self.paged.tokens = counted

    def rows_of(self, use: Use | None) -> int:
        return sum(one.rows for one in self.asked if one.use is use)


MIXED = [
    Asked(1, 40),
    Asked(20, 20),
    Asked(1, 17),
    Asked(9, 40),
    Asked(33, 33),
    Asked(0, 5),
    Asked(3, 8, padding=True),
    Asked(2, 18),
    Asked(1, 1, padding=True),
]
"""Every kind of sequence, in no order."""
