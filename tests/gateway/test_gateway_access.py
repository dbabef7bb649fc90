"""API keys over HTTP: which routes need one, what a key decides, and the limits that go with it."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from gateway_mesh import MODEL, RunningGateway, running_gateway
from loopback_http import NO_AUTHORITIES
from starlette.routing import Route

from gateway import keys
from gateway.access import Access
from gateway.app import make_app
from gateway.keys import digest_of
from gateway.limits import Allowances

BODY: dict[str, Any] = {"prompt": "x", "max_tokens": 3}


def entry(key: str, key_id: str, more: str = "") -> str:
    return f'[[key]]\nid = "{key_id}"\nsha256 = "{digest_of(key).hex()}"\n{more}\n'


@contextlib.contextmanager
def guarded(folder: Path, file: Path, text: str, **options: Any) -> Iterator[tuple[RunningGateway, httpx.Client]]:
    file.write_text(text)
    with (
        running_gateway(folder, api_keys=str(file), **options) as gw,
        httpx.Client(verify=NO_AUTHORITIES, base_url=gw.url, timeout=20) as http,
    ):
        yield gw, http


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "keys.toml"


def test_every_route_but_liveness_needs_a_key(tokenizer_folder: Path, file: Path) -> None:
    with guarded(tokenizer_folder, file, entry("k", "alice")) as (gw, http):
        routes = [route for route in make_app(gw.gateway).routes if isinstance(route, Route)]
        assert len(routes) > 5
        for route in routes:
            for method in route.methods or ():
                path = route.path.replace("{name:path}", MODEL)
                answer = http.request(method, path)
                if path == "/health":
                    assert answer.status_code == 200
                    continue
                assert answer.status_code == 401, (method, path)
                assert answer.headers["www-authenticate"] == "Bearer"
                if method != "HEAD":
                    assert answer.json()["error"]["code"] == "missing_api_key"
                    assert answer.json()["error"]["type"] == "invalid_request_error"
        for path in ("/nowhere", "/v1", "/", "/health/", "//health", "/HEALTH", "/docs", "/metrics"):
            assert http.post(path, json=BODY).status_code == 401, path
        assert http.get("/ready", headers=bearer("k")).status_code == 200
        assert not gw.mesh.submits
        assert gw.metric("headrace_gateway_requests_total", endpoint="any", outcome="unauthorized") > 10


@pytest.mark.parametrize(
    "headers",
    [
        bearer("wrong"), bearer("K"), {"authorization": "Bearer"}, {"authorization": "Basic a2V5"},
        {"authorization": "k"},
        {"x-api-key": "wrong"}, bearer(digest_of("k").hex()), {"authorization": b"Bearer \xff"}, {"api-key": "k"},
        bearer("x" * 5000),
    ],
)  # fmt: skip
def test_a_wrong_key_opens_nothing_and_is_not_quoted(
    tokenizer_folder: Path, file: Path, headers: dict[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    with guarded(tokenizer_folder, file, entry("k", "alice")) as (gw, http):
        answer = http.post("/generate", json=BODY, headers=headers)
        assert answer.status_code == 401
        assert "wrong" not in answer.text and "wrong" not in caplog.text
        assert not gw.mesh.submits


@pytest.mark.parametrize("headers", [bearer("k"), {"authorization": "bearer   k"}, {"x-api-key": "k"}])
def test_a_key_opens(tokenizer_folder: Path, file: Path, headers: dict[str, str]) -> None:
    with guarded(tokenizer_folder, file, entry("k", "alice")) as (_, http):
        assert http.post("/generate", json=BODY, headers=headers).status_code == 200


def test_one_key_by_option_as_vllm_has_it(tokenizer_folder: Path) -> None:
    with running_gateway(tokenizer_folder, api_key="token-abc123") as gw:
        client = openai.OpenAI(base_url=f"{gw.url}/v1", api_key="token-abc123", max_retries=0)
        assert client.completions.create(model=MODEL, prompt="x", max_tokens=2).choices
        with pytest.raises(openai.AuthenticationError):
            client.with_options(api_key="other").completions.create(model=MODEL, prompt="x")


def test_tenant_weight_and_priority_come_from_the_key(tokenizer_folder: Path, file: Path) -> None:
    text = entry("k", "alice", 'tenant = "team"\nweight = 250\npriority = 2') + entry("v", "vip", "priority = -3")
    with guarded(tokenizer_folder, file, text) as (gw, http):
        for key, asked in (
            ("k", {}),
            ("k", {"priority": -9}),
            ("k", {"priority": 7}),
            ("v", {}),
            ("v", {"priority": 0}),
        ):
            body = BODY | asked | {"user": "somebody", "cache_salt": "s"}
            assert http.post("/v1/completions", json=body, headers=bearer(key)).status_code == 200
        found = [(submit.tenant, submit.tenant_weight, submit.priority) for submit in gw.mesh.submits]
        assert found == [("team", 250, 2), ("team", 250, 2), ("team", 250, 7), ("vip", 100, -3), ("vip", 100, 0)]
        salts = {submit.tenant: submit.cache_salt for submit in gw.mesh.submits}
        assert len(set(salts.values())) == 2, "tenants share no cached prefix"


def test_without_keys_nobody_has_a_tenant(gw: RunningGateway, http: httpx.Client) -> None:
    assert http.post("/v1/completions", json=BODY | {"user": "me", "priority": -1}).status_code == 200
    (submit,) = gw.mesh.submits
    assert (submit.tenant, submit.tenant_weight, submit.priority, submit.cache_salt) == ("", 100, -1, "")


def test_requests_per_minute(tokenizer_folder: Path, file: Path) -> None:
    text = entry("k", "alice", "requests_per_minute = 2") + entry("f", "free")
    with guarded(tokenizer_folder, file, text) as (gw, http):
        first = http.post("/generate", json=BODY, headers=bearer("k"))
        assert first.status_code == 200
        assert first.headers["x-ratelimit-limit-requests"] == "2"
        assert first.headers["x-ratelimit-remaining-requests"] == "1"
        assert "x-ratelimit-limit-tokens" not in first.headers
        assert http.post("/v1/completions", json=BODY | {"stream": True}, headers=bearer("k")).status_code == 200
        refused = http.post("/generate", json=BODY, headers=bearer("k"))
        assert refused.status_code == 429
        assert refused.json()["error"]["code"] == "rate_limit_exceeded"
        assert 1 <= int(refused.headers["retry-after"]) <= 30
        assert refused.headers["x-ratelimit-remaining-requests"] == "0"
        assert refused.headers["x-request-id"]
        assert http.get("/v1/models", headers=bearer("k")).status_code == 200, "only answers count"
        assert http.post("/generate", json=BODY, headers=bearer("f")).status_code == 200
        assert len(gw.mesh.submits) == 3
        gw.until(lambda: gw.metric("headrace_gateway_requests_total", endpoint="generate", outcome="rate_limited") == 1)


def test_tokens_per_minute_are_counted_as_used(tokenizer_folder: Path, file: Path) -> None:
    with guarded(tokenizer_folder, file, entry("k", "alice", "tokens_per_minute = 100")) as (gw, http):
        gw.mesh.script = lambda submit, choice, position: 0 if position == 3 else 5
        length = len(gw.encode("x"))
        answer = http.post("/generate", json=BODY | {"max_tokens": 90}, headers=bearer("k"))
        assert answer.headers["x-ratelimit-remaining-tokens"] == str(100 - 90 - length)
        again = http.post("/generate", json=BODY | {"max_tokens": 80}, headers=bearer("k"))
        assert again.status_code == 200, "what it did not use was given back"
        refused = http.post("/v1/completions", json=BODY | {"max_tokens": 45, "n": 2}, headers=bearer("k"))
        assert refused.status_code == 429 and int(refused.headers["retry-after"]) >= 1
        assert len(gw.mesh.submits) == 2


def test_so_many_requests_at_once(tokenizer_folder: Path, file: Path) -> None:
    with guarded(tokenizer_folder, file, entry("k", "alice", "max_concurrency = 1")) as (gw, http):
        gw.mesh.step_s = 0.005
        body = BODY | {"max_tokens": 500, "ignore_eos": True, "stream": True}
        with http.stream("POST", "/v1/completions", json=body, headers=bearer("k")) as stream:
            next(stream.iter_raw())
            refused = http.post("/generate", json=BODY, headers=bearer("k"))
            assert refused.status_code == 429 and refused.headers["retry-after"] == "1"
        gw.until(lambda: gw.gateway.in_flight == 0)
        assert http.post("/generate", json=BODY, headers=bearer("k")).status_code == 200, "those who left count no more"
        for bad in ({"prompt": 5}, {"prompt": "x", "nonsense": 1}):
            assert http.post("/generate", json=bad, headers=bearer("k")).status_code == 400
        assert http.post("/generate", json=BODY, headers=bearer("k")).status_code == 200, "nor those refused"


@pytest.mark.parametrize(
    ("path", "body", "broken"),
    [
        ("/generate", BODY, False), ("/generate", BODY, True), ("/v1/completions", BODY | {"stream": True}, False),
        ("/v1/completions", BODY | {"stream": True}, True), ("/v1/completions", {"prompt": 5}, False),
        ("/tokenize", {"prompt": "x"}, False), ("/tokenize", {"prompt": 5}, False),
    ],
)  # fmt: skip
def test_whoever_has_the_last_bytes_may_ask_again(
    gw: RunningGateway, path: str, body: dict[str, Any], broken: bool
) -> None:
    """Whichever way an answer ends: nothing of it counts any more when its last bytes go to the connection."""
    key = keys.ApiKey("k", max_concurrency=1, tokens_per_minute=600)
    allowance = Allowances(lambda: 0.0).of("k", key)
    found: list[tuple[int, int]] = []

    async def receive() -> dict[str, Any]:
        if not received:
            received.append(True)
            return {"type": "http.request", "body": json.dumps(body).encode()}
        await asyncio.Event().wait()
        raise AssertionError

    async def send(message: dict[str, Any]) -> None:
        if message["type"] == "http.response.body" and not message.get("more_body"):
            found.append((allowance.in_flight, gw.gateway.working))

    async def ask() -> None:
        scope = {
            "type": "http", "method": "POST", "path": path, "query_string": b"", "root_path": "",
            "headers": [(b"content-type", b"application/json")], "headrace.access": Access(key, allowance),
        }  # fmt: skip
        await make_app(gw.gateway)(scope, receive, send)

    received: list[bool] = []
    gw.mesh.stepping = not broken
    answer = asyncio.run_coroutine_threadsafe(ask(), gw.loop)
    if broken:
        gw.until(lambda: bool(gw.mesh.submits))
        gw.call(gw.mesh.event(gw.mesh.submits[0], "failed", "because"))
    answer.result(10)
    assert found == [(0, 0)]
    assert (allowance.in_flight, gw.gateway.working, gw.gateway.in_flight) == (0, 0, 0)


def test_the_file_is_read_again_while_requests_run(
    tokenizer_folder: Path, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keys, "POLL_S", 0.01)
    with guarded(tokenizer_folder, file, entry("old", "alice")) as (gw, http):

        def opens(key: str) -> bool:
            return http.get("/version", headers=bearer(key)).status_code == 200

        assert opens("old") and not opens("new")
        file.write_text(entry("new", "alice"))
        gw.until(lambda: opens("new"))
        assert not opens("old")
        file.write_text("[[key]")
        gw.until(lambda: gw.gateway.keys._version == keys._version(file))
        assert opens("new"), "a broken file changes nothing"
