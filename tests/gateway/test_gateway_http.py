"""The API over real HTTP: what is refused and how, batches, limits, and the small routes."""

from __future__ import annotations

import concurrent.futures
import json
from typing import Any

import httpx
import pytest
from gateway_mesh import MAX_MODEL_LEN, MODEL, VOCAB_SIZE, RunningGateway, running_gateway
from loopback_http import NO_AUTHORITIES

from shared.messages import Outcome, Submit, SubmitReply


def strict(response: httpx.Response) -> Any:
    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is no JSON")

    return json.loads(response.content.decode("utf-8"), parse_constant=refuse)


def error_of(response: httpx.Response, status: int = 400) -> dict[str, Any]:
    assert response.status_code == status, response.text
    body = strict(response)
    assert set(body["error"]) == {"message", "type", "param", "code"}
    return body["error"]


@pytest.fixture
def canary(gw: RunningGateway, http: httpx.Client) -> Any:
    """O1: a fixed request answers the same before and after."""

    def ask() -> str:
        return http.post("/v1/completions", json={"prompt": "canary", "seed": 1, "max_tokens": 8}).json()["choices"]

    before = ask()
    yield
    assert ask() == before
    assert http.get("/health").status_code == 200


@pytest.mark.parametrize(
    "prompt", ["", [""], [], [[]], [VOCAB_SIZE], [-1], [2**63], [1.5], [True], [[5], [VOCAB_SIZE]], None, {"a": 1}]
)
def test_degenerate_prompts(http: httpx.Client, canary: None, prompt: Any) -> None:
    error_of(http.post("/v1/completions", json={"prompt": prompt, "max_tokens": 2}))


def test_the_last_id_of_the_model_is_a_prompt(http: httpx.Client) -> None:
    answer = http.post("/v1/completions", json={"prompt": [VOCAB_SIZE - 1], "max_tokens": 2})
    assert answer.status_code == 200
    counts = {"prompt_tokens": 1, "completion_tokens": 2, "total_tokens": 3}
    assert answer.json()["usage"] == counts | {"prompt_tokens_details": {"cached_tokens": 0}}


@pytest.mark.parametrize("value", ["NaN", "Infinity", "-Infinity", "1e999", '"NaN"', "-1", "2.1", "true", "[]"])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/generate"])
def test_numbers_that_are_none(http: httpx.Client, path: str, value: str) -> None:
    text = f'{{"prompt":"x","temperature":{value}}}'
    if "chat" in path:
        text = f'{{"messages":[{{"role":"user","content":"x"}}],"temperature":{value}}}'
    error_of(http.post(path, content=text))


@pytest.mark.parametrize(
    "body", [b"", b"[]", b"null", b'{"prompt":', b'{"prompt":"\\ud83d"}', b'{"prompt":"\xff"}', b"[" * 100_000]
)
def test_bodies_that_are_none(http: httpx.Client, canary: None, body: bytes) -> None:
    error_of(http.post("/v1/completions", content=body))


@pytest.mark.parametrize("field", ["prompt", "stop"])
def test_unpaired_surrogates_and_pairs(http: httpx.Client, field: str) -> None:
    fields = {"prompt": '"x"', "stop": '"y"', "max_tokens": "2"}
    fields[field] = '"\\ud83d"'
    body = "{" + ",".join(f'"{name}":{value}' for name, value in fields.items()) + "}"
    error_of(http.post("/v1/completions", content=body))
    assert http.post("/v1/completions", content=body.replace("\\ud83d", "\\ud83d\\ude00")).status_code == 200


@pytest.mark.parametrize("max_tokens", [0, -1, 1.5, True, "5"])
def test_max_tokens_that_are_none(http: httpx.Client, max_tokens: Any) -> None:
    assert error_of(http.post("/generate", json={"prompt": "x", "max_tokens": max_tokens}))["param"] == "max_tokens"


def test_the_context_limit(gw: RunningGateway, http: httpx.Client) -> None:
    error = error_of(http.post("/v1/completions", json={"prompt": "x", "max_tokens": 10**9}))
    assert str(MAX_MODEL_LEN) in error["message"]
    for length in (MAX_MODEL_LEN, MAX_MODEL_LEN + 1):
        error = error_of(http.post("/v1/completions", json={"prompt": [5] * length, "max_tokens": 1}))
        assert (str(MAX_MODEL_LEN) in error["message"], error["code"]) == (True, "context_length_exceeded")
    exact = http.post("/v1/completions", json={"prompt": [5] * (MAX_MODEL_LEN - 1)})
    assert exact.json()["usage"]["completion_tokens"] == 1
    error_of(http.post("/v1/completions", json={"prompt": "x" * 1_000_000}))
    assert len(gw.mesh.submits) == 1


def test_absent_max_tokens(gw: RunningGateway, http: httpx.Client) -> None:
    http.post("/v1/completions", json={"prompt": "x"})
    http.post("/generate", json={"prompt": "x"})
    gw.mesh.script = lambda submit, choice, position: 0 if position == 3 else 50
    messages = [{"role": "user", "content": "x"}]
    http.post("/v1/chat/completions", json={"messages": messages})
    limits = [submit.sampling.max_tokens for submit in gw.mesh.submits]
    room = MAX_MODEL_LEN - len(gw.prompt_of(gw.mesh.submits[2]))
    assert limits == [16, 16, min(room, gw.config.chat_default_max_tokens)]


def test_huge_n_is_refused(http: httpx.Client) -> None:
    error_of(http.post("/v1/completions", json={"prompt": "x", "n": 10**6}))
    error_of(http.post("/v1/completions", json={"prompt": ["x"] * 64, "n": 64}))


def test_chat_content_forms_are_the_same_prompt(gw: RunningGateway, http: httpx.Client) -> None:
    contents: list[Any] = ["a b", [{"type": "text", "text": "a b"}]]
    answers = [
        http.post(
            "/v1/chat/completions",
            json={"messages": [{"role": "user", "content": content}], "seed": 4, "max_tokens": 5},
        ).json()
        for content in contents
    ]
    assert answers[0]["choices"] == answers[1]["choices"]
    assert answers[0]["usage"] == answers[1]["usage"]
    assert answers[0]["choices"][0]["message"]["role"] == "assistant"
    capped = http.post(
        "/v1/chat/completions",
        json={"messages": [{"role": "user", "content": "x"}], "max_completion_tokens": 3, "user": "u", "metadata": {}},
    )
    assert capped.json()["usage"]["completion_tokens"] == 3


def test_a_template_in_the_body_is_refused(http: httpx.Client) -> None:
    messages = [{"role": "user", "content": "x"}]
    bomb = "{% for a in range(9999) %}{% for b in range(9999) %}x{% endfor %}{% endfor %}"
    for extra in ({"chat_template": bomb}, {"chat_template_kwargs": {"chat_template": bomb}}):
        error_of(http.post("/v1/chat/completions", json={"messages": messages, **extra}))


PROMPTS: list[Any] = ["a long prompt with several words in it", "x", "two words"]


@pytest.mark.parametrize("as_ids", [False, True])
@pytest.mark.parametrize("stream", [False, True])
def test_a_batch_of_prompts(gw: RunningGateway, http: httpx.Client, as_ids: bool, stream: bool) -> None:
    prompts = [gw.encode(prompt) for prompt in PROMPTS] if as_ids else PROMPTS
    body = {"prompt": prompts, "n": 2, "seed": 7, "max_tokens": 12, "stream": stream}
    if stream:
        body["stream_options"] = {"include_usage": True}
    answer = http.post("/v1/completions", json=body)
    submits = sorted(gw.mesh.submits, key=lambda submit: submit.prompt_index)
    assert [submit.prompt_index for submit in submits] == [0, 1, 2]
    assert len({submit.request_id for submit in submits}) == 3
    expected = [gw.decode(gw.expected(submit, choice)) for submit in submits for choice in range(2)]
    texts = [""] * 6
    if stream:
        for line in answer.text.splitlines():
            if not line.startswith("data: {"):
                continue
            chunk = json.loads(line[6:])
            usage = chunk["usage"]
            for choice in chunk["choices"]:
                texts[choice["index"]] += choice["text"]
    else:
        usage = answer.json()["usage"]
        texts = [choice["text"] for choice in answer.json()["choices"]]
        assert [choice["index"] for choice in answer.json()["choices"]] == list(range(6))
    assert texts == expected
    assert usage["prompt_tokens"] == sum(len(gw.encode(prompt)) for prompt in PROMPTS)
    assert usage["completion_tokens"] == 6 * 12


def test_one_refused_prompt_refuses_all_and_leaves_nothing_running(gw: RunningGateway, http: httpx.Client) -> None:
    gw.mesh.stepping = False
    gw.mesh.refuse = lambda submit: (
        SubmitReply(Outcome.QUEUE_FULL, 7, "the queue is full", retry_after_ms=2500)
        if submit.prompt_index == 1
        else None
    )
    answer = http.post("/v1/completions", json={"prompt": PROMPTS})
    assert error_of(answer, 429)["message"] == "the queue is full"
    assert answer.headers["retry-after"] == "3"
    gw.until(lambda: not gw.mesh.running and len(gw.gateway.dispatch.ledger) == 0)


@pytest.mark.parametrize(
    ("outcome", "status", "retry"),
    [
        (Outcome.QUEUE_FULL, 429, True), (Outcome.NO_WORKER, 503, True), (Outcome.DRAINING, 503, True),
        (Outcome.NEVER_FITS, 400, False), (Outcome.TOO_LONG, 400, False), (Outcome.INVALID, 400, False),
        (Outcome.UNKNOWN_MODEL, 503, True),  # to the scheduler; clients' names are looked up here
    ],
)  # fmt: skip
@pytest.mark.parametrize("stream", [False, True])
def test_refusals(
    gw: RunningGateway, http: httpx.Client, outcome: Outcome, status: int, retry: bool, stream: bool
) -> None:
    gw.mesh.refuse = lambda submit: SubmitReply(outcome, 7, "because")
    answer = http.post("/generate", json={"prompt": "x", "stream": stream})
    assert error_of(answer, status)["message"] == "because"
    assert ("retry-after" in answer.headers) == retry


def test_a_lost_reply_is_asked_for_again(gw: RunningGateway, http: httpx.Client) -> None:
    replies = iter([SubmitReply(Outcome.STALE_EPOCH, 7), SubmitReply(Outcome.STALE_EPOCH, 7), None])
    seen: list[Submit] = []

    def refuse(submit: Submit) -> SubmitReply | None:
        seen.append(submit)
        return next(replies)

    gw.mesh.refuse = refuse
    assert http.post("/generate", json={"prompt": "x"}).status_code == 200
    assert len({(submit.request_id, submit.attempt) for submit in seen}) == 1
    assert len(seen) == 3


def test_another_model_is_not_here(http: httpx.Client) -> None:
    body = {"prompt": "x", "model": "other"}
    assert error_of(http.post("/v1/completions", json=body), 404)["code"] == "model_not_found"
    assert http.post("/v1/completions", json={**body, "model": MODEL}).status_code == 200
    error_of(http.get("/v1/models/other"), 404)


def test_small_routes(http: httpx.Client) -> None:
    models = http.get("/v1/models").json()
    assert models["data"][0] == http.get(f"/v1/models/{MODEL}").json()
    assert (models["object"], models["data"][0]["id"]) == ("list", MODEL)
    assert models["data"][0]["max_model_len"] == MAX_MODEL_LEN
    assert http.get("/health").status_code == http.get("/ready").status_code == 200
    assert "version" in http.get("/version").json()
    error_of(http.get("/v1/completions"), 405)
    error_of(http.get("/nowhere"), 404)
    error_of(http.get("/metrics"), 404)


def test_readiness_follows_the_workers(gw: RunningGateway, http: httpx.Client) -> None:
    gw.mesh.workers = 0
    gw.until(lambda: http.get("/ready").status_code == 503)
    assert int(http.get("/ready").headers["retry-after"]) >= 1
    assert gw.metric("headrace_gateway_ready") == 0
    answer = http.post("/generate", json={"prompt": "x"})
    error_of(answer, 503)
    assert int(answer.headers["retry-after"]) >= 1
    assert http.get("/health").status_code == 200


def test_request_ids_are_echoed_if_sound(gw: RunningGateway, http: httpx.Client) -> None:
    body = {"prompt": "x", "max_tokens": 1}
    answer = http.post("/generate", json=body, headers={"X-Request-Id": "my-id.1"})
    assert answer.headers["x-request-id"] == "my-id.1"
    assert gw.mesh.submits[0].request_id != "my-id.1"
    odd = http.post("/generate", json=body, headers={"X-Request-Id": "a b\tc"})
    assert odd.headers["x-request-id"].startswith("req-")
    refused = http.post("/generate", json={}, headers={"X-Request-Id": "my-id.2"})
    assert (refused.status_code, refused.headers["x-request-id"]) == (400, "my-id.2")


def test_bodies_and_messages_have_a_size(tokenizer_folder: Any) -> None:
    with (
        running_gateway(tokenizer_folder, max_body_bytes=4096, max_payload=6000) as gateway,
        httpx.Client(verify=NO_AUTHORITIES, base_url=gateway.url) as http,
    ):
        error_of(http.post("/v1/completions", json={"prompt": "x" * 5000}), 413)
        error = error_of(http.post("/v1/completions", json={"prompt": "x", "max_tokens": 1000}))
        assert "6000 bytes" in error["message"]
        assert http.post("/v1/completions", json={"prompt": "x"}).status_code == 200


def test_too_many_at_once(tokenizer_folder: Any) -> None:
    with (
        running_gateway(tokenizer_folder, max_concurrent_requests=2) as gateway,
        httpx.Client(verify=NO_AUTHORITIES, base_url=gateway.url) as http,
        concurrent.futures.ThreadPoolExecutor(2) as pool,
    ):
        gateway.mesh.stepping = False
        waiting = [pool.submit(http.post, "/generate", json={"prompt": "x"}) for _ in range(2)]
        gateway.until(lambda: len(gateway.mesh.running) == 2)
        answer = http.post("/generate", json={"prompt": "x"})
        assert (answer.status_code, answer.headers["retry-after"]) == (429, "1")
        gateway.mesh.stepping = True
        assert [future.result().status_code for future in waiting] == [200, 200]


def test_metrics_count_what_happened(gw: RunningGateway, http: httpx.Client) -> None:
    def finished() -> float:
        return gw.metric("headrace_gateway_requests_total", endpoint="generate", outcome="finished")

    before, tokens = finished(), gw.metric("vllm:generation_tokens_total", model_name=MODEL)
    refused = gw.metric("headrace_gateway_requests_total", endpoint="generate", outcome="invalid")
    http.post("/generate", json={"prompt": "x", "n": 2, "max_tokens": 5})
    http.post("/generate", json={})
    gw.until(lambda: gw.gateway.in_flight == 0)
    assert finished() == before + 1
    assert gw.metric("vllm:generation_tokens_total", model_name=MODEL) == tokens + 10
    assert gw.metric("headrace_gateway_requests_total", endpoint="generate", outcome="invalid") == refused + 1
    assert gw.metric("headrace_gateway_requests_in_flight") == 0
