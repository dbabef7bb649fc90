"""The gateway as a process among real ones: scheduler, simulated worker, NATS server."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from mesh_stack import Process, Stack, stack
from tiny_models import make_tokenizer

from worker.simulated import expected_tokens

pytestmark = pytest.mark.mesh

VOCAB_SIZE = 290
HF = make_tokenizer()


class Mesh:
    def __init__(self, running: Stack, folder: Path) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        self.stack = running
        self.scheduler = running.start("scheduler")
        self.worker = self.start_worker()
        self.gateway = running.start(
            "gateway", "--model", str(folder), "--served-model-name", "tiny", "--port", str(port)
        )  # fmt: skip
        self.http = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=30)

    def start_worker(self) -> Process:
        return self.stack.start(
            "worker", "--simulate", "--served-model-name", "tiny", "--simulate-vocab-size", str(VOCAB_SIZE),
            "--simulate-base-us", "5000",
        )  # fmt: skip

    def ready(self) -> bool:
        try:
            return self.http.get("/ready").status_code == 200
        except httpx.TransportError:
            return False

    def until_ready(self, wanted: bool = True) -> None:
        deadline = time.monotonic() + 40
        while self.ready() != wanted:
            assert time.monotonic() < deadline, self.stack.logs()
            time.sleep(0.05)


@pytest.fixture
def mesh(tokenizer_folder: Path) -> Iterator[Mesh]:
    with stack() as running:
        mesh = Mesh(running, tokenizer_folder)
        mesh.until_ready()
        yield mesh
        mesh.http.close()


def test_tokens_arrive_whole_and_a_drain_lets_them(mesh: Mesh) -> None:
    body = {"prompt": "hello there", "seed": 5, "max_tokens": 200, "ignore_eos": True, "stream": True}
    expected = expected_tokens(HF.encode("hello there"), 5, 200, VOCAB_SIZE)
    with mesh.http.stream("POST", "/v1/completions", json=body) as answer:
        text = answer.iter_text()
        seen = next(text)
        mesh.gateway.popen.terminate()
        seen += "".join(text)
    assert seen.endswith("data: [DONE]\n\n")
    pieces = [json.loads(line[6:])["choices"][0]["text"] for line in seen.splitlines() if line.startswith("data: {")]
    assert "".join(pieces) == HF.decode(expected, skip_special_tokens=True)
    assert mesh.gateway.popen.wait(20) == 0


def test_a_dead_worker_ends_streams_and_readiness_and_a_new_one_serves(mesh: Mesh) -> None:
    body = {"prompt": "hello", "max_tokens": 5000, "ignore_eos": True, "stream": True}
    with mesh.http.stream("POST", "/v1/completions", json=body) as answer:
        text = answer.iter_text()
        seen = next(text)
        mesh.worker.popen.kill()
        killed_at = time.monotonic()
        seen += "".join(text)
    assert '"error"' in seen
    assert "[DONE]" not in seen
    assert time.monotonic() - killed_at < 10
    mesh.until_ready(False)
    mesh.start_worker()
    mesh.until_ready()
    assert mesh.http.post("/generate", json={"prompt": "x"}).status_code == 200


def test_a_dead_scheduler_ends_streams_within_ten_seconds(mesh: Mesh) -> None:
    body = {"prompt": "hello", "max_tokens": 5000, "ignore_eos": True, "stream": True}
    with mesh.http.stream("POST", "/v1/completions", json=body) as answer:
        text = answer.iter_text()
        seen = next(text)
        mesh.scheduler.popen.kill()
        killed_at = time.monotonic()
        seen += "".join(text)
    assert '"error"' in seen
    assert time.monotonic() - killed_at < 10
    assert mesh.http.post("/generate", json={"prompt": "x"}).status_code == 503
    mesh.stack.start("scheduler")
    mesh.until_ready()
    assert mesh.http.post("/generate", json={"prompt": "x"}).status_code == 200
