"""What clients wrote, and their keys, are in no log, span, metric or error at the default level, whatever fails."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from gateway_mesh import RunningGateway, running_gateway
from loopback_http import HTTP, NO_AUTHORITIES
from otlp_receiver import Receiver, otlp_receiver
from prometheus_client import generate_latest

from gateway.keys import digest_of
from observability.tracing import Tracing
from shared.messages import Outcome, SubmitReply

MARK = "zebra-crossing-4711"  # of prompts
OTHER = "okapi-2342"  # of other fields: an error may quote it to the client who sent it
SECRET = "hr-giraffe-0815"

SCHEMA = {"type": "object", "properties": {OTHER: {"type": "string"}}, "required": [OTHER]}
BODIES: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", {"prompt": MARK}),
    ("/v1/completions", {"prompt": [MARK, MARK], "n": 2, "stream": True}),
    ("/v1/completions", {"prompt": MARK, "stop": [OTHER], "logprobs": 2, "echo": True}),
    ("/v1/completions", {"prompt": MARK, "max_tokens": 1_000_000}),
    ("/v1/completions", {"prompt": MARK * 3000}),
    ("/v1/completions", {"prompt": [MARK, ""]}),
    ("/v1/completions", {"prompt": {"text": MARK}}),
    ("/v1/completions", {"prompt": MARK, "temperature": OTHER}),
    ("/v1/completions", {"prompt": MARK, "logit_bias": {OTHER: 1}}),
    ("/v1/completions", {"prompt": MARK, "structured_outputs": {"regex": f"({OTHER}"}}),
    ("/v1/completions", {"prompt": MARK, "structured_outputs": {"grammar": f'start: "{OTHER}'}}),
    ("/v1/completions", {"prompt": MARK, "timeout": 0.001}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": MARK}]}),
    ("/v1/chat/completions", {"messages": [{"role": OTHER, "content": MARK}]}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": [{"type": OTHER, OTHER: MARK}]}]}),
    (
        "/v1/chat/completions",
        {
            "messages": [{"role": "user", "content": MARK}],
            "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}},
        },
    ),
    ("/generate", {"prompt": MARK}),
    ("/tokenize", {"prompt": MARK}),
]
RAW = [f'{{"prompt": "{MARK}'.encode(), f'{{"prompt": "{MARK}\ud800"}}'.encode("utf-8", "surrogatepass"), MARK.encode()]


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with otlp_receiver() as receiver:
        yield receiver


def test_nothing_that_a_client_wrote_is_told(
    tokenizer_folder: Path, tmp_path: Path, receiver: Receiver, caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(
        logging.getLogger("httpx"), "disabled", True
    )  # the client tells what it asks for; it is not ours
    file = tmp_path / "keys.toml"
    file.write_text(f'[[key]]\nid = "a"\nsha256 = "{digest_of(SECRET).hex()}"\n')
    tracing = Tracing("gateway", "gw", receiver.url, 1.0)
    errors: list[str] = []
    with running_gateway(tokenizer_folder, tracing=tracing, api_keys=str(file), slow_reader_timeout_s=5.0) as gw:
        for key in (SECRET, SECRET + "x"):
            with httpx.Client(
                verify=NO_AUTHORITIES, base_url=gw.url, timeout=20, headers={"authorization": f"Bearer {key}"}
            ) as http:
                for refuse in (None, Outcome.QUEUE_FULL, Outcome.NEVER_FITS, Outcome.DEADLINE):
                    gw.mesh.refuse = lambda submit, refuse=refuse: refuse and SubmitReply(refuse, 7, "because")
                    for path, body in BODIES:
                        answer = http.post(path, json=body)
                        assert answer.status_code < 500 or answer.status_code == 504, answer.text
                        if answer.status_code >= 400:
                            errors.append(answer.text)
                    errors += [http.post("/v1/completions", content=raw).text for raw in RAW]
                http.get(f"/v1/models/{OTHER}")
        gw.mesh.refuse = lambda submit: None
        broken(gw)
        log = caplog.text + repr([record.__dict__ for record in caplog.records])
        metrics = generate_latest(gw.metrics.registry).decode()
    tracing.shutdown()
    spans = repr(receiver.spans)
    assert "finished" in log and spans.count("tokenize") > 5 and "rate_limit_error" in "".join(errors)
    for told in (log, metrics, spans):
        assert MARK not in told and OTHER not in told
    assert not [error for error in errors if MARK in error]
    for told in (log, metrics, spans, *errors):
        assert SECRET not in told and digest_of(SECRET).hex() not in told


def broken(gw: RunningGateway) -> None:
    """A stream that breaks off in the middle, and a client that leaves."""
    gw.mesh.step_s = 0.005
    body = {"prompt": MARK, "max_tokens": 1000, "ignore_eos": True, "stream": True}
    headers = {"authorization": f"Bearer {SECRET}"}

    def read() -> None:
        HTTP.post(f"{gw.url}/v1/completions", json=body, headers=headers, timeout=20)

    client = threading.Thread(target=read)
    client.start()
    gw.until(lambda: bool(gw.mesh.running))
    gw.call(gw.mesh.event(gw.mesh.submits[-1], "failed", "its worker is gone"))
    client.join(20)
    with HTTP.stream("POST", f"{gw.url}/v1/completions", json=body, headers=headers, timeout=20) as stream:
        next(stream.iter_raw())
    gw.until(lambda: gw.gateway.in_flight == 0)
