"""The step loop with a runner whose steps overlap: what is launched, fetched and delivered when."""

from __future__ import annotations

import queue
import threading
from dataclasses import dataclass, field

from shared.messages import Capacity, Fetch, Reset, Sampling, SlotStart, StepPlan, pack_tokens
from shared.page_hash import DIGEST_BYTES
from worker.batch import Batch, Sampled, Step
from worker.page_book import PageBook
from worker.step_loop import Executed, StepLoop

EOS = 9


def start(slot: int, name: str = "", pages: tuple[int, ...] = (1, 2), **how: int) -> SlotStart:
    return SlotStart(slot, name or f"r{slot}", 1, 0, "g", pack_tokens(range(5)), 5, list(pages), Sampling(1, 4, **how))


def plan(step: int, **fields: object) -> StepPlan:
    return StepPlan(1, "w", 1, step, backlog=True, **fields)  # type: ignore[arg-type]


@dataclass
class Flight:
    runner: Runner
    number: int
    step: Step
    needs_earlier: bool = False
    swap_us: int = 0
    landed: threading.Event = field(default_factory=threading.Event)

    def choose(self) -> None:
        self.runner.calls.append(f"choose {self.number}")

    def done(self) -> bool:
        return self.landed.is_set()

    def result(self) -> Sampled:
        self.runner.calls.append(f"result {self.number}")
        if self.number in self.runner.failing:
            raise RuntimeError("device-side assert")
        tokens = self.runner.tokens
        return Sampled([tokens.pop(0) for run in self.step.runs if run.samples and run.staged])

    def busy_us(self) -> int:
        return 1000 * self.number


class Runner:
    def __init__(self, tokens: list[int]) -> None:
        self.capacity = Capacity("m", 64, 4, 40, 997, [EOS])
        self.kv_bytes_copied = self.swap_us = 0
        self.tokens = tokens
        self.calls: list[str] = []
        self.flights: list[Flight] = []
        self.failing: set[int] = set()
        self.looks_back: set[int] = set()

    def forward(self, batch: Batch, step: Step) -> Sampled:
        raise AssertionError("its steps overlap")

    def launch(self, batch: Batch, step: Step) -> Flight:
        number = len(self.flights) + 1
        self.calls.append(f"launch {number}")
        self.flights.append(Flight(self, number, step, number in self.looks_back))
        return self.flights[-1]


class Stand:
    """A loop without its thread."""

    def __init__(self, *tokens: int) -> None:
        self.runner = Runner(list(tokens))
        self.executed: list[Executed] = []
        self.known: list[list[int]] = []
        self.current = True
        self.batch = Batch(4, 40, 64, frozenset({EOS}))
        self.loop = StepLoop(self.runner, self.batch, lambda _: self.current, self.executed.append, self._answer)

    def _answer(self, reset: Reset, pages: PageBook) -> None:
        self.known.append(sorted(pages._hash_of))

    def take(self, *items: StepPlan | Reset) -> list[str]:
        """What the loop calls meanwhile."""
        before = len(self.runner.calls)
        for item in items:
            self.loop._take(item)
        return self.runner.calls[before:]


FIRST = plan(1, starts=[start(0)], chunks=[(0, 5)])


def test_a_step_is_launched_before_the_tokens_of_the_last_one_are_fetched() -> None:
    stand = Stand(3, 4)
    assert stand.take(FIRST) == ["launch 1", "choose 1"] and not stand.executed
    assert stand.loop.executing == 1
    assert stand.take(plan(2, decodes=[0])) == ["launch 2", "choose 2", "result 1"]
    assert stand.loop.executing == 2 and [one.plan.step for one in stand.executed] == [1]
    stand.loop._land_all()
    first, second = (one.result for one in stand.executed)
    assert first.tokens == [3] and second.tokens == [4]
    assert second.wait_us == second.gap_us == 0, "a plan that came while a step ran was waited for by nobody"
    assert second.forward_us == 2000, "the device's time"
    assert first.forward_us >= 1000 and not stand.loop.executing


def test_sampling_that_looks_back_waits_for_the_tokens_and_not_the_forward_pass() -> None:
    stand = Stand(3, 4)
    stand.runner.looks_back = {2}
    stand.take(FIRST)
    assert stand.take(plan(2, decodes=[0])) == ["launch 2", "result 1", "choose 2"]


def test_a_plan_that_adds_to_tokens_waits_for_them() -> None:
    stand = Stand(0, 0)
    stand.take(plan(1, starts=[start(0)], chunks=[(0, 5)]))
    assert stand.take(plan(2, feeds=[(0, 7)], decodes=[0]))[:2] == ["result 1", "launch 2"]


def test_a_reset_comes_after_what_is_in_flight() -> None:
    stand = Stand(3, 4)
    stand.take(FIRST, plan(2, decodes=[0]))
    assert stand.take(Reset(1, "w", 1, 3)) == ["result 2"]
    assert [one.result.tokens for one in stand.executed] == [[3], [4]] and stand.known == [[]]
    assert not stand.batch.slots and stand.loop.num_slots == 0


def test_a_plan_of_an_older_epoch_is_not_launched_and_what_is_in_flight_lands() -> None:
    stand = Stand(3, 4)
    stand.take(FIRST)
    stand.current = False
    assert stand.take(plan(2, decodes=[0])) == []
    stand.loop._land_all()
    assert [one.result.tokens for one in stand.executed] == [[3]]


def test_a_step_that_fails_takes_the_one_behind_it_along() -> None:
    stand = Stand(3, 4)
    stand.runner.failing = {1}
    stand.take(FIRST, plan(2, decodes=[0]), plan(3, decodes=[0]))
    assert [(one.plan.step, bool(one.fault), one.skipped) for one in stand.executed] == [
        (1, True, False), (2, True, True), (3, True, True)
    ]  # fmt: skip
    assert stand.runner.calls[-2:] == ["result 1", "result 2"], "what the second one uses is in use until it has ended"
    assert not stand.loop._in_flight and not stand.loop.executing
    stand.runner.tokens = [6]
    stand.take(Reset(1, "w", 1, 4), plan(4, starts=[start(0)], chunks=[(0, 5)]))
    stand.loop._land_all()
    assert stand.executed[-1].result.tokens == [6]


def test_a_loop_whose_device_is_lost_ends() -> None:
    class Lost(Runner):
        lacked_memory = 0

        def answers(self) -> bool:
            return False

    runner = Lost([3])
    runner.failing = {1}
    told: queue.SimpleQueue[Executed] = queue.SimpleQueue()
    loop = StepLoop(runner, Batch(4, 40, 64, frozenset({EOS})), lambda _: True, told.put, lambda *_: None)
    loop.start()
    loop.put(FIRST)
    while not runner.flights:
        pass
    runner.flights[0].landed.set()
    assert "device-side assert" in told.get(timeout=60).fault
    loop._thread.join(60)
    assert not loop.alive


def test_a_step_that_can_not_be_staged_leaves_the_one_before_it_whole() -> None:
    stand = Stand(3)
    stand.take(FIRST, plan(2, decodes=[17]))
    whole, failed = stand.executed
    assert whole.result.tokens == [3] and not whole.fault
    assert "slot 17 is empty" in failed.fault and not failed.skipped


def test_a_sequence_that_ended_in_the_step_before_its_drop_has_ended_once() -> None:
    stand = Stand(EOS)
    stand.take(FIRST, plan(2, drops=[0]))
    stand.loop._land_all()
    ended, dropping = stand.executed
    assert [slot.index for slot in ended.finished] == [0] and not dropping.dropped


def test_a_page_that_the_next_step_gives_away_is_not_trusted_when_the_last_one_lands() -> None:
    stand = Stand(3, 4)
    hashes = [(page, bytes([page]) * DIGEST_BYTES) for page in (1, 5)]
    stand.take(plan(1, starts=[start(0), start(1, pages=(5, 6))], chunks=[(0, 4), (1, 4)], hashes=hashes))
    stand.take(plan(2, drops=[0], starts=[start(0, "other", (7, 1))], chunks=[(0, 5)]))
    stand.loop._land_all()
    stand.take(Reset(1, "w", 1, 3))
    assert stand.known == [[5]]


def test_a_result_leaves_as_soon_as_it_is_there_though_no_plan_comes() -> None:
    runner = Runner([3, 4])
    told: queue.SimpleQueue[Executed] = queue.SimpleQueue()
    loop = StepLoop(runner, Batch(4, 40, 64, frozenset({EOS})), lambda _: True, told.put, lambda *_: None)
    loop.start()
    loop.put(FIRST)
    while not runner.flights:
        pass
    assert told.empty()
    runner.flights[0].landed.set()
    assert told.get(timeout=60).result.tokens == [3]
    loop.put(plan(2, decodes=[0]))
    loop.stop(60)  # lands what is in flight
    assert told.get(timeout=60).result.tokens == [4]


class Orders:
    """What a loop says of fetches, among its runner's calls."""

    def __init__(self, calls: list[str]) -> None:
        self.calls = calls

    def begin(self, plan: StepPlan) -> None:
        self.calls.append(f"fetch {[one.fetch for one in plan.fetches]} drop {plan.drop_fetches}")

    def end(self) -> None:
        self.calls.append("end fetches")


def fetching(*tokens: int) -> Stand:
    stand = Stand(*tokens)
    stand.loop._fetching = Orders(stand.runner.calls)
    return stand


def fetch(number: int) -> Fetch:
    return Fetch(number, "v", 1, [], [(1, 30)], 1)


def test_fetches_begin_before_their_step_where_nothing_is_in_their_way() -> None:
    stand = fetching(3)
    first = plan(1, starts=[start(0)], chunks=[(0, 5)], fetches=[fetch(1)], drop_fetches=[9])
    assert stand.take(first) == ["fetch [1] drop [9]", "launch 1", "choose 1"]
    stand.loop._land_all()
    assert stand.take(plan(2, drop_fetches=[1])) == ["fetch [] drop [1]"], "a step that runs nothing has them too"
    assert stand.take(plan(3)) == []


def test_fetches_wait_for_the_steps_before_theirs() -> None:
    """Those may still read and write where they will write."""
    stand = fetching(3, 4)
    stand.take(FIRST)
    taken = stand.take(plan(2, decodes=[0], fetches=[fetch(1)]))
    assert taken == ["launch 2", "choose 2", "result 1", "fetch [1] drop []"]
    before = len(stand.runner.calls)
    stand.loop._land_all()
    assert stand.runner.calls[before:] == ["result 2"], "once"


def test_fetches_wait_for_the_pages_that_their_own_step_moves() -> None:
    stand = fetching(3, 4)
    taken = stand.take(plan(1, starts=[start(0)], chunks=[(0, 5)], copies=[(1, 30)], fetches=[fetch(1)]))
    assert taken == ["launch 1", "choose 1"]
    taken = stand.take(plan(2, decodes=[0], copies=[(30, 31)], fetches=[fetch(2)]))
    assert taken == ["launch 2", "choose 2", "result 1", "fetch [1] drop []"]
    before = len(stand.runner.calls)
    stand.loop._land_all()
    assert stand.runner.calls[before:] == ["result 2", "fetch [2] drop []"]


def test_a_reset_ends_fetches_before_it_is_answered() -> None:
    stand = fetching(3)
    stand.take(plan(1, starts=[start(0)], chunks=[(0, 5)], copies=[(1, 30)], fetches=[fetch(1)]))
    stand.loop._answer = lambda *_: stand.runner.calls.append("answer")
    assert stand.take(Reset(1, "w", 1, 2)) == ["result 1", "fetch [1] drop []", "end fetches", "answer"]


def test_fetches_of_a_step_that_fails_or_is_skipped_do_not_begin() -> None:
    stand = fetching()
    stand.runner.failing = {1}
    stand.take(FIRST)
    assert stand.take(plan(2, decodes=[0], fetches=[fetch(1)])) == ["launch 2", "choose 2", "result 1", "result 2"]
    assert stand.take(plan(3, fetches=[fetch(2)])) == []
    assert [bool(one.fault) for one in stand.executed] == [True] * 3


def test_what_others_ask_of_the_thread_is_done_between_steps() -> None:
    stand = Stand(3)
    done: list[int] = []
    stand.loop.call(lambda: done.append(stand.loop.last_step))
    stand.loop.put(FIRST)
    stand.loop.call(lambda: done.append(stand.loop.executing))
    stand.loop._queue.put(None)
    stand.loop._run()
    assert done == [0, 1]


def test_pages_that_a_fetch_writes_to_are_not_taken_for_what_they_were() -> None:
    stand = fetching(3)
    known = [(1, bytes(DIGEST_BYTES)), (2, bytes(DIGEST_BYTES))]
    stand.take(plan(1, starts=[start(0)], chunks=[(0, 5)], hashes=known))
    stand.take(plan(2, drops=[0], fetches=[Fetch(1, "v", 1, [], [(7, 2)], 1)]), Reset(1, "w", 1, 3))
    assert stand.known == [[1]]
