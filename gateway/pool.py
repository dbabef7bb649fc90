"""Which pool of workers a request asks to run in: the header ``X-Headrace-Pool``."""

from __future__ import annotations

import re

from starlette.types import Scope

from gateway.errors import invalid
from gateway.responses import header

_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")


def pool_of(scope: Scope) -> str:
    """The pool's name, empty if none is asked for. A bad one is a 400; an unknown one the scheduler refuses."""
    asked = header(scope, b"x-headrace-pool").strip()
    if asked and not _NAME.fullmatch(asked):
        raise invalid("the header X-Headrace-Pool must be 1 to 64 of A-Z a-z 0-9 . _ -")
    return asked
