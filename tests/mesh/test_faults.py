"""Faults done to a mesh of real processes: every stream ends with exactly the text that it has when nothing happens.

A quick selection; ``benchmarks/faults.py`` tries all of them, ten seconds long, and reports the pauses.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from fault_matrix import Fault, Known, tried, undisturbed
from fault_mesh import FaultMesh, fault_mesh

pytestmark = [pytest.mark.mesh, pytest.mark.timeout(300)]

LENGTH = 300
STOP_S = 2.0


@dataclass(frozen=True)
class Ready:
    mesh: FaultMesh
    known: Known


@pytest.fixture(scope="module")
def ready(tiny: Path) -> Iterator[Ready]:
    """A standby for the scheduler, a sole worker; every test leaves it whole."""
    worker = ("--dtype", "float32", "--threads", "1", "--kv-cache-memory", "64MiB")
    with fault_mesh(tiny, schedulers=2, worker=worker) as mesh:
        yield Ready(mesh, undisturbed(mesh.urls, LENGTH))


@pytest.mark.parametrize(
    "fault",
    [
        Fault("worker", "nothing"),
        Fault("worker", "kill"),
        Fault("scheduler", "kill", spare=True),
        Fault("nats", "kill"),
        Fault("worker", "stop"),
        Fault("gateway", "part"),
    ],
    ids=lambda fault: fault.name,
)
def test_every_stream_ends_with_its_undisturbed_text(ready: Ready, fault: Fault) -> None:
    outcome = tried(ready.mesh, ready.known, fault, STOP_S)
    assert not outcome.wrong, f"{outcome.wrong}\n{outcome.errors}\n{ready.mesh.logs()}"
    assert outcome.cut or fault.kind == "nothing", "the fault came too late to show anything"
    ready.mesh.wait_ready()
    ready.mesh.quiescence()
