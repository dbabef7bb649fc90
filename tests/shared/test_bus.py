"""The bus port over a real NATS server."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest
from mesh_stack import until

from headrace.nats_server import NatsServer, embedded_nats
from shared.bus import BusTimeout, BusUnavailable, NatsBus, NoResponder, PayloadTooLarge
from shared.outbox import Outbox
from shared.subjects import Subjects, subject_token


def on_nats(scenario: Callable[[NatsServer, NatsBus], Awaitable[None]]) -> None:
    async def body(nats: NatsServer) -> None:
        bus = await NatsBus.connect(nats.url, "test", nats.token)
        try:
            await scenario(nats, bus)
        finally:
            await bus.close()

    with embedded_nats() as nats:
        asyncio.run(asyncio.wait_for(body(nats), 60))


def test_messages_arrive_in_order_and_a_failing_handler_ends_nothing() -> None:
    async def scenario(_: NatsServer, bus: NatsBus) -> None:
        got: list[bytes] = []
        done = asyncio.Event()

        def handler(payload: bytes, _: str) -> None:
            got.append(payload)
            if payload == b"99":
                done.set()
            if payload == b"3":
                raise ValueError("one bad message")

        await bus.subscribe("a", handler)
        outbox = Outbox(bus)
        for index in range(100):
            outbox.post("a", b"%d" % index)
        await outbox.drain()
        await done.wait()
        assert got == [b"%d" % index for index in range(100)]

    on_nats(scenario)


async def first_answer(bus: NatsBus, subject: str) -> bytes:
    """A server may go on for a moment without a subscription that it has just taken from another connection."""
    async with asyncio.timeout(30):
        while True:
            try:
                return await bus.request(subject, b"x", 5)
            except NoResponder:
                await asyncio.sleep(0.01)


def test_requests() -> None:
    async def scenario(nats: NatsServer, bus: NatsBus) -> None:
        other = await NatsBus.connect(nats.url, "other", nats.token)
        outbox = Outbox(other)
        await other.subscribe("echo", lambda payload, reply: outbox.post(reply, payload * 2))
        await other.subscribe("silent", lambda payload, reply: None)
        await other.flush()
        sending = asyncio.create_task(outbox.run())
        try:
            assert await first_answer(bus, "echo") == b"xx"
            with pytest.raises(BusTimeout):
                await bus.request("silent", b"x", 0.05)
            with pytest.raises(NoResponder):
                await bus.request("nobody", b"x", 5)
        finally:
            sending.cancel()
            await other.close()

    on_nats(scenario)


def test_a_message_over_max_payload_is_refused_and_the_connection_untouched() -> None:
    async def scenario(_: NatsServer, bus: NatsBus) -> None:
        with pytest.raises(PayloadTooLarge):
            await bus.publish("a", b"x" * (bus.max_payload + 1))
        await bus.flush()
        assert bus.connected and bus.reconnects == 0

    on_nats(scenario)


def test_nothing_is_buffered_for_replay_while_disconnected() -> None:
    async def body() -> None:
        with embedded_nats() as nats:
            bus = await NatsBus.connect(nats.url, "test", nats.token)
            await bus.flush()
        await until(lambda: not bus.connected, "the connection to be seen as lost")
        with pytest.raises(BusUnavailable, match="publish to a: no connection to NATS"):
            await bus.publish("a", b"stale")
        with pytest.raises(BusUnavailable, match="request to a: no connection to NATS"):
            await bus.request("a", b"stale", 5)
        outbox = Outbox(bus)
        outbox.post("a", b"stale")
        await outbox.drain()
        assert outbox.dropped == 1
        await bus.close()

    asyncio.run(asyncio.wait_for(body(), 60))


def test_connecting_says_where_and_keeps_the_token_to_itself() -> None:
    with pytest.raises(BusUnavailable, match=r"no NATS at 127\.0\.0\.1:9") as caught:
        asyncio.run(NatsBus.connect("nats://secret@127.0.0.1:9", "test", timeout_s=3))
    assert "secret" not in str(caught.value)
    with embedded_nats() as nats, pytest.raises(BusUnavailable):
        asyncio.run(NatsBus.connect(nats.url, "test", "wrong token", timeout_s=3))


def test_subject_tokens_are_safe_and_distinct() -> None:
    assert subject_token("plain-Name_1") == "plain-Name_1"
    odd = ["a/b", "a.b", "a*b", "a b", "a>b", "é", "", "x" * 200, "a_b"]
    tokens = [subject_token(name) for name in odd]
    assert len(set(tokens)) == len(odd)
    for token in tokens:
        assert token and not set(token) & set(". *>\r\n\t") and len(token) <= 64
    subjects = Subjects("my mesh")
    assert subjects.submit("org/model.v1", 3).count(".") == 4
