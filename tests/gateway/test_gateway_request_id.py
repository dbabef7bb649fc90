"""Every answer has its request's id, the client's or one of ours, whichever route it came from and however it ended."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest
from gateway_mesh import MODEL, RunningGateway, running_gateway
from loopback_http import NO_AUTHORITIES
from starlette.routing import Route

from gateway.app import make_app
from gateway.errors import UNAUTHORIZED
from gateway.responses import request_id

JSON = {"content-type": "application/json"}


def every_route(gw: RunningGateway) -> list[tuple[str, str]]:
    """(method, path) of all routes."""
    routes = [route for route in make_app(gw.gateway).routes if isinstance(route, Route)]
    assert len(routes) == len(make_app(gw.gateway).routes) > 10
    return [
        (method, route.path.replace("{name:path}", MODEL))
        for route in routes
        for method in sorted((route.methods or set()) - {"HEAD"})
    ]


def assert_has_id(answer: httpx.Response, given: str) -> None:
    (found,) = answer.headers.get_list("x-request-id")
    assert found == given if given else found.startswith("req-"), answer.url


@pytest.mark.parametrize("given", ["mine-1", ""])
def test_every_route_whatever_the_answer(gw: RunningGateway, http: httpx.Client, given: str) -> None:
    headers = {"x-request-id": given} if given else {}
    statuses = set()
    for method, path in every_route(gw):
        bodies = ['{"prompt": "x"}', "{", '{"tokens": [5]}', '{"messages": [{"role": "user", "content": "x"}]}']
        answers = [http.request(method, path, headers=headers | JSON, content=body) for body in bodies]
        answers.append(http.request(method, path, headers=headers | {"content-type": "text/plain"}, content="{}"))
        answers.append(http.request("DELETE", path, headers=headers))
        answers.append(http.request(method, path + "/no/such", headers=headers | JSON, content="{}"))
        for answer in answers:
            assert_has_id(answer, given)
        statuses |= {answer.status_code for answer in answers}
        assert 200 in {answer.status_code for answer in answers}, path
    assert statuses >= {200, 400, 404, 405, 415}


def test_without_a_key_and_while_nothing_is_ready(tokenizer_folder: Path) -> None:
    with (
        running_gateway(tokenizer_folder, api_key="k") as gw,
        httpx.Client(verify=NO_AUTHORITIES, base_url=gw.url) as http,
    ):
        for method, path in every_route(gw):
            answer = http.request(method, path, headers={"x-request-id": "mine"})
            assert answer.status_code == (200 if path == "/health" else 401)
            assert_has_id(answer, "mine")
        assert gw.metric("headrace_gateway_requests_total", endpoint="any", outcome=UNAUTHORIZED) > 0
        gw.mesh.workers = 0
        gw.until(lambda: gw.gateway.why_not_ready() is not None)
        assert_has_id(http.get("/ready", headers={"x-request-id": "mine", "authorization": "Bearer k"}), "mine")


def test_an_id_is_made_once_for_a_request() -> None:
    scope = {"headers": []}
    assert request_id(scope) == request_id(scope) != request_id({"headers": []})


def test_an_internal_error(gw: RunningGateway, http: httpx.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise RuntimeError("planted")

    monkeypatch.setattr(type(gw.gateway), "check_open", lambda gateway: fail())
    for path in ("/v1/completions", "/tokenize"):
        answer = http.post(path, json={"prompt": "x"}, headers={"x-request-id": "mine"})
        assert answer.status_code == 500
        assert_has_id(answer, "mine")
