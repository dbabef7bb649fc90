"""The internal listener: what it serves, and that clients which leave or crowd do it no harm."""

from __future__ import annotations

import logging
import re
import socket
import struct
from collections.abc import Iterator
from contextlib import ExitStack, closing

import httpx
import pytest
from loopback_http import HTTP
from prometheus_client import CollectorRegistry, Counter

from observability.listener import MOST_CONNECTIONS, InternalListener, Page


@pytest.fixture
def listener() -> Iterator[InternalListener]:
    registry = CollectorRegistry()
    Counter("seen", "What was seen", registry=registry).inc(3)
    made = InternalListener(registry, "127.0.0.1", 0)
    made.add("/page", lambda rest, query: Page(f"{rest}|{query.get('q', '')}".encode() + b"x" * 100_000))
    made.add("/broken", lambda rest, query: Page(bytes(1 // len(rest))))
    yield made
    made.close()


def get(listener: InternalListener, path: str, method: str = "GET") -> httpx.Response:
    return HTTP.request(method, f"http://127.0.0.1:{listener.port}{path}", timeout=20)


def test_metrics_and_pages(listener: InternalListener) -> None:
    assert "seen_total 3.0" in get(listener, "/metrics").text
    assert get(listener, "/page/a/b?q=1").text.startswith("a/b|1x")
    assert get(listener, "/pages").status_code == 404
    index = get(listener, "/")
    assert index.headers["content-type"].startswith("text/html")
    assert re.findall('href="([^"]+)"', index.text) == ["/broken", "/metrics", "/page"]
    head = get(listener, "/page", "HEAD")
    assert head.status_code == 200 and head.content == b"" and int(head.headers["content-length"]) > 100_000


def test_a_fault_of_a_page_is_a_500_that_is_logged(
    listener: InternalListener, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.ERROR):
        assert get(listener, "/broken").status_code == 500
    assert "no answer for /broken" in caplog.text


def test_clients_that_leave_are_no_news(
    listener: InternalListener, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    with caplog.at_level(logging.DEBUG):
        for _ in range(20):
            client = socket.create_connection(("127.0.0.1", listener.port))
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            client.sendall(b"GET /page HTTP/1.1\r\nHost: x\r\n\r\n")
            client.close()
        assert get(listener, "/metrics").status_code == 200
    assert not [one for one in caplog.records if one.name.startswith("headrace")] and capsys.readouterr().err == ""


def test_connections_are_bounded_and_come_free_again(listener: InternalListener) -> None:
    with ExitStack() as stack:
        for _ in range(MOST_CONNECTIONS):
            idle = socket.create_connection(("127.0.0.1", listener.port))
            stack.enter_context(closing(idle))
            idle.sendall(b"GET /page HTTP/1.1\r\n")  # a head that does not end
        refused = socket.create_connection(("127.0.0.1", listener.port))
        stack.enter_context(closing(refused))
        refused.settimeout(20)
        assert refused.recv(100).startswith(b"HTTP/1.1 503")
    for _ in range(200):
        try:
            if get(listener, "/metrics").status_code == 200:
                return
        except httpx.TransportError:
            pass
    raise AssertionError("no connection came free")
