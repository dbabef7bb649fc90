"""A small decoder of random weights, for tests of the library that need no model: ``python small_decoder.py`` is also a
process of its own for what must not happen in the tests'."""

from __future__ import annotations

import numpy as np
import torch

from kernels.contract import Geometry, LayerAttention, RaggedBatch
from kernels.cpu.attention import CpuAttention
from kernels.cpu.decoder import CpuDecoder, DecoderLayer, DecoderWeights, PackedMatrix, interleave
from kernels.cpu.library import Library

VOCABULARY = 50
PAGES = 12
GEOMETRY = Geometry(4, 2, 16, 16)


def make_decoder(library: Library, dtype: torch.dtype = torch.float32, layers: int = 3) -> CpuDecoder:
    """64 wide, with pages of its own for up to ``16 * PAGES`` tokens; the positions end at 100."""
    generator = torch.Generator().manual_seed(3)

    def matrix(n: int, k: int) -> torch.Tensor:
        return (torch.randn((n, k), generator=generator) * 0.2).to(dtype)

    hidden, inner = 64, 48
    made = [
        DecoderLayer(
            qkv=PackedMatrix(library, matrix(128, hidden)),
            out=PackedMatrix(library, matrix(hidden, 64)),
            gate_up=PackedMatrix(library, interleave(matrix(inner, hidden), matrix(inner, hidden))),
            down=PackedMatrix(library, matrix(hidden, inner)),
            attention_norm=torch.ones(hidden, dtype=dtype),
            mlp_norm=torch.ones(hidden, dtype=dtype),
            query_norm=None,
            key_norm=None,
            rotary=True,
        )
        for _ in range(layers)
    ]
    weights = DecoderWeights(
        made, None, torch.ones(hidden, dtype=dtype), PackedMatrix(library, matrix(VOCABULARY, hidden)), hidden, inner,
        1e-5, "silu", dtype, VOCABULARY,
    )  # fmt: skip
    kernel = CpuAttention(library, GEOMETRY, dtype)
    angles = torch.arange(100)[:, None] / 100.0 ** (torch.arange(8) / 8)
    caches = [kernel.allocate(PAGES + 1) for _ in range(layers)]
    return CpuDecoder(
        library, weights, GEOMETRY, [LayerAttention(0.25)] * layers, caches, angles.cos(), angles.sin()
    )  # fmt: skip


def run(
    decoder: CpuDecoder, counts: list[int], keep: list[int], tokens: list[int] | None = None, first_position: int = 0
) -> torch.Tensor:
    """Logits of one pass over sequences of ``counts`` tokens, each from its beginning, in pages of their own."""
    starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
    total = int(starts[-1])
    place = np.concatenate([np.arange(0), *(np.arange(count) for count in counts)]).astype(np.int64)
    table = np.zeros((len(counts), PAGES), dtype=np.int32)
    free = iter(range(1, PAGES + 1))
    for number, count in enumerate(counts):
        for index in range(-(-count // 16)):
            table[number, index] = next(free)
    owner = np.repeat(np.arange(len(counts)), counts).astype(np.int64)
    slots = table[owner, place // 16].astype(np.int64) * 16 + place % 16
    ids = np.array(tokens if tokens is not None else [(5 + 7 * i) % VOCABULARY for i in place.tolist()], dtype=np.int64)
    assert len(ids) == total
    batch = RaggedBatch(starts, place + 1, table, slots)
    return decoder.forward(ids, place + first_position, batch, np.array(keep, dtype=np.int64))
