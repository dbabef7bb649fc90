"""The short way to an answer keeps what Starlette's layers gave: methods, unknown paths, an error for a fault."""

from __future__ import annotations

import logging

import httpx
import pytest
from gateway_mesh import RunningGateway

from gateway.answering import AnswerApp


def test_a_fault_of_ours_is_an_openai_error_and_is_logged(
    gw: RunningGateway, http: httpx.Client, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def fault(*_: object) -> None:
        raise ZeroDivisionError("secret")

    monkeypatch.setattr(AnswerApp, "_answer", fault)
    with caplog.at_level(logging.ERROR, "uvicorn.error"):
        reply = http.post("/v1/completions", json={"prompt": "x"})
        gw.until(lambda: "ZeroDivisionError" in caplog.text)  # logged once the answer has gone out
    assert (reply.status_code, reply.headers["connection"]) == (500, "close")
    assert reply.json()["error"]["type"] == "server_error"
    assert "secret" not in reply.text
    monkeypatch.undo()
    assert http.post("/v1/completions", json={"prompt": "x"}).status_code == 200


def test_other_methods_and_paths_go_the_long_way(http: httpx.Client) -> None:
    assert http.get("/v1/completions").status_code == 405
    assert http.post("/v1/completions/", json={"prompt": "x"}, follow_redirects=False).status_code in (307, 404)
    assert http.post("/nowhere", json={}).status_code == 404
