"""Whole meshes of real processes: a NATS server that can be restarted, three services, a client of their HTTP API."""

from __future__ import annotations

import asyncio
import contextlib
import re
import subprocess
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
from loopback_http import HTTP, NO_AUTHORITIES
from mesh_stack import DEADLINE_S, BusClient, Process, Stack, until
from test_whole_mesh import free_port

from headrace.bench.probe import read_metrics
from headrace.nats_server import NatsServer
from headrace.parent_death import die_with_parent

VOCAB_SIZE = 320
SIMULATED = ("--simulate", "--simulate-vocab-size", str(VOCAB_SIZE), "--simulate-token-us", "1")
FLOAT32 = ("--dtype", "float32", "--threads", "1")
START_POLL_S = 0.05  # a start takes seconds of CPU, and so would asking for its end all the time
BYTES_PER_BLOCK = 2 * 2 * 2 * 16 * 4 * 16  # key and value, layers, KV heads, head size, float32, tokens


class Nats:
    """A NATS server's process, which a test may kill and start again on the same port."""

    def __init__(self, server: NatsServer | None = None) -> None:
        self.server = server or NatsServer()
        self.start()

    def start(self) -> None:
        quiet = subprocess.DEVNULL
        self.process = subprocess.Popen(
            self.server.command, stdin=quiet, stdout=quiet, stderr=quiet, preexec_fn=die_with_parent()
        )
        self.server.wait_ready(lambda: self.process.poll() is None)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def close(self) -> None:
        self.kill()
        self.server.close()


class Mesh:
    """One model behind one gateway. ``scheduler``, ``worker`` and ``gateway`` are flags of the processes.

    ``beside`` is another mesh, whose NATS server and scheduler are shared.
    """

    def __init__(self, nats: Nats, folder: Path, *, scheduler: tuple[str, ...] = (), worker: tuple[str, ...] = (),
                 gateway: tuple[str, ...] = (), workers: int = 1, model: str = "m",
                 beside: Mesh | None = None) -> None:  # fmt: skip
        self.nats = nats
        self.stack = Stack(nats.server)
        self.folder = folder
        self.model = model
        self._scheduler_flags, self._worker_flags, self._gateway_flags = scheduler, worker, gateway
        if beside is None:
            self.start_scheduler()
        else:
            self.scheduler = beside.scheduler
        self.workers = [self.start_worker() for _ in range(workers)]
        self.port = free_port()
        self.gateway = self.start_gateway(self.port)
        self.url = f"http://127.0.0.1:{self.port}"
        self.http = httpx.Client(
            base_url=self.url,
            timeout=DEADLINE_S,
            verify=NO_AUTHORITIES,
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=0),
        )

    def start_scheduler(self) -> Process:
        self.scheduler = self.stack.start("scheduler", *self._scheduler_flags)
        return self.scheduler

    def start_worker(self) -> Process:
        flags = ("--model", str(self.folder), "--served-model-name", self.model, *self._worker_flags)
        return self.stack.start("worker", *flags)

    def start_gateway(self, port: int, *more: str) -> Process:
        flags = ("--model", str(self.folder), "--served-model-name", self.model, "--port", str(port))
        return self.stack.start("gateway", *flags, *self._gateway_flags, *more)

    def close(self) -> None:
        self.http.close()
        self.stack.close()

    # --- HTTP -------------------------------------------------------------------------------------------------------

    def ready(self) -> bool:
        try:
            return self.http.get("/ready").status_code == 200
        except httpx.TransportError:
            return False

    def wait_ready(self, wanted: bool = True) -> None:
        eventually(lambda: self.ready() == wanted, f"readiness {wanted}", every_s=START_POLL_S)

    def post(self, path: str = "/v1/completions", **body: Any) -> httpx.Response:
        return self.http.post(path, json={"model": self.model, **body})

    def answer(self, path: str = "/v1/completions", **body: Any) -> dict[str, Any]:
        reply = self.post(path, **body)
        assert reply.status_code == 200, reply.text
        answer: dict[str, Any] = reply.json()
        return answer

    def texts(self, **body: Any) -> list[str]:
        return [choice["text"] for choice in self.answer(**body)["choices"]]

    def text(self, **body: Any) -> str:
        (text,) = self.texts(**body)
        return text

    def together(self, bodies: list[dict[str, Any]]) -> list[list[str]]:
        """The texts of all requests, sent at once."""
        return at_once([lambda body=body: self.texts(**body) for body in bodies])

    # --- what the processes say of themselves -----------------------------------------------------------------------

    def metrics(self, process: Process) -> dict[str, float]:
        """What a process's metrics listener says, but for buckets: by name and labels as they are printed, and summed
        over them by name alone."""
        port = re.search(r"metrics on http://[^:]+:(\d+)/", process.output())
        assert port is not None, process.output()
        return read_metrics([HTTP.get(f"http://127.0.0.1:{port.group(1)}/metrics").text])

    def quiet(self) -> bool:
        """O5: nothing runs, nothing waits, no block is in use, by the gauges, without new traffic to refresh them."""
        load = self.metrics(self.scheduler)
        gauges = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc")
        in_flight = self.metrics(self.gateway)["headrace_gateway_requests_in_flight"]
        return in_flight == 0 and all(load[gauge] == 0 for gauge in gauges)

    def quiescence(self, within_s: float = DEADLINE_S) -> None:
        eventually(self.quiet, "O5: quiescence", within_s)

    def on_the_bus(self, scenario: Callable[[BusClient], Any]) -> Any:
        """Run a coroutine function with a client on the mesh's bus."""

        async def body() -> Any:
            client = await BusClient.connect(self.nats.server)
            try:
                await until(lambda: client.beat, "a beat of the scheduler")
                return await scenario(client)
            finally:
                await client.close()

        return asyncio.run(body())


def eventually(
    condition: Callable[[], object], what: str, deadline_s: float = DEADLINE_S, every_s: float = 0.01
) -> None:
    deadline = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {deadline_s:g} s: {what}"
        time.sleep(every_s)


def at_once(calls: list[Callable[[], Any]]) -> list[Any]:
    with ThreadPoolExecutor(len(calls)) as pool:
        return [future.result() for future in [pool.submit(call) for call in calls]]


def memory_bytes(process: Process) -> int:
    """Resident memory of a process (Linux)."""
    status = Path(f"/proc/{process.popen.pid}/status").read_text()
    found = re.search(r"VmRSS:\s+(\d+) kB", status)
    assert found is not None
    return int(found.group(1)) * 1024


@contextlib.contextmanager
def running_mesh(folder: Path, *, scheduler: tuple[str, ...] = (), worker: tuple[str, ...] = SIMULATED,
                 gateway: tuple[str, ...] = (), workers: int = 1) -> Iterator[Mesh]:  # fmt: skip
    """A ready mesh; on an error its logs are printed."""
    with contextlib.ExitStack() as closing:
        nats = Nats()
        closing.callback(nats.close)
        mesh = Mesh(nats, folder, scheduler=scheduler, worker=worker, gateway=gateway, workers=workers)
        closing.callback(mesh.close)
        try:
            mesh.wait_ready()
            yield mesh
        except BaseException:
            print(mesh.stack.logs())
            raise
