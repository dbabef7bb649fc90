"""A ragged batch's way to the device: one packed copy."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from kernels.contract import DeviceBatch, RaggedBatch


def on_device(batch: RaggedBatch, device: torch.device) -> DeviceBatch:
    """Nothing waits for the copy. A GPU's goes through pinned memory, which torch keeps until the copy is done."""
    query_start, visible, tables = upload([batch.query_start, batch.visible, batch.block_tables.ravel()], device)
    slots = torch.empty(batch.num_tokens, dtype=torch.int64, pin_memory=device.type == "cuda")
    slots.numpy()[:] = batch.write_slots
    return DeviceBatch(
        query_start=query_start,
        visible=visible,
        block_tables=tables.view(batch.block_tables.shape),
        write_slots=slots.to(device, non_blocking=True),
        max_query=int(np.diff(batch.query_start).max(initial=0)),
        max_keys=int(batch.visible.max(initial=0)),
        host=batch,
    )


def upload(parts: Sequence[npt.NDArray[np.integer]], device: torch.device) -> list[torch.Tensor]:
    """Flat arrays as int32 tensors, in one copy that nothing waits for."""
    sizes = [len(part) for part in parts]
    packed = torch.empty(sum(sizes), dtype=torch.int32, pin_memory=device.type == "cuda")
    np.concatenate(parts, out=packed.numpy(), casting="same_kind")
    return list(torch.split(packed.to(device, non_blocking=True), sizes))
