"""When a leading scheduler beats: at once where somebody waits for it, four times a second with news, else once."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from scheduler.core.pools import QueueKey
from shared.messages import SchedulerBeat

BEAT_S = 0.25  # between beats that tell something new
REST_BEAT_S = 1.0  # between beats that do not
FLIP_BEAT_S = 0.02  # least time from any beat to one that tells that a queue is full, or no longer


class Presence:
    """``state`` is what a beat would say now, ``send`` sends it, if this scheduler may."""

    def __init__(
        self, state: Callable[[], SchedulerBeat], full_queues: Callable[[], frozenset[QueueKey]],
        send: Callable[[SchedulerBeat], None],
    ) -> None:  # fmt: skip
        self._state = state
        self._full_queues = full_queues
        self._send = send
        self._told: SchedulerBeat | None = None  # the last beat
        self._told_s = -1e9  # when, monotonic s
        self._told_full: frozenset[QueueKey] = frozenset()
        self._flip_timer: asyncio.TimerHandle | None = None
        self._silent = True

    def begin(self) -> None:
        """From now on there are beats; the first one at once."""
        self._silent = False
        self.beat()

    def beat(self) -> None:
        if self._silent:
            return
        self._told = self._state()
        self._told_s = time.monotonic()
        self._told_full = self._full_queues()
        self._send(self._told)

    async def run(self) -> None:
        while True:
            if time.monotonic() - self._told_s >= REST_BEAT_S or self._told != self._state():
                self.beat()
            await asyncio.sleep(BEAT_S)

    def tell_if_full(self) -> None:
        """Tell gateways at once that a queue has become full, or no longer is: they refuse by what they were told."""
        if self._full_queues() == self._told_full or self._flip_timer is not None or self._silent:
            return
        wait_s = self._told_s + FLIP_BEAT_S - time.monotonic()
        if wait_s <= 0:
            self.beat()
        else:  # a queue that is full half of the time must not beat at every step
            self._flip_timer = asyncio.get_running_loop().call_later(wait_s, self._flip)

    def _flip(self) -> None:
        self._flip_timer = None
        self.tell_if_full()

    def close(self) -> None:
        self._silent = True
        if self._flip_timer is not None:
            self._flip_timer.cancel()
