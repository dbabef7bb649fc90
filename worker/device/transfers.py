"""Pages of a device as transfers see them: through pinned memory, gathered and scattered on the side stream.

The step stream has nothing to do with it: what is read was written by steps that are over, and what is written is read
by steps that are launched later. Work is given to the device on the step loop's thread; others only wait for events.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch

from worker.device.pages import PageMover
from worker.device.port import Event, Port
from worker.transfer.errors import TransferFailed
from worker.transfer.pages import GROUP_BYTES, Form, Launch, Segment, groups

STAGES = 4
"""Groups of pages in pinned memory at once, in each direction: each is a transfer's own while that goes on. So many
fetches go on at once (:data:`worker.transfer.fetches.MOST_AT_ONCE`): none that is to end waits for one."""


class _Stages:
    """Pinned memory ``[pages, page_bytes]``, made when it is first needed."""

    def __init__(self, port: Port, pages: int, page_bytes: int) -> None:
        self._port = port
        self._shape = [pages, page_bytes]
        self._changed = threading.Condition()
        self._free: list[torch.Tensor] = []
        self._made: list[torch.Tensor] = []

    @contextmanager
    def one(self) -> Iterator[torch.Tensor]:
        with self._changed:
            if not self._free and len(self._made) < STAGES:
                self._make()
            self._changed.wait_for(lambda: self._free)
            stage = self._free.pop()
        try:
            yield stage
        finally:
            with self._changed:
                self._free.append(stage)
                self._changed.notify()

    def all(self) -> list[torch.Tensor]:
        with self._changed:
            while len(self._made) < STAGES:
                self._make()
            return list(self._made)

    def _make(self) -> None:
        try:
            stage = self._port.pinned(self._shape, torch.uint8)
        except self._port.out_of_memory as error:
            raise TransferFailed(f"the host lacks memory for it ({str(error).split('.')[0]})") from None
        self._made.append(stage)
        self._free.append(stage)


class DevicePageMemory:
    """Implements :class:`~worker.transfer.pages.PageMemory`. A page of all layers lies side by side in a segment."""

    def __init__(self, form: Form, mover: PageMover, port: Port, num_blocks: int) -> None:
        self.form = form
        self.num_blocks = num_blocks
        self.page_bytes = mover.page_bytes
        self._mover = mover
        self._port = port
        self._room = max(1, GROUP_BYTES // self.page_bytes)
        self._between: torch.Tensor | None = None  # on the device; the side stream's order keeps its uses apart
        self._leaving, self._entering = (_Stages(port, self._room, self.page_bytes) for _ in range(2))

    def regions(self) -> list[Segment]:
        """See :meth:`worker.transfer.pages.PageMemory.regions`."""
        return [stage.numpy().reshape(-1) for stages in (self._leaving, self._entering) for stage in stages.all()]

    def outgoing(self, pages: Sequence[int], launch: Launch) -> Iterator[list[Segment]]:
        """See :meth:`worker.transfer.pages.PageMemory.outgoing`."""
        with self._leaving.one() as stage:
            for group in groups(pages, self.page_bytes):
                self._launched(partial(self._leave, group, stage), launch)
                yield [stage[: len(group)].numpy().reshape(-1)]

    def incoming(self, pages: Sequence[int], launch: Launch) -> Iterator[list[Segment]]:
        """See :meth:`worker.transfer.pages.PageMemory.incoming`."""
        with self._entering.one() as stage:
            for group in groups(pages, self.page_bytes):
                yield [stage[: len(group)].numpy().reshape(-1)]
                self._launched(partial(self._enter, group, stage), launch)

    def _launched(self, work: partial[tuple[Event, list[torch.Tensor]]], launch: Launch) -> None:
        """Return once the device has done it. What it is done with is kept until then."""
        try:
            event, kept = launch(work)
        except self._port.out_of_memory as error:
            raise TransferFailed(f"the device lacks memory for it ({str(error).split('.')[0]})") from None
        event.wait()
        del kept

    def _leave(self, group: Sequence[int], stage: torch.Tensor) -> tuple[Event, list[torch.Tensor]]:
        numbers, kept = self._numbers(group)

        def work() -> None:
            there = numbers.to(self._port.device, non_blocking=True)
            between = self._buffer()
            self._mover.gather(there, between)
            stage[: len(group)].copy_(between[: len(group)], non_blocking=True)
            kept.append(there)

        self._port.run(work, aside=True)
        return self._port.record(aside=True), kept

    def _enter(self, group: Sequence[int], stage: torch.Tensor) -> tuple[Event, list[torch.Tensor]]:
        numbers, kept = self._numbers(group)

        def work() -> None:
            there = numbers.to(self._port.device, non_blocking=True)
            between = self._buffer()
            between[: len(group)].copy_(stage[: len(group)], non_blocking=True)
            self._mover.scatter(between, there)
            kept.append(there)

        self._port.run(work, aside=True)
        return self._port.record(aside=True), kept

    def _numbers(self, group: Sequence[int]) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Page numbers in pinned memory, and what must live as long as the work that reads them."""
        numbers = self._port.pinned([len(group)], torch.int64)
        numbers.numpy()[:] = group
        return numbers, [numbers]

    def _buffer(self) -> torch.Tensor:
        """Made in the side stream's work, so that its memory was never another stream's."""
        if self._between is None:
            self._between = torch.empty((self._room, self.page_bytes), dtype=torch.uint8, device=self._port.device)
        return self._between
