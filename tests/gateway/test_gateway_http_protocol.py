"""Below the application: heads that are too large or too slow, bodies that dawdle, offers to upgrade."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from gateway_mesh import RunningGateway, running_gateway
from raw_http import BODY, answer, post

from gateway import http_protocol


@pytest.fixture
def connection(gw: RunningGateway) -> Iterator[socket.socket]:
    host, port = gw.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=30) as opened:
        yield opened


@pytest.mark.parametrize("upgrade", [b"h2c", b"websocket"])
def test_an_offer_to_upgrade_is_ignored_and_the_body_read(connection: socket.socket, upgrade: bytes) -> None:
    offer = (b"Connection: Upgrade, HTTP2-Settings", b"Upgrade: " + upgrade, b"HTTP2-Settings: AAEAAEAAAAIAAAAA")
    for split in (None, 40, len(post(BODY, *offer)) - 5):
        request = post(BODY, *offer)
        connection.sendall(request[:split])
        if split is not None:
            connection.sendall(request[split:])
        status, reply = answer(connection)
        assert status == 200, reply
        assert reply["usage"]["completion_tokens"] == 3
    connection.sendall(post(BODY))  # and the connection goes on as usual
    assert answer(connection)[0] == 200


def test_a_head_without_end_is_refused_before_it_fills_the_memory(connection: socket.socket) -> None:
    connection.sendall(b"POST /v1/completions HTTP/1.1\r\n")
    try:
        for _ in range(64):
            connection.sendall(b"X-Filler: " + b"a" * 4000 + b"\r\n")
    except OSError:
        pass  # it closed on us, as it should
    status, reply = answer(connection)
    assert status == 431 and "bytes" in reply["error"]["message"]


def test_a_head_that_does_not_come_is_given_up(gw: RunningGateway, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_protocol, "HEAD_TIMEOUT_S", 0.2)
    host, port = gw.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=30) as slow:
        slow.sendall(b"GET /health HTTP/1.1\r\nHost:")
        assert answer(slow)[0] == 408
        assert slow.recv(1) == b""


def test_what_is_no_http_gets_an_openai_error(connection: socket.socket) -> None:
    connection.sendall(b"\x16\x03\x01 hello\r\n\r\n")
    status, reply = answer(connection)
    assert status == 400 and reply["error"]["type"] == "invalid_request_error"


def test_a_body_that_dawdles_gets_408(tokenizer_folder: Path) -> None:
    with running_gateway(tokenizer_folder, body_timeout_s=0.2) as gateway:
        host, port = gateway.url.removeprefix("http://").split(":")
        slow_answer(host, int(port))


def slow_answer(host: str, port: int) -> None:
    with socket.create_connection((host, int(port)), timeout=30) as slow:
        slow.sendall(post(BODY)[:-3])
        status, reply = answer(slow)
    assert status == 408 and reply["error"]["code"] == "body_timeout"
