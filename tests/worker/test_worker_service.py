"""The worker's shell: what it answers on its step subject."""

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
    Need,
    PageSnapshot,
    Reset,
    RollCall,
    Sampling,
    SlotStart,
    StepPlan,
    StepResult,
    WorkerBeat,
    WorkerState,
    decode,
    encode,
    pack_tokens,
    unpack_tokens,
)
from shared.page_hash import DIGEST_BYTES
from shared.subjects import Subjects
from worker.__main__ import _readiness
from worker.batch import Batch, Sampled, Step
from worker.config import WorkerConfig
from worker.metrics import WorkerMetrics
from worker.service import WorkerService
from worker.simulated import SimulatedRunner, StepTime

CAPACITY = Capacity("m", 64, 4, 40, 997, [])
STEP = Subjects().step("w")


class Shell:
    """A worker's service on a bus of its own; ``said`` are its messages of a kind."""

    def __init__(self, max_payload: int = 1 << 20) -> None:
        self.bus = InProcessBus(max_payload)
        self.metrics = WorkerMetrics(CollectorRegistry(), "m")
        self.service = WorkerService(
            WorkerConfig(pool="chat"), "w", 7, self.bus, self.bus, self.metrics, Tracing("test", "test", "", 0.0)
        )

    async def tell(self, message: AnyMessage) -> None:
        await self.bus.publish(STEP, encode(message))

    def said(self, kind: type) -> list[AnyMessage]:
        found = [decode(payload) for subject, payload in self.bus.published if subject != STEP]
        return [message for message in found if isinstance(message, kind)]

    async def hears(self, kind: type, count: int) -> list[AnyMessage]:
        await until(lambda: len(self.said(kind)) >= count, f"{count} of {kind.__name__}", 60)
        return self.said(kind)


class OnDevice(SimulatedRunner):
    """Lacks memory in each of its steps, and finds it."""

    lacked_memory = 0

    def answers(self) -> bool:
        return True

    def forward(self, batch: Batch, step: Step) -> Sampled:
        self.lacked_memory += 1
        return super().forward(batch, step)


def run(
    scenario: Callable[[Shell], Awaitable[None]], loaded: bool = True, max_payload: int = 1 << 20,
    runner: type[SimulatedRunner] = SimulatedRunner,
) -> Shell:  # fmt: skip
    async def body() -> Shell:
        shell = Shell(max_payload)
        stop = asyncio.Event()
        async with asyncio.TaskGroup() as group:
            await shell.service.listen()
            group.create_task(shell.service.run(stop))
            if loaded:
                shell.service.attach(runner(CAPACITY, StepTime()))
            try:
                await scenario(shell)
            finally:
                stop.set()
        return shell

    return asyncio.run(asyncio.wait_for(body(), 120))


def plan(step: int, pages: list[int], epoch: int = 1) -> StepPlan:
    """A request whose prompt fills ``pages``, and their hashes."""
    tokens = pack_tokens(range(4 * len(pages)))
    start = SlotStart(0, "r", 1, 0, "g", tokens, 4 * len(pages), pages, Sampling(1, 1))
    hashes = [(page, bytes([page]) * DIGEST_BYTES) for page in pages]
    return StepPlan(epoch, "w", 7, step, starts=[start], chunks=[(0, 4 * len(pages))], hashes=hashes)


def pages_of(message: AnyMessage) -> list[int]:
    assert isinstance(message, PageSnapshot)
    assert len(message.hashes) == DIGEST_BYTES * len(message.pages) // 4
    return unpack_tokens(message.pages)


def test_a_reset_is_answered_with_what_the_pages_hold() -> None:
    async def scenario(shell: Shell) -> None:
        await shell.tell(Reset(1, "w", 7, 1))
        assert pages_of((await shell.hears(PageSnapshot, 1))[0]) == []
        await shell.tell(plan(1, [3, 5]))
        await shell.hears(StepResult, 1)
        await shell.tell(Reset(2, "w", 7, 1))
        first = (await shell.hears(PageSnapshot, 2))[1]
        assert sorted(pages_of(first)) == [3, 5]
        await shell.tell(Reset(2, "w", 7, 1))  # that answer may have been lost
        assert (await shell.hears(PageSnapshot, 3))[2] == first
        await shell.tell(plan(1, [5], epoch=2))
        await shell.hears(StepResult, 2)
        await shell.tell(Reset(2, "w", 7, 1))  # late: the batch that it began is under way
        await shell.tell(Reset(2, "w", 7, 9))
        last = (await shell.hears(PageSnapshot, 4))[3]
        assert isinstance(last, PageSnapshot) and last.step == 9

    shell = run(scenario)
    subjects = [subject for subject, payload in shell.bus.published if isinstance(decode(payload), PageSnapshot)]
    assert subjects == [Subjects().result(epoch) for epoch in (1, 2, 2, 2)]


def test_an_answer_takes_half_of_a_message_at_most() -> None:
    async def scenario(shell: Shell) -> None:
        await shell.tell(Reset(1, "w", 7, 1))
        await shell.tell(plan(1, list(range(1, 11))))
        await shell.tell(plan(2, list(range(11, 21))))
        await shell.hears(StepResult, 2)
        await shell.tell(Reset(1, "w", 7, 3))
        assert pages_of((await shell.hears(PageSnapshot, 2))[1]) == [5, 4, 3, 2, 1, *range(20, 10, -1)]

    run(scenario, max_payload=600)


def test_a_plan_before_its_reset_does_not_run() -> None:
    async def scenario(shell: Shell) -> None:
        await shell.tell(plan(1, [3]))
        assert await shell.hears(Need, 1) == [Need(1, "w", 7, 0)]
        assert not shell.said(StepResult)

    run(scenario)


def test_a_worker_that_loads_answers_no_reset_and_is_there() -> None:
    async def scenario(shell: Shell) -> None:
        before = len(await shell.hears(WorkerBeat, 1))
        await shell.tell(Reset(1, "w", 7, 1))
        await shell.tell(plan(1, [3]))
        await shell.tell(RollCall("s"))
        beat = (await shell.hears(WorkerBeat, before + 1))[-1]
        assert isinstance(beat, WorkerBeat) and beat.state is WorkerState.LOADING and beat.epoch == 0
        shell.service.attach(SimulatedRunner(CAPACITY, StepTime()))
        await shell.tell(Reset(1, "w", 7, 1))  # what it missed leaves no trace
        await shell.hears(PageSnapshot, 1)

    shell = run(scenario, loaded=False)
    assert shell.metrics.bad_messages._value.get() == 0


def test_a_roll_call_on_the_step_subject_is_answered_by_a_beat() -> None:
    async def scenario(shell: Shell) -> None:
        await shell.hears(WorkerBeat, 2)
        for _ in range(3):
            before = len(shell.said(WorkerBeat))
            await shell.tell(RollCall("s"))
            await shell.hears(WorkerBeat, before + 1)
        await shell.tell(WorkerBeat("w", 7, 1, WorkerState.READY))

    shell = run(scenario)
    assert shell.metrics.bad_messages._value.get() == 1, "a beat is none of its business"


def test_its_beats_tell_its_pool_once_the_model_is_loaded() -> None:
    async def scenario(shell: Shell) -> None:
        beats = await shell.hears(WorkerBeat, 2)
        assert isinstance(beats[0], WorkerBeat) and beats[0].capacity is None
        assert isinstance(beats[1], WorkerBeat) and beats[1].capacity is not None
        assert beats[1].capacity.pool == "chat"

    run(scenario)


def test_it_is_ready_once_its_model_is_loaded_and_until_it_stops() -> None:
    async def loading(shell: Shell) -> None:
        assert _readiness(shell.service).status == 503

    async def loaded(shell: Shell) -> None:
        assert _readiness(shell.service).status == 200

    run(loading, loaded=False)
    assert _readiness(run(loaded).service).status == 503


def test_steps_that_lacked_memory_are_counted() -> None:
    async def scenario(shell: Shell) -> None:
        await shell.tell(Reset(1, "w", 7, 1))
        await shell.tell(plan(1, [3, 5]))
        await shell.hears(StepResult, 1)
        await until(lambda: shell.metrics.lacked_memory.value == 1, "one step that lacked memory", 60)

    run(scenario, runner=OnDevice)
