"""LoRA adapters on a device: those of all rows at once, and nothing that depends on which rows have which.

The matrices of a layer's adapters lie one behind the other. One product takes every row down by all of them, what is
not of the row's own adapter becomes zero, and a second product takes that up. So a step is the same operations whatever
its rows ask for: nothing waits for the device, a graph may hold them, and other adapters add exact zeros to a row. It
costs arithmetic in proportion to the ranks of all adapters together, and none of it in a step without an adapter: rows
then go through the model as if there were none. (Kernels that gather each row's matrices, Chen et al., "Punica", 2023,
save that where adapters are many.)
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from worker.batch import PlanError, Row
from worker.lora_files import Adapter, LowRank

NOBODY = -1
"""The number of no adapter."""

MakeProduct = Callable[[torch.Tensor, torch.Tensor | None], nn.Module]
"""A linear layer of a weight ``[out, in]`` and a bias."""

_running = threading.local()


@contextmanager
def running(numbers: torch.Tensor | None) -> Iterator[None]:
    """Give each row of the models that this thread runs the adapter of its number, int64 ``[T]``; None: no row has
    one."""
    before = getattr(_running, "numbers", None)
    _running.numbers = numbers
    try:
        yield
    finally:
        _running.numbers = before


def keep_rows(keep: torch.Tensor) -> None:
    """From here on the pass goes on with these of its rows."""
    if _running.numbers is not None:
        _running.numbers = _running.numbers.index_select(0, keep)


def numbers_of(rows: Sequence[Row], known: Mapping[str, int]) -> list[int] | None:
    """Of each row's adapter; None where no row has one. Raises PlanError."""
    names = ["" if row.padding else row.slot.adapter for row in rows]
    if not any(names):
        return None
    if unknown := [name for name in names if name and name not in known]:
        raise PlanError(f"there is no adapter {unknown[0]!r} here")
    return [known[name] if name else NOBODY for name in names]


class StackedAdapters(nn.Module):
    """Stands in for a linear layer: ``base``, and what adapter ``n`` of ``changes`` adds to its rows."""

    def __init__(self, base: nn.Module, changes: Sequence[LowRank | None], make: MakeProduct, device: torch.device):
        super().__init__()
        self.base = base
        some = [(number, change) for number, change in enumerate(changes) if change is not None]
        owner = [torch.full((len(change.down),), number) for number, change in some]
        self.owner = nn.Buffer(torch.cat(owner).to(device))  # of each number that rows are taken down to
        self.down = make(torch.cat([change.down for _, change in some]).to(device), None)
        self.up = make(torch.cat([change.up for _, change in some], dim=1).to(device), None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.base(x)
        numbers: torch.Tensor | None = getattr(_running, "numbers", None)
        if numbers is None:
            return out
        rows, flat = x.reshape(-1, x.shape[-1]), out.reshape(-1, out.shape[-1])
        low = self.down(rows).masked_fill(numbers[:, None] != self.owner, 0.0)
        added = torch.where((numbers != NOBODY)[:, None], flat + self.up(low), flat)  # other rows keep their very bits
        return added.view(out.shape)


def product(weight: torch.Tensor, bias: torch.Tensor | None) -> nn.Module:
    """A :data:`MakeProduct` of torch's own."""
    made = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    made.weight = nn.Parameter(weight, requires_grad=False)
    return made


def attach_to_module(module: nn.Module, adapters: Sequence[Adapter], make: MakeProduct, device: torch.device) -> None:
    """To a model that runs module by module."""
    for path in sorted({path for adapter in adapters for path in adapter.changes}):
        owner, _, name = path.rpartition(".")
        changes = [adapter.changes.get(path) for adapter in adapters]
        setattr(
            module.get_submodule(owner), name, StackedAdapters(module.get_submodule(path), changes, make, device)
        )  # fmt: skip


def attach_to_fused(
    module: Any, layers: Sequence[nn.Module], adapters: Sequence[Adapter], make: MakeProduct, device: torch.device
) -> None:
    """To the merged matrices of ``layers`` (:class:`worker.device.decoder.FusedLayer`), which are the model's."""
    paths = {id(part): path for path, part in module.named_modules()}
    for own, merged in zip(module.base_model.layers, layers, strict=True):
        attention, mlp = own.self_attn, own.mlp
        parts = {
            "qkv": (attention.q_proj, attention.k_proj, attention.v_proj),
            "out": (attention.o_proj,),
            "gate_up": (mlp.gate_proj, mlp.up_proj),
            "down": (mlp.down_proj,),
        }
        for name, linears in parts.items():
            sizes = [linear.out_features for linear in linears]
            changes = [_merged([one.changes.get(paths[id(part)]) for part in linears], sizes) for one in adapters]
            if any(change is not None for change in changes):
                setattr(merged, name, StackedAdapters(getattr(merged, name), changes, make, device))


def _merged(changes: Sequence[LowRank | None], sizes: Sequence[int]) -> LowRank | None:
    """Of linear layers of ``sizes`` outputs that are one matrix. None where there is nothing."""
    if all(change is None for change in changes):
        return None
    downs = [change.down for change in changes if change is not None]
    up = downs[0].new_zeros((sum(sizes), sum(map(len, downs))))
    row = column = 0
    for change, size in zip(changes, sizes, strict=True):
        if change is not None:
            up[row : row + size, column : column + len(change.down)] = change.up
            column += len(change.down)
        row += size
    return LowRank(torch.cat(downs), up)
