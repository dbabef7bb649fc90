"""What answers tell beside their text: log-probabilities in OpenAI's two forms and vLLM's, echo, token ids, usage."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from gateway_mesh import MODEL, RunningGateway, running_gateway, told_of
from loopback_http import HTTP

from shared.messages import TokenLogprob

PROMPT = "The 你好 prompt"


def stream_of(http: httpx.Client, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    answer = http.post(path, json={**body, "stream": True})
    assert answer.status_code == 200, answer.text
    assert answer.text.endswith("data: [DONE]\n\n")
    return [json.loads(event[6:]) for event in answer.text.split("\n\n")[:-2]]


def values(logprob: TokenLogprob) -> list[float]:
    return [max(value, -9999.0) for value in logprob.top_log_probs]


def joined(parts: list[dict[str, Any] | None]) -> dict[str, Any]:
    """The parallel lists of a stream's deltas, put together."""
    whole: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
    for part in parts:
        for name, items in (part or {}).items():
            whole[name] += items
    return whole


def check_completion(gw: RunningGateway, logprobs: dict[str, Any], tokens: list[int], wanted: int) -> None:
    """Against what the fake worker told."""
    for place, token in enumerate(tokens):
        told = told_of(token, place, wanted)
        own = logprobs["token_logprobs"][place]
        assert own == told.log_prob
        top = dict(logprobs["top_logprobs"][place])
        assert top.pop(logprobs["tokens"][place]) == own
        assert sorted(top.values()) == sorted(values(told)[1:] if told.rank == 1 else values(told))
    assert len(logprobs["tokens"]) == len(tokens)


@pytest.mark.parametrize("wanted", [0, 1, 5])
@pytest.mark.parametrize("stop", [None, "te"])
def test_completions_streamed_and_whole_tell_the_same(
    gw: RunningGateway, http: httpx.Client, wanted: int, stop: str | None
) -> None:
    for seed in range(12):
        body = {"prompt": PROMPT, "seed": seed, "max_tokens": 40, "logprobs": wanted, "n": 2, "stop": stop}
        whole = http.post("/v1/completions", json=body).json()
        events = [event["choices"][0] for event in stream_of(http, "/v1/completions", body)]
        for choice in whole["choices"]:
            own = [event for event in events if event["index"] == choice["index"]]
            assert "".join(event["text"] for event in own) == choice["text"]
            assert joined([event["logprobs"] for event in own]) == choice["logprobs"]
            tokens = gw.expected(gw.mesh.submits[-1], choice["index"])[: len(choice["logprobs"]["tokens"])]
            check_completion(gw, choice["logprobs"], tokens, wanted)
        counted = sum(len(choice["logprobs"]["tokens"]) for choice in whole["choices"])
        assert counted == whole["usage"]["completion_tokens"]


def test_offsets_point_at_each_tokens_text(gw: RunningGateway, http: httpx.Client) -> None:
    gw.mesh.script = lambda submit, choice, position: gw.encode("say 你好 😀 twice")[position]
    tokens = gw.encode("say 你好 😀 twice")
    body = {"prompt": "x", "max_tokens": len(tokens), "logprobs": 0}
    choice = http.post("/v1/completions", json=body).json()["choices"][0]
    assert choice["text"] == "say 你好 😀 twice"
    offset, pending = 0, b""
    for name, at in zip(choice["logprobs"]["tokens"], choice["logprobs"]["text_offset"], strict=True):
        assert at == offset
        if name.startswith("bytes:"):
            pending += bytes.fromhex(name[6:].replace("\\x", ""))
            if pending.decode("utf-8", "ignore"):
                assert choice["text"].startswith(pending.decode(), at)
                offset, pending = offset + 1, b""
        else:
            assert choice["text"].startswith(name, at)
            offset += len(name)


@pytest.mark.parametrize("wanted", [0, 3])
def test_chat_streamed_and_whole_tell_the_same(gw: RunningGateway, http: httpx.Client, wanted: int) -> None:
    for seed in range(12):
        body = {
            "messages": [{"role": "user", "content": "你好"}],
            "seed": seed, "max_tokens": 40, "logprobs": True, "top_logprobs": wanted,
        }  # fmt: skip
        choice = http.post("/v1/chat/completions", json=body).json()["choices"][0]
        events = [event["choices"][0] for event in stream_of(http, "/v1/chat/completions", body)]
        parts = [event["logprobs"] for event in events if event["logprobs"] is not None]
        content = [entry for part in parts for entry in part["content"]]
        assert content == choice["logprobs"]["content"]
        tokens = gw.expected(gw.mesh.submits[-1])
        assert len(content) == len(tokens) == 40
        for place, (entry, token) in enumerate(zip(content, tokens, strict=True)):
            told = told_of(token, place, wanted)
            assert entry["logprob"] == told.log_prob
            assert [other["logprob"] for other in entry["top_logprobs"]] == values(told)
        spelled = b"".join(bytes(entry["bytes"]) for entry in content)
        assert spelled.decode("utf-8", "replace") == choice["message"]["content"]


def test_a_deltas_log_probabilities_are_those_of_its_text(gw: RunningGateway, http: httpx.Client) -> None:
    """What has no text yet (half a character, the start of a stop string) comes with the text."""
    text = "ab 😀 cd"
    tokens = gw.encode(text)
    gw.mesh.script = lambda submit, choice, position: tokens[position]
    body = {
        "messages": [{"role": "user", "content": "x"}], "max_tokens": len(tokens), "logprobs": True, "stop": "b 😀 x",
    }  # fmt: skip
    seen = b""
    written = ""
    for event in stream_of(http, "/v1/chat/completions", body):
        choice = event["choices"][0]
        written += choice["delta"].get("content", "")
        for entry in (choice["logprobs"] or {"content": []})["content"]:
            seen += bytes(entry["bytes"])
        assert seen.decode() == written
    assert written == text


def test_the_token_that_stops_is_told_too(gw: RunningGateway, http: httpx.Client) -> None:
    gw.mesh.script = lambda submit, choice, position: [40, 41, 2][position]
    whole = http.post("/v1/completions", json={"prompt": "x", "logprobs": 1, "return_token_ids": True}).json()
    choice = whole["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == (gw.decode([40, 41]), "stop")
    assert choice["token_ids"] == [40, 41, 2]
    assert len(choice["logprobs"]["tokens"]) == whole["usage"]["completion_tokens"] == 3
    messages = [{"role": "user", "content": "x"}]
    events = stream_of(http, "/v1/chat/completions", {"messages": messages, "logprobs": True})
    last = events[-1]["choices"][0]
    assert (last["delta"], last["finish_reason"]) == ({}, "stop")
    assert len(last["logprobs"]["content"]) == 1


def test_without_being_asked_nothing_is_told(gw: RunningGateway, http: httpx.Client) -> None:
    choice = http.post("/v1/completions", json={"prompt": "x"}).json()["choices"][0]
    assert set(choice) == {"index", "text", "logprobs", "finish_reason"}
    assert choice["logprobs"] is None
    assert gw.mesh.submits[0].sampling.logprobs == gw.mesh.submits[0].sampling.prompt_logprobs == -1


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("as_ids", [False, True])
def test_echo(gw: RunningGateway, http: httpx.Client, stream: bool, as_ids: bool) -> None:
    prompt: Any = gw.encode(PROMPT) if as_ids else PROMPT
    body = {"prompt": [prompt, prompt], "echo": True, "max_tokens": 6, "n": 2, "seed": 3}
    if stream:
        texts = [""] * 4
        for event in stream_of(http, "/v1/completions", body):
            texts[event["choices"][0]["index"]] += event["choices"][0]["text"]
    else:
        texts = [choice["text"] for choice in http.post("/v1/completions", json=body).json()["choices"]]
    submits = sorted(gw.mesh.submits, key=lambda submit: submit.prompt_index)
    assert texts == [PROMPT + gw.decode(gw.expected(submit, choice)) for submit in submits for choice in range(2)]
    assert gw.mesh.submits[0].sampling.prompt_logprobs == -1


@pytest.mark.parametrize("stream", [False, True])
def test_echo_with_log_probabilities(gw: RunningGateway, http: httpx.Client, stream: bool) -> None:
    body = {"prompt": PROMPT, "echo": True, "max_tokens": 6, "n": 2, "logprobs": 2, "seed": 3}
    if stream:
        events = [event["choices"][0] for event in stream_of(http, "/v1/completions", body)]
        choices = [
            {
                "text": "".join(event["text"] for event in events if event["index"] == index),
                "logprobs": joined([event["logprobs"] for event in events if event["index"] == index]),
            }
            for index in range(2)
        ]
    else:
        choices = http.post("/v1/completions", json=body).json()["choices"]
    submit = gw.mesh.submits[0]
    prompt = gw.prompt_of(submit)
    assert submit.sampling.prompt_logprobs == 2
    for index, choice in enumerate(choices):
        told = choice["logprobs"]
        assert (told["token_logprobs"][0], told["top_logprobs"][0]) == (None, None)
        assert told["token_logprobs"][1 : len(prompt)] == [
            told_of(token, place, 2).log_prob for place, token in enumerate(prompt) if place
        ]
        own = {name: items[len(prompt) :] for name, items in told.items()}
        check_completion(gw, own, gw.expected(submit, index), 2)
        assert own["text_offset"][0] == len(PROMPT)
        assert told["text_offset"] == sorted(told["text_offset"])
        for name, at in zip(told["tokens"], told["text_offset"], strict=True):
            assert name.startswith("bytes:") or choice["text"].startswith(name, at)


@pytest.mark.parametrize("logprobs", [None, 0])
@pytest.mark.parametrize("stream", [False, True])
def test_echo_with_token_ids(gw: RunningGateway, http: httpx.Client, stream: bool, logprobs: int | None) -> None:
    """Of the prompt too, whose text the choice has."""
    body = {"prompt": PROMPT, "echo": True, "max_tokens": 6, "seed": 3, "return_token_ids": True, "logprobs": logprobs}
    if stream:
        ids: list[int] = []
        for event in stream_of(http, "/v1/completions", body):
            ids += event["choices"][0]["token_ids"]
    else:
        ids = http.post("/v1/completions", json=body).json()["choices"][0]["token_ids"]
    submit = gw.mesh.submits[0]
    assert ids == [*gw.prompt_of(submit), *gw.expected(submit, 0)]


def test_only_the_prompt_is_looked_at(gw: RunningGateway, http: httpx.Client) -> None:
    body = {"prompt": PROMPT, "echo": True, "max_tokens": 0, "logprobs": 1}
    for choices in (
        http.post("/v1/completions", json=body).json()["choices"],
        [event["choices"][0] for event in stream_of(http, "/v1/completions", body)],
    ):
        (choice,) = choices
        assert (choice["text"], choice["finish_reason"]) == (PROMPT, "length")
        assert len(choice["logprobs"]["tokens"]) == len(gw.encode(PROMPT))
    usage = http.post("/v1/completions", json=body).json()["usage"]
    assert usage["completion_tokens"] == 0
    assert http.post("/v1/completions", json={"prompt": PROMPT, "max_tokens": 0}).status_code == 400


@pytest.mark.parametrize("chat", [False, True])
def test_prompt_logprobs_as_vllm_tells_them(gw: RunningGateway, http: httpx.Client, chat: bool) -> None:
    body: dict[str, Any] = {"prompt_logprobs": 2, "max_tokens": 2, "return_token_ids": True}
    if chat:
        answer = http.post("/v1/chat/completions", json=body | {"messages": [{"role": "user", "content": "你好"}]})
        told = answer.json()
    else:
        told = http.post("/v1/completions", json=body | {"prompt": PROMPT}).json()["choices"][0]
    prompt = gw.prompt_of(gw.mesh.submits[0])
    assert told["prompt_token_ids"] == prompt
    assert len(told["prompt_logprobs"]) == len(prompt)
    assert told["prompt_logprobs"][0] is None
    for place, (token, entries) in enumerate(zip(prompt, told["prompt_logprobs"], strict=True)):
        if place:
            expected = told_of(token, place, 2)
            own = entries.pop(str(token))
            assert (own["logprob"], own["rank"]) == (expected.log_prob, expected.rank)
            others = [value for id_, value in zip(expected.top_ids, values(expected), strict=True) if id_ != token]
            assert [entry["logprob"] for entry in entries.values()] == others


def test_prompts_that_are_told_of_are_computed_anew(gw: RunningGateway, http: httpx.Client) -> None:
    for body in ({"prompt_logprobs": 0}, {"prompt_logprobs": 0}, {"echo": True, "logprobs": 0}, {}):
        http.post("/v1/completions", json={"prompt": PROMPT, "max_tokens": 1, "cache_salt": "s", **body})
    salts = [submit.cache_salt for submit in gw.mesh.submits]
    assert len(set(salts)) == 4
    assert salts[3] == "s"


def test_token_ids_in_a_stream(gw: RunningGateway, http: httpx.Client) -> None:
    body = {"prompt": "你好", "max_tokens": 30, "seed": 2, "return_token_ids": True}
    events = stream_of(http, "/v1/completions", body)
    choices = [event["choices"][0] for event in events]
    assert [token for choice in choices for token in choice["token_ids"]] == gw.expected(gw.mesh.submits[0])
    assert choices[0]["prompt_token_ids"] == gw.encode("你好")
    assert not any("prompt_token_ids" in choice for choice in choices[1:])
    chat = stream_of(
        http, "/v1/chat/completions",
        {"messages": [{"role": "user", "content": "x"}], "max_tokens": 30, "return_token_ids": True},
    )  # fmt: skip
    assert chat[0]["prompt_token_ids"] == gw.prompt_of(gw.mesh.submits[1])
    ids = [token for event in chat for token in event["choices"][0].get("token_ids", [])]
    assert ids == gw.expected(gw.mesh.submits[1])


def test_special_tokens_are_shown_if_asked_for(gw: RunningGateway, http: httpx.Client) -> None:
    special = gw.tokenizer.vocabulary.special_tokens
    shown = next(token for token in special if token not in (0, 2))
    gw.mesh.script = lambda submit, choice, position: [50, shown, 51, 0][position]
    for path in ("/v1/completions", "/generate"):
        texts = []
        for skip in (True, False):
            answer = http.post(path, json={"prompt": "x", "skip_special_tokens": skip}).json()
            texts.append(answer["text"][0][1:] if path == "/generate" else answer["choices"][0]["text"])
        assert texts == [gw.decode([50, 51]), gw.decode([50]) + special[shown] + gw.decode([51])]


def test_usage_tells_what_the_prefix_cache_held(gw: RunningGateway, http: httpx.Client) -> None:
    def cached(**body: Any) -> int:
        usage = http.post("/v1/completions", json={"max_tokens": 2, **body}).json()["usage"]
        return int(usage["prompt_tokens_details"]["cached_tokens"])

    assert cached(prompt=[5] * 20) == 0
    gw.mesh.cached = 16
    assert cached(prompt=[5] * 20) == 16
    assert cached(prompt=[5] * 20, n=3) == 16
    assert cached(prompt=[[5] * 20, [6] * 17]) == 32
    assert cached(prompt=[5] * 16) == 0  # a worker that says so is wrong: some token is always computed


@pytest.mark.parametrize("logprobs", [None, 1])
def test_usage_in_every_chunk(gw: RunningGateway, http: httpx.Client, logprobs: int | None) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = {"prompt": "x", "max_tokens": 9, "stream_options": options, "logprobs": logprobs}
    events = stream_of(http, "/v1/completions", body)
    counts = [event["usage"]["completion_tokens"] for event in events]
    assert counts == sorted(counts)
    assert counts[-1] == 9
    assert events[-1]["choices"] == []


def test_ranked_choices_are_told_with_their_own(gw: RunningGateway, http: httpx.Client) -> None:
    body = {"prompt": "x", "n": 2, "best_of": 4, "max_tokens": 5, "logprobs": 1, "seed": 1, "return_token_ids": True}
    choices = http.post("/v1/completions", json=body).json()["choices"]
    made = [gw.expected(gw.mesh.submits[0], choice) for choice in range(4)]
    assert [choice["index"] for choice in choices] == [0, 1]
    for choice in choices:
        assert choice["token_ids"] in made
        check_completion(gw, choice["logprobs"], choice["token_ids"], 1)


def test_priority_reaches_the_scheduler(gw: RunningGateway, http: httpx.Client) -> None:
    for path, body in (("/v1/completions", {"prompt": "x"}), ("/generate", {"prompt": "x"})):
        assert http.post(path, json={**body, "max_tokens": 1, "priority": -7}).status_code == 200
        assert gw.mesh.submits[-1].priority == -7


def test_a_hole_in_what_was_asked_for_is_never_passed_over(tokenizer_folder: Path) -> None:
    with running_gateway(tokenizer_folder, resume_timeout_s=0.5) as gw:
        honest = gw.mesh._prompt_entries
        body = {"prompt": PROMPT * 3, "prompt_logprobs": 1, "seed": 3}
        whole = HTTP.post(f"{gw.url}/v1/completions", json=body).json()["choices"]
        gw.mesh._prompt_entries = (  # type: ignore[method-assign]
            lambda submit: honest(submit)[: -2 if submit.attempt == 1 else None]
        )
        assert HTTP.post(f"{gw.url}/v1/completions", json=body).json()["choices"] == whole
        gw.mesh._prompt_entries = lambda submit: honest(submit)[:-2]  # type: ignore[method-assign]
        offers = gw.mesh.offers
        answer = HTTP.post(f"{gw.url}/v1/completions", json=body)
        assert answer.status_code == 503
        assert "log-probabilities" in answer.json()["error"]["message"]
        assert gw.mesh.offers - offers < 10, "what never goes on is not offered again as fast as can be"


def test_the_official_client_reads_them(gw: RunningGateway) -> None:
    with openai.OpenAI(base_url=f"{gw.url}/v1", api_key="none", max_retries=0) as client:
        chat = client.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": "x"}], logprobs=True, top_logprobs=2, max_tokens=5
        )
        content = chat.choices[0].logprobs.content  # type: ignore[union-attr]
        assert content is not None
        assert len(content) == 5
        assert all(len(entry.top_logprobs) == 2 and math.isfinite(entry.logprob) for entry in content)
        completion = client.completions.create(model=MODEL, prompt="x", logprobs=2, max_tokens=5, echo=True)
        told = completion.choices[0].logprobs
        assert told is not None
        assert len(told.tokens or []) == 1 + 5
        assert chat.usage is not None and chat.usage.prompt_tokens_details is not None


def test_what_one_answer_tells_is_bounded(gw: RunningGateway, http: httpx.Client) -> None:
    for body, param in (
        ({"prompt": "x", "n": 16, "max_tokens": 2000, "logprobs": 20}, "logprobs"),
        ({"prompt": ["x"] * 8, "n": 64, "max_tokens": 1000, "return_token_ids": True}, "return_token_ids"),
        ({"prompt": [[5] * 1000] * 25, "max_tokens": 1, "prompt_logprobs": 20}, "prompt_logprobs"),
    ):
        answer = http.post("/v1/completions", json=body)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
    assert gw.mesh.submits == []
    assert http.post("/v1/completions", json={"prompt": "x", "max_tokens": 300, "logprobs": 20}).status_code == 200
