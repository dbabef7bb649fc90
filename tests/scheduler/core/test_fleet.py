"""Many workers: a choice compares a few of them, finds who holds a prefix, and what it goes by stays true."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mesh_in_a_box import Box, capacity, prompt_of, request

from scheduler.core import fleet as fleet_module
from scheduler.core.fleet import COMPARED, HOLDERS, Fleet
from scheduler.core.holders import Holders
from scheduler.core.limits import PLACEMENTS, Limits
from shared.messages import Outcome


def fleet_of(box: Box) -> Fleet:
    (state,) = box.core._queues.values()
    return state.fleet


def many(workers: int, **more: object) -> Box:
    limits = {"max_num_seqs": 8, "max_num_batched_tokens": 64, "prefill_chunk_limit": 32} | more
    return Box(Limits(**limits), workers=workers, num_blocks=60, max_model_len=200)  # type: ignore[arg-type]


def ask_all(box: Box) -> None:
    for name in box.core.whom_to_ask(list(box.queues), box.now):
        box.plan(name)


def test_of_many_workers_the_one_that_holds_a_prefix_is_found() -> None:
    box = many(3 * COMPARED)
    shared = [prompt_of("p" * (1 + group), 100) for group in range(6)]
    holders = []
    for group, prefix in enumerate(shared):
        box.submit(request(f"first{group}", prompt=[*prefix, 1], max_tokens=2))
        ask_all(box)
        holders.append(box.core.sequences_of(f"first{group}")[0].worker)
    box.run()
    assert len(set(holders)) > 1
    for group, prefix in enumerate(shared):
        box.submit(request(f"again{group}", prompt=[*prefix, 2], max_tokens=2, arrival_ns=box.now))
        ask_all(box)
        assert box.core.sequences_of(f"again{group}")[0].worker == holders[group]
    box.run()
    box.assert_tokens_right()


def test_a_burst_over_many_workers_is_spread() -> None:
    box = many(3 * COMPARED)
    for index in range(3 * COMPARED):
        box.submit(request(f"r{index}", prompt=[index, 3, 5, 7, 11], arrival_ns=index))
        ask_all(box)
    assert [len(worker.running) for worker in box.core.workers.values()] == [1] * 3 * COMPARED
    box.run()
    box.assert_tokens_right()


def test_what_is_compared_does_not_grow_with_the_workers() -> None:
    box = many(4 * COMPARED)
    shared = prompt_of("shared", 100)
    for index in range(2 * COMPARED):
        box.submit(request(f"r{index}", prompt=[*shared, index], max_tokens=3, arrival_ns=index))
        ask_all(box)
    box.run()
    box.submit(request("last", prompt=[*shared, 99], arrival_ns=box.now))
    (last,) = box.core.sequences_of("last")
    fleet = fleet_of(box)
    names = fleet.likely(next(iter(box.core.workers.values())).prompt_chain(last), last.number)
    assert len(names) <= COMPARED
    assert fleet.holders is not None and any(name in fleet.holders.of(last.chain[0]) for name in names)


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 1 << 30), st.sampled_from(PLACEMENTS))
def test_orders_and_index_stay_true_while_workers_come_and_go(seed: int, placement: str) -> None:
    """``check`` runs after every result. Few are compared, so that five workers are many."""
    rng = random.Random(seed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fleet_module, "COMPARED", 4)
        patch.setattr(fleet_module, "HOLDERS", 1)
        patch.setattr(fleet_module, "ROOMY", 1)
        box = many(5, placement=placement, max_num_seqs=3)
        shared = [prompt_of("s" * (1 + group), 24) for group in range(3)]
        for index in range(25):
            prompt = [*rng.choice(shared), *(rng.randrange(997) for _ in range(rng.randrange(1, 12)))]
            box.submit(request(f"r{index}", prompt=prompt, max_tokens=rng.randrange(1, 20), arrival_ns=box.now))
            for name in rng.sample(sorted(box.queues), rng.randrange(1, len(box.queues) + 1)):
                box.step(name)
            if rng.random() < 0.1:
                box.cancel(f"r{rng.randrange(index + 1)}")
            if rng.random() < 0.15 and len(box.queues) > 2:
                gone = rng.choice(sorted(box.queues))
                box.events += box.core.worker_lost(gone, "gone", box.now, suspect=False)
                del box.queues[gone]
            elif rng.random() < 0.15:
                box.add_worker(f"new{index}", next(iter(box.core.workers.values())).capacity)
            box.core.check()
        box.run()
        box.assert_tokens_right()


def test_the_best_holders_are_those_of_the_longest_prefix() -> None:
    holders = Holders()
    chain = [bytes([place]) * 8 for place in range(40)]
    for name, depth in (("long", 40), ("half", 20), ("one", 1), ("full", 40)):
        for content in chain[:depth]:
            holders.add(content, name)
    able = {"long", "half", "one"}.__contains__
    assert list(holders.best(chain, 1, 0, able)) == ["long"]
    assert list(holders.best(chain, HOLDERS, 0, able)) == ["long", "half", "one"]
    for content in chain:
        holders.discard(content, "full")
        holders.discard(content, "long")
    assert list(holders.best(chain, HOLDERS, 7, able)) == ["half", "one"]
    assert len(holders) == 20 and holders.of(chain[30]) == ()


def test_requests_are_judged_by_one_worker_of_each_kind_that_is_not_draining() -> None:
    box = many(20)
    assert len(fleet_of(box).capacities) == 1
    box.add_worker("larger", capacity(num_blocks=90, max_model_len=300))
    assert sorted(one.num_blocks for one in fleet_of(box).capacities) == [60, 90]
    assert box.submit(request("long", prompt_len=250)).outcome is Outcome.ACCEPTED
    box.core.worker_draining("larger")
    assert [one.num_blocks for one in fleet_of(box).capacities] == [60]
    assert box.submit(request("longer", prompt_len=251)).outcome is Outcome.TOO_LONG
    alone = many(1)
    alone.core.worker_draining("w0")
    assert alone.submit(request("r")).outcome is Outcome.NO_WORKER
