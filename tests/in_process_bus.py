"""The bus port within one event loop: delivers on later iterations, in order, and can lose messages."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Callable

from shared.bus import BusTimeout, BusUnavailable, Handler, NoResponder, PayloadTooLarge, Unsubscribe
from shared.messages import AnyMessage, decode


class InProcessBus:
    """``lose(subject, payload)`` says which messages vanish; ``published`` holds every one, lost or not."""

    def __init__(self, max_payload: int = 1 << 20) -> None:
        self.max_payload = max_payload
        self.down = False
        self.reconnects = 0
        self.lose: Callable[[str, bytes], bool] = lambda subject, payload: False
        self.published: list[tuple[str, bytes]] = []
        self._subscriptions: list[tuple[str, Handler]] = []
        self._replies: dict[str, asyncio.Future[bytes]] = {}
        self._inboxes = itertools.count()

    @property
    def connected(self) -> bool:
        return not self.down

    async def publish(self, subject: str, payload: bytes) -> None:
        if len(payload) > self.max_payload:
            raise PayloadTooLarge(f"{len(payload)} bytes")
        self.published.append((subject, payload))
        if subject in self._replies:
            future = self._replies.pop(subject)
            if not future.done():
                future.set_result(payload)
            return
        self._deliver(subject, payload, "")

    async def request(self, subject: str, payload: bytes, timeout_s: float) -> bytes:
        if len(payload) > self.max_payload:
            raise PayloadTooLarge(f"{len(payload)} bytes")
        inbox = f"_INBOX.{next(self._inboxes)}"
        future = asyncio.get_running_loop().create_future()
        self._replies[inbox] = future
        if not self._deliver(subject, payload, inbox):
            raise NoResponder(subject)
        try:
            async with asyncio.timeout(timeout_s):
                return await future
        except TimeoutError:
            raise BusTimeout(subject) from None

    async def subscribe(self, subject: str, handler: Handler) -> Unsubscribe:
        entry = (subject, handler)
        self._subscriptions.append(entry)
        return _Subscribed(self._subscriptions, entry)

    async def flush(self) -> None: ...

    async def close(self) -> None: ...

    def _deliver(self, subject: str, payload: bytes, reply: str) -> bool:
        handlers = [handler for pattern, handler in self._subscriptions if _matches(pattern, subject)]
        if self.down or self.lose(subject, payload):
            return False
        for handler in handlers:
            asyncio.get_running_loop().call_soon(handler, payload, reply)
        return bool(handlers)


class InProcessClient:
    """One process's connection to the bus, which can be killed with it, or held up while the process is stopped."""

    def __init__(self, bus: InProcessBus) -> None:
        self._bus = bus
        self._subscribed: list[Unsubscribe] = []
        self._held: list[tuple[Handler, bytes, str]] | None = None
        self.max_payload = bus.max_payload
        self.reconnects = 0
        self.alive = True

    @property
    def connected(self) -> bool:
        return self.alive and self._bus.connected

    async def publish(self, subject: str, payload: bytes) -> None:
        if not self.connected:
            raise BusUnavailable("not connected")
        await self._bus.publish(subject, payload)

    async def request(self, subject: str, payload: bytes, timeout_s: float) -> bytes:
        if not self.connected:
            raise BusUnavailable("not connected")
        return await self._bus.request(subject, payload, timeout_s)

    async def subscribe(self, subject: str, handler: Handler) -> Unsubscribe:
        def deliver(payload: bytes, reply: str) -> None:
            if self._held is not None:
                self._held.append((handler, payload, reply))
            elif self.alive:
                handler(payload, reply)

        subscribed = await self._bus.subscribe(subject, deliver)
        self._subscribed.append(subscribed)
        return subscribed

    async def flush(self) -> None:
        if not self.connected:
            raise BusUnavailable("not connected")

    async def close(self) -> None: ...

    async def kill(self) -> None:
        """The process is gone, and NATS knows that nobody listens any more."""
        self.alive = False
        for subscribed in self._subscribed:
            await subscribed.unsubscribe()

    def hold(self) -> None:
        """What arrives is read later: the process is stopped."""
        self._held = []

    def let_go(self) -> None:
        held, self._held = self._held or [], None
        for handler, payload, reply in held:
            handler(payload, reply)


class _Subscribed:
    def __init__(self, subscriptions: list[tuple[str, Handler]], entry: tuple[str, Handler]) -> None:
        self._subscriptions, self._entry = subscriptions, entry

    async def unsubscribe(self) -> None:
        with contextlib.suppress(ValueError):
            self._subscriptions.remove(self._entry)


def _matches(pattern: str, subject: str) -> bool:
    if pattern.endswith(".>"):
        return subject.startswith(pattern[:-1])
    parts, wanted = subject.split("."), pattern.split(".")
    return len(parts) == len(wanted) and all(want in ("*", part) for part, want in zip(parts, wanted, strict=True))


class LoseFirst:
    """For ``InProcessBus.lose``: the first ``count`` messages of a kind vanish, and are kept in ``lost``."""

    def __init__(self, kind: type[AnyMessage], count: int) -> None:
        self._kind = kind
        self._count = count
        self.lost: list[bytes] = []

    def __call__(self, _: str, payload: bytes) -> bool:
        if len(self.lost) >= self._count or not isinstance(decode(payload), self._kind):
            return False
        self.lost.append(payload)
        return True
