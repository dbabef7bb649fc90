"""``Idempotency-Key`` and ``Last-Event-ID``: the same body posted again has the same answer, whose stream goes on.

Nothing is stored. The key settles what is otherwise drawn for a request (its seed, its answer's id), so that running it
again, at any gateway, gives the same events; those that a client has seen are known by the id of the last one:

    <what was asked for>-<unix time of the first run>-<events of choice 0>.<of choice 1>...<events behind all choices>

The first part is a digest of what the events are a function of. An id that was made for something else is refused,
rather than continued by events that do not fit.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

from starlette.types import Scope

from gateway.errors import ApiError, invalid

MAX_NUMBERED_CHOICES = 128
"""Choices of a stream with event ids: each id counts the events of every one of them."""

_SCHEME = b"1"  # to be changed with whatever changes the events that tokens are written as
_KEY = re.compile(rb"[\x21-\x7e]{1,255}")
_EVENT_ID = re.compile(rb"([0-9a-f]{16})-(0|[1-9][0-9]{0,10})-((?:0|[1-9][0-9]{0,9})(?:\.(?:0|[1-9][0-9]{0,9}))*)")
_MAX_ID_BYTES = 64 + 11 * (MAX_NUMBERED_CHOICES + 1)


@dataclass(frozen=True, slots=True)
class Place:
    """How far the events of one stream were seen."""

    digest: str  # of what they are a function of
    created_s: int  # unix time that they all tell
    seen: tuple[int, ...]  # events of each choice, then those behind all choices


class Keyed:
    """One request that has a key. ``read`` comes first."""

    def __init__(self, owner: str, key: bytes, last_event_id: bytes) -> None:
        """``owner``: whose key it is; the same key of somebody else has nothing to do with it."""
        self._key = _digest(32, owner.encode(), key)
        self._last_event_id = last_event_id
        self.answer_name = ""  # what tells the answer's id from others'

    def read(self, endpoint: str, raw_body: bytes, body: dict[str, Any]) -> None:
        """Give ``body`` a seed if it has none."""
        self.answer_name = _digest(12, self._key, endpoint.encode(), raw_body).hex()
        if body.get("seed") is None:
            body["seed"] = int.from_bytes(_digest(8, self._key, b"seed")) >> 1

    def check(self, stream: bool, event_ids: bool) -> None:
        """A 400 if there is a ``Last-Event-ID`` for an answer that has no events with ids."""
        if not self._last_event_id:
            return
        if not event_ids:
            raise invalid("the events of this endpoint have no ids: Last-Event-ID cannot be honoured")
        if not stream:
            raise invalid("Last-Event-ID needs 'stream': true", "stream")

    def place(
        self, model: str, prompts: Sequence[bytes], max_tokens: int, choices: int, trailing: int, now_s: int
    ) -> Place:
        """Where the stream begins; a 400 if the client's event id belongs to no event of it.

        ``prompts``: packed tokens; ``trailing``: events behind all choices; ``now_s``: unix time.
        """
        if choices > MAX_NUMBERED_CHOICES:
            raise invalid(
                f"a stream with an Idempotency-Key has at most {MAX_NUMBERED_CHOICES} choices, not {choices}", "n"
            )
        limit = b"%d" % max_tokens
        digest = _digest(8, _SCHEME, self.answer_name.encode(), model.encode(), limit, *prompts).hex()
        if not self._last_event_id:
            return Place(digest, now_s, (0,) * (choices + 1))
        match = _EVENT_ID.fullmatch(self._last_event_id) if len(self._last_event_id) <= _MAX_ID_BYTES else None
        if match is None:
            raise _no_event("is not one that was sent")
        if match[1].decode() != digest:
            raise _no_event("was sent for another body, Idempotency-Key, endpoint, model or tenant")
        seen = tuple(map(int, match[3].split(b".")))
        if len(seen) != choices + 1 or seen[-1] > trailing:
            raise _no_event("is of no event of this answer")
        return Place(digest, int(match[2]), seen)


def read_keyed(scope: Scope, owner: str) -> Keyed | None:
    """The request's key, if it has one; a 400 for headers that cannot be honoured."""
    key = _only(scope, "Idempotency-Key")
    last_event_id = _only(scope, "Last-Event-ID") or b""  # an empty one says that nothing was seen
    if key is None:
        if last_event_id:
            raise invalid("Last-Event-ID needs the Idempotency-Key that the stream was begun with")
        return None
    if not _KEY.fullmatch(key):
        raise invalid("the header Idempotency-Key must have 1 to 255 visible ASCII characters")
    return Keyed(owner, key, last_event_id)


def beyond_the_end() -> ApiError:
    """More events were seen than there are. It shows when the answer has ended."""
    return _no_event("is beyond the end of this answer")


def _no_event(reason: str) -> ApiError:
    return ApiError(400, f"the Last-Event-ID {reason}; post without it to begin anew", code="invalid_event_id")


def _only(scope: Scope, wanted: str) -> bytes | None:
    name = wanted.lower().encode()
    values = [bytes(value).strip() for found, value in scope["headers"] if found == name]
    if len(values) > 1:
        raise invalid(f"the header {wanted} is there {len(values)} times")
    return values[0] if values else None


def _digest(size: int, *parts: bytes) -> bytes:
    state = blake2b(digest_size=size)
    for part in parts:
        state.update(len(part).to_bytes(8))
        state.update(part)
    return state.digest()
