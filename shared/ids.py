"""Ids that are ours: made here, unique, safe as subject tokens."""

from __future__ import annotations

import os
import secrets
import time


def new_request_id() -> str:
    """An internal request id; a client's own id never takes its place."""
    return "req-" + secrets.token_hex(12)


def new_process_id(kind: str) -> str:
    """A name for this process on the bus, e.g. ``worker-1f2e3d4c``."""
    return f"{kind}-{secrets.token_hex(4)}"


def new_incarnation() -> int:
    """A number that differs at every start of a process under the same name, and grows with time."""
    return (time.time_ns() // 1_000_000) * 1000 + os.getpid() % 1000
