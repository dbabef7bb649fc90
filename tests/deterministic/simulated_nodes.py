"""The nodes of a simulated mesh: the production services, each on a loop and connections of its own.

What is not production code here: the process around a service (start, kill, restart by its supervisor), the thread of
a worker's step loop, which takes its time on the virtual clock, and the HTTP side of a gateway.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from overlapping_runner import OverlappingRunner
from prometheus_client import CollectorRegistry
from simulated_bus import Connection, Link
from simulated_store import SimulatedStore
from virtual_exchange import VirtualExchange
from virtual_time import NodeLoop

from gateway.dispatch import Dispatch
from gateway.metrics import GatewayMetrics
from gateway.router import Router
from gateway.service import make_dispatch
from observability.tracing import Tracing
from scheduler.metrics import SchedulerMetrics
from scheduler.service import SchedulerService
from shared.bus import BusUnavailable
from shared.lifecycle import ServiceFault
from shared.messages import Capacity, Role, StepPlan
from worker import service as worker_service
from worker.metrics import WorkerMetrics
from worker.service import WorkerService
from worker.simulated import SimulatedRunner
from worker.step_loop import Executed, StepLoop

if TYPE_CHECKING:
    from simulated_clients import Client
    from simulated_mesh import SimulatedMesh

MODEL = "m"
VOCAB = 61
EOS = 7
LOOKS_S = 0.001  # how often a step loop looks for plans while a step is in flight
LOAD_S = 0.3  # how long a worker loads its model
STARTS_S = 15.0  # a process that has no bus for so long after its start may give up
SUPERVISOR_S = 0.5  # from the end of a process to its next start
OFF = Tracing("test", "test", "", 0.0)


@functools.cache
def _metrics(kind: str) -> Any:
    """Nothing is decided by them: all simulations of a process share them, since they are slow to make."""
    if kind == "scheduler":
        return SchedulerMetrics(CollectorRegistry())
    if kind == "worker":
        return WorkerMetrics(CollectorRegistry(), MODEL)
    return GatewayMetrics(MODEL)


def gateway_metrics() -> GatewayMetrics:
    found: GatewayMetrics = _metrics("gateway")
    return found


class Node:
    """A process that is started again under the same name whenever it ends."""

    kind = ""

    def __init__(self, mesh: SimulatedMesh, name: str) -> None:
        self.mesh = mesh
        self.name = name
        self.shard = mesh.shards[0]  # the mesh that it is in; a gateway is in all
        self.link = Link(mesh.clock, mesh.agenda, mesh.rng)
        self.unix_offset_ns = 0
        self.starts = 0
        self._started_ns = 0
        self.hung_until_ns = 0
        self.restarts = True  # its supervisor starts it again
        self.loop: NodeLoop | None = None
        self._stop: asyncio.Event | None = None
        self._main: asyncio.Task[None] | None = None

    def start(self) -> None:
        if self.loop is not None:
            return
        self.starts += 1
        self._started_ns = self.mesh.clock.now_ns
        self.loop = NodeLoop(self.mesh.clock, self.mesh.agenda, self)
        self.mesh.note(self.name, f"starts ({self.starts})")
        self._main = self.loop.create_task(self._run())
        self.loop.wake()

    def kill(self, down_s: float | None = None) -> None:
        """kill -9; back after ``down_s`` (None: never)."""
        if self.loop is None:
            return
        self.mesh.note(self.name, "KILLED")
        self._vanish()
        if down_s is not None:
            self.mesh.agenda.after(down_s, self.start)

    def hang(self, seconds: float) -> None:
        """SIGSTOP, and SIGCONT after so long."""
        self.mesh.note(self.name, f"STOPPED for {seconds:.2f} s")
        self.hung_until_ns = self.mesh.clock.now_ns + int(seconds * 1e9)
        self.mesh.agenda.at(self.hung_until_ns, self.mesh.note, self.name, "goes on")

    def terminate(self) -> None:
        """SIGTERM."""
        self.mesh.note(self.name, "SIGTERM")
        if self._stop is not None and self.loop is not None:
            self.loop.deliver(self._stop.set)

    @property
    def hung(self) -> bool:
        return self.hung_until_ns > self.mesh.clock.now_ns

    def run(self, loop: NodeLoop) -> None:
        """Let its loop run, unless it is stopped, or the loop is that of a process that is gone."""
        if loop is not self.loop:
            return
        if self.hung:
            loop._waking = False
            self.mesh.agenda.at(self.hung_until_ns, loop.wake)
            return
        self.mesh.clock.unix_offset_ns = self.unix_offset_ns
        loop.run()
        if self._main is not None and self._main.done():
            self._ended()

    def _ended(self) -> None:
        assert self._main is not None and self.loop is not None
        error = None if self._main.cancelled() else self._main.exception()
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        self.mesh.note(self.name, f"ends: {error or 'in good order'}")
        young = self.mesh.clock.now_ns - self._started_ns < STARTS_S * 1e9
        if (
            error is not None
            and not isinstance(error, ServiceFault)
            and not (young and isinstance(error, BusUnavailable))
        ):
            self.mesh.violate(f"{self.name} fell over: {error!r}", error)
        self._vanish()
        if self.restarts:
            self.mesh.agenda.after(SUPERVISOR_S, self.start)

    def _vanish(self) -> None:
        assert self.loop is not None
        for connection in self.link.connections:
            connection.vanish()
        self.link.connections.clear()
        loop, self.loop, self._main = self.loop, None, None
        loop.end()
        for fault in loop.faults:
            self.mesh.violate(f"{self.name}: {fault}")
        self.gone()

    async def _run(self) -> None:
        self._stop = asyncio.Event()
        await self.serve(self._stop)

    async def serve(self, stop: asyncio.Event) -> None:
        raise NotImplementedError

    def gone(self) -> None:
        """What it held in memory is lost."""

    def connect(self, name: str) -> Connection:
        assert self.loop is not None
        connection = Connection(self.mesh.server, self.loop, self.link, name, self.mesh.max_payload)
        connection.owner = f"{self.name}#{self.starts}"
        return connection


class SchedulerNode(Node):
    kind = "scheduler"

    def __init__(self, mesh: SimulatedMesh, name: str) -> None:
        super().__init__(mesh, name)
        self.service: SchedulerService | None = None
        self._handled = 0

    async def serve(self, stop: asyncio.Event) -> None:
        step_bus, bus = self.connect(f"{self.name}-step"), self.connect(self.name)
        step_bus.handled = bus.handled = self._check
        config = dataclasses.replace(self.mesh.scheduler_config, mesh=self.shard)
        store = SimulatedStore(bus, self.mesh.stores[self.shard], config.lease_s / 2)
        self.service = SchedulerService(config, self.name, step_bus, bus, store, _metrics("scheduler"), OFF)
        await self.service.run(stop)

    def gone(self) -> None:
        self.service = None

    @property
    def leads(self) -> bool:
        return self.service is not None and self.service._term is not None and self.service._lease.holds()

    def _check(self, subject: str) -> None:
        if self.service is not None and ".beat." not in subject:
            self._handled += 1
            if self._handled % self.mesh.check_every == 0:
                self.mesh.check_core(self.name, self.service.core)


class VirtualStepLoop(StepLoop):
    """The production step loop without its thread: what it hands over comes when the step's time is over."""

    mesh: SimulatedMesh  # of the simulation that runs
    owner: WorkerNode

    def start(self) -> None:
        self._items: deque[Any] = deque()
        self._busy = False
        self._event_loop = asyncio.get_running_loop()
        self._tell, self._tell_reset = self._deliver, self._answer
        self._told: list[Callable[[], None]] = []
        self._deliver = lambda executed: self._told.append(functools.partial(self._tell, executed))
        self._answer = lambda *answer: self._told.append(functools.partial(self._tell_reset, *answer))
        self.node = self.owner

    @property
    def alive(self) -> bool:
        return True

    def put(self, plan: StepPlan) -> None:
        self._add(plan)

    def reset(self, *reset: Any) -> None:
        self._add(*reset)

    def stop(self, timeout_s: float = 5.0) -> None: ...

    def _add(self, item: Any) -> None:
        self._items.append(item)
        if not self._busy:
            self._busy = True
            self._event_loop.call_soon(self._next)

    def _next(self) -> None:
        if not self._items and not self._in_flight:
            self._busy = False
            return
        clock = self.mesh.clock
        item = self._items.popleft() if self._items else None
        if item is not None:
            self._take(item)
        elif self._in_flight[0].flight.done():
            self._land()
        else:
            self._event_loop.call_later(LOOKS_S, self._next)
            return
        spent_s = clock.take_work()
        if isinstance(item, StepPlan) and self._told and not self._in_flight:
            self.executing = item.step
        self._event_loop.call_later(spent_s, self._done)

    def _done(self) -> None:
        if not self._in_flight:
            self.executing = 0
        told, self._told = self._told, []
        for one in told:
            one()
        self._next()

    def _executed(self, landing: Any, settled: Any, ended: int) -> Executed:
        executed = super()._executed(landing, settled, ended)
        self.mesh.executed(self.node, executed.plan, [row.slot.request_id for row in executed.rows])
        return executed


class WorkerNode(Node):
    kind = "worker"

    def __init__(self, mesh: SimulatedMesh, name: str) -> None:
        super().__init__(mesh, name)
        self.service: WorkerService | None = None
        self.exchange: VirtualExchange | None = None
        self.role = Role.MIXED
        self.epoch = 0  # of the last step that this process has run

    async def serve(self, stop: asyncio.Event) -> None:
        self.epoch = 0
        incarnation = self.mesh.clock.time_ns() // 1_000_000 * 1000 + self.starts
        step_bus, bus = self.connect(f"{self.name}-step"), self.connect(self.name)
        config = dataclasses.replace(self.mesh.worker_config, role=self.role, mesh=self.shard)
        self.service = WorkerService(config, self.name, incarnation, step_bus, bus, _metrics("worker"), OFF)
        await self.service.listen()
        async with asyncio.TaskGroup() as group:
            serving = group.create_task(self.service.run(stop))
            await asyncio.sleep(LOAD_S)
            VirtualStepLoop.mesh, VirtualStepLoop.owner = self.mesh, self
            VirtualExchange.mesh, VirtualExchange.owner = self.mesh, self
            kind = OverlappingRunner if self.mesh.overlapping else SimulatedRunner
            self.service.attach(kind(self.mesh.capacity, self.mesh.step_time))
            await serving

    def gone(self) -> None:
        self.service = self.exchange = None
        self.mesh.seeming_crashes += 1


class GatewayNode(Node):
    """A new name at each start, as a gateway's process has. SIGTERM lets what is open end, and takes in nothing new."""

    kind = "gateway"

    def __init__(self, mesh: SimulatedMesh, name: str) -> None:
        super().__init__(mesh, name)
        self.dispatch: Dispatch | Router | None = None
        self._clients: list[Client] = []
        self._group: asyncio.TaskGroup | None = None

    async def serve(self, stop: asyncio.Event) -> None:
        bus = self.connect(self.name)
        name = f"{self.name}-{self.starts}"
        dispatch = make_dispatch(
            self.mesh.gateway_config,
            bus,
            name,
            gateway_metrics(),
            lambda: bus.reconnects + bus.slow_consumer_drops,
            OFF,
        )
        await dispatch.start()
        async with asyncio.TaskGroup() as group:
            background = [group.create_task(dispatch.beat_forever()), group.create_task(dispatch.send_forever())]
            async with asyncio.TaskGroup() as self._group:
                self.dispatch = dispatch
                await stop.wait()
                self.dispatch = None
            await dispatch.sent()
            for task in background:
                task.cancel()

    def serve_client(self, client: Client) -> bool:
        """A request comes in; False if nobody listens."""
        if self.loop is None or self.dispatch is None:
            return False
        self._clients.append(client)
        self.loop.deliver(self._begin, client)
        return True

    def _begin(self, client: Client) -> None:
        if self.loop is None or self._group is None:
            return  # the process is gone
        if self.dispatch is None:
            client.end("nobody listens")
        else:
            self._group.create_task(client.go(self.dispatch, self.loop))

    def gone(self) -> None:
        self.dispatch = self._group = None
        for client in self._clients:
            if not client.over:
                client.end("its gateway died")
        self._clients.clear()


def virtual_step_loops() -> Callable[[], None]:
    """Workers made from now on have virtual step loops and exchanges; call the result to go back."""
    real = worker_service.StepLoop, worker_service.Exchange
    worker_service.StepLoop = VirtualStepLoop  # type: ignore[misc]
    worker_service.Exchange = VirtualExchange  # type: ignore[assignment, misc]

    def back() -> None:
        worker_service.StepLoop, worker_service.Exchange = real  # type: ignore[misc]

    return back


def capacity(block_size: int, num_blocks: int, host_blocks: int) -> Capacity:
    return Capacity(
        MODEL, num_blocks * block_size, block_size, num_blocks, VOCAB, [EOS], "simulated", host_blocks=host_blocks,
        grammars=False,
    )  # fmt: skip
