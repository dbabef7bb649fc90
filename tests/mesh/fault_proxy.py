"""A TCP proxy in a process of its own, which a test puts between a service and NATS to part them.

:meth:`Proxy.hold` is a network that has gone: nothing passes in either direction, connections stay open, new ones are
taken and get nothing. What was sent meanwhile waits in buffers and arrives after :meth:`Proxy.heal`, late, as TCP's
retransmissions do. :meth:`Proxy.cut` resets every connection; the next ones pass.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
import subprocess
import sys
import threading

CHUNK_BYTES = 1 << 16


class Proxy:
    """Passes what comes to ``port`` on to ``upstream`` (host, port)."""

    def __init__(self, upstream: tuple[str, int], host: str = "127.0.0.1") -> None:
        command = [sys.executable, __file__, host, upstream[0], str(upstream[1])]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1)
        self._asking = threading.Lock()
        self.host = host
        self.port = int(self._answer())

    @property
    def url(self) -> str:
        return f"nats://{self.host}:{self.port}"

    def hold(self) -> None:
        self._ask("hold")

    def heal(self) -> None:
        self._ask("heal")

    def cut(self) -> None:
        self._ask("cut")

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()

    def _ask(self, what: str) -> None:
        with self._asking:
            assert self._process.stdin is not None
            self._process.stdin.write(what + "\n")
            assert self._answer() == what

    def _answer(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline().strip()
        assert line, "the proxy has ended"
        return line


class _Forwarder:
    def __init__(self, upstream: tuple[str, int]) -> None:
        self._upstream = upstream
        self._passing = asyncio.Event()
        self._passing.set()
        self._writers: set[asyncio.StreamWriter] = set()
        self._serving: set[asyncio.Task[None]] = set()

    def obey(self, what: str) -> None:
        if what == "hold":
            self._passing.clear()
        elif what == "heal":
            self._passing.set()
        elif what == "cut":
            for writer in self._writers:
                linger = struct.pack("ii", 1, 0)  # on, for no time: closing sends RST
                writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
                writer.transport.abort()

    def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.get_running_loop().create_task(self._serve(reader, writer))
        self._serving.add(task)
        task.add_done_callback(self._serving.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.ExitStack() as closing:
            closing.callback(writer.transport.abort)
            self._writers.add(writer)
            closing.callback(self._writers.discard, writer)
            await self._passing.wait()
            try:
                beyond_reader, beyond_writer = await asyncio.open_connection(*self._upstream)
            except OSError:
                return  # as a server that is gone
            closing.callback(beyond_writer.transport.abort)
            self._writers.add(beyond_writer)
            closing.callback(self._writers.discard, beyond_writer)
            there = asyncio.ensure_future(self._pump(reader, beyond_writer))
            back = asyncio.ensure_future(self._pump(beyond_reader, writer))
            done, rest = await asyncio.wait((there, back), return_when=asyncio.FIRST_COMPLETED)
            for task in rest:
                task.cancel()
            await asyncio.gather(*done, *rest, return_exceptions=True)

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(CHUNK_BYTES):
                await self._passing.wait()
                writer.write(data)
                await writer.drain()
            await self._passing.wait()
            writer.close()  # what was written before still goes out
            await writer.wait_closed()


async def _main(host: str, upstream: tuple[str, int]) -> None:
    forwarder = _Forwarder(upstream)
    server = await asyncio.start_server(forwarder.serve, host, 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    orders = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(orders), sys.stdin)
    while order := (await orders.readline()).decode().strip():  # whoever started it has gone if there is none
        forwarder.obey(order)
        print(order, flush=True)


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(_main(sys.argv[1], (sys.argv[2], int(sys.argv[3]))))
