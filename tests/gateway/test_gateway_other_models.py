"""A gateway whose model no worker serves says which models are served: on /ready, in the 503, and in its log."""

from __future__ import annotations

import logging

import gateway_mesh
import httpx
import pytest
from gateway_mesh import RunningGateway


def test_what_the_workers_serve_instead_is_named(
    gw: RunningGateway, http: httpx.Client, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    reason = "no ready worker serves the model 'tiny'; workers serve: default"
    with caplog.at_level(logging.WARNING, "headrace.gateway"), monkeypatch.context() as patched:
        patched.setattr(gateway_mesh, "MODEL", "default")
        gw.until(lambda: http.get("/ready").status_code == 503)
        assert http.get("/ready").json()["error"]["message"] == reason
        assert http.post("/generate", json={"prompt": "x"}).json()["error"]["message"] == reason
        for _ in range(3):
            gw.call(gw.mesh.beat())
    assert [record.getMessage() for record in caplog.records].count(reason) == 1
