"""Clients that mean no good, or know no better: a clear 4xx or a closed connection, and nobody else notices."""

from __future__ import annotations

import contextlib
import json
import re
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from gateway_mesh import RunningGateway, running_gateway
from loopback_http import HTTP
from raw_http import BODY, answer, closed, connected, post, read_answer

from gateway import http_protocol

GET = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"
LONG = json.dumps({"prompt": "hello", "max_tokens": 1000}).encode()


def chunked(*chunks: bytes, path: bytes = b"/v1/completions") -> bytes:
    return b"POST %b HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n" % path + b"".join(chunks)


@pytest.fixture(autouse=True)
def canary(gw: RunningGateway) -> Iterator[None]:
    """Whatever a test did, the next client is served, and nothing is left running."""
    yield
    gw.mesh.stepping = True
    reply = HTTP.post(f"{gw.url}/v1/completions", content=BODY, headers={"content-type": "application/json"})
    assert reply.status_code == 200
    assert reply.json()["usage"]["completion_tokens"] == 3
    gw.until(lambda: gw.gateway.in_flight == 0 and not gw.mesh.running)


def answers_of(gw: RunningGateway, request: bytes) -> list[int]:
    """The statuses of all that comes back until the server closes, which it does once we send no more."""
    data = b""
    with connected(gw) as connection, contextlib.suppress(ConnectionResetError):
        connection.sendall(request)
        while part := connection.recv(65536):
            if not data:
                connection.shutdown(socket.SHUT_WR)
            data += part
    return [int(status) for status in re.findall(rb"HTTP/1\.1 (\d{3}) ", data)]


MALFORMED = {
    "a negative length": b"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: -5\r\n\r\nhello",
    "a length beyond all numbers": b"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: %b\r\n\r\n" % (b"9" * 40),
    "a length that is no number": b"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: 0x10\r\n\r\n",
    "a length in petabytes": b"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: 999999999999999\r\n\r\n",
    "two lengths": b"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\nContent-Length: 3\r\n\r\n{}x",
    "length and chunks": b"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\n"
    b"Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "an unknown coding": b"POST /generate HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: gzip\r\n\r\nxyz",
    "a chunk size that is none": chunked(b"zz\r\n{}\r\n0\r\n\r\n"),
    "a chunk size beyond all numbers": chunked(b"f" * 40 + b"\r\n"),
    "a negative chunk": chunked(b"-2\r\n{}\r\n0\r\n\r\n"),
    "a chunk longer than it says": chunked(b"1\r\n{}\r\n0\r\n\r\n"),
    "a bad chunk behind a good one": chunked(b"2\r\n{}\r\n", b"!\r\n"),
    "no method": b"/health HTTP/1.1\r\n\r\n",
    "an unknown method": b"BREW /health HTTP/1.1\r\nHost: x\r\n\r\n",
    "HTTP/9.9": b"GET /health HTTP/9.9\r\nHost: x\r\n\r\n",
    "a NUL in the path": b"GET /hea\0lth HTTP/1.1\r\nHost: x\r\n\r\n",
    "a NUL in a header": b"GET /health HTTP/1.1\r\nHost: x\r\nA: b\0c\r\n\r\n",
    "a header without a colon": b"GET /health HTTP/1.1\r\nHost x\r\n\r\n",
    "a space in a header's name": b"GET /health HTTP/1.1\r\nHo st: x\r\n\r\n",
    "an empty header name": b"GET /health HTTP/1.1\r\n: x\r\n\r\n",
    "a proxy's request": b"CONNECT example.org:443 HTTP/1.1\r\nHost: example.org\r\n\r\n",
    "an asterisk": b"OPTIONS * HTTP/1.1\r\nHost: x\r\n\r\n",
    "a path in latin-1": b"GET /v1/models/\xe9\xff HTTP/1.1\r\nHost: x\r\n\r\n",
    "an escaped NUL": b"GET /v1/models/%00 HTTP/1.1\r\nHost: x\r\n\r\n",
    "escaped bytes that are no UTF-8": b"GET /v1/models/%ff%fe%ED%A0%BD HTTP/1.1\r\nHost: x\r\n\r\n",
    "a broken escape": b"GET /v1/models/%zz%2 HTTP/1.1\r\nHost: x\r\n\r\n",
    "dots": b"GET /v1/models/../../../etc/passwd HTTP/1.1\r\nHost: x\r\n\r\n",
    "a path of 60 kB": b"GET /" + b"a" * 60_000 + b" HTTP/1.1\r\nHost: x\r\n\r\n",
    "a head of 100 kB in one piece": b"GET /health HTTP/1.1\r\nHost: x\r\nA: " + b"a" * 100_000 + b"\r\n\r\n",
    "200 headers": b"GET /health HTTP/1.1\r\nHost: x\r\n" + b"A: b\r\n" * 200 + b"\r\n",
    "a body where none belongs": post(b"[" * 5000, path=b"/v1/models"),
    "deep arrays": post(b'{"prompt":' + b"[" * 100_000 + b"]" * 100_000 + b"}"),
    "deep objects": post(b'{"a":' * 500 + b"1" + b"}" * 500),
    "many arrays": post(b'{"prompt":[' + b"[]," * 1_000_000 + b"[]]}"),
}


@pytest.mark.parametrize("name", MALFORMED)
def test_malformed_requests_get_one_client_error(gw: RunningGateway, name: str) -> None:
    statuses = answers_of(gw, MALFORMED[name])
    assert len(statuses) == 1, statuses
    assert 400 <= statuses[0] < 500


def test_what_looks_odd_and_is_legal_is_served(gw: RunningGateway) -> None:
    assert answers_of(gw, b"\r\n\r\n" + GET) == [200]
    assert answers_of(gw, b"GET http://elsewhere.example/health HTTP/1.1\r\nHost: x\r\n\r\n") == [200]
    assert answers_of(gw, b"GET /health HTTP/1.0\r\n\r\n") == [200]
    assert answers_of(gw, GET * 40) == [200] * 40  # more than are read ahead
    body = b"%x;note=x\r\n%b\r\n0\r\nTrailer: x\r\n\r\n" % (len(BODY), BODY)
    assert answers_of(gw, chunked(body) + GET) == [200, 200]


def test_trailers_add_nothing_to_a_request(gw: RunningGateway) -> None:
    with connected(gw) as connection:
        connection.sendall(chunked(b"0\r\nX-Request-Id: forged\r\n\r\n"))
        status, headers, _ = read_answer(connection)
    assert status == 400
    assert headers["x-request-id"] != "forged"


# --- bodies that are not wanted -------------------------------------------------------------------------------------


def test_a_client_that_sends_everything_before_it_reads_gets_its_413(gw: RunningGateway) -> None:
    with connected(gw) as connection:
        connection.sendall(post(b"x" * (20 << 20)))  # no broken pipe
        status, headers, reply = read_answer(connection)
        assert (status, reply["error"]["code"]) == (413, "body_too_large")
        assert headers["connection"] == "close"
        assert closed(connection)


def test_a_chunked_body_without_end_is_cut_off(gw: RunningGateway, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_protocol, "MAX_DRAIN_BYTES", 1 << 20)
    chunk = b"10000\r\n" + b"x" * 0x10000 + b"\r\n"
    with connected(gw) as connection:
        connection.sendall(chunked())
        with pytest.raises(OSError, match=r"reset|[Bb]roken pipe"):
            for _ in range(10_000):  # 655 MB
                connection.sendall(chunk)


def test_a_refused_body_that_dawdles_is_given_up(gw: RunningGateway, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_protocol, "DRAIN_TIMEOUT_S", 0.2)
    with connected(gw) as connection:
        connection.sendall(post(b"x" * 100, path=b"/nowhere")[:-50])
        assert answer(connection)[0] == 404
        assert closed(connection)


def test_a_connection_goes_on_behind_a_body_that_nobody_read(
    gw: RunningGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_protocol, "KEEP_ALIVE_S", 0.3)
    with connected(gw) as connection:
        request = post(b"x" * 1000, path=b"/nowhere")
        connection.sendall(request[:-500])
        assert answer(connection)[0] == 404
        connection.sendall(request[-500:] + GET)
        assert answer(connection)[0] == 200
        connection.sendall(request[:-500])
        assert answer(connection)[0] == 404
        connection.sendall(request[-500:])
        assert closed(connection)  # idle again, and not for ever


def test_expect_100_continue(gw: RunningGateway) -> None:
    with connected(gw) as connection:
        head, _, body = post(BODY, b"Expect: 100-continue").partition(b"\r\n\r\n")
        connection.sendall(head + b"\r\n\r\n")
        assert connection.recv(100) == b"HTTP/1.1 100 Continue\r\n\r\n"
        connection.sendall(body)
        assert answer(connection)[0] == 200
    with connected(gw) as connection:  # and not where the body is not wanted
        connection.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 99999999\r\nExpect: 100-continue\r\n\r\n"
        )
        assert answer(connection)[0] == 413


# --- connections that are held --------------------------------------------------------------------------------------


def test_idle_connections_are_closed(gw: RunningGateway, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_protocol, "KEEP_ALIVE_S", 0.2)
    with connected(gw) as connection:
        connection.sendall(GET)
        assert answer(connection)[0] == 200
        assert closed(connection)


def test_a_connection_that_asks_for_nothing_is_closed(gw: RunningGateway, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_protocol, "HEAD_TIMEOUT_S", 0.2)
    with connected(gw) as connection:
        assert closed(connection)


def test_line_feeds_do_not_hold_a_connection(gw: RunningGateway, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_protocol, "HEAD_TIMEOUT_S", 0.3)
    with connected(gw) as connection:
        connection.sendall(GET)
        assert answer(connection)[0] == 200
        connection.sendall(b"\r\n")
        assert answer(connection)[0] == 408


def test_one_connection_too_many_gets_503(tokenizer_folder: Path) -> None:
    with running_gateway(tokenizer_folder, max_connections=3) as gw:
        held = [socket.create_connection(("127.0.0.1", gw.port), timeout=30) for _ in range(3)]
        for connection in held:
            connection.sendall(GET)
            assert answer(connection)[0] == 200
        with connected(gw) as refused:
            status, headers, reply = read_answer(refused)
            assert (status, reply["error"]["code"]) == (503, "connections")
            assert int(headers["retry-after"]) >= 1
            assert closed(refused)
        held[0].sendall(post(BODY))  # who was there is served on
        assert answer(held[0])[0] == 200
        held.pop().close()

        def admitted() -> bool:
            with connected(gw) as another:
                another.sendall(GET)
                return answer(another)[0] == 200

        gw.until(admitted)
        for connection in held:
            connection.close()


# --- clients that leave ---------------------------------------------------------------------------------------------


def test_who_leaves_behind_pipelined_requests_is_missed_at_once(gw: RunningGateway) -> None:
    gw.mesh.stepping = False
    with connected(gw) as connection:
        connection.sendall(post(LONG) + post(LONG))
        gw.until(lambda: len(gw.mesh.submits) == 1)
    gw.until(lambda: len(gw.mesh.cancels) == 1)
    gw.until(lambda: gw.gateway.in_flight == 0)
    assert len(gw.mesh.submits) == 1  # the second was never begun


@pytest.mark.parametrize("request_", [GET, post(BODY), chunked(b"%x\r\n%b\r\n0\r\n\r\n" % (len(BODY), BODY))])
def test_who_closes_his_side_gets_an_answer_that_comes_soon(gw: RunningGateway, request_: bytes) -> None:
    with connected(gw) as connection:
        connection.sendall(request_)
        connection.shutdown(socket.SHUT_WR)
        assert answer(connection)[0] == 200
        assert closed(connection)


def test_who_closes_his_side_is_not_worked_for_much_longer(gw: RunningGateway, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_protocol, "HALF_CLOSED_S", 0.1)
    gw.mesh.stepping = False
    with connected(gw) as connection:
        connection.sendall(post(LONG))
        gw.until(lambda: len(gw.mesh.submits) == 1)
        connection.shutdown(socket.SHUT_WR)
        gw.until(lambda: len(gw.mesh.cancels) == 1)
        assert closed(connection)


def test_who_never_reads_is_cut_off_even_when_all_is_said(tokenizer_folder: Path) -> None:
    with running_gateway(tokenizer_folder, slow_reader_timeout_s=1.0) as gw:
        slow = socket.socket()
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        slow.connect(("127.0.0.1", gw.port))
        slow.settimeout(5)
        with pytest.raises(OSError):  # once the answers fill all buffers
            while True:
                slow.sendall(b"GET /v1/models HTTP/1.1\r\nHost: x\r\n\r\n" * 100)
        began = time.monotonic()
        gw.until(lambda: not _connections(gw))
        assert time.monotonic() - began < 8
        slow.close()


def _connections(gw: RunningGateway) -> int:
    """Established connections to the gateway's port, as the kernel counts them."""
    ours = f":{gw.port:04X}"
    lines = Path("/proc/net/tcp").read_text().splitlines()[1:]
    return sum(line.split()[1].endswith(ours) and line.split()[3] == "01" for line in lines)
