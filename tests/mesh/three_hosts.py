"""Three machines of one mesh, as network namespaces on one bridge: each has a NATS server of a cluster, and services.

Needs root. A host's cable can be pulled, and all that runs on it killed.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from loopback_http import HTTP
from mesh_stack import Process
from whole_mesh import eventually

from headrace.bench.probe import read_metrics
from headrace.nats_server import find_nats_server

HOSTS = 3
SUBNET = "10.214.77"
CLIENTS, ROUTES, GATEWAY = 4222, 6222, 8000  # ports, the same on every host
START_S = 120.0  # catches hangs


def ip(*arguments: str) -> None:
    """Skips the test where the machine does not allow it."""
    result = subprocess.run(["ip", *arguments], capture_output=True, text=True, check=False)
    if result.returncode != 0:
        pytest.skip(f"ip {' '.join(arguments)}: {result.stderr.strip()}")


class Host:
    def __init__(self, number: int, bridge: str) -> None:
        self.address = f"{SUBNET}.{number + 1}"
        self.processes: list[Process] = []
        self._name = f"{bridge}-{number}"
        self._near, far = f"{bridge}n{number}", f"{bridge}f{number}"
        ip("netns", "add", self._name)
        ip("link", "add", self._near, "type", "veth", "peer", "name", far, "netns", self._name)
        ip("link", "set", self._near, "master", bridge, "up")
        ip("-n", self._name, "addr", "add", f"{self.address}/24", "dev", far)
        ip("-n", self._name, "link", "set", far, "up")
        ip("-n", self._name, "link", "set", "lo", "up")

    def run(self, name: str, command: list[str], env: dict[str, str]) -> Process:
        process = Process(name, ["ip", "netns", "exec", self._name, *command], env)
        self.processes.append(process)
        return process

    def pull(self) -> None:
        ip("link", "set", self._near, "down")

    def plug(self) -> None:
        ip("link", "set", self._near, "up")

    def close(self) -> None:
        for process in self.processes:
            process.kill()
        subprocess.run(["ip", "netns", "del", self._name], check=False)  # and its cable


class ThreeHosts:
    """Hosts 0, 1 and 2. ``url`` is the gateway's on host 2, which this machine reaches too."""

    def __init__(self, folder: Path, model: Path, closing: contextlib.ExitStack) -> None:
        self.url = f"http://{SUBNET}.{HOSTS}:{GATEWAY}"
        self._model = ("--model", str(model), "--served-model-name", "m")
        self._token = secrets.token_urlsafe(24)
        bridge = f"hr{os.getpid() % 100_000}"
        ip("link", "add", bridge, "type", "bridge")
        closing.callback(subprocess.run, ["ip", "link", "del", bridge], check=False)
        ip("addr", "add", f"{SUBNET}.254/24", "dev", bridge)
        ip("link", "set", bridge, "up")
        self.hosts: list[Host] = []
        for number in range(HOSTS):
            host = Host(number, bridge)
            closing.callback(host.close)
            self.hosts.append(host)
        for number, host in enumerate(self.hosts):
            config = folder / f"nats-{number}.conf"
            config.write_text(self._nats(folder, number), "utf-8")
            host.run(f"nats{number}", [str(find_nats_server()), "--config", str(config)], dict(os.environ))
        elected = "JetStream cluster new metadata leader"
        eventually(
            lambda: any(elected in host.processes[0].output() for host in self.hosts), "a leader of JetStream", START_S
        )

    def _nats(self, folder: Path, number: int) -> str:
        address = self.hosts[number].address
        routes = ", ".join(f'"nats-route://{host.address}:{ROUTES}"' for host in self.hosts)
        return (
            f'server_name: "n{number}"\nlisten: "{address}:{CLIENTS}"\n'
            f"authorization {{ token: {json.dumps(self._token)} }}\n"
            f"jetstream {{ store_dir: {json.dumps(str(folder / f'store-{number}'))} }}\n"
            f'cluster {{ name: "c", listen: "{address}:{ROUTES}", routes: [{routes}] }}\n'
        )

    def start(self, number: int, service: str, *flags: str) -> Process:
        """A service on a host. It knows that host's NATS server first, then the others."""
        host = self.hosts[number]
        servers = [host, *(other for other in self.hosts if other is not host)]
        env = {key: value for key, value in os.environ.items() if not key.startswith("HEADRACE_")}
        env |= {
            "HEADRACE_NATS": ",".join(f"nats://{one.address}:{CLIENTS}" for one in servers),
            "HEADRACE_NATS_TOKEN": self._token,
        }
        more = self._model if service in ("worker", "gateway") else ()
        listens = ("--metrics-host", host.address, "--metrics-port", "0")
        return host.run(service, [sys.executable, "-m", service, *listens, *more, *flags], env)

    def start_gateway(self, *flags: str) -> Process:
        return self.start(HOSTS - 1, "gateway", "--host", self.hosts[-1].address, "--port", str(GATEWAY), *flags)

    def workers(self) -> float:
        """How many the scheduler that leads counts."""
        known = [self.metrics(one) for host in self.hosts for one in host.processes if one.name == "scheduler"]
        return next((one.get("headrace_workers", 0.0) for one in known if one.get("headrace_scheduler_leading")), 0.0)

    def wait_ready(self, workers: int) -> None:
        def ready() -> bool:
            try:
                return HTTP.get(f"{self.url}/ready", timeout=5).status_code == 200 and self.workers() == workers
            except httpx.TransportError:
                return False

        eventually(ready, f"a mesh with {workers} workers", START_S)

    def metrics(self, process: Process) -> dict[str, float]:
        """Of a service; empty as long as it does not answer."""
        url = re.search(r"metrics on (http://[^/]+/metrics)", process.output())
        try:
            return read_metrics([HTTP.get(url.group(1), timeout=2).text]) if url is not None else {}
        except httpx.TransportError:
            return {}

    def logs(self) -> str:
        return "".join(f"--- {one.name}\n{one.output()}" for host in self.hosts for one in host.processes)


@contextlib.contextmanager
def three_hosts(folder: Path, model: Path) -> Iterator[ThreeHosts]:
    """On an error the logs are printed."""
    with contextlib.ExitStack() as closing:
        mesh = ThreeHosts(folder, model, closing)
        try:
            yield mesh
        except BaseException:
            print(mesh.logs())
            raise
