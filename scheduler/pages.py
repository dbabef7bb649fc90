"""What the scheduler's internal listener shows: how it stands, and why requests took their time.

What the service owns is read on its event loop; what is made of it, on the listener's threads.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from typing import Any

import msgspec

from observability.dashboard import dashboard_page
from observability.explanation import joined, pieces
from observability.explanation_page import as_json, as_page, list_page, missing_page, summary
from observability.listener import InternalListener, Page, on_loop
from scheduler.look import LiveState, look
from scheduler.service import SchedulerService

JSON = "application/json"
MOST_LISTED = 200

FORGOTTEN = (
    "it may be older than what is remembered (--recorded-requests; another scheduler, or one that was started again, "
    "remembers nothing of before), it may not have reached the scheduler yet, or it was refused by its gateway, whose "
    "answer says why"
)


def add_pages(listener: InternalListener, service: SchedulerService) -> None:
    """``/debug/scheduler``: whose listener this is, and whether that one leads. ``/dashboard`` with the
    ``/debug/state`` that it polls. ``/debug/requests`` (``?slowest=N``) and ``/debug/requests/{id}``; with
    ``format=json`` for programs.

    The id is the request's, the answer's (``chatcmpl-...``) or the client's X-Request-Id, while it runs and later.
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
            why = f"no request {request_id!r} is known: {FORGOTTEN}"
            if query.get("format") == "json":
                return _json({"error": why}, 404)
            return Page(missing_page(request_id, why), status=404)
        found = pieces(report)
        intervals = joined(found)
        if query.get("format") == "json":
            return _json(as_json(report, found, intervals))
        return Page(as_page(report, found, intervals))

    live = LiveState()

    def state(rest: str, query: Mapping[str, str]) -> Page:
        try:
            since = int(query.get("since", "0"))
        except ValueError:
            return Page(b"since is a number\n", "text/plain", 400)
        seen = on_loop(loop, lambda: look(service, live.taken))
        return Page(msgspec.json.encode(live.tell(seen, since)), JSON)

    def myself(rest: str, query: Mapping[str, str]) -> Page:
        return _json({"scheduler": service.name, "mesh": service.mesh, "leads": on_loop(loop, lambda: service.leads)})

    page = dashboard_page()
    listener.add("/debug/scheduler", myself)
    listener.add("/debug/requests", requests)
    listener.add("/debug/state", state)
    listener.add("/dashboard", lambda rest, query: Page(page))


def _json(value: Any, status: int = 200) -> Page:
    return Page(json.dumps(value).encode(), JSON, status)
