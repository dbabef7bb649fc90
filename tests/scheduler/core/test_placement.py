"""Which worker takes what waits: no herd, prefixes meet, nothing waits long for another worker, and no plan alone."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mesh_in_a_box import MS, Box, capacity, prompt_of, request
from test_core_properties import hold, seeded

from scheduler.core.fleet import Load, delay_us
from scheduler.core.limits import PLACEMENTS, Limits
from scheduler.core.placement import LEAST_PATIENCE_NS, MOST_PATIENCE_NS, key_of, patience_ns, rendezvous
from scheduler.core.sequence import Lack
from shared.messages import Capacity


def limits(**more: object) -> Limits:
    base: dict[str, object] = {"max_num_seqs": 16, "max_num_batched_tokens": 64, "prefill_chunk_limit": 32}
    return Limits(**base | more)  # type: ignore[arg-type]


def ask_all(box: Box) -> None:
    """What a driver does when something has come."""
    asked = list(box.queues)
    while asked:
        left = [name for name in box.core.whom_to_ask(asked, box.now) if box.plan(name) is None]
        asked = left if len(left) < len(asked) else []


def running(box: Box) -> list[int]:
    return [len(worker.running) for worker in box.core.workers.values()]


@settings(max_examples=40, deadline=None)
@given(st.integers(2, 6), st.integers(1, 90), st.sampled_from(PLACEMENTS), st.integers(0, 1 << 30))
def test_equal_cold_requests_are_spread_evenly_over_idle_workers(n: int, k: int, placement: str, seed: int) -> None:
    box = Box(limits(placement=placement), workers=n, num_blocks=400)
    count, rng = min(k, 16 * n), random.Random(seed)
    for index in range(count):
        own = [rng.randrange(997) for _ in range(20)]
        box.submit(request(f"r{index}", prompt=own, arrival_ns=index))
    ask_all(box)
    assert sum(running(box)) == count
    assert max(running(box)) - min(running(box)) <= 1


def test_a_prefix_goes_to_the_worker_that_holds_it_until_that_is_loaded_too_much() -> None:
    box = Box(limits(), workers=4, num_blocks=400, max_model_len=400)
    shared = prompt_of("shared", 160)
    box.submit(request("first", prompt=[*shared, 1], max_tokens=2))
    ask_all(box)
    (holder,) = [name for name, worker in box.core.workers.items() if worker.running]
    box.run()
    for index in range(3):
        box.submit(request(f"again{index}", prompt=[*shared, 2 + index], max_tokens=4, arrival_ns=box.now))
        ask_all(box)
        assert box.core.sequences_of(f"again{index}")[0].worker == holder
        box.run()
    for index in range(40):
        box.submit(request(f"many{index:02}", prompt=[*shared, 100 + index], max_tokens=20, arrival_ns=box.now + index))
    ask_all(box)
    assert running(box)[list(box.core.workers).index(holder)] == max(running(box))
    assert sum(running(box)) > max(running(box)), "the others take what would wait too long there"
    box.run()
    box.assert_tokens_right()
    box.assert_idle()


def test_equal_prefixes_that_come_together_meet_where_the_first_is_computed() -> None:
    box = Box(limits(), workers=4, num_blocks=400, max_model_len=400)
    prefixes = [prompt_of(f"prefix{'x' * group}", 160) for group in range(4)]
    for index in range(8):
        box.submit(request(f"r{index}", prompt=[*prefixes[index % 4], index], max_tokens=3, arrival_ns=index))
    box.run()
    where = [box.core.sequences_of(f"r{index}")[0].worker for index in range(8)]
    assert where[:4] == where[4:] and len(set(where)) == 4
    assert box.core.counters.prefix_hits >= 4 * 64, "it joins when half of it is cached"


def holding(max_tokens: int) -> tuple[Box, list[int], str, str]:
    """(two workers, a prefix, the one that computes a prompt with it, the other one)."""
    box = Box(limits(), workers=2, num_blocks=400, max_model_len=400)
    shared = prompt_of("shared", 160)
    box.submit(request("first", prompt=[*shared, 1], max_tokens=max_tokens))
    ask_all(box)
    (holder,) = [name for name, worker in box.core.workers.items() if worker.running]
    return box, shared, holder, next(name for name in box.core.workers if name != holder)


def test_nothing_is_left_to_others_for_longer_than_the_bound() -> None:
    """The one that it is left to never takes it: its messages are lost, say."""
    box, shared, holder, other = holding(max_tokens=2)
    box.run()
    box.submit(request("second", prompt=[*shared, 2], max_tokens=2, arrival_ns=box.now))
    (second,) = box.core.sequences_of("second")
    assert box.core.whom_to_ask([other, holder], box.now) == [holder]
    since = box.now
    while box.plan(other) is None:
        assert second.causes[-1][1] is Lack.WORKER
        box.now += MS
        assert box.now - since <= MOST_PATIENCE_NS
    assert second.worker == other and box.now - since >= LEAST_PATIENCE_NS
    assert box.now - since <= patience_ns(Load(box.core.workers[holder], 1, 0)) + MS
    box.run()
    box.assert_tokens_right()


def test_whoever_is_meant_to_take_it_and_does_not_look_keeps_others_from_it_no_longer_than_the_bound() -> None:
    """It hangs in a step, and nobody else has anything to do that would make it look."""
    box, shared, _, other = holding(max_tokens=20)
    while not box.ends and len(box.core.sequences_of("first")[0].tokens) < 165:
        box.step()
    box.submit(request("second", prompt=[*shared, 2], max_tokens=2, arrival_ns=box.now))
    since = box.now
    while other not in box.core.whom_to_ask([other], box.now):
        box.now += MS
        assert box.now - since <= MOST_PATIENCE_NS
    assert box.now - since >= LEAST_PATIENCE_NS


def test_what_was_left_to_a_worker_is_not_taken_to_be_left_to_the_next_of_its_name() -> None:
    """That one counts its steps from the same one on."""
    box = Box(limits(), workers=2, num_blocks=400)
    for index in range(6):
        box.submit(request(f"r{index}", prompt=[7 * index + step for step in range(20)], arrival_ns=index))
    box.now += MS
    box.plan("w0")
    queue = box.core.queues[box.core.workers["w1"].serves]
    assert {one.left_to for one in queue} == {"w1"} and queue.num_parked == len(queue) > 0
    assert queue.head(box.now) is min(queue, key=lambda one: one.seniority), "whoever looks on sees who is first"
    box.add_worker("w1", capacity(num_blocks=400), incarnation=2)
    assert not queue.num_parked
    box.apply(box.execute("w0"))
    box.now += MS
    box.plan("w0")
    box.core.check()
    ask_all(box)
    assert not queue
    box.run()
    box.assert_tokens_right()


@pytest.mark.parametrize("comes", ["to rest", "new"])
def test_who_comes_to_rest_is_asked_for_what_another_was_to_take(comes: str) -> None:
    """That one is in the middle of a long step, or hangs."""
    box = Box(limits(), workers=2, num_blocks=400, max_model_len=400)
    box.add_worker("small", capacity(num_blocks=400, max_model_len=50))  # rests, and can never take it
    for index in range(3):
        box.submit(request(f"r{index}", prompt=prompt_of("r" * (1 + index), 60), max_tokens=3))
    box.now += MS
    ask_all(box)
    hangs, other = sorted(("w0", "w1"), key=lambda name: len(box.core.workers[name].running))
    assert sorted(running(box)) == [0, 1, 2]
    while box.plan(hangs) is not None:
        pass
    result = box.execute(other)
    while len(result.ended) < 2:
        box.apply(result)
        box.plan(other)
        result = box.execute(other)
    box.submit(request("long", prompt=prompt_of("long", 80), max_tokens=3))
    assert box.core.whom_to_ask(["small"], box.now) == []
    if comes == "to rest":
        box.apply(result)
    else:
        other = "w2"
        box.add_worker(other, capacity(num_blocks=400, max_model_len=400))
    assert other in box.core.whom_to_ask(["small", other], box.now)
    assert box.plan(other) is not None
    assert box.core.sequences_of("long")[0].worker == other


@pytest.mark.parametrize("change", ["slots", "memory", "draining", "gone"])
def test_a_worker_that_cannot_take_it_now_holds_nobodys_place(change: str) -> None:
    box = Box(limits(max_num_seqs=2), workers=2, num_blocks=60, max_model_len=200)
    shared = prompt_of("shared", 120)
    box.submit(request("first", prompt=[*shared, 1], max_tokens=70))
    ask_all(box)
    (holder,) = [name for name, worker in box.core.workers.items() if worker.running]
    other = next(name for name in box.core.workers if name != holder)
    for _ in range(6):
        box.step(holder)
    if change == "slots":
        box.submit(request("beside", prompt=[*shared, 2], max_tokens=70, arrival_ns=box.now))
        ask_all(box)
        box.step(holder)
    elif change == "memory":
        box.core.workers[holder].pool.allocate(box.core.workers[holder].pool.num_free)
    elif change == "draining":
        box.core.worker_draining(holder)
    else:
        box.events += box.core.worker_lost(holder, "gone", box.now, suspect=False)
        del box.queues[holder]
    box.submit(request("second", prompt=[*shared, 3], max_tokens=3, arrival_ns=box.now))
    plan = box.plan(other)
    assert plan is not None and [start.request_id for start in plan.starts] == ["second"]


@given(st.integers(1, 12), st.sets(st.binary(min_size=8, max_size=16), min_size=200, max_size=300))
@settings(max_examples=20, deadline=None)
def test_a_worker_that_joins_moves_only_what_it_gets(n: int, contents: set[bytes]) -> None:
    def best(content: bytes, names: list[str]) -> str:
        return max(names, key=lambda name: rendezvous(content, key_of(name)))

    names = [f"worker-{index}" for index in range(n)]
    moved = 0
    for content in contents:
        before, after = best(content, names), best(content, [*names, "new"])
        moved += before != after
        assert after in (before, "new")
    assert moved <= 2.5 * len(contents) / (n + 1) + 12


def test_what_a_sequence_costs_grows_with_what_it_adds_and_with_who_is_there() -> None:
    box = Box(workers=1)
    worker = box.core.workers["w0"]
    usual = Load(worker, 4, rows=4, queued=100)
    cost = delay_us(usual, 50, 20)
    assert delay_us(usual, 40, 20) < cost < delay_us(usual, 50, 30)
    assert delay_us(Load(worker, 4, rows=3, queued=100), 50, 20) < cost
    assert delay_us(Load(worker, 4, rows=4, queued=90), 50, 20) < cost
    assert delay_us(Load(worker, 4, rows=4, queued=100, token_us=50), 50, 20) < cost


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_one_worker_plans_the_same_whatever_the_placement(placement: str) -> None:
    def plans(policy: str) -> list[object]:
        box = Box(limits(placement=policy, max_num_seqs=3), num_blocks=30)
        for index in range(10):
            box.submit(request(f"r{index}", prompt_len=3 + index, max_tokens=4 + index, arrival_ns=index))
        box.run()
        return list(box.plans)

    assert plans(placement) == plans("prefix")


def test_many_that_come_at_once_are_spread_although_not_each_is_looked_at() -> None:
    box = Box(limits(max_num_seqs=60, max_num_batched_tokens=2000), workers=4, num_blocks=2000)
    for index in range(200):
        box.submit(request(f"r{index}", arrival_ns=index))
    ask_all(box)
    assert sum(running(box)) == 200 and max(running(box)) - min(running(box)) <= 2


def test_workers_that_keep_blocks_in_other_forms_share_a_queue() -> None:
    box = Box(limits(), num_blocks=400)
    box.add_worker("fp8", Capacity("m", 128, 4, 400, 997, [5], kv_dtype="fp8"))
    box.add_worker("small", capacity(num_blocks=10))
    for index in range(12):
        box.submit(request(f"r{index}", prompt_len=60 if index % 2 else 8, max_tokens=9, arrival_ns=index))
    box.run()
    box.assert_tokens_right()
    box.assert_idle()


@pytest.mark.parametrize("asked", [False, True])
def test_what_is_left_to_another_one_later_is_parked_until_that_one_looks(asked: bool) -> None:
    """Whether or not somebody asked meanwhile who is waited for: a replay does not ask."""
    box = Box(limits(), workers=3, num_blocks=60)
    box.submit(request("r"))
    (one,) = box.core.sequences_of("r")
    (state,) = box.core._queues.values()
    state.fleet.leave_to("w1", one)
    state.fleet.park(one, MS)
    assert state.fleet.waited_for() == ["w1"]
    assert list(state.queue.order(MS)) == [one], "it has waited long enough"
    if asked:
        assert state.fleet.waited_for() == []
    state.fleet.leave_to("w2", one)
    state.fleet.park(one, 2 * MS)
    state.fleet.show("w1")
    assert one.parked
    assert state.fleet.waited_for() == ["w2"]
    state.fleet.show("w2")
    assert not one.parked


def test_what_asks_changes_nothing() -> None:
    def plans(asking: bool) -> list[object]:
        box = Box(limits(max_num_seqs=3), workers=3, num_blocks=60)
        for index in range(14):
            box.submit(request(f"r{index}", prompt=prompt_of("p" * (index % 4), 30), arrival_ns=index))
        for _ in range(60):
            for name in box.queues:
                if asking:
                    box.core.whom_to_ask(list(box.queues), box.now)
                box.step(name)
        return list(box.plans)

    assert plans(True) == plans(False)


@settings(max_examples=12, deadline=None)
@given(st.integers(0, 1 << 30), st.integers(2, 4), st.sampled_from(PLACEMENTS))
def test_invariants_hold_over_several_workers_that_come_and_go(seed: int, workers: int, placement: str) -> None:
    rng = random.Random(seed)
    box = Box(limits(placement=placement, max_num_seqs=4, max_num_batched_tokens=16), workers=workers, num_blocks=40)
    shared = [prompt_of("s" * (1 + group), 24) for group in range(3)]
    for index in range(30):
        own = [rng.randrange(997) for _ in range(rng.randrange(1, 30))]
        prompt = [*rng.choice(shared), *own] if rng.random() < 0.6 else own
        box.submit(request(f"r{index}", prompt=prompt, max_tokens=rng.randrange(1, 30), arrival_ns=box.now,
                           n=rng.choice([1, 1, 1, 2])))  # fmt: skip
        for name in rng.sample(sorted(box.queues), rng.randrange(1, workers + 1)):
            box.step(name)
        if rng.random() < 0.1:
            box.cancel(f"r{rng.randrange(index + 1)}")
    box.run()
    box.assert_tokens_right()
    box.assert_idle()


@pytest.mark.parametrize("seed", range(900, 912))
def test_nothing_is_lost_where_workers_and_messages_are(seed: int) -> None:
    setup, ops = seeded(seed)
    hold(setup | {"workers": 3, "policy": "continuous"}, ops)
