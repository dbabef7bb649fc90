"""A mesh for the length of a measurement: ``headrace up`` as a child, around a NATS server that the bench can watch."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import sys
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field

from headrace.launch import free_port
from headrace.nats_server import NatsServer, embedded_nats
from shared.bus import NatsBus
from shared.messages import BadMessage, ModelInfo, SchedulerBeat, decode
from shared.subjects import Subjects

HEARD_WITHIN_S = 10.0
_METRICS = re.compile(r"^(\S+) *\| .*metrics on (http://\S+)")


class MeshFailed(RuntimeError):
    """The mesh did not come up; the message is its own last line."""


@dataclass(frozen=True)
class RunningMesh:
    """``metrics``: the metrics address of each child of ``headrace up`` (process ``pid``), as it was logged."""

    url: str
    nats: NatsServer
    pid: int
    metrics: dict[str, str] = field(default_factory=dict)

    async def model(self) -> ModelInfo:
        """The served model as the scheduler describes it: name, longest context, vocabulary."""
        heard: asyncio.Future[ModelInfo] = asyncio.get_running_loop().create_future()

        def on_beat(payload: bytes, _: str) -> None:
            with contextlib.suppress(BadMessage):
                beat = decode(payload)
                if isinstance(beat, SchedulerBeat) and beat.models and not heard.done():
                    heard.set_result(beat.models[0])

        bus = await NatsBus.connect(self.nats.url, "bench", self.nats.token)
        try:
            await bus.subscribe(Subjects().beats("scheduler"), on_beat)
            async with asyncio.timeout(HEARD_WITHIN_S):
                return await heard
        except TimeoutError:
            raise MeshFailed(
                "the scheduler is not heard on the bus; is the mesh's name another than default?"
            ) from None
        finally:
            await bus.close()

    async def metrics_of(self, service: str) -> list[str]:
        """The metrics addresses of the gateway, the scheduler or the workers (``worker``, ``worker-0``, ...)."""
        deadline = asyncio.get_running_loop().time() + HEARD_WITHIN_S
        while True:  # the lines were written before the mesh served, but come through another pipe
            found = [url for name, url in self.metrics.items() if name == service or name.startswith(f"{service}-")]
            if found:
                return found
            if asyncio.get_running_loop().time() > deadline:
                raise MeshFailed(f"the {service} did not log its metrics address, as it does at --log-level info")
            await asyncio.sleep(0.05)


@contextlib.asynccontextmanager
async def running_mesh(flags: Sequence[str]) -> AsyncIterator[RunningMesh]:
    """Yields the mesh once a completion has succeeded."""
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
        mesh = RunningMesh(f"http://127.0.0.1:{port}", nats, process.pid)

        async def read_errors(stream: asyncio.StreamReader) -> None:
            async for line in stream:
                text = line.decode(errors="replace").rstrip()
                if logged := _METRICS.match(text):
                    mesh.metrics[logged[1]] = logged[2]
                errors.append(text)
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
            yield mesh
            drain.cancel()
        finally:
            if process.returncode is None:
                process.send_signal(signal.SIGTERM)
                try:
                    await asyncio.wait_for(process.wait(), 60)
                except TimeoutError:
                    process.kill()
            reading.cancel()
