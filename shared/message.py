"""The base of every message and part of one."""

from __future__ import annotations

import msgspec


class Message(msgspec.Struct, array_like=True, frozen=True, gc=False, forbid_unknown_fields=False):
    """Base of the parts of a message."""
