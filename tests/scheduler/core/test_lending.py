"""Idle workers take what another pool has no room for, within the rules; a pool that loses its workers gives away."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mesh_in_a_box import MS, Box, capacity, request
from test_core_properties import EXAMPLES

from scheduler.core.events import Failed
from scheduler.core.lending import LENT_SHARE
from scheduler.core.limits import Limits
from scheduler.core.pools import QueueKey
from scheduler.core.sequence import Status
from shared.messages import Outcome

POOLS = "chat:-8,long:9-"
CHAT = QueueKey("m", "chat")
SLOTS = 4


def mesh(chat: int = 1, long: int = 1, blocks: int = 64, **more: object) -> Box:
    base: dict[str, object] = {
        "max_num_seqs": SLOTS, "max_num_batched_tokens": 16, "prefill_chunk_limit": 8, "pools": POOLS,
    }  # fmt: skip
    box = Box(Limits(**base | more), workers=0)  # type: ignore[arg-type]
    for pool, count in (("chat", chat), ("long", long)):
        for index in range(count):
            box.add_worker(f"{pool}{index}", capacity(blocks, pool=pool))
    return box


def chats(box: Box, count: int, max_tokens: int = 6, begin: int = 0) -> None:
    for index in range(begin, begin + count):
        reply = box.submit(request(f"c{index:02}", 5, max_tokens, arrival_ns=index, seed=index))
        assert reply.outcome is Outcome.ACCEPTED


def ask_all(box: Box) -> None:
    """What a driver does when something has come."""
    asked = list(box.queues)
    while asked:
        idle = [name for name in asked if not box.core.workers[name].in_flight]
        for name in box.core.whom_to_ask(asked, box.now):
            box.plan(name)
        left = [name for name in idle if not box.core.workers[name].in_flight]
        asked = left if len(left) < len(idle) else []


def on(box: Box, worker: str) -> list[str]:
    return [one.request_id for one in box.core.workers[worker].running]


def test_an_idle_worker_of_longer_prompts_takes_what_its_own_has_no_room_for() -> None:
    box = mesh()
    chats(box, 10)
    ask_all(box)
    assert len(on(box, "chat0")) == SLOTS and len(on(box, "long0")) == int(SLOTS * LENT_SHARE)
    assert on(box, "long0") == ["c04", "c05"], "in order"
    box.run()
    box.assert_tokens_right()
    box.assert_idle()
    assert {box.core.sequences_of(f"c{index:02}")[0].home.key.pool for index in range(10)} == {"chat"}


@pytest.mark.parametrize("asked_first", ["long0", "chat0"])
def test_it_takes_nothing_while_its_own_has_room(asked_first: str) -> None:
    box = mesh()
    chats(box, SLOTS)
    box.plan(asked_first)
    box.plan("chat0")
    assert len(on(box, "chat0")) == SLOTS and not on(box, "long0")


def test_long_work_never_fills_a_worker_of_shorter_prompts() -> None:
    box = mesh(chat=3, pool_lend="long>chat")
    for index in range(12):
        box.submit(request(f"r{index}", 20, 20, arrival_ns=index))
    for _ in range(200):
        ask_all(box)
        for name in list(box.queues):
            box.step(name)
        assert not any(on(box, f"chat{index}") for index in range(3))
    box.run()


def test_nobody_lends_without_a_rule_nor_while_work_of_its_own_is_there() -> None:
    box = mesh(pool_lend="")
    chats(box, 10)
    ask_all(box)
    assert not on(box, "long0")
    box = mesh()
    box.submit(request("own", 20, 30))
    ask_all(box)
    chats(box, 10)
    ask_all(box)
    assert on(box, "long0") == ["own"] and len(on(box, "chat0")) == SLOTS
    box.run()
    box.assert_tokens_right()


def test_its_own_next_request_finds_room_beside_what_is_lent() -> None:
    box = mesh(blocks=24)
    chats(box, 12, max_tokens=40)
    for _ in range(20):
        ask_all(box)
        for name in list(box.queues):
            box.step(name)
    lent = on(box, "long0")
    assert lent and len(lent) <= SLOTS * LENT_SHARE
    box.submit(request("own", 12, 8, arrival_ns=box.now))
    assert box.plan("long0") is not None or box.core.workers["long0"].in_flight
    for _ in range(3):
        box.step("long0")
    assert "own" in on(box, "long0") and set(lent) <= set(on(box, "long0")) | set(box.ends)
    before = len(box.core.queues[CHAT])
    for _ in range(3):
        box.step("long0")
    assert len(box.core.queues[CHAT]) == before, "with work of its own it takes nothing more"
    box.run()
    box.assert_tokens_right()


def test_what_a_lender_cannot_hold_keeps_it_from_no_other_pool() -> None:
    box = Box(Limits(max_num_seqs=2, max_num_batched_tokens=16, pools="a:-8,b:9-16,c:17-"), workers=0)
    for pool in "abc":
        box.add_worker(f"{pool}0", capacity(pool=pool, adapters=["x"] if pool == "b" else []))
    for number in range(3):
        box.submit(request(f"b{number}", 12, 20, adapter="x", arrival_ns=number))
        box.submit(request(f"a{number}", 5, 20, arrival_ns=number))
    ask_all(box)
    assert (on(box, "a0"), on(box, "b0")) == (["a0", "a1"], ["b0", "b1"])
    assert on(box, "c0") == ["a2"]
    box.run()
    box.assert_tokens_right()


def test_what_waits_is_shared_out_among_the_lenders() -> None:
    box = mesh(long=3)
    chats(box, SLOTS + 3)
    ask_all(box)
    assert [len(on(box, f"long{index}")) for index in range(3)] == [1, 1, 1]


def test_a_lender_neither_blocks_nor_passes_anybody() -> None:
    """The head is too large for what the lender may still give; what is behind it would fit."""
    box = Box(Limits(max_num_seqs=8, max_num_batched_tokens=64, pools="chat:-60,long:61-"), workers=0)
    box.add_worker("chat0", capacity(20, pool="chat"))
    box.add_worker("long0", capacity(18, pool="long"))
    box.submit(request("first", 60, 6, arrival_ns=0))
    box.submit(request("lent", 24, 8, arrival_ns=1))
    box.submit(request("head", 56, 6, arrival_ns=2))
    box.submit(request("behind", 4, 2, arrival_ns=3))
    box.plan("chat0")
    assert on(box, "chat0") == ["first", "behind"], "its own queue is broken by its own rules"
    assert box.core.queues[CHAT].blocked is box.core.sequences_of("lent")[0]
    box.submit(request("last", 4, 2, arrival_ns=4))
    box.plan("long0")
    assert on(box, "long0") == ["lent"], "the blocked head is helped out, the next one does not fit, and is not passed"
    assert box.core.workers["long0"].pinned_for is None
    box.run()
    box.assert_tokens_right()


def test_what_waits_for_a_pool_that_is_gone_goes_where_the_rules_say() -> None:
    box = mesh(pool_overflow="chat>long", pool_lend="")
    chats(box, 6, max_tokens=20)
    box.submit(request("n", 5, 6, n=3, arrival_ns=9))
    ask_all(box)
    waiting = box.core.queue_of("m", "chat").waiting
    assert waiting == 5
    box.events += box.core.worker_lost("chat0", "gone", box.now, suspect=False)
    del box.queues["chat0"]
    assert (box.core.queue_of("m", "chat").waiting, box.core.queue_of("m", "long").waiting) == (0, waiting)
    box.core.check()
    lost = [one.sequence.request_id for one in box.events if isinstance(one, Failed)]
    assert lost == ["c00", "c01", "c02", "c03"], "only what ran there"
    box.run()
    for name in ("c04", "c05", "n"):
        assert all(one.end_reason == "length" and one.worker == "long0" for one in box.core.sequences_of(name))


def test_what_waits_for_a_pool_whose_last_worker_stops_goes_where_the_rules_say() -> None:
    box = mesh(pool_overflow="chat>long", pool_lend="")
    chats(box, 6, max_tokens=40)
    ask_all(box)
    box.core.worker_draining("chat0")
    box.core.check()
    assert (box.core.queue_of("m", "chat").waiting, box.core.queue_of("m", "long").waiting) == (0, 2)
    assert box.submit(request("late", 5, 6)).outcome is Outcome.ACCEPTED
    box.run()
    box.assert_tokens_right()


def test_what_runs_on_a_pools_last_worker_that_stops_is_handed_over_where_the_rules_say() -> None:
    for overflow in ("", "chat>long"):
        box = mesh(pool_overflow=overflow)
        chats(box, 1, max_tokens=40)
        box.step("chat0")
        box.core.worker_draining("chat0")
        moved = [one for one in box.core.hand_over("chat0", box.now) if isinstance(one, Failed)]
        assert [one.kind for one in moved] == (["moved"] if overflow else []), "to be resumed, or it runs to its end"
        resumed = box.submit(request("c00", 5, 40, attempt=2))
        assert resumed.outcome is (Outcome.ACCEPTED if overflow else Outcome.NO_WORKER)


def test_without_a_rule_it_waits_for_a_worker_and_is_lost_after_a_while() -> None:
    box = mesh(pool_lend="")
    chats(box, 6, max_tokens=20)
    ask_all(box)
    box.events += box.core.worker_lost("chat0", "gone", box.now, suspect=False)
    del box.queues["chat0"]
    box.now += box.limits.no_worker_grace_ns + MS
    box.events += box.core.tick(box.now)
    assert not box.core.live_requests()
    late = box.submit(msgspec.structs.replace(request("late", 5), pool="chat"))
    assert late.outcome is Outcome.NO_WORKER


@settings(max_examples=EXAMPLES // 5, deadline=None)
@given(
    st.integers(1, 3), st.integers(1, 2), st.integers(16, 40), st.sampled_from(["shorter", "", "long>chat"]),
    st.lists(st.tuples(st.integers(1, 30), st.integers(1, 20), st.integers(1, 3)), min_size=1, max_size=30),
    st.randoms(use_true_random=False),
)  # fmt: skip
def test_everything_ends_in_a_pool_that_may_run_it(
    chat: int, long: int, blocks: int, lend: str, requests: list[tuple[int, int, int]], rng: object
) -> None:
    """No queue waits for ever, whoever is asked when; long ones stay with their own; the core's books agree."""
    box = mesh(chat, long, blocks, pool_lend=lend)
    for index, (prompt, outputs, n) in enumerate(requests):
        box.submit(request(f"r{index}", prompt, outputs, n=n, arrival_ns=index, seed=index))
        for name in rng.sample(sorted(box.queues), rng.randrange(len(box.queues) + 1)):  # type: ignore[attr-defined]
            box.step(name)
            box.core.check()
    box.run()
    box.assert_tokens_right()
    box.assert_idle()
    for index, (prompt, _, _) in enumerate(requests):
        for one in box.core.sequences_of(f"r{index}"):
            assert one.status is Status.ENDED
            pool = box.core.workers[one.worker].serves.pool
            assert pool == "long" if prompt > 8 else lend or pool == "chat"
