"""What the scheduler's internal listener shows: why requests took their time. Reads the recorder on the event loop."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from typing import Any

from observability.explanation import explain
from observability.explanation_page import as_json, as_page, list_page, summary
from observability.listener import InternalListener, Page, on_loop
from scheduler.service import SchedulerService

JSON = "application/json"
MOST_LISTED = 200


def add_pages(listener: InternalListener, service: SchedulerService) -> None:
    """``/debug/requests`` (``?slowest=N``) and ``/debug/requests/{id}``; with ``format=json`` for programs.

    The id is the request's, the answer's (``chatcmpl-...``) or the client's X-Request-Id.
    """
    loop = asyncio.get_running_loop()

    def requests(rest: str, query: Mapping[str, str]) -> Page:
        if rest:
            return one(rest, query)
        try:
            count = max(1, min(MOST_LISTED, int(query.get("slowest", "20"))))
        except ValueError:
            return Page(b"slowest is a number\n", "text/plain", 400)
        slowest = on_loop(loop, lambda: service.recorder.slowest(count))
        if query.get("format") == "json":
            return _json([summary(request) for request in slowest])
        return Page(list_page(slowest))

    def one(request_id: str, query: Mapping[str, str]) -> Page:
        report = on_loop(loop, lambda: service.report(request_id))
        if report.request is None:
            return _json({"error": f"no request {request_id!r} is remembered"}, 404)
        intervals = explain(report)
        if query.get("format") == "json":
            return _json(as_json(report, intervals))
        return Page(as_page(report, intervals))

    listener.add("/debug/requests", requests)


def _json(value: Any, status: int = 200) -> Page:
    return Page(json.dumps(value).encode(), JSON, status)
