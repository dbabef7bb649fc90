"""LoRA adapters beside a model's own linear layers: many at once, each row of a pass with its own or with none.

A step's rows are in one pass whatever their adapters are. The model's own products are of all rows; what an adapter
adds is computed over its rows alone, gathered. So a row's bits depend neither on which adapters are beside it nor on
whether any is: rows without one are not touched, and the products of an adapter's rows are filled up as all others are
(see :mod:`worker.linear`). Which row has which adapter is not handed through the models' own code, but stands in
:data:`_running` while the model runs, like what answers its attention (:mod:`worker.attention`).
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from worker.batch import PlanError, Row
from worker.linear import MIN_ROWS, PackedWeight, can_pack
from worker.lora_files import Adapter, LowRank

_running = threading.local()


@dataclass(frozen=True, slots=True, eq=False)
class AdapterRows:
    """Which tokens of a pass run with which adapter: (its name, their numbers, filled up by repeating the last, how
    many they are)."""

    segments: list[tuple[str, torch.Tensor, int]]
    tokens: int  # of the whole pass, those that fill it up too

    @classmethod
    def of(cls, rows: Sequence[Row], tokens: int, known: frozenset[str], device: torch.device) -> AdapterRows | None:
        """Of a step's rows, which lie one behind the other; None if none has an adapter. Raises PlanError."""
        numbers: dict[str, list[range]] = {}
        start = 0
        for row in rows:
            adapter = row.slot.adapter
            if adapter and not row.padding:
                if adapter not in known:
                    raise PlanError(f"slot {row.slot.index}: there is no adapter {adapter!r} here")
                numbers.setdefault(adapter, []).append(range(start, start + row.count))
            start += row.count
        segments = []
        for adapter, ranges in numbers.items():
            places = np.concatenate([np.arange(one.start, one.stop) for one in ranges])
            filled = np.pad(places, (0, -len(places) % MIN_ROWS), mode="edge")
            segments.append((adapter, torch.from_numpy(filled).to(device), len(places)))
        return cls(segments, tokens) if segments else None

    @classmethod
    def all_of(cls, adapter: str, tokens: int, device: torch.device) -> AdapterRows:
        """Every row of a pass with the one adapter. ``tokens``: a multiple of ``MIN_ROWS``."""
        return cls([(adapter, torch.arange(tokens, device=device), tokens)], tokens)


@contextmanager
def running(rows: AdapterRows | None) -> Iterator[None]:
    """Give the rows of the models that this thread runs their adapters."""
    before = getattr(_running, "rows", None)
    _running.rows = rows
    try:
        yield
    finally:
        _running.rows = before


class LoraLinear(nn.Module):
    """Stands in for a linear layer that some adapters change."""

    def __init__(self, base: nn.Module, changes: Mapping[str, LowRank], device: torch.device) -> None:
        super().__init__()
        self.base = base
        self._changes = {
            name: (_product(change.down.to(device)), _product(change.up.to(device))) for name, change in changes.items()
        }

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``[..., T, in]`` to ``[..., T, out]``. Raises ValueError where the rows are not those of the pass."""
        out: torch.Tensor = self.base(x)
        rows: AdapterRows | None = getattr(_running, "rows", None)
        if rows is None:
            return out
        given, flat = x.reshape(-1, x.shape[-1]), out.reshape(-1, out.shape[-1])
        if len(given) != rows.tokens:
            raise ValueError(f"a layer that adapters change is given {len(given)} of {rows.tokens} rows")
        for name, places, count in rows.segments:
            if name in self._changes:
                down, up = self._changes[name]
                added = up(down(given.index_select(0, places)))
                flat.index_add_(0, places[:count], added[:count])
        return flat.view(out.shape)


def _product(weight: torch.Tensor) -> Any:
    """``x`` to ``weight @ x`` for rows ``x``, whose bits do not depend on one another where that can be had."""
    if can_pack(weight.dtype, weight.device):
        return PackedWeight(weight)
    return lambda x: nn.functional.linear(x, weight)


def install(module: nn.Module, adapters: Sequence[Adapter], device: torch.device) -> None:
    """Put :class:`LoraLinear` in the place of each layer that an adapter changes
    (:func:`worker.lora_files.check_fits` has found them), whatever stands there by now."""
    for path in sorted({path for adapter in adapters for path in adapter.changes}):
        base = module.get_submodule(path)
        changes = {one.name: one.changes[path] for one in adapters if path in one.changes}
        owner, _, name = path.rpartition(".")
        setattr(module.get_submodule(owner), name, LoraLinear(base, changes, device))
