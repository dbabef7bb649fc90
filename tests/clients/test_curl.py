"""``curl``, as the documents show it."""

from __future__ import annotations

import json
import shutil
import subprocess
from typing import Any

import pytest

pytestmark = [pytest.mark.mesh, pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")]

CHAT = {"messages": [{"role": "user", "content": "What is the capital of France?"}], "seed": 2, "max_tokens": 20}


def curl(*arguments: str, body: dict[str, Any] | None = None) -> str:
    data = [] if body is None else ["-H", "Content-Type: application/json", "-d", json.dumps(body)]
    command = ["curl", "-s", "--max-time", "60", *arguments, *data]
    return subprocess.run(command, capture_output=True, check=True, timeout=90).stdout.decode()


def test_whole_answers(url: str) -> None:
    answer = json.loads(curl(f"{url}/chat/completions", body=CHAT))
    assert answer["choices"][0]["message"]["role"] == "assistant"
    assert json.loads(curl(f"{url}/models"))["data"][0]["id"] == "m"
    # Without a content type curl says that it sends a form: a body is JSON whatever it is called.
    text = curl(url.removesuffix("/v1") + "/generate", "-d", '{"prompt": "The capital of France is", "max_tokens": 4}')
    assert json.loads(text)["text"][0].startswith("The capital of France is")


def test_a_stream_unbuffered(url: str) -> None:
    whole = json.loads(curl(f"{url}/chat/completions", body=CHAT))["choices"][0]["message"]["content"]
    arguments = ["-H", "Content-Type: application/json", "-d", json.dumps({**CHAT, "stream": True})]
    command = ["curl", "-sN", "--max-time", "60", f"{url}/chat/completions", *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, encoding="utf-8") as process:
        assert process.stdout is not None
        lines = [line for line in process.stdout if line != "\n"]
    assert process.returncode == 0
    assert lines.pop() == "data: [DONE]\n"
    assert all(line.startswith("data: ") for line in lines)
    deltas = [json.loads(line[6:])["choices"][0]["delta"] for line in lines]
    assert "".join(delta.get("content") or "" for delta in deltas) == whole


def test_a_body_larger_than_a_packet_is_offered_first(url: str) -> None:
    """curl asks ``Expect: 100-continue`` before large bodies and waits for the answer."""
    body = {"prompt": "a" * 1500, "max_tokens": 1, "user": "b" * (2 << 20)}
    command = ["curl", "-s", "--max-time", "60", "-H", "Content-Type: application/json", "-H", "Expect: 100-continue",
               "--data-binary", "@-", "-w", "%{http_code} %{time_total}", "-o", "/dev/null",
               f"{url}/completions"]  # fmt: skip
    done = subprocess.run(command, input=json.dumps(body).encode(), capture_output=True, check=True, timeout=90)
    status, seconds = done.stdout.decode().split()
    assert status == "200" and float(seconds) < 30


def test_errors_have_their_status(url: str) -> None:
    status = ["-w", "\n%{http_code}"]
    body, code = curl(f"{url}/completions", *status, body={"prompt": "x", "max_tokens": 0}).rsplit("\n", 1)
    assert code == "400" and json.loads(body)["error"]["param"] == "max_tokens"
    body, code = curl(f"{url}/nowhere", *status).rsplit("\n", 1)
    assert code == "404" and json.loads(body)["error"]["message"]
    head = curl("-D", "-", "-o", "/dev/null", f"{url}/completions")
    assert head.startswith("HTTP/1.1 405")
