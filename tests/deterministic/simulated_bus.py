"""A NATS server in virtual time and the connections to it: what core NATS promises is kept, everything else is broken.

Kept: the order of messages from one connection to one subscription, and at most once as far as the server goes. Broken
on demand: delay (each subscription for itself, so that subjects overtake each other), loss with and without a sign,
repetition (of a publisher that tries again), partitions of one node in one direction or both (bytes wait in TCP, or are
lost once the client gives the connection up), a server that restarts.
"""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Callable
from typing import Any

from virtual_time import Agenda, Clock, NodeLoop

from shared.bus import BusTimeout, BusUnavailable, Handler, NoResponder, PayloadTooLarge

GIVE_UP_S = (6.0, 9.0)  # how long a client waits for pongs: ping_interval 3 s, two outstanding
RECONNECT_S = (0.05, 1.2)  # from the loss of the connection to the next attempt

Trace = Callable[[str, str], None]
"""(who, what)"""


def matches(pattern: str, subject: str) -> bool:
    if pattern == subject:
        return True
    if "*" not in pattern and ">" not in pattern:
        return False
    parts, wanted = subject.split("."), pattern.split(".")
    if wanted[-1] == ">":
        return len(parts) >= len(wanted) and all(
            want in ("*", part) for part, want in zip(parts, wanted[:-1], strict=False)
        )
    return len(parts) == len(wanted) and all(want in ("*", part) for part, want in zip(parts, wanted, strict=True))


class Weather:
    """How bad the network is just now; rates are per message and subscription."""

    def __init__(self) -> None:
        self.loss = 0.0
        self.repetition = 0.0
        self.jitter_s = 0.0  # most that a subscription lags behind the others


class Subscription:
    def __init__(self, connection: Connection, subject: str, handler: Handler) -> None:
        self.connection = connection
        self.subject = subject
        self.handler = handler
        self.last_ns = 0  # when its last message is handed out
        self.open = True

    async def unsubscribe(self) -> None:
        self.open = False
        if self in self.connection.subscriptions:
            self.connection.subscriptions.remove(self)
        self.connection.server.withdraw([self])


class Server:
    """``lose(sender, subject, payload)`` says which messages vanish on the way, beside what the weather takes.

    ``lag_s(subject, payload)``: for how long one is held back, and what follows it in the same subscription.
    """

    def __init__(self, clock: Clock, agenda: Agenda, rng: random.Random, trace: Trace | None) -> None:
        self.clock = clock
        self.agenda = agenda
        self.rng = rng
        self.trace = trace
        self.weather = Weather()
        self.up = True
        self.lose: Callable[[str, str, bytes], bool] = lambda sender, subject, payload: False
        self.lag_s: Callable[[str, bytes], float] = lambda subject, payload: 0.0
        self.taps: list[Callable[[Connection, str, bytes], None]] = []
        self.delivered = 0
        self._connections: list[Connection] = []
        self._interest: list[Subscription] = []
        self._matching: dict[str, list[Subscription]] = {}
        self._inboxes = itertools.count()

    def attach(self, connection: Connection) -> None:
        self._connections.append(connection)

    def detach(self, connection: Connection) -> None:
        """Its process is gone: the kernel has closed the socket."""
        self._connections.remove(connection)
        self.withdraw(connection.subscriptions)

    def announce(self, subscriptions: list[Subscription]) -> None:
        self._interest += [one for one in subscriptions if one not in self._interest]
        self._matching.clear()

    def withdraw(self, subscriptions: list[Subscription]) -> None:
        self._interest = [one for one in self._interest if one not in subscriptions]
        self._matching.clear()

    def interested(self, subject: str) -> list[Subscription]:
        found = self._matching.get(subject)
        if found is None:
            found = self._matching[subject] = [one for one in self._interest if matches(one.subject, subject)]
        return found

    def new_inbox(self) -> str:
        return f"_INBOX.{next(self._inboxes)}"

    def stop(self) -> None:
        """All connections are cut; what was on its way is lost."""
        self.up = False
        self._interest.clear()
        self._matching.clear()
        for connection in list(self._connections):
            connection.cut()

    def start(self) -> None:
        self.up = True

    def route(self, sender: Connection, generation: int, subject: str, payload: bytes, reply: str) -> None:
        """A message has come in from ``sender``."""
        if generation != sender.generation or not self.up:
            return
        targets = self.interested(subject)
        if not targets:
            if reply:
                sender.no_responder(generation, reply)
            return
        if self.lose(sender.name, subject, payload):
            if self.trace is not None:
                self.trace(sender.name, f"LOST {subject}")
            return
        for target in targets:
            self._send(target, subject, payload, reply)

    def _send(self, target: Subscription, subject: str, payload: bytes, reply: str) -> None:
        weather, rng = self.weather, self.rng
        if target.connection._lost():
            if self.trace is not None:
                self.trace(target.connection.name, f"lost on its way: {subject}")
            return
        connection = target.connection
        arrives = connection.arrival_ns()
        if weather.jitter_s:
            arrives += int(rng.random() * weather.jitter_s * 1e9)
        arrives += int(1e9 * self.lag_s(subject, payload))
        arrives = target.last_ns = max(arrives, target.last_ns)
        times = 2 if weather.repetition and rng.random() < weather.repetition else 1
        for _ in range(times):
            self.agenda.at(arrives, connection.hand_out, connection.generation, target, subject, payload, reply)


class Connection:
    """One client connection of a node: a ``shared.bus.Bus``."""

    def __init__(self, server: Server, loop: NodeLoop, link: Link, name: str, max_payload: int = 1 << 20) -> None:
        self.server = server
        self.name = name
        self.max_payload = max_payload
        self.reconnects = 0
        self.slow_consumer_drops = 0
        self.on_reconnect: Callable[[], None] | None = None
        self.generation = 1
        self.connected = True
        self.subscriptions: list[Subscription] = []
        self.slow = 0  # messages that are yet to be dropped for want of room
        self.owner = name  # the process behind it
        self.handled: Callable[[str], None] = lambda subject: None  # called after each handler
        self._loop = loop
        self._link = link
        self._up_ns = 0  # when the last byte sent reaches the server
        self._down_ns = 0
        self._replies: dict[str, asyncio.Future[bytes]] = {}
        self._closed = False
        server.attach(self)
        link.connections.append(self)

    # --- the bus port -----------------------------------------------------------------------------------------------

    async def publish(self, subject: str, payload: bytes) -> None:
        self._push(subject, payload, "")

    async def request(self, subject: str, payload: bytes, timeout_s: float) -> bytes:
        inbox = self.server.new_inbox()
        future = self._replies[inbox] = self._loop.create_future()
        reply = Subscription(self, inbox, lambda message, _: self._settle(inbox, message))
        self.server.announce([reply])
        try:
            self._push(subject, payload, inbox)
            async with asyncio.timeout(timeout_s):
                return await future
        except TimeoutError:
            raise BusTimeout(f"no reply from {subject} within {timeout_s} s") from None
        finally:
            self._replies.pop(inbox, None)
            self.server.withdraw([reply])

    async def subscribe(self, subject: str, handler: Handler) -> Subscription:
        subscription = Subscription(self, subject, handler)
        self.subscriptions.append(subscription)
        if self.connected:
            self.server.agenda.at(self._departure_ns(), self._announce, self.generation, [subscription])
        return subscription

    async def flush(self) -> None:
        if not self.connected:
            raise BusUnavailable("flush: disconnected")
        done = self._loop.create_future()
        agenda = self.server.agenda
        generation = self.generation

        def pong() -> None:
            if generation == self.generation and not self._closed:
                self._loop.deliver(lambda: done.done() or done.set_result(None))

        agenda.at(self._departure_ns(), lambda: agenda.at(self.arrival_ns(), pong))
        try:
            async with asyncio.timeout(10):
                await done
        except TimeoutError:
            raise BusUnavailable("flush: no answer") from None

    async def close(self) -> None:
        self.vanish()

    def call(self, serve: Callable[[], Callable[[], None] | None]) -> None:
        """Have ``serve`` done at the server, and what it returns at the node: either may be lost on the way."""
        agenda, generation = self.server.agenda, self.generation

        def arrive() -> None:
            if generation == self.generation and self.server.up and not self._lost():
                answer = serve()
                if answer is not None and not self._lost():
                    agenda.at(self.arrival_ns(), come_back, answer)

        def come_back(answer: Callable[[], None]) -> None:
            if generation == self.generation and not self._closed:
                self._loop.deliver(answer)

        if self.connected and not self._closed:
            agenda.at(self._departure_ns(), arrive)

    def _lost(self) -> bool:
        weather = self.server.weather
        return weather.loss > 0 and self.server.rng.random() < weather.loss

    # --- the server's side ------------------------------------------------------------------------------------------

    def arrival_ns(self) -> int:
        """When what the server sends now reaches the node."""
        way = self._link.latency_ns()
        self._down_ns = max(self._down_ns, self.server.clock.now_ns + way, self._link.down_blocked_ns + way)
        return self._down_ns

    def hand_out(self, generation: int, subscription: Subscription, subject: str, payload: bytes, reply: str) -> None:
        """What the node's socket has received goes to the subscription's handler."""
        if generation != self.generation or self._closed or not subscription.open:
            return
        if self.slow and subscription.subject[0] != "_":
            self.slow -= 1
            self._loop.deliver(self._dropped)
            return
        self.server.delivered += 1
        self._loop.deliver(self._handle, subscription, subject, payload, reply)

    def no_responder(self, generation: int, inbox: str) -> None:
        def tell() -> None:
            future = self._replies.get(inbox)
            if generation == self.generation and not self._closed and future is not None:
                self._loop.deliver(lambda: future.done() or future.set_exception(NoResponder(inbox)))

        self.server.agenda.at(self.arrival_ns(), tell)

    def cut(self) -> None:
        """The connection is gone; the client finds out when its process runs, and tries again until it has one."""
        if not self._closed and self.connected:
            self.generation += 1
            self.connected = False
            self._loop.deliver(self._reconnect_later)

    def vanish(self) -> None:
        """The process is gone, or has closed it in good order: what it has sent before arrives."""
        if not self._closed:
            self._closed = True
            self.server.agenda.at(self._departure_ns(), self._gone)

    # --- the client's side ------------------------------------------------------------------------------------------

    def _gone(self) -> None:
        self.generation += 1
        self.connected = False
        self.server.detach(self)

    def _push(self, subject: str, payload: bytes, reply: str) -> None:
        if self._closed:
            raise BusUnavailable("closed")
        if len(payload) > self.max_payload:
            raise PayloadTooLarge(f"{len(payload)} bytes to {subject}; the server takes {self.max_payload}")
        if not self.connected:
            raise BusUnavailable(f"publish to {subject}: disconnected")
        for tap in list(self.server.taps):
            tap(self, subject, payload)
        self.server.agenda.at(self._departure_ns(), self.server.route, self, self.generation, subject, payload, reply)

    def _departure_ns(self) -> int:
        """When what is sent now reaches the server."""
        way = self._link.latency_ns()
        self._up_ns = max(self._up_ns, self.server.clock.now_ns + way, self._link.up_blocked_ns + way)
        return self._up_ns

    def _announce(self, generation: int, subscriptions: list[Subscription]) -> None:
        if generation == self.generation:
            self.server.announce(subscriptions)

    def _handle(self, subscription: Subscription, subject: str, payload: bytes, reply: str) -> None:
        if self.server.trace is not None and subject[0] != "_":
            self.server.trace(self.name, f"<- {subject} {describe(payload)}")
        if subscription.open and not self._closed:
            subscription.handler(payload, reply)
            self.handled(subject)

    def _settle(self, inbox: str, payload: bytes) -> None:
        future = self._replies.get(inbox)
        if future is not None and not future.done():
            future.set_result(payload)

    def _dropped(self) -> None:
        self.slow_consumer_drops += 1

    def _reconnect_later(self) -> None:
        self._loop.call_later(self.server.rng.uniform(*RECONNECT_S), self._reconnect)

    def _reconnect(self) -> None:
        if self._closed or self.connected:
            return
        if not self.server.up or self._link.blocked:
            self._reconnect_later()
            return
        self.connected = True
        self.generation += 1
        for subscription in self.subscriptions:
            subscription.last_ns = 0
        self.server.announce(self.subscriptions)
        self.reconnects += 1
        if self.server.trace is not None:
            self.server.trace(self.name, "reconnected")
        if self.on_reconnect is not None:
            self.on_reconnect()


class Link:
    """The network between one node and the server."""

    def __init__(self, clock: Clock, agenda: Agenda, rng: random.Random) -> None:
        self.connections: list[Connection] = []
        self.up_blocked_ns = 0  # until then nothing reaches the server
        self.down_blocked_ns = 0  # until then nothing comes from it
        self.delay_s = 0.0  # most that it adds
        self._clock = clock
        self._agenda = agenda
        self._rng = rng

    @property
    def blocked(self) -> bool:
        return max(self.up_blocked_ns, self.down_blocked_ns) > self._clock.now_ns

    def latency_ns(self) -> int:
        return int(self._rng.uniform(100_000, 400_000 + self.delay_s * 1e9))

    def partition(self, seconds: float, up: bool, down: bool) -> None:
        """What is sent meanwhile waits in TCP until some time after; a client that waits too long gives up."""
        until = self._clock.now_ns + int((seconds + self._rng.uniform(0, 0.3 * seconds)) * 1e9)
        if up:
            self.up_blocked_ns = until
        if down:
            self.down_blocked_ns = until
        patience = self._rng.uniform(*GIVE_UP_S)
        if until - self._clock.now_ns > patience * 1e9:
            self._agenda.after(patience, self._give_up, list(self.connections))

    def _give_up(self, connections: list[Connection]) -> None:
        for connection in connections:
            connection.cut()  # the server holds the old one's subscriptions until the new one replaces them


def describe(payload: bytes) -> str:
    from shared.messages import BadMessage, decode

    try:
        message: Any = decode(payload)
    except BadMessage:
        return f"{len(payload)} bytes"
    text = repr(message)
    return text if len(text) < 400 else text[:400] + "..."
