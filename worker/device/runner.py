"""A model on a device that runs asynchronously, behind the :class:`~worker.runner.PipelinedRunner` seam.

The host never waits inside a step. What a step changes, and all it needs, goes up in one packed copy; the token that it
samples for a slot stays on the device, where the next step reads it, and comes to the host on the side stream.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from shared.messages import Capacity
from worker.asking import begin_guides
from worker.batch import Batch, Sampled, Step
from worker.device.flight import DeviceFlight
from worker.device.graphs import DecodeGraphs
from worker.device.model import DeviceModel
from worker.device.pages import DevicePages
from worker.device.port import Port, Uploads
from worker.device.sampling import DeviceSampler
from worker.device.state import DeviceState
from worker.device.transfers import DevicePageMemory
from worker.grammar import Grammars
from worker.kv_cache import page_layout
from worker.transfer.pages import Form

log = logging.getLogger("headrace.worker.device")

FIRST_SLOTS = 1024
"""Slots that there is room for in the beginning: with more, what is captured is lost."""

FEW_SLOTS, TABLE_BYTES = 256, 32 << 20
"""Of long sequences no more slots than these, if their block tables take more bytes than that."""


def first_slots(places: int) -> int:
    """That there is room for in the beginning, where a sequence has up to ``places`` blocks."""
    return min(FIRST_SLOTS, max(FEW_SLOTS, TABLE_BYTES // (4 * places)))


class DeviceRunner:
    """``model`` has its caches already: pages of ``capacity.num_blocks`` blocks and the scratch page. Steps of up to
    ``graph_rows`` decodes run as graphs (0: none do), which may take ``graph_room`` bytes.

    What lacks memory is run once more, without graphs and with all memory that is merely kept given back; if it lacks
    it still, the step fails like any other. So does a pass at once if the runner is not ``alone``: other ranks take
    part in its sums, and would take those of the second run for their next ones.
    """

    def __init__(
        self, model: DeviceModel, port: Port, capacity: Capacity, grammars: Grammars, *, graph_rows: int = 0,
        graph_room: int = 1 << 30, triton: bool | None = None, alone: bool = True,
    ) -> None:  # fmt: skip
        self.model = model
        self.port = port
        self.capacity = capacity
        self.grammars = grammars
        self.adapters = {name: number for number, name in enumerate(capacity.adapters)}
        self.uploads = Uploads(port)
        self._sampling_uploads = Uploads(port)
        self.pages = DevicePages(model.caches, capacity.host_blocks, port, self.uploads, self.guarded_by_itself)
        self.kv_bytes_copied = 0
        self.swap_us = 0
        self.lacked_memory = 0
        self._graph_rows = graph_rows
        self._graph_room = graph_room
        self._triton = triton
        self._alone = alone
        self._seconds = {"launch": 0.0, "device": 0.0}
        places = -(-capacity.max_model_len // capacity.block_size)
        self.state = DeviceState(port.device, first_slots(places), places)
        self.graphs = self._no_graphs_yet()
        self.sampler = self._new_sampler()
        port.synchronize()  # whatever made the model ran on other threads and streams

    def forward(self, batch: Batch, step: Step) -> Sampled:
        """See :meth:`worker.runner.Runner.forward`."""
        flight = self.launch(batch, step)
        flight.choose()
        return flight.result()

    def launch(self, batch: Batch, step: Step) -> DeviceFlight:
        """See :meth:`worker.runner.PipelinedRunner.launch`."""
        began = time.perf_counter()
        if batch.slots and max(batch.slots) >= self.state.num_slots:
            self._make_room(batch, 1 + max(batch.slots))
        begin_guides(step, self.grammars)
        flight = DeviceFlight(self, batch, step)
        self._move_pages(flight, step)
        self.guarded(flight.forward, lambda: None)
        self._seconds["launch"] += time.perf_counter() - began
        return flight

    def guarded_by_itself(self, work: Callable[[], None]) -> None:
        """:meth:`guarded`, of work in which no other rank takes part."""
        self.guarded(work, lambda: None, alone=True)

    def guarded(self, work: Callable[[], None], before: Callable[[], None], *, alone: bool = False) -> None:
        """Launch ``work``; where memory lacks, give back what can be, launch ``before``, and ``work`` again."""
        try:
            work()
            return
        except self.port.out_of_memory as error:
            if not (alone or self._alone):
                raise
            self.lacked_memory += 1
            log.warning("a step lacks memory (%s): it runs again without graphs", str(error).split(".")[0])
        # The error is gone by here, and what the frames that it came through had in hand.
        self.port.synchronize()
        self.graphs.drop()
        self.port.give_back()
        # Its mirror of token counts may be ahead of what was launched.
        self.sampler = self._new_sampler()
        before()
        work()

    def page_memory(self) -> DevicePageMemory:
        """See :class:`worker.transfer.pages.HasPages`."""
        form = Form.of(self.capacity, f"on a device: {page_layout(self.model.caches)}")
        return DevicePageMemory(form, self.pages.mover, self.port, self.capacity.num_blocks)

    def answers(self) -> bool:
        """See :meth:`worker.runner.OnDevice.answers`."""
        return self.port.answers()

    def landed(self, launch_s: float, device_us: int) -> None:
        """A flight tells what it took."""
        self._seconds["launch"] += launch_s
        self._seconds["device"] += device_us / 1e6

    def phase_times(self) -> dict[str, float]:
        """Seconds of the steps since this was last asked: the host launching, and the device working."""
        times = dict(self._seconds)
        self._seconds = dict.fromkeys(times, 0.0)
        return times

    def _move_pages(self, flight: DeviceFlight, step: Step) -> None:
        if step.swap_outs:
            began = self.port.record()
            self.pages.swap_out(step.swap_outs)
            flight.swaps.append((began, self.port.record()))
        self.kv_bytes_copied += self.pages.copy(step.copies)
        if step.swap_ins:
            began = self.port.record()
            self.pages.swap_in(step.swap_ins)
            flight.swaps.append((began, self.port.record()))

    def _new_sampler(self) -> DeviceSampler:
        return DeviceSampler(self.port.device, self._sampling_uploads, self._triton)

    def _no_graphs_yet(self) -> DecodeGraphs:
        capacity = self.capacity
        return DecodeGraphs(
            self.model, self.state, self.port, capacity.block_size, capacity.max_model_len, self._graph_rows,
            self._graph_room, bool(self.adapters),
        )  # fmt: skip

    def _make_room(self, batch: Batch, slots: int) -> None:
        """More slots than ever before: everything that knows where they lie starts anew."""
        self.port.synchronize()
        old = self.state
        self.state = old.grown(max(slots, 2 * old.num_slots), self.port)
        self.graphs = self._no_graphs_yet()
