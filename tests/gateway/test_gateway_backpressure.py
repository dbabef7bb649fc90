"""Refusals from the queue's state, before work is done: by requests, then by tokens; and what they tell the client."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import httpx
import pytest
from gateway_mesh import MODEL, RunningGateway, running_gateway
from loopback_http import NO_AUTHORITIES

from gateway.mesh_view import MeshView
from shared.messages import ModelInfo, Outcome, SchedulerBeat, SubmitReply
from shared.retry import retry_after_s


def tell(gw: RunningGateway, **queue: Any) -> None:
    """Let the beats tell of this queue, and wait until the gateway has heard it."""
    gw.mesh.queue = queue

    def heard() -> bool:
        info = gw.gateway.dispatch.mesh.model(MODEL, time.monotonic())
        return info is not None and all(getattr(info, name) == value for name, value in queue.items())

    gw.until(heard)


def error_of(answer: httpx.Response, status: int) -> dict[str, Any]:
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert isinstance(error, dict)
    return error


def forbid_tokenising(gw: RunningGateway, monkeypatch: pytest.MonkeyPatch) -> None:
    async def fail(*_: object) -> None:
        raise AssertionError("a request that is refused was tokenised")

    monkeypatch.setattr(gw.tokenizer, "prompts", fail)
    monkeypatch.setattr(gw.tokenizer, "chat", fail)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/generate"])
@pytest.mark.parametrize("stream", [False, True])
def test_a_full_queue_refuses_before_anything_is_done(
    gw: RunningGateway, http: httpx.Client, path: str, stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    forbid_tokenising(gw, monkeypatch)
    tell(gw, waiting=100, max_waiting=100, service_rate=10.0)
    body: dict[str, Any] = {"messages": [{"role": "user", "content": "x"}]} if "chat" in path else {"prompt": "x"}
    answer = http.post(path, json=body | {"stream": stream}, headers={"x-request-id": "mine"})
    error = error_of(answer, 429)
    assert (error["type"], error["code"]) == ("rate_limit_error", "queue_full")
    assert answer.headers["retry-after"] == str(retry_after_s(100, 10.0, "mine"))
    assert 10 <= int(answer.headers["retry-after"]) <= 13
    assert not gw.mesh.submits
    assert http.post(path, content=b"{" * 100_000).status_code == 429, "not even the body is parsed"


def test_all_choices_of_all_prompts_find_room_or_none(
    gw: RunningGateway, http: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    tell(gw, waiting=6, max_waiting=10)
    four = {"prompt": ["a", "b"], "n": 2, "max_tokens": 3}
    assert len(http.post("/v1/completions", json=four).json()["choices"]) == 4
    gw.mesh.submits.clear()
    forbid_tokenising(gw, monkeypatch)
    for body in ({"prompt": "a", "n": 8}, {"prompt": ["a"] * 5}, {"prompt": ["a", "b"], "n": 2, "best_of": 3}):
        assert error_of(http.post("/v1/completions", json=body), 429)["code"] == "queue_full"
    assert not gw.mesh.submits


def test_more_choices_than_the_queue_ever_holds_are_a_400(
    gw: RunningGateway, http: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    tell(gw, waiting=6, max_waiting=8, queue_size=8)
    forbid_tokenising(gw, monkeypatch)
    for body in ({"prompt": "a", "n": 9}, {"prompt": ["a"] * 9}, {"prompt": ["a", "b", "c"], "n": 3}):
        answer = http.post("/v1/completions", json=body)
        error = error_of(answer, 400)
        assert error["type"] == "invalid_request_error" and "retry-after" not in answer.headers
        assert "9 choices" in error["message"] and "holds 8 (--max-num-queued-reqs)" in error["message"]
    assert http.post("/v1/completions", json={"prompt": "a", "n": 8}).status_code == 429, "it may find room later"
    assert not gw.mesh.submits


def test_a_beam_search_takes_one_place(gw: RunningGateway, http: httpx.Client) -> None:
    tell(gw, waiting=9, max_waiting=10)
    http.post("/generate", json={"prompt": "a", "use_beam_search": True, "n": 4, "max_tokens": 1})
    assert len(gw.mesh.submits) == 1


def test_tokens_are_bounded_once_they_are_known(gw: RunningGateway, http: httpx.Client) -> None:
    prompt = "some words of a prompt"
    length = len(gw.encode(prompt))
    tell(gw, waiting=5, max_waiting=1000, waiting_tokens=1000, max_waiting_tokens=1000 + 2 * (length + 3 * 10))
    fits = {"prompt": [prompt, prompt], "n": 3, "max_tokens": 10}
    assert http.post("/v1/completions", json=fits).status_code == 200
    gw.mesh.submits.clear()
    answer = http.post("/v1/completions", json=fits | {"max_tokens": 11})
    assert error_of(answer, 429)["code"] == "queue_full"
    assert int(answer.headers["retry-after"]) >= 1
    assert not gw.mesh.submits, "all prompts or none"


def test_what_exceeds_the_bound_on_tokens_by_itself_may_wait_alone(gw: RunningGateway, http: httpx.Client) -> None:
    tell(gw, waiting=0, max_waiting=1000, waiting_tokens=0, max_waiting_tokens=10)
    assert http.post("/generate", json={"prompt": "x", "max_tokens": 50}).status_code == 200


def test_a_queue_of_which_nothing_is_told_refuses_nobody(gw: RunningGateway, http: httpx.Client) -> None:
    tell(gw, waiting=1_000_000)
    assert http.post("/generate", json={"prompt": "x", "max_tokens": 2}).status_code == 200


def test_room_again_is_heard_at_once(gw: RunningGateway, http: httpx.Client) -> None:
    tell(gw, waiting=10, max_waiting=10)
    assert http.post("/generate", json={"prompt": "x"}).status_code == 429
    tell(gw, waiting=9, max_waiting=10)
    assert http.post("/generate", json={"prompt": "x"}).status_code == 200


def test_the_schedulers_own_refusal_tells_its_own_time(gw: RunningGateway, http: httpx.Client) -> None:
    gw.mesh.refuse = lambda submit: SubmitReply(Outcome.QUEUE_FULL, 7, "full", retry_after_ms=17_000)
    answer = http.post("/generate", json={"prompt": "x"})
    assert error_of(answer, 429)["message"] == "full" and answer.headers["retry-after"] == "17"


def test_no_worker_and_no_scheduler_are_a_503_with_a_time(tokenizer_folder: Path) -> None:
    with (
        running_gateway(tokenizer_folder, scheduler_stale_s=0.3) as gw,
        httpx.Client(verify=NO_AUTHORITIES, base_url=gw.url, timeout=20) as http,
    ):
        gw.mesh.workers = 0
        gw.until(lambda: gw.gateway.why_not_ready() is not None)
        answer = http.post("/generate", json={"prompt": "x"})
        assert error_of(answer, 503)["code"] == "no_worker" and int(answer.headers["retry-after"]) >= 1
        gw.mesh.workers = 1
        gw.until(lambda: gw.gateway.why_not_ready() is None)
        gw.mesh.beating = False
        gw.until(lambda: gw.gateway.why_not_ready() is not None)
        answer = http.post("/generate", json={"prompt": "x"})
        assert error_of(answer, 503)["code"] == "no_worker" and int(answer.headers["retry-after"]) >= 1


def test_a_state_that_is_too_old_lets_nobody_in() -> None:
    view = MeshView(stale_s=3.0)
    view.observe(SchedulerBeat("s", 1, [ModelInfo("m", 10, 10, 1, waiting=0, max_waiting=9)]), 100.0)
    assert view.why_not_ready("m", 103.0) is None
    assert view.why_not_ready("m", 103.1) is not None


def test_a_refused_connection_goes_on(gw: RunningGateway, http: httpx.Client) -> None:
    """The body of a refused request is read to its end: the next request on the connection is understood."""
    big = {"prompt": "x" * 2_000_000}
    tell(gw, waiting=10, max_waiting=10)
    for _ in range(3):
        assert http.post("/generate", json=big).status_code == 429
    tell(gw, waiting=0, max_waiting=10)
    assert http.post("/generate", json={"prompt": "x"}).status_code == 200
