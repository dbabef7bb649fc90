"""How ``up`` shows what its children write: one line each, under the child's name."""

from __future__ import annotations

import json
import sys

NAME_WIDTH = 12

PLAINTEXT_PASSWORDS = "Plaintext passwords detected"
"""A warning of NATS about its configuration. That of the embedded server has passwords that are random, made for one
run, and in a file that only its owner can read and that is deleted at the end: a hash of them would protect nothing."""


def show(name: str, line: str) -> None:
    """Write a child's line to stderr under its name; JSON log lines are put into words, banners of NATS left out."""
    if name == "nats" and ("[INF]" in line or PLAINTEXT_PASSWORDS in line):
        return
    for part in readable(line).splitlines():
        print(f"{name:<{NAME_WIDTH}}| {part}", file=sys.stderr, flush=True)


def readable(line: str) -> str:
    """A log line of observability.logs for a person; any other line as it is."""
    if not line.startswith("{"):
        return line
    try:
        record = json.loads(line)
        text = f"{record['ts'][11:19]} {record['level'].upper():<7} {record['message']}"
        if "exception" in record:
            text += f"\n{record['exception']}"
    except (ValueError, TypeError, KeyError, AttributeError):
        return line
    return text
