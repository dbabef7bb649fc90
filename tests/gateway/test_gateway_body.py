"""Reading bodies: bounded, strict, and never a server error."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import msgspec
import pytest

from gateway.body import MAX_NESTING, MAX_PARTS, ClientGone, parse_json, read_body
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


def nested(levels: int) -> bytes:
    """An object with ``levels`` - 1 arrays within one another."""
    return b'{"a":' + b"[" * (levels - 1) + b"]" * (levels - 1) + b"}"


def test_nesting_has_a_limit_far_from_the_interpreter_s() -> None:
    parse_json(nested(MAX_NESTING))
    for levels in (MAX_NESTING + 1, 500, 40_000):
        with pytest.raises(ApiError, match="nested too deeply"):
            parse_json(nested(levels))
    parse_json(b'{"a":[' + b"[1]," * 1000 + b'[1]],"b":"' + b"[" * 1000 + b'"}')  # many, not deep


@pytest.mark.parametrize(
    "body",
    [
        b'{"a":[' + b"[]," * MAX_PARTS + b"[]]}",
        b'{"a":[' + b"{}," * MAX_PARTS + b"{}]}",
        b"{" + b",".join(b'"%d":0' % key for key in range(MAX_PARTS + 1)) + b"}",
        b"[" * (MAX_PARTS + 1) + b'"' + b'\\"[' * 1_000_000,  # a string without end: no quadratic search for it
    ],
    ids=["lists", "objects", "keys", "no end"],
)
def test_a_body_of_too_many_parts_is_refused_unparsed(body: bytes) -> None:
    began = time.process_time()
    with pytest.raises(ApiError, match=f"more than {MAX_PARTS}"):
        parse_json(body)
    assert time.process_time() - began < 2  # quadratic work would take hours


def test_brackets_within_texts_do_not_count() -> None:
    text = '[{:\\"' * (MAX_PARTS + 1)
    body = msgspec.json.encode({"a": text, "b": [text]})
    assert parse_json(body) == {"a": text, "b": [text]}


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
