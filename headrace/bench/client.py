"""The load: streaming completions over HTTP, with the arrival time of every piece of text.

The client shares its machine with the mesh it measures, so it does only what is measured: pooled HTTP/1.1 connections,
a parser in C (httptools), and no more of an answer read than its frames.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import Callable, Iterator
from urllib.parse import urlsplit

import httptools

from headrace.bench.taken import Taken
from headrace.bench.workload import Shot

IDLE_S = 2.0
"""An idle connection is not used again after so long: servers close theirs after five seconds, and might just then."""


class Client:
    """Asks one mesh. Cancelling :meth:`ask` closes its connection, which is how a client gives a request up."""

    def __init__(self, url: str, model: str, keep_alive: bool = True) -> None:
        """``keep_alive`` False: a connection for each request, for servers that close theirs without a word."""
        address = urlsplit(url)
        self._host, self._port = address.hostname or "", address.port or 80
        self._model = model
        self._head = f"POST /v1/completions HTTP/1.1\r\nhost: {address.netloc}\r\ncontent-type: application/json\r\n"
        if not keep_alive:
            self._head += "connection: close\r\n"
        self._idle: list[_Connection] = []

    async def ask(self, shot: Shot, taken: Taken) -> None:
        """Send one request and fill in ``taken`` until the answer has ended, whichever way. Nothing is retried."""
        request = self._request(shot)
        try:
            connection = self._pooled() or await self._connect()
            taken.sent_s = time.perf_counter()
            await connection.exchange(request, taken)
        except OSError as error:
            taken.error = taken.error or f"{type(error).__name__}: {error}"
        taken.ended_s = time.perf_counter()
        if taken.status == 200 and not taken.error and taken.completion_tokens != taken.want_tokens:
            taken.error = f"{taken.completion_tokens} tokens instead of {taken.want_tokens}"

    def close(self) -> None:
        for connection in self._idle:
            connection.close()
        self._idle.clear()

    def _request(self, shot: Shot) -> bytes:
        body = {
            "model": self._model,
            "prompt": shot.prompt,
            "max_tokens": shot.max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        payload = json.dumps(body, separators=(",", ":")).encode()
        return f"{self._head}content-length: {len(payload)}\r\n\r\n".encode() + payload

    def _pooled(self) -> _Connection | None:
        while self._idle:
            connection = self._idle.pop()  # the latest used
            if connection.open and time.perf_counter() - connection.idle_since_s < IDLE_S:
                return connection
            connection.close()
        return None

    async def _connect(self) -> _Connection:
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_connection(lambda: _Connection(self._idle), self._host, self._port)
        return connection


class _Connection(asyncio.Protocol):
    """One HTTP/1.1 connection: one exchange at a time, then back to ``pool``. The ``on_`` methods are httptools'."""

    def __init__(self, pool: list[_Connection]) -> None:
        self.open = False
        self.idle_since_s = 0.0
        self._pool = pool
        self._transport: asyncio.Transport
        self._parser = httptools.HttpResponseParser(self)
        self._taken: Taken | None = None
        self._done: asyncio.Future[None] | None = None
        self._now_s = 0.0
        self._tail = b""

    async def exchange(self, request: bytes, taken: Taken) -> None:
        """Raises ConnectionError if the connection ends before the answer does."""
        self._taken, self._tail = taken, b""
        self._done = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        try:
            await self._done
        except asyncio.CancelledError:
            self._taken = None
            self._transport.abort()
            raise

    def close(self) -> None:
        self._transport.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self.open = True

    def connection_lost(self, exc: Exception | None) -> None:
        self.open = False
        self._end(exc or ConnectionResetError("the connection ended before the answer"))

    def data_received(self, data: bytes) -> None:
        self._now_s = time.perf_counter()
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._end(ConnectionError(f"no HTTP: {error}"))
            self._transport.abort()

    def on_header(self, name: bytes, _: bytes) -> None:
        if name.lower() == b"retry-after" and self._taken is not None:
            self._taken.retry_after = True

    def on_headers_complete(self) -> None:
        if self._taken is not None:
            self._taken.status = self._parser.get_status_code()

    def on_body(self, body: bytes) -> None:
        taken = self._taken
        if taken is None:
            return
        *frames, self._tail = (self._tail + body).split(b"\n\n")
        for frame in frames:
            if frame.startswith(b'data: {"error"'):
                taken.error = frame.decode(errors="replace")[:200]
            elif b'"usage":{' in frame:  # in a frame of its own, or in that of the end
                last = json.loads(frame[6:])
                taken.completion_tokens = last["usage"]["completion_tokens"]
                if any(choice["text"] for choice in last["choices"]):
                    taken.text_s.append(self._now_s)
            elif frame.startswith(b"data: {"):
                taken.text_s.append(self._now_s)

    def on_message_complete(self) -> None:
        if self._taken is not None and self._taken.status != 200:
            self._taken.error = f"HTTP {self._taken.status}: {self._tail.decode(errors='replace')[:200]}"
        self._end(None)
        if self._parser.should_keep_alive() and not self._transport.is_closing():
            self.idle_since_s = self._now_s
            self._parser = httptools.HttpResponseParser(self)
            self._pool.append(self)
        else:
            self._transport.close()

    def _end(self, error: Exception | None) -> None:
        self._taken = None
        if self._done is not None and not self._done.done():
            if error is None:
                self._done.set_result(None)
            else:
                self._done.set_exception(error)


@contextlib.contextmanager
def client_of(url: str, model: str) -> Iterator[Client]:
    client = Client(url, model)
    try:
        yield client
    finally:
        client.close()


async def fire(
    url: str, model: str, load: list[Shot], concurrency: int, done: Callable[[int], None]
) -> tuple[list[Taken], float]:
    """Send every shot, ``concurrency`` at most at once; returns what each took and the seconds in all."""
    places = asyncio.Semaphore(concurrency)
    finished = 0
    with client_of(url, model) as client:
        began = time.perf_counter()

        async def one(shot: Shot) -> Taken:
            nonlocal finished
            await asyncio.sleep(max(0.0, shot.at_s - (time.perf_counter() - began)))
            arrived = time.perf_counter() if shot.at_s else 0.0
            async with places:
                taken = Taken(shot.max_tokens, arrived or time.perf_counter())
                await client.ask(shot, taken)
            finished += 1
            done(finished)
            return taken

        results = await asyncio.gather(*(one(shot) for shot in load))
        return list(results), time.perf_counter() - began
