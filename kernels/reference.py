"""Paged attention in plain torch operations: the reference that every other kernel is held against, and quick enough to
serve small models on a CPU. Runs on any device; batch-invariant on CPUs (probed when it is made).

Each layer costs a fixed number of torch calls however many sequences there are: gather the pages of all (item, tile)
pairs, attend tile by tile, merge the tiles by their log-sum-exp (see :mod:`kernels.tiling`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
import torch

from kernels.contract import Geometry, LayerAttention, LayerCache, RaggedBatch
from kernels.elementwise import VECTOR, elementwise
from kernels.pages import zeros
from kernels.quantized_pages import dequantize, has_scales, quantize
from kernels.tile_attention import attend_tiles
from kernels.tiling import QUERY_BLOCK, Items, Pairs, chunk_items, decode_items, pair_groups, visible_keys

TILE_TOKENS = 128
"""Keys in a tile, or near it: whole pages, whole vectors. Smaller wastes less of the last tile, larger merges less."""

LARGEST_KEY = 1e15
"""Of a number in a key: a score with one that a page still holds of another sequence stays finite, and the mask hides
it (infinity plus a mask of -infinity would be NaN)."""

SLAB_BYTES = 16 << 20
"""Keys gathered at once. Measured flat from 0.5 to 16 MiB here; fewer calls are simply fewer."""

PARTIAL_BYTES = 32 << 20
"""Results of tiles kept until they are merged."""


@dataclass(slots=True, eq=False)
class Slab:
    """Some pairs of a group, gathered and attended to at once."""

    page_rows: torch.Tensor  # [pairs * num_kv_heads * pages per tile]: rows of the cache
    item: torch.Tensor | slice  # which item's queries each pair takes
    mask: torch.Tensor  # [pairs, 1, rows, tile]: 0 or -inf
    blind: torch.Tensor | None  # [pairs, 1, rows]: the row sees no key of the tile


@dataclass(slots=True, eq=False)
class Group:
    query_rows: torch.Tensor  # [items * num_kv_heads * rows]: rows of the [T * num_heads, head_dim] queries
    num_items: int
    rows: int  # query rows of an item, for each key/value head
    slabs: list[Slab]
    per_tile: list[int]


@dataclass(slots=True, eq=False)
class WindowPlan:
    groups: list[Group]
    output_rows: torch.Tensor  # [T * num_heads]: where each query's result is among all groups' rows


@dataclass(slots=True, eq=False)
class ReferencePlan:
    batch: RaggedBatch
    write_rows: torch.Tensor  # [T * num_kv_heads]: rows of the cache seen as [pages * kv heads * block, head_dim]
    windows: dict[int | None, WindowPlan] = field(default_factory=dict)


class ReferenceAttention:
    """:class:`~kernels.contract.AttentionKernel` in torch. Pages lie in memory as ``[page, kv head, token, dim]``, so
    that the pages of one key/value head gather into one contiguous tile.

    ``storage`` is what pages hold, if not ``dtype``: fp8 (e4m3) or int8, taken back to ``dtype`` tile by tile.
    """

    name = "torch"

    def __init__(
        self, geometry: Geometry, dtype: torch.dtype, device: torch.device, storage: torch.dtype | None = None
    ) -> None:
        self.geometry = geometry
        self.dtype = dtype
        self.device = device
        self.storage = storage or dtype
        self.largest_key = min(LARGEST_KEY, torch.finfo(dtype).max)
        whole_vectors = math.lcm(geometry.block_size, VECTOR)
        self.tile_pages = max(1, TILE_TOKENS // whole_vectors) * whole_vectors // geometry.block_size
        self.tile = self.tile_pages * geometry.block_size
        self.chunk_rows = max(QUERY_BLOCK * geometry.group, 32)
        self.decode_rows, self.batch_invariant = self._probe_rows()
        tile_bytes = self.tile * geometry.num_kv_heads * geometry.head_dim * dtype.itemsize
        self.slab_pairs = max(1, SLAB_BYTES // tile_bytes)
        size = self.slab_pairs * self.tile_pages * geometry.num_kv_heads, geometry.block_size * geometry.head_dim
        self._key_slab = torch.empty(size, dtype=self.storage, device=device)
        self._value_slab = torch.empty(size, dtype=self.storage, device=device)

    def allocate(self, num_pages: int) -> LayerCache:
        g = self.geometry
        shape = (num_pages, g.num_kv_heads, g.block_size, g.head_dim)
        key, value = (zeros(shape, self.storage, self.device).transpose(1, 2) for _ in range(2))
        if not has_scales(self.storage):
            return LayerCache(key, value)
        scales = (zeros(shape[:3], torch.float32, self.device).transpose(1, 2) for _ in range(2))
        return LayerCache(key, value, *scales)

    # --- once per forward pass ---------------------------------------------------------------------------------------

    def plan(self, batch: RaggedBatch) -> ReferencePlan:
        g = self.geometry
        page, offset = np.divmod(batch.write_slots, g.block_size)
        rows = (page[:, None] * g.num_kv_heads + np.arange(g.num_kv_heads)) * g.block_size + offset[:, None]
        return ReferencePlan(batch, self._tensor(rows.ravel()))

    def _window_plan(self, batch: RaggedBatch, window: int | None) -> WindowPlan:
        g = self.geometry
        groups: list[Group] = []
        output_rows = np.zeros((batch.num_tokens, g.num_heads), dtype=np.int64)
        base = 0
        for items, rows in ((decode_items(batch), self.decode_rows), (chunk_items(batch), self.chunk_rows)):
            partial_bytes = g.num_kv_heads * rows * g.head_dim * 4
            max_pairs = max(1, PARTIAL_BYTES // partial_bytes)
            for pairs in pair_groups(batch, items, window, g.block_size, self.tile_pages, max_pairs):
                groups.append(self._group(batch, pairs, window, rows))
                self._place(pairs.items, rows, base, output_rows)
                base += len(pairs.items.sequence) * g.num_kv_heads * rows
        return WindowPlan(groups, self._tensor(output_rows.ravel()))

    def _group(self, batch: RaggedBatch, pairs: Pairs, window: int | None, rows: int) -> Group:
        g = self.geometry
        tokens = pairs.items.tokens
        row = np.arange(rows)
        token = tokens[:, np.minimum(row // g.group, tokens.shape[1] - 1)]  # rows beyond the last query repeat it
        head = np.arange(g.num_kv_heads)[:, None] * g.group + row % g.group
        query_rows = token[:, None, :] * g.num_heads + head
        page_rows = pairs.pages[:, None, :] * g.num_kv_heads + np.arange(g.num_kv_heads)[:, None]
        page_rows_tensor = self._tensor(page_rows)
        starts = np.concatenate([[0], np.cumsum(pairs.per_tile)])
        slabs = []
        for start in range(0, len(pairs.item), self.slab_pairs):
            part = slice(start, min(start + self.slab_pairs, len(pairs.item)))
            item: torch.Tensor | slice
            tile = int(np.searchsorted(starts, part.start, side="right")) - 1
            if part.stop <= starts[tile + 1]:  # one tile: its items lie side by side
                item = slice(part.start - int(starts[tile]), part.stop - int(starts[tile]))
            else:
                item = self._tensor(pairs.item[part])
            mask, blind = self._mask(visible_keys(batch, pairs, part, window, self.tile), rows)
            slabs.append(Slab(page_rows_tensor[part].reshape(-1), item, mask, blind))
        return Group(self._tensor(query_rows.ravel()), len(tokens), rows, slabs, pairs.per_tile)

    def _mask(self, seen: np.ndarray, rows: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        """(additive mask, rows that see nothing) from ``seen`` ``[pairs, queries, tile]``."""
        pairs, queries, tile = seen.shape
        if seen.all():  # costs nothing, and adds exact zeros like any other mask: the same bits
            zero = torch.zeros(1, dtype=self.dtype, device=self.device)
            return zero.expand(pairs, 1, rows, tile), None
        mask = torch.zeros((pairs, queries, tile), dtype=self.dtype, device=self.device)
        mask.masked_fill_(torch.from_numpy(~seen).to(self.device), float("-inf"))
        blind_rows = ~seen.any(axis=2)
        blind = torch.from_numpy(blind_rows).to(self.device)
        if queries == 1:
            return mask[:, None].expand(pairs, 1, rows, tile), (
                blind[:, None].expand(pairs, 1, rows) if blind_rows.any() else None
            )
        row = torch.arange(rows, device=self.device).div(self.geometry.group, rounding_mode="floor")
        row.clamp_(max=queries - 1)
        return mask[:, row][:, None], blind[:, row][:, None] if blind_rows.any() else None

    def _place(self, items: Items, rows: int, base: int, output_rows: np.ndarray) -> None:
        """Note for each real query and head which row of the results is its own."""
        g = self.geometry
        item = np.repeat(np.arange(len(items.first)), items.count)
        query = np.arange(len(item)) - np.repeat(np.cumsum(items.count) - items.count, items.count)
        kv_head, within = np.divmod(np.arange(g.num_heads), g.group)
        row = (item[:, None] * g.num_kv_heads + kv_head) * rows + query[:, None] * g.group + within
        output_rows[items.first[item] + query] = base + row

    def _tensor(self, array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self.device)

    # --- once per layer ----------------------------------------------------------------------------------------------

    def attend(
        self,
        plan: ReferencePlan,
        cache: LayerCache,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        layer: LayerAttention,
    ) -> torch.Tensor:
        g = self.geometry
        key = key.clamp(-self.largest_key, self.largest_key)
        for pages, scales, new in ((cache.key, cache.key_scale, key), (cache.value, cache.value_scale, value)):
            finite = torch.nan_to_num(new.reshape(-1, g.head_dim))
            if scales is not None:
                finite, scale = quantize(finite, self.storage)
                scales.transpose(1, 2).view(-1).index_copy_(0, plan.write_rows, scale)
            flat = _bytes(pages.transpose(1, 2).view(-1, g.head_dim))
            flat.index_copy_(0, plan.write_rows, _bytes(finite))
        window = plan.windows.get(layer.window)
        if window is None:
            window = plan.windows[layer.window] = self._window_plan(plan.batch, layer.window)
        flat_query = query.reshape(-1, g.head_dim)
        results = [self._attend_group(group, cache, flat_query, layer) for group in window.groups]
        rows = results[0] if len(results) == 1 else torch.cat(results)
        return rows.index_select(0, window.output_rows).view(query.shape)

    def _attend_group(
        self, group: Group, cache: LayerCache, flat_query: torch.Tensor, layer: LayerAttention
    ) -> torch.Tensor:
        """``[items * num_kv_heads * rows, head_dim]``."""
        g = self.geometry
        queries = flat_query.index_select(0, group.query_rows).view(-1, g.num_kv_heads, group.rows, g.head_dim)
        outputs, sums = [], []
        for slab in group.slabs:
            keys = self._gather(cache.key, cache.key_scale, slab.page_rows, self._key_slab)
            values = self._gather(cache.value, cache.value_scale, slab.page_rows, self._value_slab)
            item = slab.item
            part = queries[item] if isinstance(item, slice) else queries.index_select(0, item)
            output, log_sum = attend_tiles(part, keys, values, slab.mask, layer.scaling, layer.softcap)
            if slab.blind is not None:
                log_sum.masked_fill_(slab.blind, float("-inf"))
            outputs.append(output)
            sums.append(log_sum)
        output = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
        log_sum = sums[0] if len(sums) == 1 else torch.cat(sums)
        if len(group.per_tile) > 1 or layer.sinks is not None:
            output = self._merge(output, log_sum, group, layer.sinks)
        return output.reshape(-1, g.head_dim)

    def _gather(
        self, pages: torch.Tensor, scales: torch.Tensor | None, rows: torch.Tensor, slab: torch.Tensor
    ) -> torch.Tensor:
        """``[pairs, num_kv_heads, tile, head_dim]`` in ``dtype``."""
        g = self.geometry
        source = _bytes(pages.transpose(1, 2).view(-1, g.block_size * g.head_dim))
        slab = slab[: len(rows)]
        torch.index_select(source, 0, rows, out=_bytes(slab))
        if scales is not None:
            scale = scales.transpose(1, 2).view(-1, g.block_size).index_select(0, rows)
            slab = dequantize(slab.view(-1, g.head_dim), scale.view(-1), self.dtype)
        return slab.view(-1, g.num_kv_heads, self.tile, g.head_dim)

    def _merge(
        self, output: torch.Tensor, log_sum: torch.Tensor, group: Group, sinks: torch.Tensor | None
    ) -> torch.Tensor:
        """Weigh each item's tiles by their share of the softmax, adding them up in the order of the tiles.

        A tile that a row does not see has weight exp(-inf) = 0 and adds exact zeros, so that it makes no difference
        whether an item that the row shares has that tile or not.
        """
        parts = []
        start = 0
        for size in group.per_tile:
            parts.append((slice(start, start + size), size))
            start += size
        first = parts[0][0]
        top = log_sum[first].clone()
        for part, size in parts[1:]:
            torch.maximum(top[:size], log_sum[part], out=top[:size])
        sink = None
        if sinks is not None:
            g = self.geometry
            row = torch.arange(group.rows, device=self.device) % g.group
            sink = sinks.to(top.dtype).view(g.num_kv_heads, g.group)[:, row]
            top = torch.maximum(top, sink)
        weight = log_sum.clone()
        for part, size in parts:
            weight[part].sub_(top[:size])
        weight = elementwise(torch.exp_, weight)
        total = weight[first].clone()
        weighted = output.to(weight.dtype) * weight.unsqueeze(-1)
        merged = weighted[first]
        for part, size in parts[1:]:
            total[:size] += weight[part]
            merged[:size] += weighted[part]
        if sink is not None:
            total += elementwise(torch.exp, sink - top)
        return (merged / total.unsqueeze(-1)).to(output.dtype)

    # --- once, at start ----------------------------------------------------------------------------------------------

    def _probe_rows(self) -> tuple[int, bool]:
        """The fewest rows of a decode item at which a row has the bits it has in a chunk item, and whether any has.

        Matrix libraries take other paths for few rows (MKL here: below 3 at head size 64, below 6 at 128).
        """
        g = self.geometry
        candidates = [rows for rows in (4, 6, 8, 12, 16, 24, 32, 48, 64, 96) if g.group <= rows < self.chunk_rows]
        if self.dtype == torch.float64 or self.device.type != "cpu":
            return (candidates or [self.chunk_rows])[0], self.dtype != torch.float64 and self.device.type == "cpu"
        generator = torch.Generator().manual_seed(0)
        shape = (5, g.num_kv_heads, self.chunk_rows, g.head_dim)
        query = torch.randn(shape, generator=generator).to(self.dtype)
        key, value = (
            torch.randn((5, g.num_kv_heads, self.tile, g.head_dim), generator=generator).to(self.dtype)
            for _ in range(2)
        )
        mask = torch.zeros((5, 1, 1, self.tile), dtype=self.dtype)
        mask[:3, ..., self.tile - 7 :] = float("-inf")
        for rows in [*candidates, self.chunk_rows]:
            if all(self._same_bits(query, key, value, mask, rows, softcap) for softcap in (None, 30.0)):
                return rows, True
        return self.chunk_rows, False

    def _same_bits(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor,
        rows: int,
        softcap: float | None,
    ) -> bool:
        scale = self.geometry.head_dim**-0.5
        whole = attend_tiles(query, key, value, mask.expand(-1, 1, query.shape[2], -1), scale, softcap)
        few = mask.expand(-1, 1, rows, -1)
        for pairs in (1, 2, 5):
            part = attend_tiles(query[:pairs, :, :rows], key[:pairs], value[:pairs], few[:pairs], scale, softcap)
            if not all(torch.equal(a[:pairs, :, :rows], b) for a, b in zip(whole, part, strict=True)):
                return False
        return True


def _bytes(x: torch.Tensor) -> torch.Tensor:
    """As it lies; fp8 as bytes, since torch neither gathers nor scatters it."""
    return x.view(torch.uint8) if x.dtype == torch.float8_e4m3fn else x
