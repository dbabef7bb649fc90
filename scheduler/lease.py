"""Who leads: one key with compare-and-swap, and everybody's own monotonic clock.

A holder renews the key; whoever stands by takes it once it has seen no new revision for ``lease_s``. The holder counts
the same time from before its last renewal was sent, less a margin, and does nothing beyond. So no two act at once, and
no clock of anybody else, and no time-to-live of the store, plays a part.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

import msgspec

from scheduler.metrics import SchedulerMetrics
from shared.jetstream import Conflict, KeyStore, StoreUnavailable
from shared.messages import MAX_EPOCH
from shared.supervision import STANDS_BY, tell

log = logging.getLogger("headrace.scheduler")

POLL_S = 0.15  # between two looks of a scheduler that stands by, or less:
LEAST_LOOKS = 10  # in the time of a lease
MOST_LOOKS = 20  # at one revision: a store that is always slow to answer does not keep the lease from running out
RETRY_S = 0.1  # between two renewals that failed
RENEWALS = 4  # in the time of a lease
MARGIN_SHARE = 0.1  # of a lease: for clocks that do not run alike, and for what is on its way to the bus


class Lease(msgspec.Struct, frozen=True):
    """The key's value, as JSON."""

    holder: str
    epoch: int
    released: bool = False


_NOBODY = Lease("", 0)
_decoder = msgspec.json.Decoder(Lease)


def _lease_of(value: bytes) -> Lease:
    """What the value says; nobody's, in epoch 0, if it is no lease."""
    try:
        lease = _decoder.decode(value)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return _NOBODY
    return lease if 0 <= lease.epoch < MAX_EPOCH else _NOBODY


Found = tuple[bytes, int] | None
"""(value, revision), or None: there is no such key."""


class LeaseView:
    """What one scheduler makes of the lease, standing by and holding it. Pure: times, in monotonic s, come in."""

    def __init__(self, name: str, lease_s: float) -> None:
        self._name = name
        self._lease_s = lease_s
        self.epoch = 0  # of the lease that this one holds or last held
        self.revision = 0
        self._until_s = float("-inf")
        self._bid_epoch = 0  # of the last bid, which may have been stored though nobody said so
        self._newborn = True  # a lease under this name is of the process before this one
        self._seen: tuple[int, float] | None = None  # (revision, since when it is known not to change), standing by
        self._first_s = 0.0  # when that revision was first seen
        self._looks = 0  # at it
        self._looked_s = 0.0
        self.leader = ""  # whose lease was seen last

    # --- standing by ------------------------------------------------------------------------------------------------

    def bid(self, found: Found, asked_s: float, answered_s: float, seen_epoch: int) -> Lease | None:
        """What to write in place of ``found`` to take the lease, or None: it is somebody else's.

        The key was read between ``asked_s`` and ``answered_s``. ``seen_epoch`` is the highest that beats have told.

        A lost key is recreated by whoever leads: only where no epoch was ever seen is it nobody's at once.
        """
        lease, revision = (_lease_of(found[0]), found[1]) if found is not None else (_NOBODY, 0)
        self.leader = lease.holder
        if self._seen is None or self._seen[0] != revision:
            self._seen = (revision, answered_s)
            self._first_s, self._looks = answered_s, 0
        elif asked_s - self._looked_s > self._lease_s / 2:
            # Not looked for long: this process or the store stood still, and so may the holder have, which goes on now.
            self._seen = (revision, answered_s)
        since_s = self._seen[1] if self._looks < MOST_LOOKS else self._first_s
        self._looks += 1
        self._looked_s = asked_s
        free = seen_epoch == 0 if found is None else lease.released
        own = lease.holder == self._name and (self._newborn or lease.epoch == self._bid_epoch)
        self._newborn = self._newborn and (own or found is None)
        if not (free or own or asked_s - since_s >= self._lease_s):
            return None
        self._bid_epoch = max(lease.epoch, seen_epoch, self.epoch) + 1
        return Lease(self._name, self._bid_epoch)

    def took(self, lease: Lease, revision: int, asked_s: float) -> None:
        """The bid was stored; ``asked_s`` is from before it was sent."""
        self.epoch = lease.epoch
        self._newborn = False
        self._seen = None
        self.renewed(revision, asked_s)

    # --- holding ----------------------------------------------------------------------------------------------------

    def holds(self, now_s: float) -> bool:
        """True if nobody else can lead."""
        return now_s < self._until_s

    def mine(self, released: bool = False) -> Lease:
        return Lease(self._name, self.epoch, released)

    def renewed(self, revision: int, asked_s: float) -> None:
        """A late renewal that was stored is as good: nobody has led in between."""
        self.revision = revision
        self._until_s = asked_s + self._lease_s * (1 - MARGIN_SHARE)

    def contested(self, found: Found) -> str:
        """The key was not at the revision that this one wrote: who leads instead, or nothing: write again.

        It may be lost, or hold a renewal of ours whose answer was lost.
        """
        if found is None:
            self.revision = 0
            return ""
        lease = _lease_of(found[0])
        if (lease.holder, lease.epoch, lease.released) != (self._name, self.epoch, False):
            self.gave_up()
            if lease is _NOBODY:
                return "the key holds no lease"
            return f"scheduler {lease.holder} leads in epoch {lease.epoch}"
        self.revision = found[1]
        return ""

    def gave_up(self) -> None:
        self._until_s = float("-inf")

    def outdated(self) -> None:
        """A higher epoch is about, of which the key did not know: whoever has it may lead on until its time is out.
        This one's own lease is then like anybody else's: it must be seen to stand still for its length."""
        self.gave_up()
        self._bid_epoch, self._newborn, self._seen = -1, False, None


class LeaseKeeper:
    """Takes the lease, renews it and lets it go."""

    def __init__(self, store: KeyStore, name: str, lease_s: float, metrics: SchedulerMetrics) -> None:
        self._store = store
        self._view = LeaseView(name, lease_s)
        self._pause_s = lease_s / RENEWALS
        self._poll_s = min(POLL_S, lease_s / LEAST_LOOKS)
        self._metrics = metrics

    @property
    def epoch(self) -> int:
        return self._view.epoch

    def holds(self) -> bool:
        """Whether this scheduler may act as the leader at this moment."""
        return self._view.holds(time.monotonic())

    async def acquire(self, stop: asyncio.Event, seen_epoch: Callable[[], int]) -> bool:
        """Stand by until the lease is this one's (True) or ``stop`` is set (False)."""
        waits, troubled = False, False
        while not stop.is_set():
            try:
                asked_s = time.monotonic()
                found = await self._store.read()
                troubled = False
                lease = self._view.bid(found, asked_s, time.monotonic(), seen_epoch())
                if lease is not None:
                    asked_s = time.monotonic()
                    revision = await self._store.write(msgspec.json.encode(lease), found[1] if found else 0)
                    self._view.took(lease, revision, asked_s)
                    self._metrics.takeovers.inc()
                    return True
                if not waits:
                    waits = True
                    log.info("stands by: scheduler %s leads", self._view.leader or "of an unknown name")
                    tell(STANDS_BY)
            except Conflict:
                pass  # another one was quicker
            except StoreUnavailable as error:
                if not troubled:
                    troubled = True
                    log.warning("the lease cannot be read: %s", error)
            await asyncio.sleep(self._poll_s)
        return False

    async def keep(self, regained: Callable[[], None]) -> str:
        """Renew until another one leads, which is said. ``regained`` is called after a renewal that was late."""
        pause_s, troubled = self._pause_s, False
        while True:
            await asyncio.sleep(pause_s)
            asked_s = time.monotonic()
            late = not self._view.holds(asked_s)
            try:
                revision = await self._store.write(msgspec.json.encode(self._view.mine()), self._view.revision)
            except Conflict:
                why = await self._look_again()
                if why:
                    return why
                pause_s = 0.0 if why is not None else RETRY_S
                continue
            except StoreUnavailable as error:
                self._metrics.lease_renewals_failed.inc()
                if not troubled:
                    troubled = True
                    log.warning("the lease was not renewed: %s", error)
                pause_s = RETRY_S
                continue
            late = late or not self._view.holds(time.monotonic())
            self._view.renewed(revision, asked_s)
            pause_s, troubled = self._pause_s, False
            if late and self.holds():
                log.warning("the lease had run out; it is renewed, and nobody has led in between")
                regained()

    async def _look_again(self) -> str | None:
        """Who leads instead, nothing if the lease may be written again, or None if the store does not say."""
        try:
            return self._view.contested(await self._store.read())
        except StoreUnavailable:
            self._metrics.lease_renewals_failed.inc()
            return None

    def abandon(self) -> None:
        """Lead no more, and leave the key as it is: a higher epoch has been seen, whose holder may still lead."""
        self._view.outdated()

    async def release(self) -> None:
        """Let whoever stands by take it at once. Call it once nothing more is done as the leader."""
        held, value = self.holds(), msgspec.json.encode(self._view.mine(released=True))
        self._view.gave_up()
        if not held:
            return  # it runs out by itself, and may be another one's
        try:
            try:
                await self._store.write(value, self._view.revision)
            except Conflict:  # a renewal was under way
                if not self._view.contested(await self._store.read()):
                    await self._store.write(value, self._view.revision)
        except (Conflict, StoreUnavailable) as error:
            log.warning("the lease was not released, and runs out by itself: %s", error)
