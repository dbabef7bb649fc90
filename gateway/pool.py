"""Which pool of workers a request asks to run in: the header ``X-Headrace-Pool``."""

from __future__ import annotations

from starlette.types import Scope

from gateway.errors import invalid
from gateway.responses import header
from shared.pool_name import is_pool_name


def pool_of(scope: Scope) -> str:
    """The pool's name, empty if none is asked for. A bad one is a 400; an unknown one the scheduler refuses."""
    asked = header(scope, b"x-headrace-pool").strip()
    if problem := is_pool_name(asked):
        raise invalid(f"the header X-Headrace-Pool {problem}")
    return asked
