"""One mesh over three machines: its tokens are those of a single worker, whoever comes and goes.

Not part of an ordinary run, since it needs root: ``make test ARGS="-m privileged"``.
"""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import pytest
from loopback_http import HTTP
from mesh_stack import DEADLINE_S
from three_hosts import ThreeHosts, three_hosts
from whole_mesh import FLOAT32, at_once, eventually, running_mesh

pytestmark = [pytest.mark.mesh, pytest.mark.privileged, pytest.mark.timeout(600)]

MEMORY = ("--kv-cache-memory", "64MiB")
PATIENT = ("--resume-timeout-s", "120")
STREAMS = 24


@pytest.fixture(autouse=True)
def asked_for(request: pytest.FixtureRequest) -> None:
    if "privileged" not in request.config.getoption("markexpr"):
        pytest.skip("makes networks on the machine: run with -m privileged")
    if os.geteuid() != 0:
        pytest.skip("needs root")


def bodies(tokens: int) -> list[dict[str, Any]]:
    """Greedy and seeded, some with two choices, some with a beginning in common."""
    shared = "a beginning that many of them have in common, and that is some blocks long. " * 3
    return [
        {"model": "m", "prompt": (shared if index % 3 == 0 else "") + f"host {index}", "max_tokens": tokens + index,
         "ignore_eos": True, "seed": index, "temperature": float(index % 2), "n": 2 if index % 8 == 7 else 1}
        for index in range(STREAMS)
    ]  # fmt: skip


def texts(url: str, body: dict[str, Any]) -> list[str]:
    reply = HTTP.post(f"{url}/v1/completions", json=body, timeout=5 * DEADLINE_S)
    assert reply.status_code == 200, reply.text
    return [choice["text"] for choice in reply.json()["choices"]]


def alone(model: Path, wanted: list[dict[str, Any]]) -> list[list[str]]:
    """What a single worker answers."""
    with running_mesh(model, worker=(*FLOAT32, *MEMORY)) as mesh:
        return mesh.together(wanted)


def asked(mesh: ThreeHosts, wanted: list[dict[str, Any]]) -> tuple[threading.Thread, list[list[str]]]:
    answers: list[list[str]] = []

    def ask() -> None:
        answers.extend(at_once([lambda body=body: texts(mesh.url, body) for body in wanted]))

    thread = threading.Thread(target=ask)
    thread.start()
    return thread, answers


def generated(mesh: ThreeHosts) -> float:
    gateway = next(one for one in mesh.hosts[-1].processes if one.name == "gateway")
    return mesh.metrics(gateway).get("vllm:generation_tokens_total", 0.0)


def test_three_hosts_answer_as_one_worker_does_while_hosts_go_and_come(tiny: Path, tmp_path: Path) -> None:
    wanted = bodies(300)
    expected = alone(tiny, wanted)
    with three_hosts(tmp_path, tiny) as mesh:
        mesh.start(0, "scheduler", "--scheduler-id", "first")
        mesh.start(1, "scheduler", "--scheduler-id", "second")
        workers = [mesh.start(number, "worker", *FLOAT32, *MEMORY) for number in range(3)]
        mesh.start_gateway(*PATIENT)
        mesh.wait_ready(3)
        assert at_once([lambda body=body: texts(mesh.url, body) for body in wanted]) == expected

        before = generated(mesh)
        thread, answers = asked(mesh, wanted)
        eventually(lambda: generated(mesh) > before + 200, "streams run")
        workers[1].kill()  # one goes for good,
        mesh.start(1, "worker", *FLOAT32, *MEMORY)  # and another one comes
        eventually(lambda: generated(mesh) > before + 1000, "streams go on")
        mesh.hosts[0].pull()  # a whole machine: a scheduler, a NATS server and a worker
        thread.join()
        assert answers == expected
        mesh.hosts[0].plug()
        mesh.wait_ready(3)
        assert texts(mesh.url, wanted[0]) == expected[0]


def test_prompts_on_one_host_and_decodes_on_the_others(tiny: Path, tmp_path: Path) -> None:
    wanted = bodies(60)
    expected = alone(tiny, wanted)
    with three_hosts(tmp_path, tiny) as mesh:
        scheduler = mesh.start(0, "scheduler")
        mesh.start(0, "worker", *FLOAT32, *MEMORY, "--role", "prefill")
        decoding = [mesh.start(number, "worker", *FLOAT32, *MEMORY, "--role", "decode") for number in (1, 2)]
        mesh.start_gateway(*PATIENT)
        mesh.wait_ready(3)
        assert at_once([lambda body=body: texts(mesh.url, body) for body in wanted]) == expected
        moves = mesh.metrics(scheduler)["headrace_moves_total"]
        fetched = [mesh.metrics(one).get("headrace_kv_fetched_bytes_total", 0.0) for one in decoding]
        seconds = [mesh.metrics(one).get("headrace_kv_fetch_seconds_sum", 0.0) for one in decoding]
        print(f"{moves:.0f} sequences went on elsewhere; {fetched} bytes were fetched, in {seconds} s")
        assert moves > 0 and sum(fetched) > 0, "nothing has gone from host to host"
