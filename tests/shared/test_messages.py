"""The wire format: round trips, growth, and hostile bytes."""

from __future__ import annotations

import pickle

import msgpack
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.messages import (
    PROTOCOL,
    BadMessage,
    Cancel,
    Sampling,
    StepPlan,
    StepResult,
    Submit,
    decode,
    encode,
    pack_tokens,
    unpack_tokens,
)


def submit() -> Submit:
    return Submit("r", 1, "g", "m", pack_tokens([1, 2]), Sampling(5, 16), 7)


@pytest.mark.parametrize(
    "message",
    [submit(), Cancel("r", 1), StepPlan(1, "w", 2, 3, decodes=[1, 2], chunks=[(3, 4)]), StepResult(1, "w", 2, 3, [5])],
)
def test_round_trip(message: Submit | Cancel | StepPlan | StepResult) -> None:
    assert decode(encode(message)) == message


def test_any_language_can_read_a_message_with_plain_msgpack() -> None:
    *version, fields = msgpack.unpackb(encode(submit()))
    assert tuple(version) == PROTOCOL
    assert fields[0] == "submit" and fields[1] == "r" and fields[5] == pack_tokens([1, 2])


def test_a_message_of_a_later_version_is_read_and_an_earlier_one_gets_defaults() -> None:
    major, minor, fields = msgpack.unpackb(encode(Cancel("r", 1)))
    assert decode(msgpack.packb([major, minor + 1, [*fields, "a field from the future"]])) == Cancel("r", 1)
    assert decode(msgpack.packb([major, minor, fields[:3]])) == Cancel("r", 1, -1)


def test_another_major_version_is_dropped_with_a_word_that_says_so() -> None:
    major, minor, fields = msgpack.unpackb(encode(Cancel("r", 1)))
    with pytest.raises(BadMessage, match=f"protocol {major + 1}.0"):
        decode(msgpack.packb([major + 1, 0, fields]))
    with pytest.raises(BadMessage, match=f"protocol {major}.{minor + 1}"):
        decode(msgpack.packb([major, minor + 1, ["a kind from the future", 1]]))


class Planted:
    def __reduce__(self) -> tuple[object, ...]:
        return (exec, ("raise SystemExit",))


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"\xc1",
        b"\xff" * 100,
        b"\x91" * 100_000,  # a nesting bomb
        b"\xdd\xff\xff\xff\xff",  # an array that says it has 4 billion entries
        msgpack.packb(None),
        msgpack.packb({"submit": 1}),
        msgpack.packb(["submit"]),
        msgpack.packb([*PROTOCOL, ["submit"]]),
        msgpack.packb([*PROTOCOL, ["nobody", 1, 2]]),
        msgpack.packb([*PROTOCOL, ["cancel", 5, "x"]]),
        msgpack.packb([*PROTOCOL, ["cancel", b"bytes", 1]]),
        msgpack.packb(["cancel", "r", 1]),  # without its version
        encode(submit())[:-3],
        pickle.dumps(Planted()),
        b"\x93\x01\x00\x93\xa6cancel\xa1\xff\x01",  # text that is no UTF-8
    ],
)
def test_bytes_that_are_no_message_are_refused(payload: bytes) -> None:
    with pytest.raises(BadMessage):
        decode(payload)


@given(st.binary(max_size=200))
def test_random_bytes_never_raise_anything_else(payload: bytes) -> None:
    try:
        decode(payload)
    except BadMessage:
        return


@given(st.lists(st.integers(0, 2**32 - 1)))
def test_tokens_pack_to_four_bytes_each(tokens: list[int]) -> None:
    packed = pack_tokens(tokens)
    assert len(packed) == 4 * len(tokens) and unpack_tokens(packed) == tokens


def test_tokens_outside_uint32_do_not_pack() -> None:
    for token in (-1, 2**32):
        with pytest.raises(OverflowError):
            pack_tokens([token])
    with pytest.raises(BadMessage):
        unpack_tokens(b"abc")


def test_fields_without_a_default_come_first() -> None:
    """Growth only works at the end: a required field after a defaulted one would break the previous version."""
    for kind in (Submit, StepPlan, StepResult, Sampling, Cancel):
        required = [field.required for field in msgspec.structs.fields(kind)]
        assert required == sorted(required, reverse=True), kind
