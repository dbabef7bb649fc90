"""``/tokenize`` and ``/detokenize``: text to ids and back, the same ids that a completion would be computed from."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from gateway_mesh import MAX_MODEL_LEN, MODEL, VOCAB_SIZE, RunningGateway

TEXT = "The 你好 prompt 😀"
MESSAGES = [{"role": "user", "content": TEXT}]


def test_a_text_and_back(gw: RunningGateway, http: httpx.Client) -> None:
    answer = http.post("/tokenize", json={"prompt": TEXT, "model": MODEL}).json()
    assert answer == {
        "count": len(gw.encode(TEXT)), "max_model_len": MAX_MODEL_LEN, "tokens": gw.encode(TEXT), "token_strs": None,
    }  # fmt: skip
    assert http.post("/detokenize", json={"tokens": answer["tokens"]}).json() == {"prompt": TEXT}


def test_the_ids_are_those_that_are_computed(gw: RunningGateway, http: httpx.Client) -> None:
    for path, body in (("/v1/completions", {"prompt": TEXT}), ("/v1/chat/completions", {"messages": MESSAGES})):
        http.post(path, json={**body, "max_tokens": 1})
        assert http.post("/tokenize", json=body).json()["tokens"] == gw.prompt_of(gw.mesh.submits[-1]), path
    bare = http.post("/tokenize", json={"messages": MESSAGES, "add_generation_prompt": False}).json()
    assert bare["count"] < len(gw.prompt_of(gw.mesh.submits[-1]))


def test_spellings_and_special_tokens(gw: RunningGateway, http: httpx.Client) -> None:
    answer = http.post("/tokenize", json={"prompt": "a b", "return_token_strs": True}).json()
    assert "".join(answer["token_strs"]) == "aĠb"
    special = next(iter(gw.tokenizer.vocabulary.special_tokens.items()))
    shown = http.post("/detokenize", json={"tokens": [special[0], *gw.encode("x")]}).json()
    assert shown == {"prompt": special[1] + "x"}


def test_nothing_is_nothing(http: httpx.Client) -> None:
    assert http.post("/tokenize", json={"prompt": ""}).json()["tokens"] == []
    assert http.post("/detokenize", json={"tokens": []}).json() == {"prompt": ""}


def test_no_request_reaches_the_mesh(gw: RunningGateway, http: httpx.Client) -> None:
    http.post("/tokenize", json={"prompt": TEXT})
    assert gw.mesh.submits == []
    assert len(gw.gateway.dispatch.ledger) == 0
    gw.until(lambda: gw.gateway.in_flight == 0)


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"), ("/tokenize", {"prompt": 5}, "prompt"), ("/tokenize", {"prompt": ["x"]}, "prompt"),
        ("/tokenize", {"prompt": "x", "messages": MESSAGES}, "messages"), ("/tokenize", {"messages": []}, "messages"),
        ("/tokenize", {"prompt": "x", "add_special_tokens": 1}, "add_special_tokens"),
        ("/tokenize", {"messages": MESSAGES, "add_special_tokens": True}, "add_special_tokens"),
        ("/tokenize", {"messages": MESSAGES, "chat_template": "x"}, "chat_template"),
        ("/tokenize", {"prompt": "x", "return_token_strs": "yes"}, "return_token_strs"),
        ("/tokenize", {"prompt": "x", "max_tokens": 1}, "max_tokens"),
        ("/detokenize", {}, "tokens"), ("/detokenize", {"tokens": "x"}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens"), ("/detokenize", {"tokens": [VOCAB_SIZE]}, "tokens"),
        ("/detokenize", {"tokens": [True]}, "tokens"), ("/detokenize", {"tokens": [1], "x": 1}, "x"),
    ],
)  # fmt: skip
def test_what_is_refused_is_named(http: httpx.Client, path: str, body: Any, param: str) -> None:
    answer = http.post(path, json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


def test_lengths_models_and_readiness(gw: RunningGateway, http: httpx.Client) -> None:
    long = http.post("/tokenize", json={"prompt": "x" * 1_000_000})
    assert (long.status_code, long.json()["error"]["code"]) == (400, "context_length_exceeded")
    for path, body in (("/tokenize", {"prompt": "x"}), ("/detokenize", {"tokens": [5]})):
        assert http.post(path, json={**body, "model": "other"}).json()["error"]["code"] == "model_not_found"
    gw.mesh.workers = 0
    gw.until(lambda: http.get("/ready").status_code == 503)
    answer = http.post("/tokenize", json={"prompt": "x"})
    assert (answer.status_code, "retry-after" in answer.headers) == (503, True)


@pytest.mark.parametrize("path", ["/tokenize", "/detokenize", "/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize("media_type", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data", ""])
def test_other_media_types_are_refused(http: httpx.Client, path: str, media_type: str) -> None:
    answer = http.post(path, content=b'{"prompt":"x"}', headers={"content-type": media_type})
    assert (answer.status_code, answer.json()["error"]["code"]) == (415, "unsupported_media_type")
    hinted = "-H 'Content-Type: application/json'" in answer.json()["error"]["message"]
    assert hinted == (media_type == "application/x-www-form-urlencoded"), "what curl -d says unless told otherwise"


def test_json_may_have_parameters_or_no_name(http: httpx.Client) -> None:
    for headers in ({"content-type": "Application/JSON; charset=utf-8"}, {}):
        assert http.post("/tokenize", content=b'{"prompt":"x"}', headers=headers).status_code == 200
    form = {"content-type": "application/x-www-form-urlencoded"}
    assert http.post("/generate", content=b'{"prompt":"x"}', headers=form).status_code == 200


@pytest.mark.parametrize("method", ["GET", "HEAD", "OPTIONS", "PUT", "DELETE", "PATCH", "PROPFIND"])
@pytest.mark.parametrize("path", ["/tokenize", "/v1/completions", "/v1/models", "/health"])
def test_other_methods(http: httpx.Client, method: str, path: str) -> None:
    answer = http.request(method, path)
    if path in ("/v1/models", "/health") and method in ("GET", "HEAD"):
        assert answer.status_code == 200
        return
    assert answer.status_code == 405
    assert ("POST" in answer.headers["allow"]) == (path not in ("/v1/models", "/health"))
    if method != "HEAD":
        error = answer.json()["error"]
        assert (error["type"], error["code"], error["param"]) == ("invalid_request_error", "method_not_allowed", None)


def test_paths_that_are_none(http: httpx.Client) -> None:
    error = http.get("/v1/nothing").json()["error"]
    assert error == {
        "message": "Invalid URL (GET /v1/nothing)", "type": "invalid_request_error", "param": None, "code": "not_found",
    }  # fmt: skip
    missing = http.get("/v1/models/other").json()["error"]
    assert (missing["code"], missing["param"]) == ("model_not_found", "model")
