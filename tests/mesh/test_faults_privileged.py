"""Faults that need root: networks that are cut and healed, a full disk; and clocks that jump, which need a compiler.

Not part of an ordinary run: ``make test ARGS="-m privileged"``.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import struct
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
from fault_matrix import Fault, tried, undisturbed
from fault_mesh import FaultMesh, Place, fault_mesh

from headrace.nats_server import NatsServer

LENGTH = 400
FAULT_S = 10.0
WORKER = ("--dtype", "float32", "--threads", "1", "--kv-cache-memory", "64MiB")
PATIENT = ("--resume-timeout-s", "120")
STORE_BYTES = 4 << 20

pytestmark = [pytest.mark.mesh, pytest.mark.privileged, pytest.mark.timeout(600)]


@pytest.fixture(autouse=True)
def asked_for(request: pytest.FixtureRequest) -> None:
    if "privileged" not in request.config.getoption("markexpr"):
        pytest.skip("changes networks and mounts of the machine: run with -m privileged")


@pytest.fixture
def root(asked_for: None) -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root")


def done(*command: str) -> None:
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode != 0:
        pytest.skip(f"{' '.join(command)}: {result.stderr.strip()}")


class Network:
    """A network namespace that is joined to this one by a cable, which can be pulled."""

    def __init__(self, number: int) -> None:
        self.name = f"headrace-{os.getpid()}-{number}"
        self._near = f"hr{os.getpid() % 100_000}n{number}"
        far = f"hr{os.getpid() % 100_000}f{number}"
        subnet = f"10.213.{number}"
        self.here, self.there = f"{subnet}.1", f"{subnet}.2"
        done("ip", "netns", "add", self.name)
        try:
            done("ip", "link", "add", self._near, "type", "veth", "peer", "name", far, "netns", self.name)
            done("ip", "addr", "add", f"{self.here}/30", "dev", self._near)
            done("ip", "link", "set", self._near, "up")
            for rest in (("addr", "add", f"{self.there}/30", "dev", far), ("link", "set", far, "up"),
                         ("link", "set", "lo", "up")):  # fmt: skip
                done("ip", "-n", self.name, *rest)
        except BaseException:
            self.close()
            raise

    @property
    def prefix(self) -> tuple[str, ...]:
        return ("ip", "netns", "exec", self.name)

    def pull(self) -> None:
        subprocess.run(["ip", "link", "set", self._near, "down"], check=True)

    def plug(self) -> None:
        subprocess.run(["ip", "link", "set", self._near, "up"], check=True)

    def close(self) -> None:
        subprocess.run(["ip", "netns", "del", self.name], check=False)  # and its end of the cable, and so the other


@dataclass(frozen=True)
class Cable(Fault):
    """The cable of a service is pulled, and plugged in again."""

    network: Network | None = None

    def inflict(self, mesh: FaultMesh, length_s: float, index: int = 0) -> None:
        assert self.network is not None
        self.network.pull()
        try:
            time.sleep(length_s)  # the fault itself
        finally:
            self.network.plug()


@dataclass(frozen=True)
class FullDisk(Fault):
    """JetStream's disk is full for a while; NATS is restarted when there is room again."""

    store: Path = Path()

    def inflict(self, mesh: FaultMesh, length_s: float, index: int = 0) -> None:
        ballast = self.store / "ballast"
        with ballast.open("wb", buffering=0) as file, pytest.raises(OSError, match="No space"):
            while True:
                file.write(bytes(4096))
        time.sleep(length_s)  # the fault itself
        ballast.unlink()
        mesh.kill(mesh.nats.name)


@dataclass(frozen=True)
class ClockJumps(Fault):
    """The wall clock of every service jumps: an hour ahead, then an hour back beyond where it was."""

    file: Path = Path()

    def inflict(self, mesh: FaultMesh, length_s: float, index: int = 0) -> None:
        for ahead_s in (3600.0, -3600.0):
            self.file.write_bytes(struct.pack("d", ahead_s))
            time.sleep(length_s / 2)  # the fault itself


def check(mesh: FaultMesh, fault: Fault, length_s: float) -> None:
    known = undisturbed(mesh.urls, LENGTH)
    outcome = tried(mesh, known, fault, length_s)
    assert not outcome.wrong, f"{outcome.wrong}\n{outcome.errors}\n{mesh.logs()}"
    assert outcome.cut, "the fault came too late to show anything"
    mesh.wait_ready()
    mesh.quiescence()


@pytest.mark.parametrize("kind", ["worker", "scheduler"])
def test_a_network_that_is_cut_and_healed(root: None, tiny: Path, kind: str) -> None:
    with contextlib.ExitStack() as closing:
        network = Network(("worker", "scheduler").index(kind))
        closing.callback(network.close)
        place = Place(network.prefix, network.here, network.there)
        mesh = closing.enter_context(fault_mesh(tiny, worker=WORKER, gateway=PATIENT, places={kind: place}))
        check(mesh, Cable(kind, "part", network=network), FAULT_S)


def test_jetstream_whose_disk_is_full(root: None, tiny: Path) -> None:
    with contextlib.ExitStack() as closing:
        server = NatsServer()
        closing.callback(server.close)
        store = Path(server.command[-1]).parent / "jetstream"
        store.mkdir()
        done("mount", "-t", "tmpfs", "-o", f"size={STORE_BYTES}", "tmpfs", str(store))
        closing.callback(subprocess.run, ["umount", "--lazy", str(store)], check=True)
        mesh = closing.enter_context(fault_mesh(tiny, schedulers=2, worker=WORKER, gateway=PATIENT, server=server))
        check(mesh, FullDisk("nats", "full", store=store), FAULT_S)


def test_clocks_that_jump(tiny: Path, tmp_path: Path) -> None:
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("needs a C compiler")
    library, file = tmp_path / "fault_clock.so", tmp_path / "ahead"
    source = Path(__file__).parent / "fault_clock.c"
    subprocess.run([compiler, "-shared", "-fPIC", "-O2", "-o", str(library), str(source), "-ldl"], check=True)
    file.write_bytes(struct.pack("d", 0.0))
    place = Place(env={"LD_PRELOAD": str(library), "FAULT_CLOCK_FILE": str(file)})
    places = dict.fromkeys(("scheduler", "worker", "gateway"), place)
    with fault_mesh(tiny, schedulers=2, worker=WORKER, gateway=PATIENT, places=places) as mesh:
        check(mesh, ClockJumps("clocks", "jump", file=file), 4.0)
