"""The control socket of a running ``headrace up``: one request a connection, answered line by line (JSON).

Asked: ``{"restart": [kind, ...], "surge": bool}``. Answered: ``{"say": line}`` as it goes on; last ``{"exit": code}``.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass
from pathlib import Path

import msgspec

from headrace.runtime_folder import removed_if_stale
from shared.ports import accept_no_more

log = logging.getLogger("headrace.control")

KINDS = ("nats", "scheduler", "worker", "gateway")
"""What can be restarted, in this order: each kind leans on those before it."""

ASK_TIMEOUT_S = 10.0
LAST_WORDS_S = 2.0


@dataclass(frozen=True)
class Wish:
    """What is to be restarted. ``given_up``: nobody waits for it any more."""

    kinds: Collection[str]
    surge: bool
    say: Callable[[str], None]
    given_up: asyncio.Event


class Asked(msgspec.Struct, forbid_unknown_fields=True):
    restart: list[str]
    surge: bool = True


class Said(msgspec.Struct, omit_defaults=True):
    say: str = ""
    exit: int | None = None


class ControlServer:
    """Takes requests at ``path``, one at a time. Nothing that a client does, or leaves undone, harms the mesh."""

    def __init__(self, path: Path, restart: Callable[[Wish], Awaitable[bool]]) -> None:
        self._path = path
        self._restart = restart
        self._server: asyncio.Server | None = None
        self._current: Wish | None = None
        self._connections: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Raises OSError if another mesh answers there, or the socket cannot be made."""
        if not removed_if_stale(self._path):
            raise FileExistsError(f"another mesh answers at {self._path}")
        self._server = await asyncio.start_unix_server(self._serve, self._path)
        os.chmod(self._path, 0o600)  # (its folder lets nobody else in, either)

    async def close(self) -> None:
        """Nobody is served any more, and what is not up yet is given up."""
        if self._server is not None:
            await accept_no_more([one.fileno() for one in self._server.sockets])
            self._server.close()
            self._server = None
            self._path.unlink(missing_ok=True)
        if self._current is not None:
            self._current.given_up.set()

    async def closed(self) -> None:
        """Return once everybody has had an answer, or has had the time for it."""
        if self._connections:
            _, late = await asyncio.wait(self._connections, timeout=LAST_WORDS_S)
            for connection in late:
                connection.cancel()
            await asyncio.gather(*late, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = asyncio.current_task()
        assert connection is not None
        self._connections.add(connection)
        connection.add_done_callback(self._connections.discard)

        def say(said: Said) -> None:
            if not writer.is_closing():
                writer.write(msgspec.json.encode(said) + b"\n")

        try:
            async with asyncio.timeout(ASK_TIMEOUT_S):
                line = await reader.readline()
            say(Said(exit=await self._answer(line, reader, lambda text: say(Said(say=text)))))
            await writer.drain()
        except (TimeoutError, OSError, ValueError):  # it left, sent nothing, or a line without end
            pass
        finally:
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()

    async def _answer(self, line: bytes, reader: asyncio.StreamReader, say: Callable[[str], None]) -> int:
        try:
            asked = msgspec.json.decode(line, type=Asked)
        except msgspec.DecodeError as error:
            say(f"not understood: {error}")
            return 2
        if unknown := set(asked.restart) - set(KINDS):
            say(f"not understood: {', '.join(sorted(unknown))}")
            return 2
        if self._current is not None:
            say("refused: a restart is going on already")
            return 1
        given_up = asyncio.Event()
        self._current = Wish(asked.restart, asked.surge, say, given_up)
        gone = asyncio.ensure_future(reader.read())  # a client that waits says nothing more: this ends when it leaves
        gone.add_done_callback(lambda _: given_up.set())
        try:
            done = await self._restart(self._current)
        except Exception as error:
            log.exception("a restart failed")
            say(f"failed: {error}")
            return 1
        finally:
            self._current = None
            gone.cancel()
            await asyncio.gather(gone, return_exceptions=True)
        return 0 if done else 1
