"""Pages of a device go to another worker's, and back into a device's, as late as a device may work."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable

import pytest
import torch
from device_box import make_runner
from hash_model import EOS, expected
from rehearsal_port import RehearsalPort

from shared.messages import Capacity, Fetch, Fetched, Sampling, SlotStart, StepPlan, pack_tokens
from worker.batch import Batch
from worker.config import WorkerConfig
from worker.device import transfers
from worker.device.runner import DeviceRunner
from worker.ledger import Standing
from worker.step_loop import Executed, StepLoop
from worker.transfer import pages as pages_module
from worker.transfer.errors import TransferFailed
from worker.transfer.exchange import Exchange, Listening
from worker.transfer.fetches import MOST_AT_ONCE

CAPACITY = Capacity("m", 64, 4, 40, 29, [EOS])
PROMPT = [(3 * i) % 29 for i in range(18)]
SAMPLING = Sampling(1, 12, ignore_eos=True)


def direct(work: Callable[[], object]) -> object:
    return work()


def filled(port: RehearsalPort, seed: int) -> DeviceRunner:
    runner = make_runner(port, CAPACITY)
    rng = torch.Generator().manual_seed(seed)
    for pool in runner.model.caches[0].tensors():
        pool.copy_(torch.randint(1 << 40, pool.shape, generator=rng))
    return runner


@pytest.mark.parametrize("seed", [None, *range(8)])
@pytest.mark.parametrize("group", [1, 3, 40])
def test_pages_come_as_they_are_on_the_device(
    seed: int | None, group: int, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    ports = RehearsalPort(seed), RehearsalPort(seed)
    there, here = filled(ports[0], 1), filled(ports[1], 2)
    monkeypatch.setattr(pages_module, "GROUP_BYTES", group * there.pages.page_bytes)
    monkeypatch.setattr(transfers, "GROUP_BYTES", group * there.pages.page_bytes)
    source, target = there.page_memory(), here.page_memory()
    assert source.form.difference(target.form) == "" and source.page_bytes == 2 * 4 * 8
    rng = random.Random(seed)
    taken, given = rng.choices(range(1, 41), k=17), rng.sample(range(1, 41), 17)
    before = [pool.clone() for pool in here.model.caches[0].tensors()]
    outgoing, incoming = source.outgoing(taken, direct), target.incoming(given, direct)
    for leaving, entering in zip(outgoing, incoming, strict=True):
        for ours, theirs in zip(leaving, entering, strict=True):
            theirs[:] = ours
    for pool, old, other in zip(
        here.model.caches[0].tensors(), before, there.model.caches[0].tensors(), strict=True
    ):  # fmt: skip
        old[given] = other[taken]
        assert torch.equal(pool, old)


def test_a_transfer_that_ends_early_writes_no_more_and_leaves_its_memory_to_others() -> None:
    port = RehearsalPort()
    runner = filled(port, 1)
    memory = runner.page_memory()
    before = [pool.clone() for pool in runner.model.caches[0].tensors()]
    for _ in range(2 * transfers.STAGES):
        incoming = memory.incoming([1, 2], direct)
        next(incoming)[0][:] = 7
        incoming.close()  # type: ignore[attr-defined]
    port.synchronize()
    for pool, old in zip(runner.model.caches[0].tensors(), before, strict=True):
        assert torch.equal(pool, old)
    assert len({region.ctypes.data for region in memory.regions()}) == 2 * transfers.STAGES


def test_a_fetch_never_waits_for_memory_that_others_fetch_through() -> None:
    memory = filled(RehearsalPort(), 1).page_memory()
    leaving = [memory.outgoing([1], direct) for _ in range(transfers.STAGES)]
    entering = [memory.incoming([2], direct) for _ in range(MOST_AT_ONCE)]
    stages = [next(one)[0].ctypes.data for one in [*leaving, *entering]]
    assert len(set(stages)) == len(stages)


def test_a_device_without_memory_for_it_fails_the_transfer_alone() -> None:
    port = RehearsalPort()
    memory = filled(port, 1).page_memory()

    def lacking(work: Callable[[], object]) -> object:
        raise port.out_of_memory("out of memory. Tried to allocate")

    with pytest.raises(TransferFailed, match="the device lacks memory for it"):
        next(memory.outgoing([1], lacking))
    assert next(memory.outgoing([1], direct))


class Device:
    """A worker's step loop on a device, with its exchange. The test's thread is the step loop's."""

    def __init__(self, name: str, seed: int | None) -> None:
        self.port = RehearsalPort(seed)
        self.runner = make_runner(self.port, CAPACITY)
        self.name = name
        self.executed: list[Executed] = []
        self.answers: list[Fetched] = []
        self._calls: list[Callable[[], None]] = []
        self._called = threading.Lock()
        memory = self.runner.page_memory()
        config = WorkerConfig(transfer_host="127.0.0.1", transfer_by="tcp")
        self.exchange = Exchange(
            name, 7, memory, Listening(config), lambda: Standing(1, 1, self.loop.last_step), self._call,
            self.answers.append, lambda *_: None,
        )  # fmt: skip
        batch = Batch(4, 40, 64, frozenset([EOS]))
        self.loop = StepLoop(
            self.runner, batch, lambda _: True, self.executed.append, lambda *_: None, self.exchange.fetches
        )  # fmt: skip

    def _call(self, work: Callable[[], None]) -> None:
        """Its device is rehearsed: nobody else may even look at its events meanwhile."""
        done = threading.Event()

        def run() -> None:
            work()
            self.port.synchronize()
            done.set()

        with self._called:
            self._calls.append(run)
        assert done.wait(60)

    def work(self) -> None:
        with self._called:
            calls, self._calls = self._calls, []
        for call in calls:
            call()

    def plan(self, step: int, **fields: object) -> None:
        self.loop._take(StepPlan(1, self.name, 7, step, **fields))  # type: ignore[arg-type]

    def tokens(self) -> list[int]:
        self.loop._land_all()
        assert not any(one.fault for one in self.executed)
        return [token for one in self.executed for token in one.result.tokens]


@pytest.mark.parametrize("seed", [None, *range(5)])
def test_a_sequence_goes_on_at_another_device(seed: int | None) -> None:
    a, b = Device("a", seed), Device("b", seed)
    start = SlotStart(0, "r", 1, 0, "g", pack_tokens(PROMPT), len(PROMPT), [3, 4, 5, 6, 9], SAMPLING)
    a.plan(1, starts=[start], chunks=[(0, 10)])
    a.plan(2, chunks=[(0, 8)])
    want = expected(PROMPT, SAMPLING, 0)
    assert a.tokens() == want[:1]
    pages = [(3, 11), (4, 12), (5, 13), (6, 14), (9, 15)]
    # The plan before it is in flight, and holds the page that the fetch will write to until it is over.
    other = SlotStart(1, "s", 1, 0, "g", pack_tokens(PROMPT), len(PROMPT), [15, 21, 22, 23, 24], SAMPLING)
    b.plan(1, starts=[other], chunks=[(1, 18)])
    b.plan(2, drops=[1], fetches=[Fetch(1, "a", 7, a.exchange.addresses, pages, 2)])
    b.loop._land_all()
    patience = time.monotonic() + 60
    while not b.answers:
        assert time.monotonic() < patience
        a.work()
        b.work()
        time.sleep(0.001)
    assert b.answers[0].reason == ""
    went_on = SlotStart(
        0, "r", 1, 0, "g", pack_tokens([*PROMPT, want[0]]), len(PROMPT), [11, 12, 13, 14, 15], SAMPLING,
        computed=len(PROMPT),
    )  # fmt: skip
    b.plan(3, starts=[went_on], chunks=[(0, 1)], drop_fetches=[1])
    b.plan(4, decodes=[0])
    assert b.tokens()[1:] == want[1:3]
    for one in (a, b):
        one.exchange.close()
