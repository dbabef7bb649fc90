"""Log lines: human-readable on a terminal, one JSON object a line otherwise. Prompts and tokens are never logged."""

from __future__ import annotations

import json
import logging
import sys
import time

from observability.context import trace_id

REQUEST_FIELDS = ("request_id", "trace_id")
"""What a line about a request carries besides its text; an empty one is left out."""


def about(request_id: str, traceparent: str = "") -> dict[str, str]:
    """The ``extra`` of a log line about a request: its id, and the trace's id where it has one."""
    return {"request_id": request_id, "trace_id": trace_id(traceparent)}


class _TextFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        fields = [f"{key}={getattr(record, key)}" for key in REQUEST_FIELDS if getattr(record, key, "")]
        text = super().format(record)
        return f"{text} [{' '.join(fields)}]" if fields and not record.exc_info else text


class _JsonFormatter(logging.Formatter):
    def __init__(self, service: str) -> None:
        super().__init__()
        self._service = service

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, object] = {
            "ts": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "service": self._service,
            "logger": record.name,
            "message": record.getMessage(),
        }
        for key in REQUEST_FIELDS:
            if value := getattr(record, key, ""):
                line[key] = value
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line)


def setup_logging(service: str, level: str) -> None:
    """Send every log line of this process to stderr, in the form that fits where stderr goes."""
    handler = logging.StreamHandler(sys.stderr)
    if sys.stderr.isatty():
        handler.setFormatter(
            _TextFormatter(f"%(asctime)s {service:<9} %(levelname)-7s %(message)s", datefmt="%H:%M:%S")
        )
    else:
        handler.setFormatter(_JsonFormatter(service))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    logging.getLogger("headrace").setLevel(level.upper())
