"""A ragged batch cut by what a library of dense attention can be asked for: whole sequences go one way or another.

Decided on the host, from numbers that the host has; nothing waits for the device.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from enum import Enum

import numpy as np
import numpy.typing as npt
import torch

from kernels.contract import DeviceBatch, RaggedBatch
from kernels.device_batch import upload


class Use(Enum):
    """What a library can serve, each by a call of its own."""

    FRESH = "fresh prompts"  # the whole context is in this step: keys and values side by side, no block table
    ROWS = "decode"  # one query of a sequence, over its pages
    CHUNKS = "chunks"  # several queries of a sequence that has pages already


REST = len(Use)
NUMBER = {use: number for number, use in enumerate(Use)}


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """Some sequences of a batch with all their rows, in the batch's order."""

    rows: slice | torch.Tensor  # of the whole batch; int64 indices where they do not lie side by side
    batch: DeviceBatch  # of these sequences alone


def kinds(batch: RaggedBatch, block_size: int) -> npt.NDArray[np.int64]:
    """``[S]``: the use that each sequence could be served by (its :data:`NUMBER`), or ``REST``.

    A prompt is fresh if its rows see 1, 2, 3... keys, and write theirs where its table has those. What has several rows
    of which each does not see one key more than the one before (padding) is left to the rest. A single row may see
    what it likes. A sequence without rows counts as the rest.
    """
    count = np.diff(batch.query_start)
    found = np.where(count == 1, NUMBER[Use.ROWS], REST)
    several = np.flatnonzero(count > 1)
    if not len(several):
        return found
    size = count[several]
    owner = np.repeat(np.arange(len(several)), size)
    index = np.arange(len(owner)) - np.repeat(np.cumsum(size) - size, size)
    token = batch.query_start[several][owner] + index
    before = batch.visible[batch.query_start[several]] - 1
    regular = _all_of(batch.visible[token] == before[owner] + 1 + index, owner)
    found[several[regular & (before > 0)]] = NUMBER[Use.CHUNKS]
    fresh = regular & (before == 0)
    asked = fresh[owner]
    page, offset = np.divmod(index[asked], block_size)
    slot = batch.block_tables[several[owner[asked]], page].astype(np.int64) * block_size + offset
    in_place = np.zeros(len(owner), dtype=bool)
    in_place[asked] = batch.write_slots[token[asked]] == slot
    found[several[fresh & _all_of(in_place, owner)]] = NUMBER[Use.FRESH]
    return found


def _all_of(true: npt.NDArray[np.bool_], owner: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
    """``[owners]``: whether everything of an owner is true. Each owns something."""
    return np.logical_not(np.bincount(owner, weights=~true))


def cut(batch: DeviceBatch, host: RaggedBatch, block_size: int, uses: Collection[Use]) -> dict[Use | None, Part]:
    """The parts of a batch for ``uses``; what is left for the paged kernel under None. Each has sequences."""
    found = kinds(host, block_size)
    parts: dict[Use | None, Part] = {}
    taken = np.zeros(len(found), dtype=bool)
    for use in uses:
        own = found == NUMBER[use]
        if own.any():
            parts[use] = _part(batch, host, np.flatnonzero(own))
            taken |= own
    left = np.flatnonzero(~taken & (np.diff(host.query_start) > 0))
    if len(left):
        parts[None] = _part(batch, host, left)
    return parts


def _part(batch: DeviceBatch, host: RaggedBatch, sequences: npt.NDArray[np.int64]) -> Part:
    count = np.diff(host.query_start)[sequences]
    start = np.concatenate([[0], np.cumsum(count)])
    first, last = int(sequences[0]), int(sequences[-1]) + 1
    rows: slice | torch.Tensor
    at: slice | torch.Tensor
    if last - first == len(sequences):
        rows = slice(int(host.query_start[first]), int(host.query_start[last]))
        at = slice(first, last)
        picked = RaggedBatch(start, host.visible[rows], host.block_tables[at], host.write_slots[rows])
        query_start = batch.query_start[first : last + 1]
        query_start = query_start - rows.start if rows.start else query_start
    else:
        token = np.repeat(host.query_start[sequences] - start[:-1], count) + np.arange(start[-1])
        picked = RaggedBatch(start, host.visible[token], host.block_tables[sequences], host.write_slots[token])
        query_start, rows, at = upload([start, token, sequences], batch.visible.device)
        rows = rows.long()  # index_copy_ takes no less
    return Part(
        rows,
        DeviceBatch(
            query_start=query_start,
            visible=batch.visible[rows],
            block_tables=batch.block_tables[at],
            write_slots=batch.write_slots[rows],
            max_query=int(count.max()),
            max_keys=int(picked.visible.max()),
            host=picked,
        ),
    )
