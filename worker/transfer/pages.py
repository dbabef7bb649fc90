"""Page memory as transfers see it: bytes in a known form, read and written page by page while steps go on.

Nobody else touches the pages of a transfer: the scheduler holds them on both sides until the answer has come.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol, TypeVar, runtime_checkable

import msgspec
import numpy as np
import numpy.typing as npt

from shared.messages import Capacity

GROUP_BYTES = 8 << 20
"""Pages go in groups of at most so many bytes (a page at least). Both sides reckon with the same."""

Segment = npt.NDArray[np.uint8]
"""Bytes ``[n]`` that lie side by side in host memory."""

T = TypeVar("T")


class Launch(Protocol):
    """Runs work on the step loop's thread, which alone gives work to a device, and returns what it returns. Raises
    :class:`~worker.transfer.errors.TransferFailed` once the transfer is to end."""

    def __call__(self, work: Callable[[], T]) -> T: ...


class Form(msgspec.Struct, frozen=True, array_like=True):
    """What the bytes of a page mean. Pages go only between workers of which all of it is equal."""

    model: str
    block_size: int  # tokens
    dtype: str
    kv_dtype: str  # empty: the dtype
    layout: str  # of each layer's keys and values within a page

    @classmethod
    def of(cls, capacity: Capacity, layout: str) -> Form:
        return cls(capacity.model, capacity.block_size, capacity.dtype, capacity.kv_dtype, layout)

    def difference(self, other: Form) -> str:
        """The first thing that differs, for whoever reads why; empty if nothing does."""
        for name in self.__struct_fields__:
            ours, theirs = getattr(self, name), getattr(other, name)
            if ours != theirs:
                return f"{name} {ours!r}, not {theirs!r}"
        return ""


class PageMemory(Protocol):
    """The pages of a worker, numbered as its block tables number them."""

    form: Form
    num_blocks: int  # pages 1 .. num_blocks may be read and written
    page_bytes: int

    def regions(self) -> list[Segment]:
        """The memory that all segments below are parts of: it stays where it is."""
        ...

    def outgoing(self, pages: Sequence[int], launch: Launch) -> Iterator[list[Segment]]:
        """The bytes of ``pages``, group by group: each valid until the next is asked for."""
        ...

    def incoming(self, pages: Sequence[int], launch: Launch) -> Iterator[list[Segment]]:
        """Where the bytes of ``pages`` are to be put, group by group; they are in the pages once the next is asked for.
        When the iterator is closed early, nothing more is written."""
        ...


@runtime_checkable
class HasPages(Protocol):
    """A :class:`~worker.runner.Runner` whose pages can be transferred."""

    def page_memory(self) -> PageMemory | None:
        """None where they can't be as this one is set up."""
        ...


class HostPages:
    """Pages in host memory. In each of ``pools``, uint8 ``[num_pages, row_bytes]``, a page is one row.

    Implements :class:`PageMemory`: bytes go straight from page memory and into it.
    """

    def __init__(self, form: Form, pools: Sequence[npt.NDArray[np.uint8]]) -> None:
        self.form = form
        self._pools = list(pools)
        self.num_blocks = len(pools[0]) - 1
        self.page_bytes = sum(pool.shape[1] for pool in pools)

    def regions(self) -> list[Segment]:
        return [pool.reshape(-1) for pool in self._pools]

    def outgoing(self, pages: Sequence[int], launch: Launch) -> Iterator[list[Segment]]:
        for group in groups(pages, self.page_bytes):
            yield self.segments(group)

    def incoming(self, pages: Sequence[int], launch: Launch) -> Iterator[list[Segment]]:
        return self.outgoing(pages, launch)

    def segments(self, pages: Sequence[int]) -> list[Segment]:
        """The bytes of ``pages``, pool by pool; of neighbours as one."""
        spans = runs(pages)
        return [pool[first : first + count].reshape(-1) for pool in self._pools for first, count in spans]


def groups(pages: Sequence[int], page_bytes: int) -> Iterator[Sequence[int]]:
    """``pages`` in groups of :data:`GROUP_BYTES`."""
    room = max(1, GROUP_BYTES // page_bytes)
    for first in range(0, len(pages), room):
        yield pages[first : first + room]


def runs(pages: Sequence[int]) -> list[tuple[int, int]]:
    """(first, how many) of ``pages`` that follow one another."""
    found: list[tuple[int, int]] = []
    for page in pages:
        if found and page == sum(found[-1]):
            found[-1] = found[-1][0], found[-1][1] + 1
        else:
            found.append((page, 1))
    return found
