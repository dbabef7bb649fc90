"""Sending from plain functions: messages are queued in memory and sent in order by one task.

Bus callbacks and the scheduling loop are synchronous; this is how they send. What cannot be sent is dropped and
counted, never replayed later: numbers in the messages detect the loss.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable

from shared.bus import Bus, BusUnavailable, PayloadTooLarge

log = logging.getLogger("headrace.outbox")


class Outbox:
    """``allowed`` is asked when a message is sent: what may not be sent any more is dropped."""

    def __init__(self, bus: Bus, allowed: Callable[[], bool] = lambda: True) -> None:
        self._bus = bus
        self._allowed = allowed
        self._queue: deque[tuple[str, bytes]] = deque()
        self._ready = asyncio.Event()
        self._failing = False
        self.dropped = 0

    def post(self, subject: str, payload: bytes) -> None:
        """Send soon, after everything posted before. Call it on the event loop."""
        self._queue.append((subject, payload))
        self._ready.set()

    async def run(self) -> None:
        """The sending task; cancel it after :meth:`drain`."""
        while True:
            await self._ready.wait()
            self._ready.clear()
            await self.drain()

    async def drain(self) -> None:
        """Send everything that is queued."""
        while self._queue:
            subject, payload = self._queue.popleft()
            if not self._allowed():
                self.dropped += 1
                continue
            try:
                await self._bus.publish(subject, payload)
                self._failing = False
            except BusUnavailable as error:
                self.dropped += 1
                if not self._failing:  # once per outage, not once per message
                    self._failing = True
                    log.warning("dropped: %s", error)
            except PayloadTooLarge as error:
                self.dropped += 1
                log.error("dropped: %s", error)
