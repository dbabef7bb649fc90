"""Sequences in scattered pages to run an attention kernel on, and attention written out densely, in float64, of what
the pages hold."""

from __future__ import annotations

from collections.abc import Sequence as Listed
from dataclasses import dataclass

import numpy as np
import torch

from kernels.contract import DeviceKernel, Geometry, LayerAttention, LayerCache, RaggedBatch
from kernels.device_batch import on_device
from kernels.reference import LARGEST_KEY

JUNK_PAGE = 0
"""What a block table names past the last key: a page that is there, and holds the worst."""


@dataclass(eq=False)
class Sequence:
    """One sequence's queries, keys and values for its whole length, and the pages that it owns."""

    query: torch.Tensor  # [length, heads, dim]
    key: torch.Tensor  # [length, kv heads, dim]
    value: torch.Tensor
    pages: list[int]

    @property
    def length(self) -> int:
        return len(self.query)


Part = tuple[Sequence, int, int]
"""Tokens ``start .. stop`` of a sequence."""


class Pool:
    """One layer's cache, full of what others have left there, and sequences whose pages are scattered over it.

    ``cache``: one that is there already, of ``num_pages``.
    """

    junk = JUNK_PAGE

    def __init__(
        self, kernel: DeviceKernel, geometry: Geometry, dtype: torch.dtype, device: torch.device, num_pages: int,
        seed: int, cache: LayerCache | None = None,
    ) -> None:  # fmt: skip
        self.kernel = kernel
        self.geometry = geometry
        self.dtype = dtype
        self.device = device
        self.generator = torch.Generator(device).manual_seed(seed)
        self.cache = cache if cache is not None else kernel.allocate(num_pages)
        if cache is None:
            poison(self.cache, dtype)
        order = torch.randperm(num_pages - 1, generator=torch.Generator().manual_seed(seed)) + 1
        self.free: list[int] = order.tolist()

    def sequence(self, length: int) -> Sequence:
        g = self.geometry
        heads = (g.num_heads, g.num_kv_heads, g.num_kv_heads)
        query, key, value = (
            torch.randn((length, count, g.head_dim), generator=self.generator, device=self.device).to(self.dtype)
            for count in heads
        )
        return Sequence(query, key, value, [self.free.pop() for _ in range(-(-length // g.block_size))])

    def batch(self, parts: Listed[Part]) -> RaggedBatch:
        size = self.geometry.block_size
        table = np.full((len(parts), max(len(s.pages) for s, _, _ in parts)), self.junk, dtype=np.int32)
        for number, (sequence, _, stop) in enumerate(parts):
            used = -(-stop // size)
            table[number, :used] = sequence.pages[:used]
        counts = [stop - start for _, start, stop in parts]
        positions = np.concatenate([np.arange(start, stop) for _, start, stop in parts])
        owner = np.repeat(np.arange(len(parts)), counts)
        slots = table[owner, positions // size].astype(np.int64) * size + positions % size
        return RaggedBatch(np.concatenate([[0], np.cumsum(counts)]), positions + 1, table, slots)

    def attend(self, parts: Listed[Part], layer: LayerAttention) -> list[torch.Tensor]:
        """One pass over the parts; the outputs of each. Memory for them was full of NaN."""
        query, key, value = (
            torch.cat([getattr(s, name)[a:b] for s, a, b in parts]) for name in ("query", "key", "value")
        )
        plan = self.kernel.plan_device(on_device(self.batch(parts), self.device))
        self.kernel.write(plan, self.cache, key, value)
        leave_nan(query)
        out = self.kernel.read(plan, self.cache, query, layer)
        return list(torch.split(out, [stop - start for _, start, stop in parts]))

    def attend_in_pieces(self, sequence: Sequence, stops: Listed[int], layer: LayerAttention) -> torch.Tensor:
        """One sequence alone, from its beginning to each of ``stops`` in turn; the outputs together."""
        pieces = zip([0, *stops[:-1]], stops, strict=True)
        return torch.cat([self.attend([(sequence, a, b)], layer)[0] for a, b in pieces])

    def stored(self, sequence: Sequence, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values ``[length, kv heads, dim]`` in float64, as the pages hold them."""
        pages = torch.tensor(sequence.pages, device=self.device)
        cache = self.cache
        found = []
        for held, scale in ((cache.key, cache.key_scale), (cache.value, cache.value_scale)):
            rows = held.view(torch.uint8)[pages].view(held.dtype).flatten(0, 1)[:length].float().double()
            if scale is not None:
                rows = rows * scale[pages].flatten(0, 1)[:length].double().unsqueeze(-1)
            found.append(rows)
        return found[0], found[1]

    def dense(self, sequence: Sequence, start: int, stop: int, layer: LayerAttention) -> torch.Tensor:
        """``[stop - start, heads, dim]``: :func:`dense`, of what the pages hold."""
        return dense(sequence.query[start:stop], *self.stored(sequence, stop), layer)


def dense(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, layer: LayerAttention) -> torch.Tensor:
    """``[n, heads, dim]``: causal attention of a sequence's last ``n`` queries over its keys and values
    ``[m, kv heads, dim]``, in float64, with nothing clever in it."""
    count, keys = len(query), len(key)
    group = query.shape[1] // key.shape[1]
    key, value = (x.double().repeat_interleave(group, dim=1) for x in (key, value))
    scores = torch.einsum("qhd,khd->hqk", query.double(), key) * layer.scaling
    if layer.softcap is not None:
        scores = layer.softcap * torch.tanh(scores / layer.softcap)
    place = torch.arange(keys, device=query.device)
    own = place[keys - count :, None]
    hidden = place[None, :] > own
    if layer.window is not None:
        hidden |= place[None, :] <= own - layer.window
    scores = scores.masked_fill(hidden, float("-inf"))
    if layer.sinks is not None:
        sinks = layer.sinks.double()[:, None, None].expand(-1, count, 1)
        scores = torch.cat([scores, sinks], dim=-1)
    return torch.einsum("hqk,khd->qhd", scores.softmax(dim=-1)[..., :keys], value)


def poison(cache: LayerCache, dtype: torch.dtype) -> None:
    """Fill pages with the worst that a sequence may have left there: all numbers that are written are finite."""
    largest = torch.finfo(dtype).max
    for pages, worst in ((cache.key, min(LARGEST_KEY, largest)), (cache.value, largest)):
        if pages.dtype.itemsize == 1:
            pages.copy_(torch.full_like(pages, 100.0, dtype=torch.float32).to(pages.dtype))
        else:
            pages.fill_(worst)
    for scale in (cache.key_scale, cache.value_scale):
        if scale is not None:
            scale.fill_(1e4)


def leave_nan(like: torch.Tensor) -> None:
    """Have the allocator hand out memory full of NaN next: an output that is not written shows."""
    for _ in range(2):
        torch.full_like(like, float("nan"))
