"""A mesh for the length of a measurement: ``headrace up`` as a child, around a NATS server that the bench can watch."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import AsyncIterator, Sequence

from headrace.launch import free_port
from headrace.nats_server import NatsServer, embedded_nats


class MeshFailed(RuntimeError):
    """The mesh did not come up; the message is its own last line."""


@contextlib.asynccontextmanager
async def running_mesh(flags: Sequence[str]) -> AsyncIterator[tuple[str, NatsServer]]:
    """Yields the gateway's base URL and the NATS server once a completion has succeeded."""
    with embedded_nats() as nats:
        port = free_port("127.0.0.1")
        env = {**os.environ, "HEADRACE_NATS_TOKEN": nats.token}
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "headrace", "up", "--nats", nats.url, "--port", str(port), "--metrics-port", "0",
            *flags, env=env, stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE, start_new_session=True,
        )  # fmt: skip
        assert process.stdout is not None and process.stderr is not None
        errors: list[str] = []

        async def read_errors(stream: asyncio.StreamReader) -> None:
            async for line in stream:
                errors.append(line.decode(errors="replace").rstrip())
                del errors[:-20]

        reading = asyncio.create_task(read_errors(process.stderr))
        try:
            served = False
            async for line in process.stdout:
                if b" is served at " in line:
                    served = True
                    break
            if not served:
                await process.wait()
                await reading
                raise MeshFailed("\n".join(errors[-5:]) or f"headrace up ended with {process.returncode}")
            drain = asyncio.create_task(process.stdout.read())
            yield f"http://127.0.0.1:{port}", nats
            drain.cancel()
        finally:
            if process.returncode is None:
                process.send_signal(signal.SIGTERM)
                try:
                    await asyncio.wait_for(process.wait(), 60)
                except TimeoutError:
                    process.kill()
            reading.cancel()
