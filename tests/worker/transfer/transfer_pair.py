"""Two workers' parts in a transfer, without the services around them: one that has pages, one that fetches."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from shared.messages import Capacity, Fetch, Fetched, StepPlan
from worker.config import WorkerConfig
from worker.ledger import Standing
from worker.transfer.exchange import Exchange, Listening
from worker.transfer.pages import Form, HostPages, Launch, PageMemory, Segment

CAPACITY = Capacity("m", 64, 4, 40, 997, [], dtype="float32")
INCARNATION = 70
PATIENCE_S = 60.0


def host_pages(
    seed: int = 0, num_blocks: int = 40, row_bytes: Sequence[int] = (96, 33), layout: str = "l"
) -> HostPages:
    """Pages of random bytes, of another form than any model's."""
    rng = np.random.default_rng(seed)
    pools = [rng.integers(0, 256, (num_blocks + 1, size), dtype=np.uint8) for size in row_bytes]
    return HostPages(Form.of(CAPACITY, layout), pools)


def content(memory: PageMemory, pages: Sequence[int]) -> list[bytes]:
    """The bytes of each page."""
    found = []
    for page in pages:
        parts = [bytes(part) for segments in memory.outgoing([page], lambda work: work()) for part in segments]
        found.append(b"".join(parts))
    return found


class End:
    """One worker: its exchange, and what it has answered."""

    def __init__(
        self, name: str, memory: PageMemory | None, *, listens: bool = True, by: str = "tcp", **options: object
    ) -> None:
        self.name = name
        self.memory = memory
        self.standing = Standing(1, 1, 5)
        self.answers: queue.SimpleQueue[Fetched] = queue.SimpleQueue()
        self.served: queue.SimpleQueue[tuple[str, int, str]] = queue.SimpleQueue()
        host = "127.0.0.1" if listens else ""
        config = WorkerConfig(transfer_host=host, transfer_by=by, **options)  # type: ignore[arg-type]
        self.exchange = Exchange(
            name, INCARNATION, memory, Listening(config), lambda: self.standing, self.call, self.answers.put,
            lambda *told: self.served.put(told),
        )  # fmt: skip

    def call(self, work: Callable[[], None]) -> None:
        work()

    def fetch(self, source: End, pages: Sequence[tuple[int, int]], number: int = 1, **fields: object) -> None:
        """Begin to fetch (page there, page here)."""
        order = {
            "fetch": number, "source": source.name, "incarnation": INCARNATION, "addresses": source.exchange.addresses,
            "pages": list(pages), "after": 5, **fields,
        }  # fmt: skip
        self.begin(fetches=[Fetch(**order)])  # type: ignore[arg-type]

    def begin(self, epoch: int = 1, **fields: object) -> None:
        self.exchange.fetches.begin(StepPlan(epoch, self.name, INCARNATION, 1, **fields))  # type: ignore[arg-type]

    def answer(self) -> Fetched:
        return self.answers.get(timeout=PATIENCE_S)

    def close(self) -> None:
        self.exchange.close()


class ByPage:
    """Page memory whose groups are single pages."""

    def __init__(self, memory: HostPages) -> None:
        self._memory = memory
        self.form, self.num_blocks, self.page_bytes = memory.form, memory.num_blocks, memory.page_bytes

    def regions(self) -> list[Segment]:
        return self._memory.regions()

    def outgoing(self, pages: Sequence[int], launch: Launch) -> Iterator[list[Segment]]:
        for page in pages:
            yield self._memory.segments([page])

    def incoming(self, pages: Sequence[int], launch: Launch) -> Iterator[list[Segment]]:
        return self.outgoing(pages, launch)


class Held(ByPage):
    """Page memory of which a source stops before each page, and once more after the last, until it is told to go on."""

    def __init__(self, memory: HostPages) -> None:
        super().__init__(memory)
        self.reached = threading.Semaphore(0)
        self.go_on = threading.Semaphore(0)

    def outgoing(self, pages: Sequence[int], launch: Launch) -> Iterator[list[Segment]]:
        for page in pages:
            self.reached.release()
            assert self.go_on.acquire(timeout=PATIENCE_S)
            yield self._memory.segments([page])
        self.reached.release()
        assert self.go_on.acquire(timeout=PATIENCE_S)
