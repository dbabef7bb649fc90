"""Who leads, and until when: judged by one's own clock, over a key with compare-and-swap."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import msgspec
import pytest
from memory_store import MemoryStore
from mesh_stack import until
from prometheus_client import CollectorRegistry

from scheduler.config import SchedulerConfig
from scheduler.lease import MOST_LOOKS, Found, Lease, LeaseKeeper, LeaseView
from scheduler.metrics import SchedulerMetrics
from scheduler.patience import LATE_S, RECONNECT_GRACE_S, Patience
from shared.config import ConfigError, options_of

LEASE_S = 1.0


def stored(holder: str, epoch: int, revision: int, released: bool = False) -> Found:
    return msgspec.json.encode(Lease(holder, epoch, released)), revision


class Standby:
    """Looks at the key each 0.2 s; a look takes 0.01 s."""

    def __init__(self, name: str = "b", seen_epoch: int = 0) -> None:
        self.view = LeaseView(name, LEASE_S)
        self.seen_epoch = seen_epoch
        self.now = 100.0

    def look(self, found: Found) -> Lease | None:
        self.now += 0.2
        return self.view.bid(found, self.now, self.now + 0.01, self.seen_epoch)

    def looks(self, found: Found, count: int) -> list[Lease | None]:
        return [self.look(found) for _ in range(count)]


# --- standing by ----------------------------------------------------------------------------------------------------


def test_a_lease_is_taken_once_no_new_revision_was_seen_for_its_length() -> None:
    one = Standby()
    assert one.looks(stored("a", 4, 7), 4) == [None] * 4
    assert one.looks(stored("a", 4, 8), 5) == [None] * 5, "a renewal begins the wait anew"
    assert one.looks(stored("a", 4, 8), 2) == [None, Lease("b", 5)]


def test_an_epoch_is_above_the_lease_and_above_every_epoch_that_beats_told() -> None:
    one = Standby(seen_epoch=41)
    assert one.look(stored("a", 4, 7, released=True)) == Lease("b", 42)
    other = Standby(seen_epoch=2)
    assert other.look(stored("a", 4, 7, released=True)) == Lease("b", 5)


def test_a_released_lease_is_taken_at_once() -> None:
    one = Standby()
    assert one.looks(stored("a", 4, 7), 2) == [None, None]
    assert one.look(stored("a", 4, 8, released=True)) == Lease("b", 5)


def test_a_restarted_scheduler_of_the_same_name_takes_its_lease_at_once() -> None:
    assert Standby("a").look(stored("a", 4, 7)) == Lease("a", 5)


def test_a_twin_of_the_same_name_is_not_pushed_out_again_and_again() -> None:
    one = Standby("a")
    one.view.took(Lease("a", 5), 8, one.now)
    assert one.view.contested(stored("a", 6, 9)), "the twin leads"
    assert one.looks(stored("a", 6, 9), 4) == [None] * 4
    other = Standby("a")
    assert other.look(stored("b", 6, 9)) is None
    assert other.look(stored("a", 7, 10)) is None, "it came while this one stood by"


def test_a_bid_of_which_nobody_said_whether_it_was_stored_is_ones_own() -> None:
    one = Standby()
    assert one.look(stored("a", 4, 7, released=True)) == Lease("b", 5)
    assert one.look(stored("b", 5, 8)) == Lease("b", 6)


def test_a_key_that_is_not_there_is_free_only_where_no_epoch_was_ever_seen() -> None:
    assert Standby().look(None) == Lease("b", 1)
    one = Standby(seen_epoch=7)
    assert one.looks(None, 6) == [None] * 6, "whoever leads recreates it"
    assert one.look(None) == Lease("b", 8)


def test_whoever_took_a_lost_key_below_a_living_epoch_waits_like_anybody_else() -> None:
    """The store was lost, nobody had been heard yet, and the key was free: but somebody leads on in epoch 2, for as
    long as its last renewal lasts."""
    b, c = Standby("b"), Standby("c", seen_epoch=2)
    lease = b.look(None)
    assert lease == Lease("b", 1)
    b.view.took(lease, 1, b.now)
    b.view.outdated()
    assert not b.view.holds(b.now)
    b.seen_epoch = 2
    assert b.looks(stored("b", 1, 1), 5) == [None] * 5
    assert c.looks(stored("b", 1, 1), 5) == [None] * 5
    assert Lease("b", 3) in b.looks(stored("b", 1, 1), 2)


def test_time_in_which_nobody_looked_does_not_count() -> None:
    one = Standby()
    assert one.look(stored("a", 4, 7)) is None
    one.now += 10  # this process was stopped, or the store away: the holder goes on as well
    assert one.looks(stored("a", 4, 7), 5) == [None] * 5
    assert one.looks(stored("a", 4, 7), 2) == [None, Lease("b", 5)]


def test_a_store_that_is_always_slow_does_not_keep_the_lease_from_running_out() -> None:
    one = Standby()
    for _ in range(MOST_LOOKS):
        one.now += 0.5
        assert one.look(stored("a", 4, 7)) is None
    one.now += 0.5
    assert one.look(stored("a", 4, 7)) == Lease("b", 5)


@pytest.mark.parametrize(
    "value", [b"", b"noise", b"[1]", b'{"holder": "x", "epoch": -1}', b'{"holder": 1, "epoch": 2}']
)
def test_noise_in_the_key_runs_out_like_a_lease(value: bytes) -> None:
    one = Standby(seen_epoch=3)
    assert one.looks((value, 7), 6) == [None] * 6
    assert one.look((value, 7)) == Lease("b", 4)


# --- holding --------------------------------------------------------------------------------------------------------


def test_a_holder_whose_key_was_overwritten_with_noise_leads_no_more() -> None:
    view = LeaseView("a", LEASE_S)
    view.took(Lease("a", 5), 8, 100.0)
    assert view.contested((b"noise", 9)) == "the key holds no lease"
    assert not view.holds(100.1)


def test_a_holder_stops_before_anybody_else_may_begin() -> None:
    """Both count from one renewal: the holder from before it was sent, the other from after it was seen."""
    holder, other = LeaseView("a", LEASE_S), Standby()
    other.look(stored("a", 4, 7))
    asked_s = other.now - 0.3  # it was stored some time between, and answered late
    holder.took(Lease("a", 4), 7, asked_s)
    other.seen_epoch = 4
    while other.look(stored("a", 4, 7)) is None:
        pass
    assert not holder.holds(other.now) and not holder.holds(asked_s + LEASE_S)
    assert holder.holds(asked_s + 0.8 * LEASE_S)


def test_a_late_renewal_is_as_good() -> None:
    view = LeaseView("a", LEASE_S)
    view.took(Lease("a", 4), 7, 100.0)
    assert not view.holds(103.0)
    view.renewed(8, 103.0)
    assert view.holds(103.5) and view.mine() == Lease("a", 4)


def test_what_a_conflict_means() -> None:
    view = LeaseView("a", LEASE_S)
    view.took(Lease("a", 4), 7, 100.0)
    assert view.contested(None) == "" and view.revision == 0, "the store is lost: made again, in the same epoch"
    assert view.contested(stored("a", 4, 2)) == "" and view.revision == 2, "ours, whose answer was lost"
    assert view.holds(100.5)
    for found in (stored("b", 5, 9), stored("a", 5, 9), stored("b", 3, 9), stored("a", 4, 9, released=True)):
        assert view.contested(found)
        assert not view.holds(100.5)
        view.renewed(9, 100.0)


# --- over a store ---------------------------------------------------------------------------------------------------


class Keeper:
    def __init__(self, store: MemoryStore, name: str, lease_s: float = 0.4) -> None:
        self.metrics = SchedulerMetrics(CollectorRegistry())
        self.keeper = LeaseKeeper(store, name, lease_s, self.metrics)
        self.stop = asyncio.Event()
        self.seen = 0
        self.regained = 0
        self.keeping: asyncio.Task[str]

    async def lead(self) -> None:
        assert await self.keeper.acquire(self.stop, lambda: self.seen)
        self.keeping = asyncio.create_task(self.keeper.keep(self._regain))

    def _regain(self) -> None:
        self.regained += 1

    async def end(self) -> None:
        self.keeping.cancel()
        await self.keeper.release()


def run(scenario: Callable[[MemoryStore], Awaitable[None]]) -> None:
    async def body() -> None:
        await scenario(MemoryStore())

    asyncio.run(asyncio.wait_for(body(), 30))


def test_one_leads_until_it_lets_go_and_then_the_other() -> None:
    async def scenario(store: MemoryStore) -> None:
        a, b = Keeper(store, "a"), Keeper(store, "b")
        await a.lead()
        waiting = asyncio.create_task(b.lead())
        revision = store.revision
        await until(lambda: store.revision > revision + 5, "renewals")
        assert a.keeper.holds() and not waiting.done() and not b.keeper.holds()
        await a.end()
        assert not a.keeper.holds()
        await waiting
        assert b.keeper.holds() and b.keeper.epoch == a.keeper.epoch + 1
        await b.end()

    run(scenario)


def test_whoever_stands_by_can_be_stopped() -> None:
    async def scenario(store: MemoryStore) -> None:
        a, b = Keeper(store, "a"), Keeper(store, "b")
        await a.lead()
        waiting = asyncio.create_task(b.keeper.acquire(b.stop, lambda: 0))
        await asyncio.sleep(0)
        b.stop.set()
        assert not await waiting
        await a.end()

    run(scenario)


def test_the_jetstream_store_lost() -> None:
    """The leader makes the key again and goes on in its epoch; nobody who stands by was quicker."""

    async def scenario(store: MemoryStore) -> None:
        a, b = Keeper(store, "a"), Keeper(store, "b")
        store.value, store.revision = msgspec.json.encode(Lease("x", 8, released=True)), 40
        await a.lead()
        assert a.keeper.epoch == 9
        b.seen = 9  # it hears beats
        waiting = asyncio.create_task(b.lead())
        for _ in range(3):
            store.lose()
            await until(lambda: store.value is not None, "the key")
            assert msgspec.json.decode(store.value or b"", type=Lease) == Lease("a", 9)
        assert a.keeper.holds() and not waiting.done() and not a.keeping.done()
        waiting.cancel()
        await a.end()

    run(scenario)


def test_a_store_that_is_away_stops_the_leader_and_lets_it_go_on_in_the_same_epoch() -> None:
    async def scenario(store: MemoryStore) -> None:
        a = Keeper(store, "a")
        await a.lead()
        store.down = True
        await until(lambda: not a.keeper.holds(), "the end of the lease")
        assert not a.keeping.done()
        store.down = False
        await until(a.keeper.holds, "a renewal")
        assert a.keeper.epoch == 1 and a.regained == 1
        assert a.metrics.lease_renewals_failed._value.get() > 0
        await a.end()

    run(scenario)


def test_whoever_was_taken_over_from_while_the_store_was_away_is_told() -> None:
    async def scenario(store: MemoryStore) -> None:
        a = Keeper(store, "a")
        await a.lead()
        store.down = True
        await until(lambda: not a.keeper.holds(), "the end of the lease")
        store.value, store.revision = msgspec.json.encode(Lease("b", 2)), store.revision + 1
        store.down = False
        assert await a.keeping == "scheduler b leads in epoch 2"
        assert not a.keeper.holds()
        await a.keeper.release()
        assert msgspec.json.decode(store.value, type=Lease) == Lease("b", 2), "another one's lease is not released"

    run(scenario)


# --- silence --------------------------------------------------------------------------------------------------------


def test_silence_does_not_count_while_this_process_stood_still_or_was_cut_off() -> None:
    one = Patience(0.25)
    assert one.excused(10.0, True, 3) is None
    assert one.excused(10.25 + LATE_S, True, 3) is None
    assert one.excused(15.0, True, 3) == 15.0
    assert one.excused(15.25, True, 3) is None
    assert one.excused(15.5, False, 3) == 15.5 + RECONNECT_GRACE_S
    assert not one.reconnected
    assert one.excused(15.75, True, 4) == 15.75 + RECONNECT_GRACE_S and one.reconnected
    assert one.excused(16.0, True, 4) is None and not one.reconnected


def test_the_shortest_lease_that_can_be_set_runs_out_too() -> None:
    lease_s = 0.3
    (option,) = [option for option in options_of(SchedulerConfig) if option.name == "lease_s"]
    assert option.parse(lease_s, "here") == lease_s
    with pytest.raises(ConfigError):
        option.parse(lease_s - 0.01, "here")

    async def scenario(store: MemoryStore) -> None:
        for epoch, name in enumerate("ab", 1):
            keeper = LeaseKeeper(store, name, lease_s, SchedulerMetrics(CollectorRegistry()))
            assert await keeper.acquire(asyncio.Event(), lambda: 0)
            assert keeper.epoch == epoch

    run(scenario)
