"""Rows of a step as what a forward pass takes: token ids, positions, and where keys and values lie."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kernels.contract import RaggedBatch
from worker.batch import SCRATCH_PAGE, Batch, Row


def assemble(
    batch: Batch, rows: Sequence[Row], fillers: int, max_model_len: int
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], RaggedBatch]:
    """(token ids, positions, what attention needs) of ``rows`` and of ``fillers``.

    A filler is a sequence of its own: one token at position 0, with its KV in the scratch page. The id of a token that
    a step in flight samples is 0.
    """
    block_size = batch.block_size
    count = np.array([row.count for row in rows], dtype=np.int64)
    query_start = np.concatenate([[0], np.cumsum(np.concatenate([count, np.ones(fillers, dtype=np.int64)]))])
    num_tokens = int(query_start[-1])
    tokens = np.zeros(num_tokens, dtype=np.int64)
    for row, start in zip(rows, query_start.tolist(), strict=False):
        if row.padding:
            continue
        if row.count > 1:
            known = row.slot.tokens[row.start : row.start + row.count]
            tokens[start : start + len(known)] = known
        elif row.start < len(row.slot.tokens):
            tokens[start] = row.slot.tokens[row.start]
    sequence = np.repeat(np.arange(len(count) + fillers), np.diff(query_start))
    first = np.array([row.start for row in rows] + [0] * fillers, dtype=np.int64)
    padding = np.array([row.padding for row in rows] + [True] * fillers)
    positions = first[sequence] + np.arange(num_tokens) - query_start[sequence]
    is_padding = padding[sequence]
    visible = np.where(is_padding, np.maximum(first, 1)[sequence], positions + 1)
    used = -(-int(visible.max()) // block_size)
    tables = np.zeros((len(count) + fillers, used), dtype=np.int32)
    tables[: len(count)] = batch.tables[[row.slot.index for row in rows], :used]
    page = tables[sequence, np.minimum(positions // block_size, used - 1)].astype(np.int64)
    write_slots = np.where(is_padding, SCRATCH_PAGE, page * block_size + positions % block_size)
    # padding may stand for tokens past the longest sequence; a learned position embedding has no row for those
    positions = np.minimum(positions, max_model_len - 1)
    return tokens, positions, RaggedBatch(query_start, visible, tables, write_slots)
