"""What of the batch stays on the device from step to step: block tables, and each slot's last token.

A step uploads what has changed. The token that a step samples for a slot is written there by that step, and read by
the next one, whether or not the host has seen it.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt
import torch

from worker.batch import Batch, Slot
from worker.device.port import Port
from worker.device.upload import Packing


class DeviceState:
    """``tables`` int32 ``[num_slots + 1, places]``, ``last_token`` int64 ``[num_slots + 1]``. Slot ``scratch`` is
    nobody's: its table names the scratch page everywhere."""

    def __init__(self, device: torch.device, num_slots: int, places: int) -> None:
        self.scratch = num_slots
        self.tables = torch.zeros((num_slots + 1, places), dtype=torch.int32, device=device)
        self.last_token = torch.zeros(num_slots + 1, dtype=torch.int64, device=device)
        # Whose token last_token has for a slot, and of which position. A slot's next owner is another Slot.
        self._held: dict[int, tuple[Slot, int]] = {}

    @property
    def num_slots(self) -> int:
        return self.scratch

    def grown(self, num_slots: int, port: Port) -> DeviceState:
        """The same with more slots."""
        more = DeviceState(port.device, num_slots, self.tables.shape[1])
        more._held = self._held

        def copy() -> None:
            more.tables[: self.num_slots].copy_(self.tables[:-1])
            more.last_token[: self.num_slots].copy_(self.last_token[:-1])

        port.run(copy)
        return more

    def hold(self, slot: Slot, position: int) -> None:
        """The step that is being launched samples the slot's token at ``position``."""
        self._held[slot.index] = slot, position

    def has(self, slot: Slot, position: int) -> bool:
        """Whether the device has the slot's token at ``position``, as far as all steps launched go."""
        return self._held.get(slot.index) == (slot, position)


class Delta:
    """What a step changes in a :class:`DeviceState` before its forward pass. May be applied more than once."""

    def __init__(self, state: DeviceState, batch: Batch, tokens: Iterable[tuple[Slot, int]], packing: Packing) -> None:
        """``tokens``: (slot, position) of those that the step reads from ``last_token``, and the host knows."""
        self._state = state
        places = state.tables.shape[1]
        cells = [np.empty(0, dtype=np.int64)]
        pages: list[npt.NDArray[np.int32]] = [np.empty(0, dtype=np.int32)]
        for index, first in batch.changed.items():
            slot = batch.slots.get(index)
            if slot is not None and first < slot.num_pages:
                cells.append(np.arange(index * places + first, index * places + slot.num_pages))
                pages.append(batch.tables[index, first : slot.num_pages])
        batch.changed.clear()
        news = [(slot, position) for slot, position in tokens if not state.has(slot, position)]
        self._cells = packing.add(np.concatenate(cells))
        self._pages = packing.add(np.concatenate(pages))
        self._slots = packing.add(np.array([slot.index for slot, _ in news], dtype=np.int64))
        self._tokens = packing.add(np.array([slot.tokens[position] for slot, position in news], dtype=np.int64))

    def apply(self, uploaded: list[torch.Tensor]) -> None:
        """Launch it, once ``uploaded`` is what the packing has sent."""
        state = self._state
        if len(uploaded[self._cells]):
            state.tables.view(-1).index_copy_(0, uploaded[self._cells], uploaded[self._pages])
        if len(uploaded[self._slots]):
            state.last_token.index_copy_(0, uploaded[self._slots], uploaded[self._tokens])
