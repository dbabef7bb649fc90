"""One wording for a port that cannot be listened on."""

from __future__ import annotations

import errno


def taken(host: str, port: int, flag: str) -> str:
    return f"port {port} on {host} is taken; choose another with {flag}"


def listen_problem(host: str, port: int, error: OSError, flag: str) -> str:
    """What is wrong with ``port``, in one line; ``flag`` is the one that sets it."""
    if error.errno == errno.EADDRINUSE:
        return taken(host, port, flag)
    return f"cannot listen on port {port} of {host} ({flag}): {error.strerror or error}"
