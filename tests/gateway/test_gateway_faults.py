"""What happens when something goes away: clients, workers, schedulers, messages, the gateway itself."""

from __future__ import annotations

import asyncio
import concurrent.futures
import json
import socket
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
from gateway_mesh import RunningGateway, running_gateway
from loopback_http import HTTP, NO_AUTHORITIES

from gateway import offering
from shared.messages import Outcome, RollCall, SubmitReply, TokenEntry, encode, pack_tokens

BODY = {"prompt": "x", "max_tokens": 500}


def raw_request(gateway: RunningGateway, body: dict[str, Any], path: str = "/v1/completions") -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", gateway.port), timeout=10)
    data = json.dumps(body).encode()
    connection.sendall(f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(data)}\r\n\r\n".encode() + data)
    return connection


def nothing_open(gw: RunningGateway) -> bool:
    return not gw.mesh.running and len(gw.gateway.dispatch.ledger) == 0 and gw.gateway.in_flight == 0


def stream_errors(text: str) -> list[str]:
    """The error messages among a stream's events; fails if it looks like a whole answer."""
    assert "[DONE]" not in text
    events = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: ")]
    assert not any(choice["finish_reason"] for event in events for choice in event.get("choices", []))
    return [event["error"]["message"] for event in events if "error" in event]


@pytest.mark.parametrize("stream", [True, False])
def test_clients_that_leave_are_cancelled_at_once(gw: RunningGateway, stream: bool) -> None:
    gw.mesh.step_s = 0.005
    aborted = gw.metric("headrace_gateway_requests_total", endpoint="completions", outcome="aborted")
    connections = [raw_request(gw, {**BODY, "stream": stream, "n": 2}) for _ in range(20)]
    gw.until(lambda: len(gw.mesh.running) == 40)
    if stream:
        for connection in connections:
            assert connection.recv(100)
    left_at = time.monotonic()
    for connection in connections:
        connection.close()
    gw.until(lambda: nothing_open(gw))
    assert time.monotonic() - left_at < 2
    assert len({cancel.request_id for cancel in gw.mesh.cancels}) == 20
    gw.until(
        lambda: gw.metric("headrace_gateway_requests_total", endpoint="completions", outcome="aborted") == aborted + 20
    )
    sent = gw.mesh.sent_tokens
    time.sleep(0.05)
    assert gw.mesh.sent_tokens == sent


def test_a_client_that_leaves_while_its_submission_waits(gw: RunningGateway) -> None:
    gw.mesh.stepping = False
    offered: list[str] = []

    def refuse(submit: Any) -> SubmitReply:
        offered.append(submit.request_id)
        return SubmitReply(Outcome.STALE_EPOCH, 7)

    gw.mesh.refuse = refuse
    connection = raw_request(gw, BODY)
    gw.until(lambda: bool(offered))
    connection.close()
    gw.until(lambda: nothing_open(gw), timeout_s=2)
    gw.until(lambda: [cancel.request_id for cancel in gw.mesh.cancels] == [offered[0]])


def test_a_client_that_leaves_before_the_reply_is_cancelled_at_once(
    gw: RunningGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(offering, "REPLY_TIMEOUT_S", 600.0)
    gw.mesh.stepping = False
    replies: list[tuple[str, bytes]] = []
    publish = gw.bus.publish

    async def hold(subject: str, payload: bytes) -> None:
        if subject.startswith("_INBOX"):
            replies.append((subject, payload))
        else:
            await publish(subject, payload)

    monkeypatch.setattr(gw.bus, "publish", hold)
    connection = raw_request(gw, BODY)
    gw.until(lambda: len(replies) == 1)
    connection.close()
    gw.until(lambda: [(cancel.attempt, cancel.choice) for cancel in gw.mesh.cancels] == [(1, -1)])
    assert not gw.mesh.running
    gw.call(publish(*replies[0]))
    gw.until(lambda: nothing_open(gw))


@pytest.mark.parametrize("kind", ["failed", "dropped"])
def test_the_schedulers_word_ends_the_stream_with_an_error(gw: RunningGateway, kind: str) -> None:
    gw.mesh.step_s = 0.005
    with HTTP.stream("POST", f"{gw.url}/v1/completions", json={**BODY, "stream": True}) as answer:
        lines = answer.iter_text()
        seen = next(lines)
        gw.call(gw.mesh.event(gw.mesh.submits[0], kind, "its worker died"))
        seen += "".join(lines)
    assert stream_errors(seen) == [f"the request was {kind}: its worker died"]
    gw.until(lambda: nothing_open(gw))


def test_a_whole_answer_that_cannot_be_had_is_a_503(gw: RunningGateway) -> None:
    gw.mesh.stepping = False
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        answer = pool.submit(httpx.post, f"{gw.url}/v1/completions", json=BODY)
        gw.until(lambda: len(gw.mesh.running) == 1)
        gw.call(gw.mesh.event(gw.mesh.submits[0], "failed", "its worker died"))
        assert answer.result(10).status_code == 503
        assert "its worker died" in answer.result().json()["error"]["message"]
        assert "retry-after" in answer.result().headers


def test_a_hole_in_the_tokens_is_never_text(gw: RunningGateway) -> None:
    gw.mesh.stepping = False
    with HTTP.stream("POST", f"{gw.url}/v1/completions", json={**BODY, "max_tokens": 4, "stream": True}) as answer:
        lines = answer.iter_text()

        def entry(offset: int, token: int, attempt: int = 1, end: str = "") -> TokenEntry:
            return TokenEntry(gw.mesh.submits[0].request_id, attempt, 0, offset, [token], end, 4 if end else 0)

        for batch, epoch in ((entry(0, 50), 7), (entry(0, 50), 7), (entry(1, 51), 1), (entry(2, 52), 7)):
            gw.call(gw.mesh.send("gw", [batch], epoch=epoch))
        gw.until(lambda: len(gw.mesh.submits) == 2)
        again = gw.mesh.submits[1]
        assert (again.attempt, again.resumed) == (2, [pack_tokens([50])])
        gw.call(gw.mesh.send("gw", [entry(1, 53)]))  # of the attempt before
        rest = [entry(1, 61, 2), entry(2, 62, 2), entry(3, 63, 2, "length")]
        gw.call(gw.mesh.send("gw", rest))
        text = "".join(lines)
    assert text.endswith("data: [DONE]\n\n")
    events = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
    assert "".join(event["choices"][0]["text"] for event in events) == gw.decode([50, 61, 62, 63])
    gw.mesh.running.clear()


def test_a_batch_from_nowhere_is_dropped_and_counted(gw: RunningGateway) -> None:
    before = gw.metric("headrace_gateway_bad_messages_total")
    for payload in (b"", b"\x80\x04junk", b"\xff" * 50, encode(RollCall("s"))):
        gw.call(gw.bus.publish(gw.mesh.subjects.tokens("gw"), payload))
    gw.until(lambda: gw.metric("headrace_gateway_bad_messages_total") == before + 4)
    assert HTTP.post(f"{gw.url}/generate", json={"prompt": "x"}).status_code == 200


def test_beats_list_what_is_live_and_answer_a_roll_call(gw: RunningGateway) -> None:
    gw.mesh.stepping = False
    connection = raw_request(gw, BODY)
    gw.until(lambda: [record.epoch for record in gw.gateway.dispatch.ledger] == [7])
    gw.mesh.gateway_beats.clear()
    asked_at = time.monotonic()
    gw.call(gw.bus.publish(gw.mesh.subjects.roll_call, encode(RollCall("s"))))
    gw.until(lambda: bool(gw.mesh.gateway_beats))
    assert time.monotonic() - asked_at < 0.9
    beat = gw.mesh.gateway_beats[0]
    assert (beat.gateway, beat.epoch, beat.live) == ("gw", 7, [(gw.mesh.submits[0].request_id, 1)])
    connection.close()
    gw.until(lambda: nothing_open(gw))


def test_a_slow_reader_gets_its_exact_text_and_holds_nobody_up(gw: RunningGateway) -> None:
    prompt = "x" * 1500
    slow = raw_request(gw, {"prompt": prompt, "n": 32, "max_tokens": 300, "stream": True}, "/generate")
    gw.until(lambda: len(gw.mesh.submits) == 1)
    gw.until(lambda: not gw.mesh.running)  # generated to its end while the client read nothing
    assert HTTP.post(f"{gw.url}/generate", json={"prompt": "x"}).status_code == 200
    raw = b""
    while not raw.endswith(b"0\r\n\r\n"):
        raw += slow.recv(1 << 20)
    slow.close()
    lines = [line for line in raw.split(b"\n") if line.startswith(b'{"text":')]
    assert len(lines) < 300  # what the client was too slow for has merged
    submit = gw.mesh.submits[0]
    expected = [prompt + gw.decode(gw.expected(submit, choice)) for choice in range(32)]
    assert json.loads(lines[-1])["text"] == expected


# --- with a gateway of their own ------------------------------------------------------------------------------------


def test_a_silent_scheduler_ends_open_requests_and_readiness(tokenizer_folder: Path) -> None:
    with running_gateway(tokenizer_folder, scheduler_stale_s=0.5, resume_timeout_s=1.0, submit_timeout_s=0.5) as gw:
        gw.mesh.step_s = 0.01
        with HTTP.stream(
            "POST", f"{gw.url}/v1/completions", json={**BODY, "max_tokens": 2000, "stream": True}
        ) as answer:
            lines = answer.iter_text()
            seen = next(lines)
            gw.mesh.beating = gw.mesh.stepping = False
            gw.until(lambda: HTTP.get(f"{gw.url}/ready").status_code == 503)
            refused = HTTP.post(f"{gw.url}/generate", json={"prompt": "x"})
            assert (refused.status_code, "retry-after" in refused.headers) == (503, True)
            seen += "".join(lines)
        assert "silent" in stream_errors(seen)[0]
        gw.mesh.beating = gw.mesh.stepping = True
        gw.until(lambda: HTTP.get(f"{gw.url}/ready").status_code == 200)
        assert HTTP.post(f"{gw.url}/generate", json={"prompt": "x"}).status_code == 200


def test_a_scheduler_that_never_answers_is_a_503(tokenizer_folder: Path) -> None:
    with running_gateway(tokenizer_folder, submit_timeout_s=0.3) as gw:
        gw.mesh.subjects = type(gw.mesh.subjects)("elsewhere")  # beats of "default" stop; the subscription stays
        gw.bus._subscriptions = [entry for entry in gw.bus._subscriptions if ".submit." not in entry[0]]
        answer = HTTP.post(f"{gw.url}/generate", json={"prompt": "x"})
        assert (answer.status_code, "retry-after" in answer.headers) == (503, True)


def test_a_reader_that_takes_nothing_is_dropped(tokenizer_folder: Path) -> None:
    with running_gateway(tokenizer_folder, slow_reader_timeout_s=1.0) as gw:
        slow = socket.socket()
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        slow.connect(("127.0.0.1", gw.port))
        body = json.dumps({"prompt": "x" * 1500, "n": 64, "max_tokens": 400, "stream": True}).encode()
        slow.sendall(b"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
        gw.until(lambda: len(gw.mesh.submits) == 1)
        gw.until(lambda: gw.gateway.in_flight == 0)
        assert gw.metric("headrace_gateway_requests_total", endpoint="generate", outcome="aborted") == 1
        slow.close()


def test_drain_lets_streams_finish_and_refuses_new_requests(tokenizer_folder: Path) -> None:
    with running_gateway(tokenizer_folder, drain_grace_s=20.0) as gw:
        gw.mesh.stepping = False

        async def five() -> list[str]:
            async with httpx.AsyncClient(verify=NO_AUTHORITIES, base_url=gw.url, timeout=20) as client:
                body = {"prompt": "x", "max_tokens": 30, "stream": True}
                requests = [asyncio.create_task(client.post("/v1/completions", json=body)) for _ in range(5)]
                await asyncio.to_thread(gw.until, lambda: len(gw.mesh.running) == 5)
                gw.stop()
                await asyncio.to_thread(gw.until, lambda: gw.gateway.draining)
                assert (await client.get("/ready")).status_code == 503
                refused = await client.post("/generate", json={"prompt": "x"})
                assert (refused.status_code, refused.json()["error"]["code"]) == (503, "draining")
                assert (await client.get("/health")).status_code == 200
                gw.mesh.stepping = True
                return [(await request).text for request in requests]

        texts = asyncio.run(five())
        assert all(text.endswith("data: [DONE]\n\n") for text in texts)
        assert gw.join(5)


def test_the_grace_is_a_bound_even_with_a_client_that_never_reads(tokenizer_folder: Path) -> None:
    with running_gateway(tokenizer_folder, drain_grace_s=0.5) as gw:
        gw.mesh.step_s = 0.01
        stuck = raw_request(gw, {"prompt": "x" * 1000, "n": 16, "max_tokens": 1000, "stream": True}, "/generate")
        with HTTP.stream(
            "POST", f"{gw.url}/v1/completions", json={**BODY, "max_tokens": 2000, "stream": True}
        ) as answer:
            gw.until(lambda: len(gw.mesh.submits) == 2)
            began = time.monotonic()
            gw.stop()
            text = answer.read().decode()
        assert "shutting down" in stream_errors(text)[0]
        assert gw.join(6)
        assert time.monotonic() - began < 5
        stuck.close()
