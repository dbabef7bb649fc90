"""By when an answer must be complete, as the client asks: the field ``timeout``, the header ``X-Request-Timeout``."""

from __future__ import annotations

import re

from starlette.types import Scope

from gateway.errors import invalid
from gateway.parameters import MAX_TIMEOUT_S
from gateway.responses import header

_SECONDS = re.compile(r"\d{1,9}(\.\d{1,9})?", re.ASCII)


def deadline_ns(arrival_ns: int, timeout_s: float, scope: Scope) -> int:
    """Unix ns by which the answer must be complete, 0 if any time will do: the sooner of the two.

    ``timeout_s`` is the field's value in seconds from arrival, 0 if it is absent. A bad header is a 400.
    """
    asked = header(scope, b"x-request-timeout").strip()
    if asked:
        if not _SECONDS.fullmatch(asked) or not 0 < float(asked) <= MAX_TIMEOUT_S:
            raise invalid(f"the header X-Request-Timeout must be a number of seconds, up to {MAX_TIMEOUT_S:g}")
        timeout_s = min(timeout_s or MAX_TIMEOUT_S, float(asked))
    return arrival_ns + int(timeout_s * 1e9) if timeout_s else 0
