"""A mesh on a cluster of three NATS servers: it keeps going when any one of them is gone."""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from nats_cluster import nats_cluster
from whole_mesh import SIMULATED, Mesh, eventually

from shared.subjects import LEASE_BUCKET

pytestmark = [pytest.mark.mesh, pytest.mark.timeout(300)]

SLOW = (*SIMULATED, "--simulate-base-us", "10000")


def body(number: int) -> dict[str, Any]:
    return {"prompt": f"cluster {number}", "max_tokens": 200, "ignore_eos": True, "seed": number, "temperature": 1.0}


def test_streams_go_on_when_one_of_three_servers_is_gone(tiny: Path) -> None:
    """Of the three the worst to lose: the one that leads the lease's stream. The others elect another first."""
    with nats_cluster() as cluster:
        mesh = Mesh(SimpleNamespace(server=cluster), tiny, worker=SLOW)  # type: ignore[arg-type]
        try:
            mesh.wait_ready()
            expected = mesh.together([body(number) for number in range(4)])
            texts: list[list[str]] = []
            asking = threading.Thread(target=lambda: texts.extend(mesh.together([body(number) for number in range(4)])))
            before = mesh.metrics(mesh.gateway)["vllm:generation_tokens_total"]
            asking.start()
            eventually(lambda: mesh.metrics(mesh.gateway)["vllm:generation_tokens_total"] > before + 20, "streams run")
            cluster.kill(cluster.leader_of(f"KV_{LEASE_BUCKET}"))
            asking.join()
            assert texts == expected
            assert mesh.text(**body(9)), "new requests are taken with two servers"
        except BaseException:
            print(mesh.stack.logs())
            raise
        finally:
            mesh.close()
