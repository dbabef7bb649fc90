"""Moving whole pages: copy-on-write on the device, and swaps to and from host memory, beside the forward pass.

A swap out gathers pages on the step stream, so that the step may overwrite them at once, and takes them to the host on
the side stream, out of a buffer of its own; a swap in goes the other way, and the step waits for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import numpy as np
import torch

from kernels.contract import LayerCache
from worker.device.port import Event, Port
from worker.device.upload import Packing, Upload

STAGING_BYTES = 64 << 20
"""Of a buffer between pages and host memory. There are two, if anything may be swapped."""

PIECE_BYTES = 256 << 20
"""Of host memory that is asked for at once: torch rounds what it pins up to a power of two, which of all of it together
could be as much again."""

Guarded = Callable[[Callable[[], None]], None]
"""Launches a piece of work, and again if memory lacked."""


def once(work: Callable[[], None]) -> None:
    """Guards nothing."""
    work()


@dataclass(slots=True)
class _Buffer:
    memory: torch.Tensor  # uint8 [pages, page_bytes]
    free: Event | None = None  # once what was last done with it is done


class HostPlaces:
    """``count`` places of ``page_bytes`` in pinned memory."""

    def __init__(self, port: Port, count: int, page_bytes: int) -> None:
        self._each = max(1, PIECE_BYTES // page_bytes)
        self._pieces = [
            port.pinned([min(self._each, count - first), page_bytes], torch.uint8)
            for first in range(0, count, self._each)
        ]

    def __getitem__(self, place: int) -> torch.Tensor:
        """uint8 ``[page_bytes]``."""
        piece, row = divmod(place, self._each)
        return self._pieces[piece][row]


class DevicePages:
    """``host_blocks`` places in host memory, each of which holds a page of all layers side by side.

    Moves are launched group by group through ``guarded``: a group may be launched again, those before it must not.
    """

    def __init__(
        self, caches: Sequence[LayerCache], host_blocks: int, port: Port, upload: Upload, guarded: Guarded = once
    ) -> None:
        self._port = port
        self._upload = upload
        self._guarded = guarded
        self._moves = _page_moves([pool for cache in caches for pool in cache.tensors()])
        self.page_bytes = self._moves.page_bytes
        self._host = HostPlaces(port, host_blocks, self.page_bytes)
        self._room = max(1, min(STAGING_BYTES // self.page_bytes, host_blocks))
        shape = (self._room, self.page_bytes)
        self._buffers = [
            _Buffer(torch.empty(shape, dtype=torch.uint8, device=port.device)) for _ in range(2 if host_blocks else 0)
        ]
        self._turn = 0

    @property
    def mover(self) -> PageMover:
        return self._moves

    def copy(self, moves: Sequence[tuple[int, int]]) -> int:
        """(source, target) in the order given; returns the bytes copied."""
        for group in groups(moves):
            self._guarded(partial(self._copy, group))
        return len(moves) * self.page_bytes

    def _copy(self, group: Sequence[tuple[int, int]]) -> None:
        sources, targets = self._uploaded(*zip(*group, strict=True))
        self._port.run(partial(self._moves.copy, sources, targets))

    def swap_out(self, moves: Sequence[tuple[int, int]]) -> None:
        """(page, place) pairs."""
        for part, buffer in self._parts(moves):
            self._guarded(partial(self._leave, part, buffer))

    def _leave(self, part: Sequence[tuple[int, int]], buffer: _Buffer) -> None:
        [pages] = self._uploaded([page for page, _ in part])
        if buffer.free is not None:
            self._port.wait(buffer.free)
        self._port.run(partial(self._moves.gather, pages, buffer.memory))
        self._port.wait(self._port.record(), aside=True)
        self._port.run(self._leaving(buffer.memory, [place for _, place in part]), aside=True)
        buffer.free = self._port.record(aside=True)

    def swap_in(self, moves: Sequence[tuple[int, int]]) -> None:
        """(place, page) pairs. What left for these places before is there by then: the side stream keeps its order."""
        for part, buffer in self._parts(moves):
            self._guarded(partial(self._enter, part, buffer))

    def _enter(self, part: Sequence[tuple[int, int]], buffer: _Buffer) -> None:
        [pages] = self._uploaded([page for _, page in part])
        if buffer.free is not None:
            self._port.wait(buffer.free, aside=True)
        self._port.run(self._entering(buffer.memory, [place for place, _ in part]), aside=True)
        self._port.wait(self._port.record(aside=True))
        self._port.run(partial(self._moves.scatter, buffer.memory, pages))
        buffer.free = self._port.record()

    def _uploaded(self, *numbers: Sequence[int]) -> list[torch.Tensor]:
        packing = Packing()
        for one in numbers:
            packing.add(np.array(one, dtype=np.int64))
        return packing.send(self._upload)

    def _parts(self, moves: Sequence[tuple[int, int]]) -> Iterator[tuple[Sequence[tuple[int, int]], _Buffer]]:
        """As many at a time as a buffer holds, each with the buffer that was used longest ago."""
        room = self._room
        for first in range(0, len(moves), room):
            self._turn = 1 - self._turn
            yield moves[first : first + room], self._buffers[self._turn]

    def _leaving(self, buffer: torch.Tensor, places: list[int]) -> Callable[[], None]:
        host = self._host

        def work() -> None:
            for row, place in enumerate(places):
                host[place].copy_(buffer[row], non_blocking=True)

        return work

    def _entering(self, buffer: torch.Tensor, places: list[int]) -> Callable[[], None]:
        host = self._host

        def work() -> None:
            for row, place in enumerate(places):
                buffer[row].copy_(host[place], non_blocking=True)

        return work


class PageMover(Protocol):
    """See :class:`kernels.triton.moves.PageMoves`."""

    page_bytes: int

    def copy(self, sources: torch.Tensor, targets: torch.Tensor) -> None: ...

    def gather(self, pages: torch.Tensor, buffer: torch.Tensor) -> None: ...

    def scatter(self, buffer: torch.Tensor, pages: torch.Tensor) -> None: ...


def _page_moves(pools: Sequence[torch.Tensor]) -> PageMover:
    if not pools[0].is_cuda:
        return _TorchMoves(pools)
    from kernels.triton.moves import PageMoves  # a GPU's: one launch for all layers

    return PageMoves(pools)


class _TorchMoves:
    """Pool by pool, where there is no Triton."""

    def __init__(self, pools: Sequence[torch.Tensor]) -> None:
        self._pools = [pool.flatten(1).view(torch.uint8) for pool in pools]
        self._sizes = [pool.shape[1] for pool in self._pools]
        self.page_bytes = sum(self._sizes)

    def copy(self, sources: torch.Tensor, targets: torch.Tensor) -> None:
        for pool in self._pools:
            pool.index_copy_(0, targets, pool.index_select(0, sources))

    def gather(self, pages: torch.Tensor, buffer: torch.Tensor) -> None:
        for pool, column in zip(self._pools, torch.split(buffer[: len(pages)], self._sizes, dim=1), strict=True):
            column.copy_(pool.index_select(0, pages))

    def scatter(self, buffer: torch.Tensor, pages: torch.Tensor) -> None:
        for pool, column in zip(self._pools, torch.split(buffer[: len(pages)], self._sizes, dim=1), strict=True):
            pool.index_copy_(0, pages, column)


def groups(moves: Sequence[tuple[int, int]]) -> list[list[tuple[int, int]]]:
    """(source, target) copies in runs that may be done in any order, or at once: no target is a source."""
    runs: list[list[tuple[int, int]]] = []
    read: set[int] = set()
    written: set[int] = set()
    for source, target in moves:
        if not runs or source in written or target in written or target in read:
            runs.append([])
            read, written = set(), set()
        runs[-1].append((source, target))
        read.add(source)
        written.add(target)
    return runs
