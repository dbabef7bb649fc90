"""Two thousand streams at once, and one that is read byte by byte beside others that are not."""

from __future__ import annotations

import asyncio
import json
import resource
import socket
from pathlib import Path
from typing import Any

import pytest
from gateway_mesh import RunningGateway, running_gateway
from raw_http import connected, post

from gateway.http_protocol import GatewayHttpProtocol

STREAMS = 2000
OPEN_AT_ONCE = 100  # connections being made: the backlog of a listening socket is finite


def text_of(raw: bytes) -> str:
    """The joined text of a stream of completions, after checking that it is whole."""
    head, _, body = raw.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200")
    assert body.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
    events = [json.loads(line[6:]) for line in body.split(b"\n") if line.startswith(b"data: {")]
    assert [event["choices"][0]["finish_reason"] for event in events] == [None] * (len(events) - 1) + ["length"]
    return "".join(event["choices"][0]["text"] for event in events)


@pytest.fixture
def many_files() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    need = 2 * STREAMS + 512  # both ends of each connection are in this process
    if hard != resource.RLIM_INFINITY and hard < need:
        pytest.skip(f"needs {need} open files; the hard limit is {hard}")
    if soft != resource.RLIM_INFINITY and soft < need:
        resource.setrlimit(resource.RLIMIT_NOFILE, (need, hard))


@pytest.mark.usefixtures("many_files")
def test_two_thousand_streams_end_correctly(tokenizer_folder: Path) -> None:
    with running_gateway(tokenizer_folder) as gw:
        gw.mesh.stepping = False
        texts = asyncio.run(_stream_all(gw))
        finished = {"endpoint": "completions", "outcome": "finished"}
        gw.until(lambda: gw.metric("headrace_gateway_requests_total", **finished) == STREAMS)
        submits = {submit.sampling.seed: submit for submit in gw.mesh.submits}
        assert len(submits) == STREAMS
        for seed, text in texts.items():
            assert text == gw.decode(gw.expected(submits[seed])), f"seed {seed}"
        gw.gateway.dispatch.ledger.check()
        assert not len(gw.gateway.dispatch.ledger)


async def _stream_all(gw: RunningGateway) -> dict[int, str]:
    slots = asyncio.Semaphore(OPEN_AT_ONCE)

    async def stream(seed: int) -> str:
        body = json.dumps({"prompt": "idle", "max_tokens": 8, "seed": seed, "stream": True, "ignore_eos": True})
        async with slots:
            reader, writer = await asyncio.open_connection("127.0.0.1", gw.port)
            writer.write(post(body.encode(), b"Content-Type: application/json"))
            head = await reader.readuntil(b"\r\n\r\n")
        async with asyncio.timeout(120):
            body_bytes = await reader.readuntil(b"\r\n0\r\n\r\n")
        writer.close()
        return text_of(head + body_bytes)

    async def begin() -> None:
        while len(gw.mesh.submits) < STREAMS:  # noqa: ASYNC110 - of another thread: there is no event to wait for
            await asyncio.sleep(0.01)
        gw.mesh.stepping = True  # only now that all are open

    async with asyncio.TaskGroup() as group:
        tasks = {seed: group.create_task(stream(seed)) for seed in range(STREAMS)}
        group.create_task(begin())
    return {seed: task.result() for seed, task in tasks.items()}


# --- CASES B13 ------------------------------------------------------------------------------------------------------


def test_one_byte_at_a_time_beside_eight_who_read(gw: RunningGateway, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel's buffers are made small, so that the gateway's own show."""
    protocols: list[GatewayHttpProtocol] = []
    made = GatewayHttpProtocol.connection_made

    def connection_made(self: GatewayHttpProtocol, transport: Any) -> None:
        transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        protocols.append(self)
        made(self, transport)

    monkeypatch.setattr(GatewayHttpProtocol, "connection_made", connection_made)
    body = {"prompt": "slow", "max_tokens": 1900, "stream": True, "ignore_eos": True}
    with connected(gw) as slow:
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        slow.sendall(post(json.dumps({**body, "seed": 99}).encode(), b"Content-Type: application/json"))
        gw.until(lambda: len(gw.mesh.submits) == 1)
        raw = slow.recv(1)
        texts = asyncio.run(_neighbours(gw, body, 8))
        gw.until(lambda: not gw.mesh.running)  # generated to its end, its memory freed, though hardly any was read
        raw += slow.recv(1)
        waiting = gw.call(_write_buffer(protocols[0]))
        assert waiting < 64 * 1024 + 4096  # uvloop's high-water mark, and one piece
        assert waiting > 32 * 1024  # it did wait: the test would see more
        while not raw.endswith(b"\r\n0\r\n\r\n"):
            raw += slow.recv(1 << 16)
    submits = {submit.sampling.seed: submit for submit in gw.mesh.submits}
    texts[99] = text_of(raw)
    assert len(texts) == 9
    for seed, text in texts.items():
        assert text == gw.decode(gw.expected(submits[seed])), f"seed {seed}"
    assert len(raw) < 300_000  # what nobody took has merged: 1,900 frames would be more


async def _write_buffer(protocol: GatewayHttpProtocol) -> int:
    return protocol.transport.get_write_buffer_size()


async def _neighbours(gw: RunningGateway, body: dict[str, Any], count: int) -> dict[int, str]:
    async def stream(seed: int) -> str:
        reader, writer = await asyncio.open_connection("127.0.0.1", gw.port)
        writer.write(post(json.dumps({**body, "seed": seed}).encode(), b"Content-Type: application/json"))
        async with asyncio.timeout(60):
            raw = await reader.readuntil(b"\r\n\r\n")
            chunks = [raw]
            while not chunks[-1].endswith(b"\r\n0\r\n\r\n"):
                chunks.append(await reader.read(1 << 16))
        writer.close()
        return text_of(b"".join(chunks))

    return dict(enumerate(await asyncio.gather(*(stream(seed) for seed in range(count)))))
