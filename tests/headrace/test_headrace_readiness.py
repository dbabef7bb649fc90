"""What ``up`` waits for, and what it prints."""

from __future__ import annotations

import asyncio
import json
import shlex
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import httpx
import pytest

from gateway.mesh_view import MeshView
from headrace import readiness
from headrace.child_output import readable, show
from headrace.readiness import NotServing, base_url, curl_line, has_chat_template, wait_until_serving, why_waiting
from shared.messages import ModelInfo, SchedulerBeat

Answer = tuple[int, object]


class Gateway:
    """Answers /ready and /v1/completions from two scripts; the last entry of each stays."""

    def __init__(self) -> None:
        self.ready: list[Answer] = [(200, {})]
        self.completions: list[Answer] = [(200, {})]
        self.asked: list[object] = []
        gateway = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.reply(gateway.ready)

            def do_POST(self) -> None:
                gateway.asked.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
                self.reply(gateway.completions)

            def reply(self, script: list[Answer]) -> None:
                status, body = script.pop(0) if len(script) > 1 else script[0]
                self.send_response(status)
                self.end_headers()
                self.wfile.write(json.dumps(body).encode())

            def log_message(self, format: str, *args: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"


@pytest.fixture
def gateway(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gateway]:
    monkeypatch.setattr(readiness, "POLL_S", 0.001)
    made = Gateway()
    thread = threading.Thread(target=made.server.serve_forever, args=(0.01,))
    thread.start()
    yield made
    made.server.shutdown()
    thread.join()
    made.server.server_close()


def wait(gateway: Gateway) -> list[str]:
    said: list[str] = []
    asyncio.run(asyncio.wait_for(wait_until_serving(gateway.url, "m", said.append), 20))
    return said


def test_waits_for_ready_then_for_a_completion(gateway: Gateway) -> None:
    gateway.ready = [(503, {}), (503, {}), (200, {})]
    gateway.completions = [(503, {}), (429, {}), (500, {}), (200, {})]
    wait(gateway)
    assert gateway.asked == [{"model": "m", "prompt": "Hello", "max_tokens": 1}] * 4


def test_a_full_queue_is_a_mesh_at_work_where_others_ask_as_well(gateway: Gateway) -> None:
    gateway.completions = [(503, {}), (429, {}), (500, {})]
    asyncio.run(asyncio.wait_for(wait_until_serving(gateway.url, "m", lambda line: None, loaded=True), 20))
    assert len(gateway.asked) == 2


def test_says_why_it_waits(gateway: Gateway, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readiness, "REPORT_EVERY_S", 0.0)
    gateway.ready = [(503, {"error": {"message": "no worker is ready"}}), (503, {"status": "loading"}), (200, {})]
    assert wait(gateway) == ["not ready yet: no worker is ready", "not ready yet: loading"]


def test_what_is_done_meanwhile_is_said_and_for_how_long() -> None:
    view = MeshView(3.0)
    view.observe(SchedulerBeat("s", 1, [ModelInfo("m", 100, 50, workers=0), ModelInfo("other", 100, 50, 1)]), 0.0)
    assert why_waiting(view.why_not_ready("m", 0.0) or "", 12.4) == "the worker is loading the model (12 s)"
    assert why_waiting("", 10.0) == "the gateway is starting (10 s)"


def test_a_gateway_that_is_not_there_yet_is_starting(gateway: Gateway, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readiness, "REPORT_EVERY_S", 0.0)
    said: list[str] = []
    failures = [httpx.ReadTimeout(""), None, httpx.ReadTimeout(""), None]

    async def trying(client: object, model: str, loaded: bool) -> str:
        failure = failures.pop(0)
        if failure is not None:
            raise failure
        return "draining" if failures else ""

    monkeypatch.setattr(readiness, "_try", trying)
    asyncio.run(wait_until_serving(gateway.url, "m", said.append))
    assert said == [
        "the gateway is starting (0 s)", "not ready yet: draining",
        "not ready yet: the gateway does not answer (ReadTimeout)",
    ]  # fmt: skip


def test_a_refused_completion_is_no_reason_to_wait(gateway: Gateway) -> None:
    gateway.completions = [(400, {"error": {"message": "the prompt is bad"}})]
    with pytest.raises(NotServing, match="refused with 400: the prompt is bad"):
        wait(gateway)


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("127.0.0.1", "http://127.0.0.1:80"),
        ("0.0.0.0", "http://127.0.0.1:80"),
        ("::", "http://[::1]:80"),
        ("fe80::1", "http://[fe80::1]:80"),
        ("localhost", "http://localhost:80"),
    ],
)
def test_the_address_is_one_that_this_machine_reaches(host: str, url: str) -> None:
    assert base_url(host, 80) == url


def test_the_curl_line_survives_a_shell() -> None:
    words = shlex.split(curl_line("http://h:1", "it's $HOME", chat=True))
    assert words[:3] == ["curl", "-N", "http://h:1/v1/chat/completions"]
    body = json.loads(words[-1])
    assert body["model"] == "it's $HOME"
    assert body["messages"][0]["content"] == "What is the capital of France?"
    assert body["stream"] is True


def test_a_model_without_a_chat_template_is_shown_as_a_completion(tmp_path: Path) -> None:
    assert not has_chat_template(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("{}")
    assert not has_chat_template(tmp_path)
    assert "/v1/completions" in curl_line("http://h:1", "m", chat=False)
    (tmp_path / "tokenizer_config.json").write_text('{"chat_template": "x"}')
    assert has_chat_template(tmp_path)


def test_log_lines_are_put_into_words() -> None:
    record = {"ts": "2026-01-02T03:04:05.678Z", "level": "warning", "message": "low on pages"}
    assert readable(json.dumps(record)) == "03:04:05 WARNING low on pages"
    assert readable(json.dumps(record | {"exception": "Traceback"})).endswith("\nTraceback")
    for other in ("plain text", "{not json", '{"a": 1}', "[1]", '{"ts": 1, "level": 2, "message": 3}'):
        assert readable(other) == other


def test_every_line_stands_under_its_childs_name(capsys: pytest.CaptureFixture[str]) -> None:
    record = {"ts": "2026-01-02T03:04:05.678Z", "level": "error", "message": "fault", "exception": "Traceback\nLast"}
    show("worker-0", json.dumps(record))
    show("nats", "[1] [INF] Starting nats-server")
    show("nats", "[1] [WRN] Plaintext passwords detected, use nkeys or bcrypt")
    show("nats", "[1] [ERR] address in use")
    assert capsys.readouterr().err.splitlines() == [
        "worker-0    | 03:04:05 ERROR   fault",
        "worker-0    | Traceback",
        "worker-0    | Last",
        "nats        | [1] [ERR] address in use",
    ]
