"""What the runner of an asynchronous device asks of it: two streams of work, events, memory that copies can run from
beside the host, and graphs. A test drives the runner through another implementation, which has no device but runs
everything as late, or as oddly, as the rules allow.

Work runs in the order in which it is given to its stream, some time after :meth:`Port.run` returns. What orders the
two streams, and tells the host how far they are, is events alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch


class Event(Protocol):
    """A point in a stream's work."""

    def done(self) -> bool:
        """Whether everything before it has run."""
        ...

    def wait(self) -> None:
        """Return once it has. Raises what that work raised."""
        ...


class Graph(Protocol):
    """Recorded work on tensors that stay where they are."""

    def replay(self) -> None:
        """Run it with what the tensors hold by then. To be called in :meth:`Port.run`."""
        ...


class Port(Protocol):
    """``aside``: on the side stream, of copies to and from the host, instead of the step stream."""

    device: torch.device
    out_of_memory: type[Exception]

    def pinned(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Host memory of which a copy does not hold the host up. Raises ``out_of_memory``."""
        ...

    def run(self, work: Callable[[], object], *, aside: bool = False) -> None:
        """Work that waits for nothing on the host. Raises ``out_of_memory`` if it can't be launched for want of it; a
        part of it may have run then."""
        ...

    def record(self, *, aside: bool = False) -> Event: ...

    def wait(self, event: Event, *, aside: bool = False) -> None:
        """What the stream is given from now on runs after the event."""
        ...

    def elapsed_us(self, first: Event, last: Event) -> int:
        """Between two events that are done, on the device's clock."""
        ...

    def capture(self, work: Callable[[], object]) -> Graph:
        """Record ``work`` without running it. It has been run before in the same way, so that nothing is compiled or
        set up in it. Waits for the device. Raises what can't be captured, and ``out_of_memory``."""
        ...

    def synchronize(self) -> None:
        """Wait for all work."""
        ...

    def answers(self) -> bool:
        """Whether the device does anything at all, after an error. Waits for all work."""
        ...

    def give_back(self) -> None:
        """Memory that is kept for later use and not in use."""
        ...

    def reserved(self) -> int:
        """Bytes of the device's memory that this process holds, in use or not."""
        ...


@dataclass(slots=True)
class Fetched:
    """Tensors on their way to the host. What they are copied from lives as long as this does."""

    ready: Event
    sources: Sequence[torch.Tensor] = ()
    copies: list[torch.Tensor] = field(default_factory=list)

    def arrays(self) -> list[npt.NDArray[Any]]:
        """Once they are here: the caller has waited for ``ready``."""
        if not self.ready.done():
            raise RuntimeError("tensors were read before they had come")
        return [copy.numpy() for copy in self.copies]


def fetch(port: Port, tensors: Callable[[], Sequence[torch.Tensor]]) -> Fetched:
    """Copy to the host, beside the step stream, what that has computed by then. ``tensors`` is asked once it has."""
    fetched = Fetched(port.record())
    port.wait(fetched.ready, aside=True)

    def copy() -> None:
        fetched.sources = tensors()
        fetched.copies = [port.pinned(source.shape, source.dtype) for source in fetched.sources]
        for source, target in zip(fetched.sources, fetched.copies, strict=True):
            target.copy_(source, non_blocking=True)

    port.run(copy, aside=True)
    fetched.ready = port.record(aside=True)
    return fetched


@dataclass(slots=True)
class _Place:
    memory: torch.Tensor  # uint8, pinned
    free: Event | None = None  # once the copy from it has run


class Uploads:
    """Takes bytes to the device through a few pinned buffers in turn. Implements
    :data:`worker.device.upload.Upload`."""

    def __init__(self, port: Port, places: int = 4) -> None:
        self._port = port
        self._places = [_Place(port.pinned([1 << 16], torch.uint8)) for _ in range(places)]
        self._next = 0

    def __call__(self, source: npt.NDArray[np.uint8]) -> torch.Tensor:
        place = self._places[self._next]
        self._next = (self._next + 1) % len(self._places)
        if place.free is not None:
            place.free.wait()  # it has run long ago, but for a host that is several uploads ahead
        count = len(source)
        if len(place.memory) < count:
            place.memory = self._port.pinned([2 * count], torch.uint8)
        place.memory[:count].numpy()[:] = source
        there = torch.empty(count, dtype=torch.uint8, device=self._port.device)
        here = place.memory[:count]
        self._port.run(lambda: there.copy_(here, non_blocking=True))
        place.free = self._port.record()
        return there
