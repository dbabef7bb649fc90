"""A mesh in which some nodes are of the next minor version: rolling upgrades mix them."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from loopback_http import HTTP
from mesh_stack import Process, Stack, stack
from test_whole_mesh import free_port, wait_ready

pytestmark = [pytest.mark.mesh, pytest.mark.timeout(300)]

NEXT_MINOR = """
import runpy, sys
import msgpack
import shared.messages as messages

encode_now = messages.encode

def encode(message):
    major, minor, fields = msgpack.unpackb(encode_now(message), strict_map_key=False)
    return msgpack.packb([major, minor + 1, [*fields, {"a field": "from the future"}]])

messages.encode = encode  # before any service has taken the name
sys.argv = sys.argv[1:]
runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
"""

SIMULATED = ("--simulate", "--simulate-vocab-size", "320", "--simulate-base-us", "1000")


def start(mesh: Stack, service: str, *flags: str) -> None:
    env = {key: value for key, value in os.environ.items() if not key.startswith("HEADRACE_")}
    env |= {"HEADRACE_NATS": mesh.nats.url, "HEADRACE_NATS_TOKEN": mesh.nats.token}
    command = [sys.executable, "-c", NEXT_MINOR, service, "--metrics-port", "0", *flags]
    mesh.processes.append(Process(service, command, env))


def test_what_nodes_of_the_next_minor_version_say_is_understood(tiny: Path) -> None:
    """Whoever reads here is of this version; all that is said is of the next one."""
    port = free_port()
    with stack() as mesh:
        start(mesh, "scheduler")
        start(mesh, "worker", "--model", "x", "--served-model-name", "m", *SIMULATED)
        start(mesh, "gateway", "--model", str(tiny), "--served-model-name", "m", "--port", str(port))
        url = f"http://127.0.0.1:{port}"
        wait_ready(url)
        body = {"prompt": "x", "max_tokens": 30, "ignore_eos": True, "n": 2, "logprobs": 1}
        answer = HTTP.post(url + "/v1/completions", json=body, timeout=60)
        assert answer.status_code == 200, answer.text
        assert answer.json()["usage"]["completion_tokens"] == 60
