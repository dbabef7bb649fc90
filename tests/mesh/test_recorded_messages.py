"""Messages recorded from each release: today's code reads them, and what it says can be read by them."""

from __future__ import annotations

import json
import typing
from pathlib import Path
from typing import Any

import msgpack
import msgspec
import pytest
from record_messages import FOLDER, by_name, examples, recording

from shared.messages import PROTOCOL, AnyMessage, Message, StepPlan, StepResult, Submit, WorkerBeat, decode, encode

RECORDINGS = sorted(FOLDER.glob("*.json"))
RECORDED = [(file, one) for file in RECORDINGS for one in json.loads(file.read_text("utf-8"))["messages"]]
NAMES = [f"{file.stem}-{one['kind']}-{index}" for index, (file, one) in enumerate(RECORDED)]


def unlike(recorded: Any, now: Any, where: str = "") -> list[str]:
    """Fields that do not have the recorded value. What has come since is not looked at."""
    if isinstance(recorded, dict) and isinstance(now, dict):
        return [
            line
            for name, value in recorded.items()
            for line in (
                unlike(value, now[name], f"{where}.{name}") if name in now else [f"{where}.{name}: there is none"]
            )
        ]
    if isinstance(recorded, list) and isinstance(now, list) and len(recorded) == len(now):
        pairs = enumerate(zip(recorded, now, strict=True))
        return [line for index, (was, is_) in pairs for line in unlike(was, is_, f"{where}[{index}]")]
    return [] if recorded == now else [f"{where}: {now!r}, was {recorded!r}"]


def begins_with(now: Any, recorded: Any) -> bool:
    """True if a node that knows the ``recorded`` fields finds them where they were: what is new is at an end."""
    if isinstance(recorded, list) and isinstance(now, list):
        return len(now) >= len(recorded) and all(map(begins_with, now, recorded))
    return bool(now == recorded)


def test_what_is_recorded_is_of_this_protocol_and_every_kind_is_still_there() -> None:
    assert [file.stem for file in RECORDINGS] == ["0.1.0"]
    kinds = {kind.__struct_config__.tag for kind in typing.get_args(AnyMessage)}
    for file in RECORDINGS:
        content = json.loads(file.read_text("utf-8"))
        assert content["protocol"][0] == PROTOCOL[0]
        recorded = {one["kind"] for one in content["messages"]}
        assert len(recorded) >= 16 and recorded <= kinds, "a kind that nodes send is gone"


@pytest.mark.parametrize(("file", "recorded"), RECORDED, ids=NAMES)
def test_a_recorded_message_is_read_as_it_was_meant(file: Path, recorded: dict[str, Any]) -> None:
    message = decode(bytes.fromhex(recorded["bytes"]))
    assert message.__struct_config__.tag == recorded["kind"]
    assert not unlike(recorded["fields"], by_name(message))


@pytest.mark.parametrize(("file", "recorded"), RECORDED, ids=NAMES)
def test_a_node_of_that_release_finds_every_field_in_what_we_say(file: Path, recorded: dict[str, Any]) -> None:
    sent = bytes.fromhex(recorded["bytes"])
    *_, now = msgpack.unpackb(encode(decode(sent)))
    *_, then = msgpack.unpackb(sent)
    assert begins_with(now, then)


def test_a_recording_has_a_value_of_its_own_in_every_field() -> None:
    """Else a change of order would not show."""
    for message in examples():
        plain = [value for value in _leaves(by_name(message)) if not isinstance(value, bool | None)]
        assert len(plain) == len(set(map(repr, plain))), type(message).__name__
    assert {one["kind"] for one in recording()["messages"]} >= {one["kind"] for _, one in RECORDED}


def _leaves(value: Any) -> list[Any]:
    if isinstance(value, dict | list):
        children = value.values() if isinstance(value, dict) else value
        return [leaf for child in children for leaf in _leaves(child)]
    return [value]


# --- what may change, and what may not ------------------------------------------------------------------------------

Fields = list[tuple[str, Any] | tuple[str, Any, Any]]


def fields_of(kind: type[Message]) -> Fields:
    found: Fields = []
    for field in msgspec.structs.fields(kind):
        if field.required:
            found.append((field.name, field.type))
        elif field.default is not msgspec.NODEFAULT:
            found.append((field.name, field.type, field.default))
        else:
            found.append((field.name, field.type, msgspec.field(default_factory=field.default_factory)))
    return found


def faults_of(kind: type[Message], fields: Fields) -> list[str]:
    """What goes wrong with the recorded messages of a kind if it had these fields."""
    changed = msgspec.defstruct(
        kind.__name__, fields, bases=(Message,), array_like=True, frozen=True, tag=kind.__struct_config__.tag
    )
    faults = []
    for _, one in RECORDED:
        if one["kind"] == kind.__struct_config__.tag:
            try:
                message = msgspec.msgpack.decode(bytes.fromhex(one["bytes"]), type=tuple[int, int, changed])[2]
            except msgspec.ValidationError as error:
                faults.append(str(error))
            else:
                faults += unlike(one["fields"], by_name(message))
    return faults


CHANGED = (Submit, StepPlan, StepResult, WorkerBeat)


@pytest.mark.parametrize("kind", CHANGED)
def test_a_field_at_the_end_with_a_default_may_come(kind: type[Message]) -> None:
    fields = fields_of(kind)
    assert not faults_of(kind, fields)
    assert not faults_of(kind, [*fields, ("new", int, 7)])


@pytest.mark.parametrize("kind", CHANGED)
def test_a_field_that_goes_moves_or_has_no_default_is_found(kind: type[Message]) -> None:
    fields = fields_of(kind)
    required = sum(len(field) == 2 for field in fields)
    recorded = max(len(one["fields"]) for _, one in RECORDED if one["kind"] == kind.__struct_config__.tag)
    for index in range(recorded):  # those that came later no release has sent yet
        assert faults_of(kind, fields[:index] + fields[index + 1 :]), f"without {fields[index][0]}"
        if index + 1 < recorded and (index + 1 < required or index >= required):
            swapped = [*fields[:index], fields[index + 1], fields[index], *fields[index + 2 :]]
            assert faults_of(kind, swapped), f"{fields[index][0]} and the next one change places"
    defaulted = fields[required:]
    assert faults_of(kind, [*fields[:required], ("new", int), *defaulted]), "a new one among the old"
    assert faults_of(kind, [*fields[:required], *((name, type_) for name, type_, *_ in defaulted), ("new", int)])
