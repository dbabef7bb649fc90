"""The key that holds the lease, behind the same network and server as everything else.

What is asked of it travels over the asker's connection; the answer may be lost though the key was written.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Coroutine
from typing import Any

from memory_store import MemoryStore
from simulated_bus import Connection

from shared.jetstream import Conflict, StoreUnavailable

Stored = tuple[bytes, int] | int | None


class SimulatedStore:
    """A ``shared.jetstream.KeyStore`` of one scheduler. ``memory`` is what the server has stored."""

    def __init__(self, connection: Connection, memory: MemoryStore, timeout_s: float) -> None:
        self._connection = connection
        self._memory = memory
        self._timeout_s = timeout_s

    async def open(self) -> None: ...

    async def read(self) -> tuple[bytes, int] | None:
        return await self._ask(self._memory.read)  # type: ignore[return-value]

    async def write(self, value: bytes, expected: int) -> int:
        return await self._ask(lambda: self._memory.write(value, expected))  # type: ignore[return-value]

    async def _ask(self, operation: Callable[[], Coroutine[Any, Any, Stored]]) -> Stored:
        reply: asyncio.Future[Stored] = asyncio.get_running_loop().create_future()

        def serve() -> Callable[[], None] | None:
            """At the server; what is to be done once the answer is here, or None if there is none."""
            try:
                operation().send(None)
            except StopIteration as done:
                return functools.partial(_settle, reply, done.value, None)
            except Conflict as conflict:
                return functools.partial(_settle, reply, None, conflict)
            except StoreUnavailable:
                return None
            raise AssertionError("the memory does not wait")

        self._connection.call(serve)
        try:
            async with asyncio.timeout(self._timeout_s):
                return await reply
        except TimeoutError:
            raise StoreUnavailable("no answer") from None


def _settle(reply: asyncio.Future[Stored], value: Stored, error: Conflict | None) -> None:
    if reply.done():
        return
    if error is not None:
        reply.set_exception(error)
    else:
        reply.set_result(value)
