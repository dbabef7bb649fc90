"""Three NATS servers in one cluster with JetStream, each of which a test may kill and start again."""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import nats

from headrace.nats_server import HOST, find_nats_server
from headrace.parent_death import die_with_parent


class NatsCluster:
    """``url`` names all servers; ``token`` lets a client do anything, as in the embedded server's tests."""

    def __init__(self, folder: Path, size: int = 3) -> None:
        self.token = secrets.token_urlsafe(24)
        self._folder = folder
        ports = _free_ports(2 * size)
        self.ports, self._routes = ports[:size], ports[size:]
        self._processes: list[subprocess.Popen[bytes] | None] = [None] * size
        for index in range(size):
            self._config(index).write_text(self._text(index), "utf-8")
            self.start(index)

    @property
    def url(self) -> str:
        return ",".join(f"nats://{HOST}:{port}" for port in self.ports)

    def start(self, index: int) -> None:
        command = [str(find_nats_server()), "--config", str(self._config(index))]
        with (self._folder / f"{index}.log").open("ab") as log:
            self._processes[index] = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, preexec_fn=die_with_parent()
            )

    def kill(self, index: int) -> None:
        process = self._processes[index]
        assert process is not None
        process.kill()
        process.wait()

    def close(self) -> None:
        for process in self._processes:
            if process is not None and process.poll() is None:
                process.kill()
                process.wait()

    def wait_for_a_leader(self, deadline_s: float = 60.0) -> None:
        """Return once the servers have elected a JetStream meta leader: before that no stream can be made."""
        deadline = time.monotonic() + deadline_s
        wanted = "JetStream cluster new metadata leader"
        while not any(wanted in (self._folder / f"{index}.log").read_text() for index in range(len(self.ports))):
            assert time.monotonic() < deadline, "no JetStream leader"
            time.sleep(0.02)

    def leader_of(self, stream: str) -> int:
        """Which server leads a stream."""
        return int(asyncio.run(self._leader_of(stream)).removeprefix("n"))

    async def _leader_of(self, stream: str) -> str:
        client = await nats.connect(self.url.split(","), token=self.token)
        try:
            cluster = (await client.jetstream().stream_info(stream)).cluster
            assert cluster is not None and cluster.leader, cluster
            return cluster.leader
        finally:
            await client.close()

    def _config(self, index: int) -> Path:
        return self._folder / f"{index}.conf"

    def _text(self, index: int) -> str:
        routes = ", ".join(f'"nats-route://{HOST}:{port}"' for port in self._routes)
        return (
            f'server_name: "n{index}"\n'
            f'listen: "{HOST}:{self.ports[index]}"\n'
            f"authorization {{ token: {json.dumps(self.token)} }}\n"
            f"jetstream {{ store_dir: {json.dumps(str(self._folder / f'store-{index}'))} }}\n"
            f'cluster {{ name: "c", listen: "{HOST}:{self._routes[index]}", routes: [{routes}] }}\n'
        )


@contextlib.contextmanager
def nats_cluster() -> Iterator[NatsCluster]:
    with tempfile.TemporaryDirectory(prefix="headrace-cluster-") as folder:
        cluster = NatsCluster(Path(folder))
        try:
            cluster.wait_for_a_leader()
            yield cluster
        finally:
            cluster.close()


def _free_ports(count: int) -> list[int]:
    """All different: each stays bound until the last one is found."""
    with contextlib.ExitStack() as held:
        return [held.enter_context(socket.create_server((HOST, 0))).getsockname()[1] for _ in range(count)]
