"""The bus port and its NATS implementation: at-most-once publish, request/reply, and callbacks.

Three habits come from how nats-py behaves, and are settled here once:

* No outbound buffer while disconnected (``pending_size=0``). A buffered publish would be replayed after a reconnect,
  when the plan or the token in it is stale; here it raises :class:`BusUnavailable` and numbers repair the loss.
* Reconnect for ever (the client's default gives up after two minutes), and notice a dead peer within seconds.
* Callbacks, not iterators: they run serially per subscription and are several times faster. A handler is a plain
  function that must return quickly; slow work belongs to a task of the service.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import ssl
from collections.abc import Callable
from typing import Any, Protocol

import nats
import nats.errors
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription

from shared.config import MeshConfig
from shared.jetstream import JetStreamKey, KeyStore
from shared.subjects import inbox_prefix

log = logging.getLogger("headrace.bus")

Handler = Callable[[bytes, str], None]
"""(payload, reply subject or '') -> None. Runs on the event loop, in order within one subscription."""


class BusUnavailable(ConnectionError):
    """The message was not sent: the connection is down, or the buffer is full. Nothing is replayed later."""


class NoResponder(BusUnavailable):
    """Nobody listens on the subject of a request."""


class BusTimeout(BusUnavailable):
    """A request was sent and no reply came in time; whether it was handled is unknown."""


class PayloadTooLarge(ValueError):
    """The message exceeds the server's max_payload. The connection is untouched."""


class Unsubscribe(Protocol):
    async def unsubscribe(self) -> None: ...


class Bus(Protocol):
    """What a service needs from a bus. ``reconnects`` counts: each one means that messages may have been lost."""

    max_payload: int
    reconnects: int

    @property
    def connected(self) -> bool: ...

    async def publish(self, subject: str, payload: bytes) -> None: ...
    async def request(self, subject: str, payload: bytes, timeout_s: float) -> bytes: ...
    async def subscribe(self, subject: str, handler: Handler) -> Unsubscribe: ...
    async def flush(self) -> None: ...
    async def close(self) -> None: ...


class _Client(Client):
    """nats-py sends its credentials in the clear if a server, or somebody before it, does not ask for TLS."""

    must_have_tls = False

    async def _process_info(self, info: dict[str, Any], initial_connection: bool = False) -> None:
        if initial_connection and self.must_have_tls and not info.get("tls_required"):
            raise nats.errors.Error("it does not ask for TLS, and is not spoken to without")
        await super()._process_info(info, initial_connection)


class NatsBus:
    """One NATS connection."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self.max_payload = client.max_payload
        self.reconnects = 0
        self.slow_consumer_drops = 0
        self._closing = False
        self.on_reconnect: Callable[[], None] | None = None

    @classmethod
    async def join(cls, config: MeshConfig, kind: str, name: str) -> NatsBus:
        """Connect as a service of ``kind`` whose connection is called ``name``; raises as :meth:`connect`."""
        user = config.nats_user or (kind if config.nats_password else "")
        return await cls.connect(
            config.nats, name, config.nats_token, user=user, password=config.nats_password, ca=config.nats_ca,
            inbox=inbox_prefix(kind),
        )  # fmt: skip

    @classmethod
    async def connect(
        cls, url: str, name: str, token: str = "", timeout_s: float = 10.0, *, user: str = "", password: str = "",
        ca: str = "", inbox: str = "_INBOX",
    ) -> NatsBus:  # fmt: skip
        """Connect, or raise :class:`BusUnavailable` naming the URL once ``timeout_s`` has passed.

        An address that begins with ``tls://`` is never spoken to without TLS. ``ca`` is a PEM file with the only CA
        to trust, else the system's are; replies to requests come under ``inbox``.
        """
        client = _Client()
        client.must_have_tls = ca != "" or any(part.strip().startswith("tls://") for part in url.split(","))
        try:
            tls = ssl.create_default_context(cafile=ca or None) if client.must_have_tls else None
        except OSError as error:  # ssl.SSLError is one
            raise BusUnavailable(f"--nats-ca {ca}: {error.strerror or error}") from None
        holder: list[NatsBus] = []
        attempts: list[str] = []  # why each failed
        told: set[str] = set()  # in this outage: each attempt fails for the same reason, once a second

        async def on_error(error: Exception) -> None:
            if isinstance(error, nats.errors.SlowConsumerError):
                if holder:
                    holder[0].slow_consumer_drops += 1
                log.error("slow consumer: a message was dropped (%s)", error)
            elif holder:
                why = (str(error) or type(error).__name__).removeprefix("nats: ")
                if client.is_connected or why not in told:
                    log.warning("nats: %s", why)
                told.add(why)
            else:  # it is tried again and again: the last attempt says why
                attempts.append(str(error) or type(error).__name__)

        async def on_disconnect() -> None:
            if not (holder and holder[0]._closing):
                log.warning("nats: disconnected")

        async def on_reconnect() -> None:
            told.clear()
            log.warning("nats: reconnected")
            if holder:
                holder[0].reconnects += 1
                if holder[0].on_reconnect is not None:
                    holder[0].on_reconnect()

        for part in url.split(","):
            if not part.strip().startswith(("nats://", "tls://", "ws://", "wss://")):
                raise BusUnavailable(f"{_without_secrets(part)!r} is no NATS address; write e.g. nats://127.0.0.1:4222")
        try:
            async with asyncio.timeout(timeout_s):
                await client.connect(
                    servers=[part.strip() for part in url.split(",")],
                    name=name,
                    token=token or None,
                    user=user or None,
                    password=password or None,
                    tls=tls,
                    inbox_prefix=inbox,
                    error_cb=on_error,
                    disconnected_cb=on_disconnect,
                    reconnected_cb=on_reconnect,
                    connect_timeout=5,
                    reconnect_time_wait=1,
                    max_reconnect_attempts=-1,
                    ping_interval=3,
                    max_outstanding_pings=2,
                    pending_size=0,
                )
        except (TimeoutError, OSError, nats.errors.Error) as error:
            why = str(error) or (attempts[-1] if attempts else f"no answer within {timeout_s:g} s")
            raise BusUnavailable(f"no NATS at {_without_secrets(url)} ({why}); is a server running there?") from None
        bus = cls(client)
        holder.append(bus)
        return bus

    @property
    def connected(self) -> bool:
        return self._client.is_connected

    async def publish(self, subject: str, payload: bytes) -> None:
        try:
            await self._client.publish(subject, payload)
        except nats.errors.MaxPayloadError:
            raise PayloadTooLarge(f"{len(payload)} bytes to {subject}; the server takes {self.max_payload}") from None
        except nats.errors.OutboundBufferLimitError:  # nothing is buffered meanwhile: pending_size
            raise BusUnavailable(f"publish to {subject}: no connection to NATS") from None
        except (nats.errors.Error, OSError) as error:
            raise BusUnavailable(f"publish to {subject}: {error or type(error).__name__}") from None

    async def request(self, subject: str, payload: bytes, timeout_s: float) -> bytes:
        try:
            reply: Msg = await self._client.request(subject, payload, timeout=timeout_s)
        except nats.errors.MaxPayloadError:
            raise PayloadTooLarge(f"{len(payload)} bytes to {subject}; the server takes {self.max_payload}") from None
        except nats.errors.NoRespondersError:
            raise NoResponder(f"nobody listens on {subject}") from None
        except (TimeoutError, nats.errors.TimeoutError):
            raise BusTimeout(f"no reply from {subject} within {timeout_s} s") from None
        except nats.errors.OutboundBufferLimitError:
            raise BusUnavailable(f"request to {subject}: no connection to NATS") from None
        except (nats.errors.Error, OSError) as error:
            raise BusUnavailable(f"request to {subject}: {error or type(error).__name__}") from None
        return bytes(reply.data)

    async def subscribe(self, subject: str, handler: Handler) -> Unsubscribe:
        async def callback(message: Msg) -> None:
            try:
                handler(message.data, message.reply)
            except Exception:  # a handler's fault must not end the subscription: nats-py would only log it
                log.exception("handler of %s failed", subject)

        return _Subscribed(await self._client.subscribe(subject, cb=callback))

    def key(self, bucket: str, key: str, timeout_s: float) -> KeyStore:
        """One key of a JetStream bucket; nothing is asked of the server yet."""
        return JetStreamKey(self._client, bucket, key, timeout_s)

    async def flush(self) -> None:
        """Return once the server has processed everything that was sent; :class:`BusUnavailable` if it does not."""
        try:
            await self._client.flush(timeout=10)
        except (TimeoutError, nats.errors.Error) as error:
            raise BusUnavailable(f"flush: {error or type(error).__name__}") from None

    async def close(self) -> None:
        self._closing = True
        if self._client.is_connected:
            with contextlib.suppress(TimeoutError, nats.errors.Error):  # closing anyway
                await self._client.flush(timeout=2)
        with contextlib.suppress(OSError):  # what was still to be written to a connection that had broken
            await self._client.close()


class _Subscribed:
    def __init__(self, subscription: Subscription) -> None:
        self._subscription = subscription

    async def unsubscribe(self) -> None:
        with contextlib.suppress(nats.errors.Error):  # the connection is closed: nothing comes any more
            await self._subscription.unsubscribe()


def _without_secrets(url: str) -> str:
    return ",".join(part.rsplit("@", 1)[-1].rsplit("//", 1)[-1] for part in url.split(","))
