"""Whole workers: one goes on with a sequence in pages that it has fetched from another, told by plans alone."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from in_process_bus import InProcessBus
from mesh_stack import until
from prometheus_client import CollectorRegistry

from observability.tracing import Tracing
from shared.messages import (
    AnyMessage,
    Capacity,
    Fetch,
    Fetched,
    PageSnapshot,
    Reset,
    RollCall,
    Sampling,
    SlotStart,
    StepPlan,
    StepResult,
    WorkerBeat,
    decode,
    encode,
    pack_tokens,
    unpack_tokens,
)
from shared.page_hash import DIGEST_BYTES
from shared.subjects import Subjects
from worker.config import WorkerConfig
from worker.metrics import WorkerMetrics
from worker.service import WorkerService
from worker.simulated import SimulatedRunner, StepTime, expected_tokens

CAPACITY = Capacity("m", 64, 4, 40, 997, [])
PROMPT = list(range(100, 118))
SAMPLING = Sampling(1, 40)


class Worker:
    """A worker's service on a bus of its own."""

    def __init__(self, name: str, incarnation: int, transfer_host: str = "127.0.0.1") -> None:
        self.name = name
        self.incarnation = incarnation
        self.bus = InProcessBus()
        self.registry = CollectorRegistry()
        config = WorkerConfig(transfer_host=transfer_host, simulate=True, drain_grace_s=20)
        metrics = WorkerMetrics(self.registry, "m")
        self.service = WorkerService(
            config, name, incarnation, self.bus, self.bus, metrics, Tracing("test", "test", "", 0.0)
        )  # fmt: skip
        self.runner = SimulatedRunner(CAPACITY, StepTime())
        self.stop = asyncio.Event()

    async def tell(self, message: AnyMessage) -> None:
        await self.bus.publish(Subjects().step(self.name), encode(message))

    async def plan(self, step: int, epoch: int = 1, **fields: object) -> None:
        await self.tell(StepPlan(epoch, self.name, self.incarnation, step, **fields))  # type: ignore[arg-type]

    async def reset(self, step: int, epoch: int = 1) -> PageSnapshot:
        count = len(self.said(PageSnapshot))
        await self.tell(Reset(epoch, self.name, self.incarnation, step))
        snapshot = (await self.hears(PageSnapshot, count + 1))[-1]
        assert isinstance(snapshot, PageSnapshot)
        return snapshot

    def said(self, kind: type) -> list[AnyMessage]:
        found = [decode(payload) for subject, payload in self.bus.published if ".step." not in subject]
        return [message for message in found if isinstance(message, kind)]

    async def hears(self, kind: type, count: int) -> list[AnyMessage]:
        await until(lambda: len(self.said(kind)) >= count, f"{count} of {kind.__name__} of {self.name}", 60)
        return self.said(kind)

    async def beat(self) -> WorkerBeat:
        count = len(self.said(WorkerBeat))
        await self.tell(RollCall("s"))
        beat = (await self.hears(WorkerBeat, count + 1))[-1]
        assert isinstance(beat, WorkerBeat)
        return beat

    async def tokens(self, steps: int) -> list[int]:
        results = await self.hears(StepResult, steps)
        return [token for result in results if isinstance(result, StepResult) for token in result.tokens]

    async def order(self, source: Worker, pages: list[tuple[int, int]], after: int, number: int = 1) -> Fetch:
        """A fetch as a scheduler makes it, of what the source's beat says."""
        beat = await source.beat()
        assert beat.capacity is not None and beat.capacity.transfer
        return Fetch(number, source.name, source.incarnation, beat.capacity.transfer, pages, after)

    def counted(self, name: str, **labels: str) -> float:
        return self.registry.get_sample_value(name, labels) or 0.0


def run(scenario: Callable[[Worker, Worker], Awaitable[None]]) -> None:
    async def body() -> None:
        workers = [Worker("a", 7), Worker("b", 8, transfer_host="")]
        async with asyncio.TaskGroup() as group:
            for worker in workers:
                await worker.service.listen()
                group.create_task(worker.service.run(worker.stop))
                worker.service.attach(worker.runner)
            try:
                for worker in workers:
                    await worker.reset(1)
                await scenario(*workers)
            finally:
                for worker in workers:
                    if not worker.stop.is_set():
                        await worker.reset(100)  # it need not wait for its sequences
                        worker.stop.set()

    asyncio.run(asyncio.wait_for(body(), 120))


def start(tokens: list[int], pages: list[int], computed: int = 0) -> SlotStart:
    return SlotStart(0, "r", 1, 0, "g", pack_tokens(tokens), len(PROMPT), pages, SAMPLING, computed=computed)


async def prefill(worker: Worker) -> int:
    """The prompt in pages 3, 4, 5, 6 and 9, in two chunks; the first token."""
    await worker.plan(1, starts=[start(PROMPT, [3, 4, 5, 6, 9])], chunks=[(0, 10)])
    await worker.plan(2, chunks=[(0, 8)])
    [token] = await worker.tokens(2)
    return token


EXPECTED = expected_tokens(PROMPT, SAMPLING.seed, 6, CAPACITY.vocab_size)


def test_a_sequence_goes_on_where_its_pages_were_fetched_to() -> None:
    async def scenario(a: Worker, b: Worker) -> None:
        assert (await b.beat()).capacity == CAPACITY, "others fetch nothing from b"
        await a.plan(1, starts=[start(PROMPT, [3, 4, 5, 6, 9])], chunks=[(0, 10)])
        await a.tokens(1)
        await b.plan(1, fetches=[await b.order(a, [(3, 11), (4, 12)], after=1)])  # while the prompt's rest is computed
        await a.plan(2, chunks=[(0, 8)])
        assert await a.tokens(2) == EXPECTED[:1]
        await a.plan(3, drops=[0])
        await a.hears(StepResult, 3)
        await b.plan(2, fetches=[await b.order(a, [(5, 14), (6, 13), (9, 20)], after=2, number=2)])
        answers = await b.hears(Fetched, 2)
        size = 4 * 8
        assert [(one.fetch, one.reason, one.bytes, one.transport) for one in answers] == [  # type: ignore[attr-defined]
            (1, "", 2 * size, "shm"), (2, "", 3 * size, "shm"),
        ]  # fmt: skip
        assert b.counted("headrace_kv_fetched_bytes_total", transport="shm") == 5 * size
        await until(lambda: a.counted("headrace_kv_served_bytes_total", transport="shm") == 5 * size, "a's count", 60)
        assert b.counted("headrace_kv_fetch_seconds_count", transport="shm") == 2
        assert [one.fetch for one in (await b.beat()).fetched] == [1, 2], "told until they were heard"
        went_on = start([*PROMPT, EXPECTED[0]], [11, 12, 14, 13, 20], computed=len(PROMPT))
        hashes = [(11, bytes([1]) * DIGEST_BYTES)]
        await b.plan(3, starts=[went_on], chunks=[(0, 1)], drop_fetches=[1], hashes=hashes)
        await b.plan(4, decodes=[0])
        await b.plan(5, pages=[(0, [21])], decodes=[0], drop_fetches=[2])
        assert await b.tokens(5) == EXPECTED[1:4]
        assert (await b.beat()).fetched == []
        assert unpack_tokens((await b.reset(6)).pages) == [11]

    run(scenario)


def test_a_worker_that_stops_while_it_loads_listens_no_more() -> None:
    async def body() -> None:
        worker = Worker("a", 7)
        await worker.service.listen()
        worker.stop.set()
        await worker.service.run(worker.stop)
        listening = worker.service._listening
        assert listening is not None and [bound.fileno() for bound in listening.sockets] == [-1, -1]

    asyncio.run(asyncio.wait_for(body(), 60))


def test_a_fetch_that_fails_is_answered_and_harms_nothing_else() -> None:
    async def scenario(a: Worker, b: Worker) -> None:
        await prefill(a)
        await b.plan(1, starts=[start(PROMPT, [3, 4, 5, 6, 9])], chunks=[(0, 18)])
        await a.reset(3)
        await b.plan(2, decodes=[0], fetches=[await b.order(a, [(3, 11)], after=2)])
        [answer] = await b.hears(Fetched, 1)
        assert isinstance(answer, Fetched) and answer.reason == "it was reset after step 2" and answer.bytes == 0
        assert b.counted("headrace_kv_fetch_failures_total", transport="shm") == 1
        assert a.counted("headrace_kv_fetches_refused_total") == 1
        assert await b.tokens(2) == EXPECTED[:2]
        order = await b.order(a, [(3, 11)], after=2, number=2)
        a.stop.set()
        await until(lambda: not a.service._loop.alive, "a is gone", 60)  # type: ignore[union-attr]
        await b.plan(3, fetches=[order])
        reason = (await b.hears(Fetched, 2))[1].reason  # type: ignore[attr-defined]
        assert reason.startswith("shm: ") and "; tcp: " in reason

    run(scenario)


def test_a_reset_forgets_fetches_and_their_answers() -> None:
    async def scenario(a: Worker, b: Worker) -> None:
        await prefill(a)
        hashes = [(11, bytes([1]) * DIGEST_BYTES), (12, bytes([2]) * DIGEST_BYTES)]
        await b.plan(1, starts=[start(PROMPT, [11, 12, 13, 14, 15])], chunks=[(0, 18)], hashes=hashes)
        await b.plan(2, drops=[0])
        await b.plan(3, fetches=[await b.order(a, [(3, 12)], after=2)])
        await b.hears(Fetched, 1)
        assert len((await b.beat()).fetched) == 1
        snapshot = await b.reset(4)
        assert unpack_tokens(snapshot.pages) == [11], "what a fetch wrote over is not what it was"
        assert (await b.beat()).fetched == []

    run(scenario)


def test_a_worker_that_stops_stays_while_others_fetch_what_it_handed_over() -> None:
    async def scenario(a: Worker, b: Worker) -> None:
        token = await prefill(a)
        order = await b.order(a, [(3, 11), (4, 12), (5, 13), (6, 14), (9, 15)], after=2)
        a.stop.set()
        await until(lambda: a.service.draining, "a drains", 60)
        await a.plan(3, drops=[0])
        await a.hears(StepResult, 3)
        await b.plan(1, fetches=[order])
        assert (await b.hears(Fetched, 1))[0].reason == ""  # type: ignore[attr-defined]
        await b.plan(2, starts=[start([*PROMPT, token], [11, 12, 13, 14, 15], len(PROMPT))], chunks=[(0, 1)])
        assert await b.tokens(2) == EXPECTED[1:2]

    run(scenario)
