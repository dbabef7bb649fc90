"""The bench's HTTP client, against a server that sends exactly what a test says."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from headrace.bench.client import Client, _Connection, client_of
from headrace.bench.taken import Taken
from headrace.bench.workload import Shot

DEADLINE_S = 30.0
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
SHOT = Shot(0.0, [5, 6], 3)

Answer = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


def chunk(*payloads: str) -> bytes:
    body = "".join(f"data: {payload}\n\n" for payload in payloads).encode()
    return b"%x\r\n%b\r\n" % (len(body), body)


def usage(tokens: int) -> str:
    return f'{{"id":"cmpl-1","choices":[],"usage":{{"prompt_tokens":2,"completion_tokens":{tokens}}}}}'


TEXT = '{"id":"cmpl-1","choices":[{"index":0,"text":"a"}],"usage":null}'


async def request_of(reader: asyncio.StreamReader) -> bytes:
    head = await reader.readuntil(b"\r\n\r\n")
    length = next(line for line in head.split(b"\r\n") if line.startswith(b"content-length:"))
    return await reader.readexactly(int(length.split(b":")[1]))


def run(answer: Answer, use: Callable[[Client], Coroutine[Any, Any, None]]) -> int:
    """Runs ``use`` with a client of a server that does ``answer`` for each connection; returns their number."""
    connections = 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal connections
        connections += 1
        try:
            await answer(reader, writer)
        except asyncio.IncompleteReadError:
            pass
        finally:
            writer.close()

    async def main() -> None:
        async with asyncio.timeout(DEADLINE_S):
            server = await asyncio.start_server(serve, "127.0.0.1", 0)
            port = server.sockets[0].getsockname()[1]
            with client_of(f"http://127.0.0.1:{port}", "m") as client:
                await use(client)
            server.close()
            await server.wait_closed()

    asyncio.run(main())
    return connections


def taken_from(answer: bytes) -> Taken:
    taken = Taken(SHOT.max_tokens, time.perf_counter())

    async def reply(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await request_of(reader)
        writer.write(answer)

    run(reply, lambda client: client.ask(SHOT, taken))
    return taken


def test_a_whole_answer_has_the_time_of_each_piece_and_its_usage() -> None:
    taken = taken_from(HEAD + chunk(TEXT) + chunk(TEXT, TEXT) + chunk(usage(3), "[DONE]") + b"0\r\n\r\n")
    assert (taken.status, taken.error, taken.completion_tokens, len(taken.text_s)) == (200, "", 3, 3)
    assert 0 < taken.ttft_s <= taken.e2e_s
    assert len(taken.itl_s) == 2


def test_usage_may_come_with_the_last_text_or_with_the_empty_end() -> None:
    last = '{"choices":[{"index":0,"text":"%s"}],"usage":{"completion_tokens":3}}'
    for text, pieces in (("a", 2), ("", 1)):
        taken = taken_from(HEAD + chunk(TEXT) + chunk(last % text, "[DONE]") + b"0\r\n\r\n")
        assert (taken.error, taken.completion_tokens, len(taken.text_s)) == ("", 3, pieces)


def test_without_keep_alive_each_request_says_so_and_has_a_connection_of_its_own() -> None:
    heads: list[bytes] = []

    async def reply(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        heads.append(head)
        writer.write(HEAD.replace(b"\r\n\r\n", b"\r\nconnection: close\r\n\r\n"))
        writer.write(chunk(TEXT) + chunk(usage(3), "[DONE]") + b"0\r\n\r\n")

    async def ask_twice(client: Client) -> None:
        once = Client(f"http://127.0.0.1:{client._port}", "m", keep_alive=False)
        for _ in range(2):
            taken = Taken(3, time.perf_counter())
            await once.ask(SHOT, taken)
            assert taken.error == ""
        once.close()

    assert run(reply, ask_twice) == 2
    assert all(b"\r\nconnection: close\r\n" in head for head in heads)


class Sink(asyncio.Transport):
    """Takes what is written to it."""

    def write(self, data: bytes | bytearray | memoryview) -> None:
        pass

    def is_closing(self) -> bool:
        return False


def test_an_answer_may_come_byte_by_byte() -> None:
    async def main() -> Taken:
        taken, pool = Taken(3, 0.0), []
        connection = _Connection(pool)
        connection.connection_made(Sink())
        exchange = asyncio.ensure_future(connection.exchange(b"", taken))
        await asyncio.sleep(0)  # it has sent
        for byte in HEAD + chunk(TEXT) + chunk(TEXT, usage(3), "[DONE]") + b"0\r\n\r\n":
            connection.data_received(bytes([byte]))
        await exchange
        assert pool == [connection]
        return taken

    taken = asyncio.run(main())
    assert (taken.status, taken.error, taken.completion_tokens, len(taken.text_s)) == (200, "", 3, 2)


def test_a_refusal_is_told_with_its_retry_after_and_not_tried_again() -> None:
    body = b'{"error":{"message":"full"}}'
    answer = b"HTTP/1.1 429 Too Many Requests\r\nRetry-After: 1\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body)
    taken = taken_from(answer)
    assert (taken.status, taken.retry_after) == (429, True)
    assert taken.error == 'HTTP 429: {"error":{"message":"full"}}'
    assert taken.ended_s


def test_an_answer_that_breaks_off_or_lacks_tokens_failed() -> None:
    assert "ended before" in taken_from(HEAD + chunk(TEXT)).error
    assert taken_from(HEAD + chunk('{"error":{"message":"lost"}}') + b"0\r\n\r\n").error.startswith('data: {"error"')
    assert taken_from(HEAD + chunk(TEXT, usage(1)) + b"0\r\n\r\n").error == "1 tokens instead of 3"
    assert "no HTTP" in taken_from(b"nonsense\r\n\r\n").error


def test_connections_are_used_again_and_closed_when_a_request_is_given_up() -> None:
    gone = asyncio.Event()
    waiting = asyncio.Event()
    whole = HEAD + chunk(TEXT, usage(3)) + b"0\r\n\r\n"

    async def reply(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for _ in range(2):
            await request_of(reader)
            writer.write(whole)
        await request_of(reader)
        waiting.set()
        assert await reader.read() == b""  # the client closed
        gone.set()

    async def use(client: Client) -> None:
        for _ in range(2):
            taken = Taken(3, 0.0)
            await client.ask(SHOT, taken)
            assert not taken.error
        given_up = Taken(3, 0.0)
        asking = asyncio.ensure_future(client.ask(SHOT, given_up))
        await waiting.wait()
        asking.cancel()
        await gone.wait()
        assert (given_up.error, given_up.ended_s) == ("", 0.0)

    assert run(reply, use) == 1


def test_a_server_that_is_away_is_an_error_of_the_request() -> None:
    async def main() -> Taken:
        taken = Taken(3, 0.0)
        with client_of("http://127.0.0.1:1", "m") as client:
            await client.ask(SHOT, taken)
        return taken

    taken = asyncio.run(main())
    assert "Connect" in taken.error
    assert taken.status == 0
