"""Reading bodies: bounded, strict, and never a server error."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from gateway.body import ClientGone, parse_json, read_body
from gateway.errors import ApiError


@pytest.mark.parametrize(
    "body",
    [
        b"", b"null", b"[]", b"5", b'"x"', b'{"a":', b'{"a":NaN}', b'{"a":Infinity}', b'{"a":-Infinity}',
        b'{"a":1e999}', b'{"a":-1e999}', b'{"a":"\xff"}', b'{"a":"\\ud83d"}', b'{"a":"\\ud83dx"}',
        b'{"a":"\xed\xa0\xbd"}',
        b'{"\\ud83d":1}', b"[" * 200_000, b'{"a":' * 200_000, b"{'a':1}", b'{"a":1}x',
    ],
)  # fmt: skip
def test_what_is_no_object_is_a_400_with_a_strict_body(body: bytes) -> None:
    with pytest.raises(ApiError) as caught:
        parse_json(body)
    assert caught.value.status == 400
    assert parse_json(caught.value.body())["error"]["type"] == "invalid_request_error"


def test_paired_surrogates_and_nul_are_text() -> None:
    assert parse_json(b'{"a":"\\ud83d\\ude00","b":"\\u0000"}') == {"a": "\U0001f600", "b": "\0"}


def test_an_error_that_quotes_a_surrogate_can_be_written() -> None:
    parse_json(ApiError(400, "bad \ud83d").body())


def read(messages: list[dict[str, Any]], limit: int, headers: Any = ()) -> bytes:
    stream = iter(messages)

    async def receive() -> dict[str, Any]:
        return next(stream)

    return asyncio.run(read_body({"type": "http", "headers": list(headers)}, receive, limit))


def chunk(body: bytes, more: bool = True) -> dict[str, Any]:
    return {"type": "http.request", "body": body, "more_body": more}


def test_the_limit_holds_while_reading() -> None:
    assert read([chunk(b"abc"), chunk(b"de", more=False)], 5) == b"abcde"
    with pytest.raises(ApiError) as caught:
        read([chunk(b"abc"), chunk(b"def")], 5)  # a third message is never asked for
    assert caught.value.status == 413


def test_a_declared_length_over_the_limit_is_refused_unread() -> None:
    with pytest.raises(ApiError) as caught:
        read([], 5, [(b"content-length", b"6")])
    assert caught.value.status == 413


def test_a_client_that_leaves_while_sending() -> None:
    with pytest.raises(ClientGone):
        read([chunk(b"abc"), {"type": "http.disconnect"}], 5)
