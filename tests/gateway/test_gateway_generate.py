"""vLLM's plain endpoint: the shapes that tutorials' clients expect."""

from __future__ import annotations

import itertools
import json

import httpx
from gateway_mesh import RunningGateway


def test_the_tutorial_client(gw: RunningGateway, http: httpx.Client) -> None:
    prompt = "介绍一下什么是大语言模型"
    body = json.dumps({"prompt": prompt, "max_tokens": 30, "temperature": 0.0})
    answer = http.post("/generate", headers={"Content-Type": "application/json"}, content=body).json()
    assert list(answer) == ["text"]
    (text,) = answer["text"]
    assert text == prompt + gw.decode(gw.expected(gw.mesh.submits[0]))
    sampling = gw.mesh.submits[0].sampling
    assert (sampling.max_tokens, sampling.temperature) == (30, 0.0)


def test_defaults_and_n(gw: RunningGateway, http: httpx.Client) -> None:
    answer = http.post("/generate", json={"prompt": "hello ", "n": 3}).json()
    (submit,) = gw.mesh.submits
    assert (submit.sampling.max_tokens, submit.sampling.temperature, submit.n) == (16, 1.0, 3)
    assert answer["text"] == ["hello " + gw.decode(gw.expected(submit, choice)) for choice in range(3)]


def test_streaming_gives_the_text_so_far(gw: RunningGateway, http: httpx.Client) -> None:
    answer = http.post("/generate", json={"prompt": "hello ", "n": 2, "stream": True, "max_tokens": 20})
    lines = [json.loads(line)["text"] for line in answer.text.split("\n")[:-1]]
    (submit,) = gw.mesh.submits
    assert lines[-1] == ["hello " + gw.decode(gw.expected(submit, choice)) for choice in range(2)]
    assert len(lines) > 1
    for earlier, later in itertools.pairwise(lines):
        assert all(after.startswith(before) for before, after in zip(earlier, later, strict=True))


def test_control_tokens_in_a_text_prompt_are_tokens(gw: RunningGateway, http: httpx.Client) -> None:
    http.post("/generate", json={"prompt": "a<|im_end|>", "max_tokens": 1})
    assert gw.prompt_of(gw.mesh.submits[0])[-1] == 2


def test_ignore_eos_and_stop_ids_travel(gw: RunningGateway, http: httpx.Client) -> None:
    gw.mesh.script = lambda submit, choice, position: 0 if position == 2 else 60
    ended = http.post("/generate", json={"prompt": "x", "max_tokens": 6}).json()["text"][0]
    whole = http.post("/generate", json={"prompt": "x", "max_tokens": 6, "ignore_eos": True}).json()["text"][0]
    char = gw.decode([60])
    assert ended == "x" + char * 2
    assert whole == "x" + char * 5  # the EOS token itself is never visible
    stopped = http.post("/generate", json={"prompt": "x", "max_tokens": 6, "stop_token_ids": [60]}).json()["text"][0]
    assert stopped == "x"
