"""By when an answer must be complete: asked by field or header, told to the scheduler, and what a miss looks like."""

from __future__ import annotations

import json
import threading
import time
from typing import Any

import httpx
import pytest
from gateway_mesh import RunningGateway

from shared.messages import Outcome, SubmitReply

BODY: dict[str, Any] = {"prompt": "x", "max_tokens": 2}


@pytest.mark.parametrize(
    ("field", "header", "seconds"),
    [
        (5, None, 5), (0.25, None, 0.25), (None, "5", 5), (None, "2.5", 2.5), (5, "7", 5), (7, "5", 5),
        (None, "604800", 604800),
    ],
)  # fmt: skip
@pytest.mark.parametrize("path", ["/v1/completions", "/generate", "/v1/chat/completions"])
def test_the_sooner_of_field_and_header_goes_to_the_scheduler(
    gw: RunningGateway, http: httpx.Client, path: str, field: float | None, header: str | None, seconds: float
) -> None:
    body = BODY | {"timeout": field}
    if "chat" in path:
        body["messages"] = [{"role": "user", "content": body.pop("prompt")}]
    before_ns = time.time_ns()
    answer = http.post(path, json=body, headers={} if header is None else {"X-Request-Timeout": header})
    assert answer.status_code == 200, answer.text
    (submit,) = gw.mesh.submits
    assert submit.deadline_ns - submit.arrival_ns == seconds * 1e9
    assert before_ns <= submit.arrival_ns <= time.time_ns()


def test_without_either_any_time_will_do(gw: RunningGateway, http: httpx.Client) -> None:
    assert http.post("/generate", json=BODY).status_code == 200
    assert gw.mesh.submits[0].deadline_ns == 0


@pytest.mark.parametrize("header", ["0", "-1", "nan", "inf", "1e3", "5s", "604801", "1_0", "٣", "1,5", "9" * 5000])
def test_a_header_that_is_no_time_is_a_400(gw: RunningGateway, http: httpx.Client, header: str) -> None:
    answer = http.post("/generate", json=BODY, headers={"X-Request-Timeout": header.encode()})
    assert answer.status_code == 400 and "X-Request-Timeout" in answer.json()["error"]["message"]
    assert not gw.mesh.submits


@pytest.mark.parametrize("value", [0, -1, "5", True, 604801, [1]])
def test_a_field_that_is_no_time_is_a_400(gw: RunningGateway, http: httpx.Client, value: object) -> None:
    answer = http.post("/generate", json=BODY | {"timeout": value})
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "timeout"


@pytest.mark.parametrize("stream", [False, True])
def test_a_predicted_miss_is_refused_at_once(gw: RunningGateway, http: httpx.Client, stream: bool) -> None:
    reason = "the request is predicted to miss its deadline by 70 ms"
    gw.mesh.refuse = lambda submit: SubmitReply(Outcome.DEADLINE, 7, reason)
    answer = http.post("/generate", json=BODY | {"timeout": 1, "stream": stream})
    assert answer.status_code == 504
    assert answer.json()["error"] == {
        "message": reason, "type": "timeout_error", "param": None, "code": "deadline_exceeded",
    }  # fmt: skip
    gw.until(lambda: gw.metric("headrace_gateway_requests_total", endpoint="generate", outcome="deadline") > 0)


@pytest.mark.parametrize("stream", [False, True])
def test_what_is_dropped_later_ends_with_an_explicit_error(
    gw: RunningGateway, http: httpx.Client, stream: bool
) -> None:
    gw.mesh.step_s = 0.01
    answers: list[httpx.Response] = []
    body = {"prompt": "x", "max_tokens": 1000, "timeout": 60, "stream": stream, "ignore_eos": True}
    client = threading.Thread(target=lambda: answers.append(http.post("/v1/completions", json=body)))
    client.start()
    gw.until(lambda: bool(gw.mesh.running) and len(gw.mesh.running[0].tokens) > 3)
    gw.call(gw.mesh.event(gw.mesh.submits[0], "dropped", "the request can no longer make its deadline"))
    client.join(20)
    (answer,) = answers
    if stream:
        assert answer.status_code == 200
        events = [line[6:] for line in answer.text.splitlines() if line.startswith("data: ")]
        error = json.loads(next(event for event in events if '"error"' in event))["error"]
        assert '"finish_reason":"' not in answer.text
    else:
        assert answer.status_code == 504
        error = answer.json()["error"]
    assert error["code"] == "deadline_exceeded" and "deadline" in error["message"]
    gw.until(lambda: len(gw.gateway.dispatch.ledger) == 0)
