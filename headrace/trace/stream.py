"""Reading a trace: ``[time_ns, kind, ...]`` arrays one after the other, with the plain msgpack package.

Two writers exist: the scheduler (``scheduler.recording``: every input of the core and every plan) and ``headrace tap``
(``[unix_ns, kind, message]``). Neither is ever loaded whole.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgpack
import msgspec

from shared.messages import AnyMessage

_MOST_BYTES = 64 << 20  # of one record


class BadTrace(ValueError):
    """Not a trace, or one of another version."""


def records(path: Path) -> Iterator[list[Any]]:
    """The records of a trace, in order. A record that the writer had not finished is left out.

    Raises BadTrace if the file cannot be read as one.
    """
    try:
        file = path.open("rb")
    except OSError as error:
        raise BadTrace(f"{path}: {error.strerror}") from None
    with file:
        unpacker = msgpack.Unpacker(file, raw=False, max_buffer_size=_MOST_BYTES)
        try:
            for record in unpacker:
                if not (
                    isinstance(record, list) and len(record) >= 2 and isinstance(record[0], int)
                    and isinstance(record[1], str)
                ):  # fmt: skip
                    raise BadTrace(f"{path}: not a trace (records are arrays that begin with a time and a kind)")
                yield record
        except (msgpack.exceptions.UnpackException, ValueError) as error:
            if isinstance(error, BadTrace):
                raise
            raise BadTrace(f"{path}: {error}") from None


def message(raw: Any) -> AnyMessage:
    """A message that was embedded in a record. Raises BadTrace if it is none."""
    try:
        found: AnyMessage = msgspec.convert(raw, AnyMessage)
    except msgspec.ValidationError as error:
        raise BadTrace(f"a message that cannot be read: {error}") from None
    return found


def same_bytes(raw: Any, encoded: bytes) -> bool:
    """True if the embedded message was ``encoded`` (msgpack has one shortest form, and both libraries write it)."""
    return bool(msgpack.packb(raw, use_bin_type=True) == encoded)
