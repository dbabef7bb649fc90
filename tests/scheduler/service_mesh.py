"""The production shells of schedulers and workers in one event loop, over a bus and a store that a test may break.

Tokens are collected as a gateway would, by offset; :meth:`ServiceMesh.resume` submits again behind them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec
from in_process_bus import InProcessBus, InProcessClient
from memory_store import MemoryStore
from mesh_stack import until
from prometheus_client import CollectorRegistry

from observability.tracing import Tracing
from scheduler.config import SchedulerConfig
from scheduler.metrics import SchedulerMetrics
from scheduler.service import SchedulerService
from shared.jetstream import StoreUnavailable
from shared.messages import (
    AnyMessage,
    Cancel,
    Capacity,
    GatewayBeat,
    Outcome,
    RequestEvent,
    Sampling,
    Submit,
    SubmitReply,
    TokenBatch,
    decode,
    encode,
    pack_tokens,
)
from shared.subjects import Subjects
from worker.config import WorkerConfig
from worker.metrics import WorkerMetrics
from worker.service import WorkerService
from worker.simulated import SimulatedRunner, StepTime, expected_tokens

VOCAB = 997
CAPACITY = Capacity("m", 4096, 4, 60, VOCAB, [])
OFF = Tracing("test", "test", "", 0.0)
SUBJECTS = Subjects()


def prompt(name: str, length: int = 3) -> list[int]:
    return [(sum(name.encode()) + 3 * index) % VOCAB for index in range(length)]


class Stallable:
    """One scheduler's way to the store: while it stalls nothing comes back."""

    def __init__(self, store: MemoryStore) -> None:
        self._store = store
        self.going = asyncio.Event()
        self.going.set()

    async def open(self) -> None: ...

    async def read(self) -> tuple[bytes, int] | None:
        await self._go()
        return await self._store.read()

    async def write(self, value: bytes, expected: int) -> int:
        await self._go()
        return await self._store.write(value, expected)

    async def _go(self) -> None:
        if not self.going.is_set():
            await self.going.wait()
            raise StoreUnavailable("it was stopped")


@dataclass
class Node:
    """A process: its connection, its task, and what it is told to stop by."""

    client: InProcessClient
    stop: asyncio.Event = field(default_factory=asyncio.Event)
    task: asyncio.Task[None] = field(init=False)

    async def kill(self) -> None:
        """kill -9: nothing more comes from it."""
        await self.client.kill()
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)

    async def end(self) -> None:
        """SIGTERM, and wait."""
        self.stop.set()
        await self.task


@dataclass
class SchedulerNode(Node):
    service: SchedulerService = field(init=False)
    metrics: SchedulerMetrics = field(init=False)
    store: Stallable = field(init=False)

    def of(self, metric: str) -> float:
        return float(getattr(self.metrics, metric)._value.get())

    @property
    def workers(self) -> list[str]:
        return sorted(self.service.core.workers)


class ServiceMesh:
    def __init__(self, **options: object) -> None:
        self.bus = InProcessBus()
        self.store = MemoryStore()
        self.options: dict[str, object] = {"max_num_seqs": 4, "worker_timeout_s": 1.0, "lease_s": 0.5} | options
        self.tokens: dict[str, list[int]] = {}
        self.ends: dict[str, str] = {}
        self.events: list[RequestEvent] = []
        self.attempts: dict[str, int] = {}
        self.submits: dict[str, Submit] = {}
        self.nodes: list[Node] = []

    async def listen(self) -> None:
        await self.bus.subscribe(SUBJECTS.tokens("g"), self._on_tokens)
        await self.bus.subscribe(SUBJECTS.event("g"), self._on_event)

    async def scheduler(self, name: str = "s", **options: object) -> SchedulerNode:
        node = SchedulerNode(InProcessClient(self.bus))
        node.metrics = SchedulerMetrics(CollectorRegistry())
        node.store = Stallable(self.store)
        config = SchedulerConfig(**(self.options | options))  # type: ignore[arg-type]
        node.service = SchedulerService(config, name, node.client, node.client, node.store, node.metrics, OFF)
        node.task = asyncio.create_task(node.service.run(node.stop))
        self.nodes.append(node)
        return node

    async def worker(
        self, name: str = "w", incarnation: int = 1, runner: SimulatedRunner | None = None, **options: Any
    ) -> Node:
        node = Node(InProcessClient(self.bus))
        metrics = WorkerMetrics(CollectorRegistry(), "m")
        service = WorkerService(WorkerConfig(**options), name, incarnation, node.client, node.client, metrics, OFF)
        await service.listen()
        node.task = asyncio.create_task(service.run(node.stop))
        service.attach(runner or SimulatedRunner(CAPACITY, StepTime(300.0)))
        self.nodes.append(node)
        return node

    async def both(self) -> tuple[SchedulerNode, Node]:
        scheduler, worker = await self.scheduler(), await self.worker()
        await until(lambda: scheduler.workers, "the worker to be known")
        return scheduler, worker

    # --- as a gateway -----------------------------------------------------------------------------------------------

    async def submit(
        self, scheduler: SchedulerNode, name: str, max_tokens: int = 20, length: int = 3, n: int = 1
    ) -> None:
        sampling = Sampling(sum(name.encode()), max_tokens)
        self.submits[name] = Submit(name, 1, "g", "m", pack_tokens(prompt(name, length)), sampling, 1, n=n)
        await self.resume(scheduler, name)

    async def resume(self, scheduler: SchedulerNode, name: str) -> None:
        """The first attempt, or one more behind the tokens that are here."""
        self.attempts[name] = self.attempts.get(name, 0) + 1
        submit = msgspec.structs.replace(
            self.submits[name], attempt=self.attempts[name], resumed=[pack_tokens(self.tokens.get(name, []))]
        )
        while True:  # also while the worker is being greeted
            subject = SUBJECTS.submit("m", scheduler.service.core.epoch)
            reply = decode(await self.bus.request(subject, encode(submit), 5))
            assert isinstance(reply, SubmitReply)
            if reply.outcome not in (Outcome.NO_WORKER, Outcome.UNKNOWN_MODEL):
                break
            await asyncio.sleep(0.01)
        assert reply.outcome is Outcome.ACCEPTED

    async def cancel(self, scheduler: SchedulerNode, name: str) -> None:
        await self.bus.publish(SUBJECTS.cancel(scheduler.service.core.epoch), encode(Cancel(name, 1)))

    async def beat(self, *live: tuple[str, int], gateway: str = "g", epoch: int = 0) -> None:
        await self.bus.publish(SUBJECTS.beat("gateway", gateway), encode(GatewayBeat(gateway, epoch, list(live))))

    async def ended(self, *names: str) -> None:
        """Wait for their ends, and check that their tokens are exactly the right ones."""
        await until(lambda: set(names) <= self.ends.keys(), f"ends of {names}", 30)
        for name in names:
            submit = self.submits[name]
            sampling = submit.sampling
            wanted = prompt(name, len(submit.prompt) // 4)
            assert self.tokens[name] == expected_tokens(wanted, sampling.seed, sampling.max_tokens, VOCAB)

    def sent(self, kind: type, subject: str = "") -> list[AnyMessage]:
        """Every message of that kind so far, lost or not."""
        messages = (decode(payload) for where, payload in self.bus.published if subject in where)
        return [message for message in messages if isinstance(message, kind)]

    def kinds(self) -> list[str]:
        return [event.kind for event in self.events]

    def _on_tokens(self, payload: bytes, _: str) -> None:
        message = decode(payload)
        assert isinstance(message, TokenBatch)
        for entry in message.entries:
            if entry.attempt != self.attempts[entry.request_id] or entry.choice:
                continue
            got = self.tokens.setdefault(entry.request_id, [])
            assert entry.offset <= len(got), "a gap"
            got[entry.offset :] = entry.tokens
            if entry.end:
                self.ends[entry.request_id] = entry.end

    def _on_event(self, payload: bytes, _: str) -> None:
        message = decode(payload)
        assert isinstance(message, RequestEvent)
        self.events.append(message)


def run(scenario: Callable[[ServiceMesh], Awaitable[None]], **options: object) -> ServiceMesh:
    """Run a scenario, then stop what it started."""

    async def body() -> ServiceMesh:
        mesh = ServiceMesh(**options)
        await mesh.listen()
        try:
            await scenario(mesh)
            for node in mesh.nodes:
                if node.task.done() and not node.task.cancelled():
                    node.task.result()
        finally:
            mesh.bus.lose = lambda subject, payload: False
            mesh.bus.down = False
            for node in mesh.nodes:
                node.stop.set()
            await asyncio.wait([node.task for node in mesh.nodes], timeout=2)
            for node in mesh.nodes:
                node.task.cancel()
            await asyncio.gather(*(node.task for node in mesh.nodes), return_exceptions=True)
        return mesh

    return asyncio.run(asyncio.wait_for(body(), 60))
