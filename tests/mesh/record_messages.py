"""Record one message of every kind, with every field set: what later versions must still read.

    python tests/mesh/record_messages.py 0.1.0        writes tests/mesh/recorded_messages/0.1.0.json

Once for each release, with that release's code; a file that is there is never made again.
"""

from __future__ import annotations

import json
import sys
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
from msgspec import inspect

from shared.messages import PROTOCOL, AnyMessage, encode

FOLDER = Path(__file__).parent / "recorded_messages"


class Values:
    """Values for fields of any type, each unlike the one before and unlike a default.

    ``variant`` chooses among the members of an enumeration; an optional field is None in odd ones.
    """

    def __init__(self, variant: int) -> None:
        self._variant = variant
        self._count = 100

    def of(self, kind: inspect.Type) -> Any:
        self._count += 1
        match kind:
            case inspect.BoolType():
                return self._count % 2 == 1
            case inspect.IntType():
                return self._count
            case inspect.FloatType():
                return self._count + 0.5
            case inspect.StrType():
                return f"text {self._count}"
            case inspect.BytesType():
                return self._count.to_bytes(4, "little")
            case inspect.EnumType(cls=members):
                values = list(members)
                return values[self._variant % len(values)]
            case inspect.ListType(item_type=item):
                return [self.of(item), self.of(item)]
            case inspect.TupleType(item_types=items):
                return tuple(self.of(item) for item in items)
            case inspect.UnionType(types=types):
                (some,) = (one for one in types if not isinstance(one, inspect.NoneType))
                return None if self._variant % 2 else self.of(some)
            case inspect.StructType(cls=struct, fields=fields):
                return struct(**{field.name: self.of(field.type) for field in fields})
        raise TypeError(f"no value for {kind}: say here what one looks like")


def examples() -> Iterator[AnyMessage]:
    """Every kind of message, in as many variants as its enumerations have members."""
    for kind in typing.get_args(AnyMessage):
        described = typing.cast(inspect.StructType, inspect.type_info(kind))
        members = [len(field.type.cls) for field in described.fields if isinstance(field.type, inspect.EnumType)]
        for variant in range(max(members, default=1)):
            yield Values(variant).of(described)


def by_name(value: Any) -> Any:
    """A message as JSON can hold it, its fields under their names: a value in another field's place shows."""
    if isinstance(value, msgspec.Struct):
        return {name: by_name(getattr(value, name)) for name in value.__struct_fields__}
    if isinstance(value, list | tuple):
        return [by_name(one) for one in value]
    return value.hex() if isinstance(value, bytes) else value


def recording() -> dict[str, Any]:
    messages = [
        {"kind": message.__struct_config__.tag, "bytes": encode(message).hex(), "fields": by_name(message)}
        for message in examples()
    ]
    return {"protocol": list(PROTOCOL), "messages": messages}


def main(version: str) -> None:
    with (FOLDER / f"{version}.json").open("x", encoding="utf-8") as file:
        json.dump(recording(), file, indent=1)
        file.write("\n")


if __name__ == "__main__":
    main(sys.argv[1])
