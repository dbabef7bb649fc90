"""A whole mesh of real processes to which faults are done: killed, stopped, parted from NATS; and started again.

Every process is kept alive as a supervisor keeps it, but at once: what has ended is started again under the same name.
Each reaches NATS through a proxy of its own (:mod:`fault_proxy`), by which it can be parted from it.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import httpx
from fault_proxy import Proxy
from loopback_http import HTTP
from mesh_stack import DEADLINE_S, Process
from test_whole_mesh import free_port
from whole_mesh import START_POLL_S, Nats, eventually

from headrace.bench.probe import read_metrics
from headrace.nats_server import NatsServer

MODEL = "m"
LOOK_EVERY_S = 0.01  # how soon a process that has ended is started again
LEAST_LIFE_S = 0.5  # between two starts of one that cannot live
START_S = 240.0  # catches hangs
KEPT_LIVES, KEPT_LOG_LINES = 3, 60


@dataclass(frozen=True)
class Place:
    """Where the services of a kind run, if not simply here."""

    prefix: tuple[str, ...] = ()  # of their command
    here: str = "127.0.0.1"  # the address of this machine that they reach
    there: str = "127.0.0.1"  # theirs
    env: Mapping[str, str] = field(default_factory=dict)


class Service:
    """One service under its name, over all its lives."""

    def __init__(self, name: str, service: str, flags: tuple[str, ...], env: Mapping[str, str], place: Place) -> None:
        self.name = name
        self._command = [*place.prefix, sys.executable, "-m", service, "--metrics-host", place.there, *flags]
        own = {key: value for key, value in os.environ.items() if not key.startswith("HEADRACE_")}
        self._env = {**own, **env, **place.env}
        self.lives: list[Process] = []
        self.supervised = True
        self.started_s = 0.0  # monotonic

    def start(self) -> None:
        self.started_s = time.monotonic()
        self.lives.append(Process(self.name, self._command, self._env))

    @property
    def process(self) -> Process:
        return self.lives[-1]

    @property
    def pid(self) -> int:
        return self.process.popen.pid

    def ended(self) -> bool:
        return self.process.popen.poll() is not None

    def metrics(self) -> dict[str, float]:
        """By name, and by name with labels; empty while its listener is not there."""
        url = re.search(r"metrics on (http://[^/]+/metrics)", self.process.output())
        if url is None:
            return {}
        try:
            return read_metrics([HTTP.get(url.group(1), timeout=5).text])
        except httpx.TransportError:
            return {}

    def close(self) -> None:
        for life in self.lives:
            life.kill()
            Path(life.log.name).unlink(missing_ok=True)

    def log(self) -> str:
        return "".join(
            f"--- {self.name}, life {number}\n" + "".join(life.output().splitlines(True)[-KEPT_LOG_LINES:])
            for number, life in list(enumerate(self.lives, 1))[-KEPT_LIVES:]
        )


class NatsService:
    """The NATS server in the same role. Its port and its store stay."""

    name = "nats"

    def __init__(self, server: NatsServer | None) -> None:
        self._nats = Nats(server)
        self.server = self._nats.server
        self.supervised = True
        self.started_s = time.monotonic()

    def start(self) -> None:
        self.started_s = time.monotonic()
        self._nats.start()

    @property
    def pid(self) -> int:
        return self._nats.process.pid

    def ended(self) -> bool:
        return self._nats.process.poll() is not None

    def close(self) -> None:
        self._nats.close()


class FaultMesh:
    """Services are named ``scheduler0``, ``worker1``, ``gateway0``, ..., and ``nats``."""

    def __init__(
        self, folder: Path, *, schedulers: int = 1, workers: int = 1, gateways: int = 1,
        scheduler: tuple[str, ...] = (), worker: tuple[str, ...] = (), gateway: tuple[str, ...] = (),
        places: Mapping[str, Place] | None = None, server: NatsServer | None = None,
    ) -> None:  # fmt: skip
        """``scheduler``, ``worker`` and ``gateway`` are flags, ``places`` is by kind of service."""
        self._closing = contextlib.ExitStack()
        self._changing = threading.Lock()
        self._places = dict(places or {})
        self.nats = NatsService(server)
        self._closing.callback(self.nats.close)
        self.services: dict[str, Service] = {}
        self.proxies: dict[str, Proxy] = {}
        self.urls: list[str] = []
        model = ("--model", str(folder), "--served-model-name", MODEL)
        try:
            for index in range(schedulers):
                name = f"scheduler{index}"
                self.start(name, "--scheduler-id", name, *scheduler)
            for index in range(workers):
                name = f"worker{index}"
                self.start(name, "--worker-id", name, *model, *worker)
            for index in range(gateways):
                port = free_port()
                self.urls.append(f"http://127.0.0.1:{port}")
                self.start(f"gateway{index}", "--port", str(port), *model, *gateway)
        except BaseException:
            self.close()
            raise
        self._over = threading.Event()
        self._supervisor = threading.Thread(target=self._supervise, name="supervisor", daemon=True)
        self._supervisor.start()

    def start(self, name: str, *flags: str) -> Service:
        """Start a service and keep it alive."""
        kind = name.rstrip("0123456789")
        place = self._places.get(kind, Place())
        nats_host, _, nats_port = self.nats.server.url.removeprefix("nats://").partition(":")
        proxy = self.proxies[name] = Proxy((nats_host, int(nats_port)), place.here)
        self._closing.callback(proxy.close)
        every = ("--nats", proxy.url, "--metrics-port", "0")
        service = Service(name, kind, (*every, *flags), {"HEADRACE_NATS_TOKEN": self.nats.server.token}, place)
        service.start()
        self._closing.callback(service.close)
        with self._changing:
            self.services[name] = service
        return service

    def close(self) -> None:
        if hasattr(self, "_over"):
            self._over.set()
            self._supervisor.join()
        for service in self.services.values():  # a stopped process that is killed is gone as well
            service.supervised = False
        self._closing.close()

    # --- faults -----------------------------------------------------------------------------------------------------

    def kill(self, name: str) -> None:
        """SIGKILL. It is started again at once."""
        self._send(name, signal.SIGKILL)

    def stop(self, name: str) -> None:
        self._send(name, signal.SIGSTOP)

    def go_on(self, name: str) -> None:
        self._send(name, signal.SIGCONT)

    def part(self, name: str) -> None:
        """Part a service from NATS; ``nats`` itself from all of them."""
        for proxy in self._proxies_of(name):
            proxy.hold()

    def heal(self, name: str) -> None:
        for proxy in self._proxies_of(name):
            proxy.heal()

    def _proxies_of(self, name: str) -> list[Proxy]:
        return list(self.proxies.values()) if name == self.nats.name else [self.proxies[name]]

    def _send(self, name: str, number: signal.Signals) -> None:
        with self._changing:
            os.kill(self.member(name).pid, number)

    def member(self, name: str) -> Service | NatsService:
        return self.nats if name == self.nats.name else self.services[name]

    def _supervise(self) -> None:
        while not self._over.wait(LOOK_EVERY_S):
            for member in (self.nats, *self.services.values()):
                with self._changing:
                    rested = time.monotonic() - member.started_s > LEAST_LIFE_S
                    if member.supervised and rested and member.ended():
                        member.start()

    # --- what it says of itself -------------------------------------------------------------------------------------

    def of_kind(self, kind: str) -> list[Service]:
        return [service for name, service in self.services.items() if name.startswith(kind)]

    def leader(self) -> str:
        """The name of the scheduler that leads, or ''."""
        leading = "headrace_scheduler_leading"
        return next((one.name for one in self.of_kind("scheduler") if one.metrics().get(leading)), "")

    def load(self) -> dict[str, float]:
        """The metrics of the scheduler that leads."""
        leader = self.leader()
        return self.services[leader].metrics() if leader else {}

    def ready(self) -> bool:
        """Every gateway serves, and every worker is ready."""
        try:
            if any(HTTP.get(url + "/ready", timeout=5).status_code != 200 for url in self.urls):
                return False
        except httpx.TransportError:
            return False
        return self.load().get("headrace_workers") == len(self.of_kind("worker"))

    def wait_ready(self, within_s: float = START_S) -> None:
        eventually(self.ready, "the whole mesh is ready", within_s, every_s=START_POLL_S)

    def quiet(self) -> bool:
        """Nothing runs, nothing waits, every block is free."""
        load = self.load()
        gauges = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc")
        open_requests = [one.metrics().get("headrace_gateway_requests_in_flight") for one in self.of_kind("gateway")]
        return all(load.get(gauge) == 0 for gauge in gauges) and not any(open_requests)

    def quiescence(self, within_s: float = DEADLINE_S) -> None:
        eventually(self.quiet, "quiescence", within_s)

    def logs(self) -> str:
        return "".join(service.log() for service in self.services.values())


@contextlib.contextmanager
def fault_mesh(folder: Path, **given: object) -> Iterator[FaultMesh]:
    """A ready mesh; on an error its logs are printed. Takes what :class:`FaultMesh` takes."""
    mesh = FaultMesh(folder, **given)  # type: ignore[arg-type]
    try:
        mesh.wait_ready()
        yield mesh
    except BaseException:
        print(mesh.logs(), file=sys.stderr)
        raise
    finally:
        mesh.close()
