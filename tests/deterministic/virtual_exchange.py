"""KV blocks between simulated workers, without threads and sockets: bytes take their time on the virtual clock.

What stands at a source's gate, and what a worker tells of its fetches, is production code or does as that does. The
network between two workers is as bad as theirs to the bus, and fails and stalls beside that.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from shared.messages import Fetch, Fetched, StepPlan, pack_tokens
from worker.ledger import Standing
from worker.transfer.gate import Gate, Request
from worker.transfer.pages import HostPages

if TYPE_CHECKING:
    from simulated_mesh import SimulatedMesh
    from simulated_nodes import WorkerNode

STALL_S = 5.0  # without a byte for so long a fetch fails
LOOK_AGAIN_S = 0.05
RUBBISH = 0xA5


@dataclass
class Roads:
    """How it goes from worker to worker."""

    failure: float = 0.0  # share of fetches that break off
    delay_s: float = 0.002  # most that half of a fetch takes


@dataclass
class _Job:
    epoch: int
    order: Fetch
    began_ns: int
    done: int = 0  # pages that are here
    stalled_ns: int = 0


class VirtualFetches:
    """Implements :class:`worker.step_loop.Fetching`."""

    def __init__(
        self, node: WorkerNode, incarnation: int, memory: HostPages, answer: Callable[[Fetched], None]
    ) -> None:  # fmt: skip
        self._node = node
        self._incarnation = incarnation
        self._memory = memory
        self._answer = answer
        self._loop = asyncio.get_running_loop()
        self._jobs: dict[int, _Job] = {}
        self._unheard: dict[int, Fetched] = {}

    @property
    def unheard(self) -> list[Fetched]:
        return list(self._unheard.values())

    def begin(self, plan: StepPlan) -> None:
        mesh = self._node.mesh
        for number in plan.drop_fetches:
            self._unheard.pop(number, None)
        for order in plan.fetches:
            job = self._jobs[order.fetch] = _Job(plan.epoch, order, mesh.clock.monotonic_ns())
            for segment in self._memory.segments([here for _, here in order.pages]):
                segment[:] = RUBBISH  # until it is over nobody may read what is there
            self._later(job)

    def end(self) -> None:
        self._jobs.clear()
        self._unheard.clear()

    def _later(self, job: _Job, seconds: float | None = None) -> None:
        roads, rng = self._node.mesh.roads, self._node.mesh.rng
        self._loop.call_later(rng.uniform(0.0, roads.delay_s) if seconds is None else seconds, self._go_on, job)

    def _go_on(self, job: _Job) -> None:
        """The next half of its pages."""
        if self._jobs.get(job.order.fetch) is not job:
            return  # a reset has ended it
        mesh, order = self._node.mesh, job.order
        source = next(one for one in mesh.workers if one.name == order.source)
        if source.hung or source.link.blocked or self._node.link.blocked:
            job.stalled_ns = job.stalled_ns or mesh.clock.monotonic_ns()
            if mesh.clock.monotonic_ns() - job.stalled_ns < STALL_S * 1e9:
                self._later(job, LOOK_AGAIN_S)
            else:
                self._finish(job, "no byte came")
            return
        reason = self._refusal(source, job)
        if reason or mesh.rng.random() < mesh.roads.failure:
            self._finish(job, reason or "the connection was reset")
            return
        count = len(order.pages)
        until = count if job.done or count == 1 else count // 2
        exchange = source.exchange
        assert exchange is not None
        for there, here in order.pages[job.done : until]:
            for theirs, ours in zip(exchange.memory.segments([there]), self._memory.segments([here]), strict=True):
                ours[:] = theirs
        job.done = until
        if until == count:
            self._finish(job, "")
        else:
            self._later(job)

    def _refusal(self, source: WorkerNode, job: _Job) -> str:
        exchange = source.exchange
        if source.loop is None or exchange is None:
            return "nobody listens there"
        order = job.order
        pages = pack_tokens(there for there, _ in order.pages)
        return exchange.gate.refusal(
            Request("virtual", order.incarnation, job.epoch, order.after, self._memory.form, pages)
        )

    def _finish(self, job: _Job, reason: str) -> None:
        del self._jobs[job.order.fetch]
        count = len(job.order.pages)
        us = (self._node.mesh.clock.monotonic_ns() - job.began_ns) // 1000
        size = 0 if reason else count * self._memory.page_bytes
        answer = Fetched(
            job.epoch, self._node.name, self._incarnation, job.order.fetch, reason, size, us, "virtual"
        )  # fmt: skip
        self._unheard[job.order.fetch] = answer
        self._answer(answer)
        self._node.mesh.note(self._node.name, f"fetched {count} pages of {job.order.source}: {reason or 'whole'}")


class VirtualExchange:
    """In the place of :class:`worker.transfer.exchange.Exchange`. ``owner``: whose worker is made just now."""

    mesh: SimulatedMesh
    owner: WorkerNode

    def __init__(
        self, worker: str, incarnation: int, memory: HostPages, listening: Any, standing: Callable[[], Standing],
        call: Any, answer: Callable[[Fetched], None], served: Any,
    ) -> None:  # fmt: skip
        self.memory = memory
        self.gate = Gate(incarnation, memory.form, memory.num_blocks, standing)
        self.addresses = [f"virtual://{worker}/key"] if self.mesh.transfers else []
        self.fetches = VirtualFetches(self.owner, incarnation, memory, answer)
        self.owner.exchange = self

    def idle_s(self) -> float | None:
        return math.inf if self.addresses else None

    def close(self) -> None:
        self.fetches.end()
