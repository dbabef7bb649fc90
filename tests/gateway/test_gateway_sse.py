"""Streams as clients see them: raw framing, the official OpenAI client, and parity with the whole answer."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import openai
import pytest
from gateway_mesh import MODEL, RunningGateway

MESSAGES: Any = [{"role": "user", "content": "你好 😀"}]


def raw_stream(http: httpx.Client, path: str, body: dict[str, Any]) -> list[Any]:
    """The events of a stream, after checking each byte of the framing."""
    with http.stream("POST", path, json={**body, "stream": True}) as answer:
        assert answer.status_code == 200
        assert answer.headers["content-type"].startswith("text/event-stream")
        raw = b"".join(answer.iter_bytes())
    assert b"\r" not in raw
    assert raw.endswith(b"data: [DONE]\n\n")
    assert raw.count(b"[DONE]") == 1
    frames = raw.split(b"\n\n")
    assert frames.pop() == b""
    for frame in frames:
        assert frame.startswith(b"data: ")
        assert b"\n" not in frame
    return [json.loads(frame[6:]) for frame in frames[:-1]]


@pytest.mark.parametrize("include_usage", [False, True])
@pytest.mark.parametrize("n", [1, 3])
def test_the_shape_of_a_chat_stream(gw: RunningGateway, http: httpx.Client, include_usage: bool, n: int) -> None:
    body: dict[str, Any] = {"messages": MESSAGES, "max_tokens": 12, "n": n}
    if include_usage:
        body["stream_options"] = {"include_usage": True}
    events = raw_stream(http, "/v1/chat/completions", body)
    assert {(event["id"], event["created"], event["model"], event["object"]) for event in events} == {
        (events[0]["id"], events[0]["created"], MODEL, "chat.completion.chunk")
    }
    if include_usage:
        last = events.pop()
        assert last["choices"] == []
        assert last["usage"]["completion_tokens"] == 12 * n
        assert all(event["usage"] is None for event in events)
    assert all(len(event["choices"]) == 1 for event in events)
    assert not any(event.get("usage") for event in events)
    for index in range(n):
        own = [event["choices"][0] for event in events if event["choices"][0]["index"] == index]
        assert own[0]["delta"]["role"] == "assistant"
        assert not any("role" in choice["delta"] for choice in own[1:])
        reasons = [choice["finish_reason"] for choice in own]
        assert reasons == [None] * (len(own) - 1) + ["length"]
        text = "".join(choice["delta"].get("content", "") for choice in own)
        assert text == gw.decode(gw.expected(gw.mesh.submits[0], index))


def test_the_shape_of_a_completion_stream(gw: RunningGateway, http: httpx.Client) -> None:
    gw.mesh.script = lambda submit, choice, position: 0 if position == 5 else 40 + position
    events = raw_stream(http, "/v1/completions", {"prompt": "x"})
    assert {event["object"] for event in events} == {"text_completion"}
    reasons = [event["choices"][0]["finish_reason"] for event in events]
    assert reasons == [None] * (len(events) - 1) + ["stop"]
    assert "".join(event["choices"][0]["text"] for event in events) == gw.decode([40, 41, 42, 43, 44])


def test_transport_parity_over_many_seeds(gw: RunningGateway, http: httpx.Client) -> None:
    for seed in range(50):
        body = {"prompt": "你好 😀", "seed": seed, "max_tokens": 64}
        pieces = [event["choices"][0]["text"] for event in raw_stream(http, "/v1/completions", body)]
        whole = http.post("/v1/completions", json=body).json()["choices"][0]["text"]
        expected = gw.decode(gw.expected(gw.mesh.submits[-1]))
        assert "".join(pieces) == whole == expected, f"seed {seed}"


@pytest.mark.parametrize("stream", [False, True])
def test_stop_strings_leak_nothing_and_cancel(gw: RunningGateway, http: httpx.Client, stream: bool) -> None:
    gw.mesh.script = lambda submit, choice, position: 3 + (position * 7) % 90
    text = gw.decode([gw.mesh.script(None, 0, position) for position in range(60)])  # type: ignore[arg-type]
    first, second = text[20:24], text[10:13]
    body = {"prompt": f"the prompt has {second}", "max_tokens": 60, "stop": [first, second], "stream": stream}
    gw.mesh.step_s = 0.002
    if stream:
        events = raw_stream(http, "/v1/completions", body)
        got = "".join(event["choices"][0]["text"] for event in events)
        reason = events[-1]["choices"][0]["finish_reason"]
    else:
        choice = http.post("/v1/completions", json=body).json()["choices"][0]
        got, reason = choice["text"], choice["finish_reason"]
    assert (got, reason) == (text[:10], "stop")
    gw.until(lambda: [cancel.choice for cancel in gw.mesh.cancels] == [0])
    gw.until(lambda: not gw.mesh.running)


def test_later_choices_go_on_after_a_stop(gw: RunningGateway, http: httpx.Client) -> None:
    gw.mesh.script = lambda submit, choice, position: 40 + position if choice == 0 else 70
    stop = gw.decode([43])
    answer = http.post("/v1/completions", json={"prompt": "x", "n": 2, "stop": stop, "max_tokens": 20}).json()
    assert [choice["finish_reason"] for choice in answer["choices"]] == ["stop", "length"]
    assert answer["choices"][1]["text"] == gw.decode([70]) * 20
    assert answer["usage"]["completion_tokens"] == 4 + 20


def test_min_tokens_hold_stop_strings_off(gw: RunningGateway, http: httpx.Client) -> None:
    gw.mesh.script = lambda submit, choice, position: 50
    char = gw.decode([50])
    body = {"prompt": "x", "stop": char, "max_tokens": 20}
    assert http.post("/v1/completions", json=body).json()["choices"][0]["text"] == ""
    held = http.post("/v1/completions", json={**body, "min_tokens": 4}).json()
    assert held["choices"][0]["text"] == char * 4
    assert held["usage"]["completion_tokens"] == 5


def test_eos_first_and_eos_last(gw: RunningGateway, http: httpx.Client) -> None:
    gw.mesh.script = lambda submit, choice, position: 0 if position == submit.sampling.max_tokens - 1 else 50
    for max_tokens in (1, 5):
        choice = http.post("/v1/completions", json={"prompt": "x", "max_tokens": max_tokens}).json()["choices"][0]
        assert (choice["text"], choice["finish_reason"]) == (gw.decode([50]) * (max_tokens - 1), "stop")


def test_line_separators_do_not_split_lines() -> None:
    from gateway.writers import json_text

    text = "a\u0085b\u2028c\u2029d\x0b\x0c\x1c\n\r中"
    encoded = json_text(text).decode()
    assert len(encoded.splitlines()) == 1
    assert json.loads(encoded) == text


def test_the_official_client(gw: RunningGateway) -> None:
    with openai.OpenAI(base_url=f"{gw.url}/v1", api_key="none", max_retries=0) as client:
        whole = client.chat.completions.create(model=MODEL, messages=MESSAGES, seed=5, max_tokens=20)
        stream = client.chat.completions.create(
            model=MODEL, messages=MESSAGES, seed=5, max_tokens=20, stream=True, stream_options={"include_usage": True}
        )
        chunks = list(stream)
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
        assert text == whole.choices[0].message.content
        assert chunks[-1].usage == whole.usage
        completion = client.completions.create(model=MODEL, prompt=["a", "b"], max_tokens=3)
        assert [choice.index for choice in completion.choices] == [0, 1]
        assert [model.id for model in client.models.list()] == [MODEL]
        with pytest.raises(openai.BadRequestError) as caught:
            client.completions.create(model=MODEL, prompt="x", max_tokens=0)
        assert caught.value.param == "max_tokens"
        with pytest.raises(openai.NotFoundError):
            client.models.retrieve("other")


def test_the_official_async_client_many_at_once(gw: RunningGateway) -> None:
    async def ask(client: openai.AsyncOpenAI, seed: int) -> tuple[int, str]:
        stream = await client.completions.create(
            model=MODEL, prompt=f"prompt {seed}", seed=seed, max_tokens=24, stream=True
        )
        return seed, "".join([chunk.choices[0].text async for chunk in stream])

    async def all_of_them() -> list[tuple[int, str]]:
        async with openai.AsyncOpenAI(base_url=f"{gw.url}/v1", api_key="none", max_retries=0) as client:
            return await asyncio.gather(*(ask(client, seed) for seed in range(24)))

    answers = dict(asyncio.run(all_of_them()))
    for submit in gw.mesh.submits:
        assert answers[submit.sampling.seed] == gw.decode(gw.expected(submit))
