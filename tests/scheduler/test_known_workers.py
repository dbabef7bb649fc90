"""What is remembered of workers by their names: of those that are gone too, and never of too many."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from mesh_stack import until
from service_mesh import CAPACITY, SUBJECTS, ServiceMesh, run

from scheduler import known_workers, term, workers
from scheduler.known_workers import KnownWorkers
from shared.messages import PageSnapshot, Reset, WorkerBeat, WorkerState, encode


@pytest.fixture(autouse=True)
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(known_workers, "MOST_GONE", 3)


def test_those_that_are_there_and_the_last_that_went_are_remembered() -> None:
    known = KnownWorkers()
    for number in range(8):
        known.tell(f"w{number}", 7)
        known.lose(f"w{number}", 7, 10 * number)
    known.tell("w1", 7)  # it is there again
    known.trim({"w1"}, 1)
    assert len(known) == 4
    assert [number for number in range(8) if known.told(f"w{number}", 7)] == [1, 5, 6, 7]
    assert (known.first_step("w7", 7), known.first_step("w7", 8)) == (71, 41), "another process has no late results"


def test_a_refusal_is_news_once_for_each_process() -> None:
    known = KnownWorkers()
    assert [known.refuse("w", 1), known.refuse("w", 1), known.refuse("w", 2)] == [True, False, True]


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(1, 3), st.integers(1, 50)), max_size=60))
def test_no_step_of_a_batch_comes_again_whatever_is_forgotten(batches: list[tuple[int, int, int]]) -> None:
    known = KnownWorkers()
    steps: dict[tuple[int, int], int] = {}  # (worker, incarnation) -> the highest that it was ever given
    for worker, incarnation, length in batches:
        first = known.first_step(f"w{worker}", incarnation)
        newest = max((one for name, one in steps if name == worker), default=0)
        if incarnation < newest:
            continue  # of a process that was followed by another one
        assert first > steps.get((worker, incarnation), 0)
        known.tell(f"w{worker}", incarnation)
        steps[worker, incarnation] = first + length - 1
        known.lose(f"w{worker}", incarnation, first + length)
        known.trim((), 0)
        assert len(known) <= 3


def test_a_worker_that_was_forgotten_comes_back_in_a_new_epoch(monkeypatch: pytest.MonkeyPatch) -> None:
    """This leader's resets tell it the epoch, as another leader's of that epoch would have."""
    monkeypatch.setattr(workers, "GREET_AGAIN_S", 0.0)
    monkeypatch.setattr(term, "TICK_S", 0.02)

    async def scenario(mesh: ServiceMesh) -> None:
        leader = await mesh.scheduler()
        await until(lambda: leader.of("leading"), "a leader")
        epoch = leader.service.core.epoch
        known = leader.service._term._workers._known  # type: ignore[union-attr]

        async def beats(name: str, epoch: int = 0) -> None:
            beat = WorkerBeat(name, 1, epoch, WorkerState.READY, CAPACITY)
            await mesh.bus.publish(SUBJECTS.beat("worker", name), encode(beat))

        async def resets(name: str) -> Reset:
            await until(lambda: mesh.sent(Reset, SUBJECTS.step(name)), f"a reset for {name}")
            reset = mesh.sent(Reset, SUBJECTS.step(name))[-1]
            assert isinstance(reset, Reset)
            return reset

        await beats("old")
        reset = await resets("old")
        await mesh.bus.publish(SUBJECTS.result(epoch), encode(PageSnapshot(epoch, "old", 1, reset.step)))
        await until(lambda: leader.workers == ["old"], "the worker to be known")
        await until(lambda: not leader.workers, "the worker to be lost: it says no more")
        for number in range(9):
            await beats(f"w{number}")
            await resets(f"w{number}")
        await until(lambda: len(known) == 3, "what was never heard of again to be forgotten")
        assert leader.service.core.epoch == epoch
        await beats("old", epoch)
        await until(lambda: leader.service.core.epoch > epoch and leader.of("leading"), "a new epoch")
        await beats("old", epoch)
        await until(lambda: mesh.sent(Reset)[-1].epoch > epoch, "its reset")  # type: ignore[union-attr]

    run(scenario, worker_timeout_s=0.5)
