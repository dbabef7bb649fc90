"""The short way to what streams: past Starlette's layers, each of which would wrap every piece that is sent."""

from __future__ import annotations

import contextlib

from starlette.applications import Starlette
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from gateway.answering import AnswerApp
from gateway.errors import ApiError
from gateway.responses import id_header, send_error, with_request_id


class DirectRoutes:
    """Hands a POST to an :class:`AnswerApp` among ``app``'s routes straight to it, and everything else to ``app``.

    What ``app`` answers gets its request's id here; an :class:`AnswerApp` sends it itself.
    """

    def __init__(self, app: Starlette) -> None:
        self._app = app
        self._answers = {
            route.path: route.endpoint
            for route in app.routes
            if isinstance(route, Route) and isinstance(route.endpoint, AnswerApp)
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        answer = self._answers.get(scope["path"]) if scope["type"] == "http" and scope["method"] == "POST" else None
        if answer is None:
            await self._app(scope, receive, with_request_id(scope, send) if scope["type"] == "http" else send)
            return
        try:
            await answer(scope, receive, send)
        except Exception:
            with contextlib.suppress(RuntimeError):  # the response has begun: the server cuts the connection
                await send_error(send, ApiError(500, "internal error", "server_error"), [id_header(scope)])
            raise  # the server logs it
