"""The official ``openai`` package, sync and async, against a whole mesh."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from typing import Any, Literal

import openai
import pytest
from pydantic import BaseModel

pytestmark = pytest.mark.mesh

HELLO: list[Any] = [{"role": "user", "content": "hello"}]
SEEDED: dict[str, Any] = {"model": "m", "seed": 5, "max_tokens": 24}


class Answer(BaseModel):
    """Bounded, so that even random weights come to its end."""

    colour: Literal["red", "green", "blue"]
    sure: bool
    size: Literal[1, 2, 3]


@pytest.fixture(scope="module")
def client(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=url, api_key="unused", max_retries=0, timeout=60) as client:
        yield client


@pytest.fixture
def run(url: str) -> Callable[[Callable[[openai.AsyncOpenAI], Coroutine[Any, Any, None]]], None]:
    """Runs a coroutine function with an async client."""

    def run(use: Callable[[openai.AsyncOpenAI], Coroutine[Any, Any, None]]) -> None:
        async def main() -> None:
            async with openai.AsyncOpenAI(base_url=url, api_key="unused", max_retries=0, timeout=60) as client:
                await use(client)

        asyncio.run(main())

    return run


def joined(chunks: list[Any]) -> dict[int, str]:
    texts: dict[int, str] = {}
    for chunk in chunks:
        for choice in chunk.choices:
            piece = choice.text if hasattr(choice, "text") else choice.delta.content
            texts[choice.index] = texts.get(choice.index, "") + (piece or "")
    return texts


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["m"]
    assert client.models.retrieve("m").id == "m"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")


def test_completions_whole_and_streamed(client: openai.OpenAI) -> None:
    request = {**SEEDED, "prompt": ["one", "two"], "n": 2}
    whole = client.completions.create(**request)
    chunks = list(client.completions.create(**request, stream=True, stream_options={"include_usage": True}))
    assert [choice.index for choice in whole.choices] == [0, 1, 2, 3]
    assert joined(chunks) == {choice.index: choice.text for choice in whole.choices}
    assert whole.usage is not None and chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    ids = client.completions.create(model="m", prompt=[5, 6, 7], max_tokens=1)
    assert ids.usage is not None and ids.usage.prompt_tokens == 3


def test_chat_whole_and_streamed(client: openai.OpenAI) -> None:
    request = {**SEEDED, "messages": HELLO, "n": 2}
    whole = client.chat.completions.create(**request)
    assert [choice.message.role for choice in whole.choices] == ["assistant"] * 2
    chunks = list(client.chat.completions.create(**request, stream=True, stream_options={"include_usage": True}))
    assert joined(chunks) == {choice.index: choice.message.content for choice in whole.choices}
    assert chunks[-1].usage is not None and whole.usage is not None
    assert chunks[-1].usage.total_tokens == whole.usage.total_tokens
    ends = [choice.finish_reason for chunk in chunks for choice in chunk.choices if choice.finish_reason]
    assert sorted(ends) == sorted(choice.finish_reason for choice in whole.choices)


def test_the_streaming_helper_gathers_what_the_whole_answer_is(client: openai.OpenAI) -> None:
    request = {**SEEDED, "messages": HELLO, "extra_body": {"structured_outputs": {"regex": "[a-z ]{9,12}"}}}
    whole = client.chat.completions.create(**request)
    with client.chat.completions.stream(**request) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_completion()
    assert final.choices[0].message.content == whole.choices[0].message.content
    assert kinds >= {"chunk", "content.delta", "content.done"}


def numbered(index: int) -> dict[str, Any]:
    return {**SEEDED, "messages": [{"role": "user", "content": f"number {index}"}], "seed": index}


def test_async_many_at_once(run: Any) -> None:
    async def use(client: openai.AsyncOpenAI) -> None:
        async def streamed(index: int) -> str:
            stream = await client.chat.completions.create(**numbered(index), stream=True)
            return joined([chunk async for chunk in stream])[0]

        async def whole(index: int) -> str:
            answer = await client.chat.completions.create(**numbered(index))
            return answer.choices[0].message.content or ""

        together = await asyncio.gather(*(streamed(index) for index in range(16)))
        assert await asyncio.gather(*(whole(index) for index in range(16))) == together
        completion = await client.completions.create(model="m", prompt="x", max_tokens=3)
        assert completion.usage is not None and 1 <= completion.usage.completion_tokens <= 3
        assert [model.id async for model in client.models.list()] == ["m"]

    run(use)


def test_async_a_stream_that_is_closed_early(run: Any) -> None:
    async def use(client: openai.AsyncOpenAI) -> None:
        stream = await client.completions.create(model="m", prompt="x", max_tokens=1500, stream=True)
        chunks: AsyncIterator[Any] = aiter(stream)
        await anext(chunks)
        await stream.close()
        answer = await client.completions.create(model="m", prompt="y", max_tokens=2)
        assert answer.choices

    run(use)


def test_logprobs(client: openai.OpenAI) -> None:
    request = {**SEEDED, "messages": HELLO, "max_tokens": 6, "logprobs": True, "top_logprobs": 3}
    chat = client.chat.completions.create(**request)
    assert chat.choices[0].logprobs is not None and chat.choices[0].logprobs.content is not None
    content = chat.choices[0].logprobs.content
    assert chat.choices[0].finish_reason == "length" and len(content) == 6
    for entry in content:
        best = [top.logprob for top in entry.top_logprobs]
        assert len(best) == 3 and best == sorted(best, reverse=True) and best[0] >= entry.logprob <= 0
    streamed = [
        entry
        for chunk in client.chat.completions.create(**request, stream=True)
        for choice in chunk.choices
        for entry in (choice.logprobs and choice.logprobs.content) or []
    ]
    assert [entry.token for entry in streamed] == [entry.token for entry in content]
    completion = client.completions.create(**SEEDED, prompt="x", logprobs=2)
    logprobs = completion.choices[0].logprobs
    assert logprobs is not None and logprobs.tokens and logprobs.token_logprobs and logprobs.top_logprobs
    assert (
        len(logprobs.tokens)
        == len(logprobs.token_logprobs)
        == len(logprobs.top_logprobs)
        == len(logprobs.text_offset or [])
    )


def test_structured_output_is_parsed(client: openai.OpenAI) -> None:
    parsed = client.chat.completions.parse(**SEEDED | {"max_tokens": 200}, messages=HELLO, response_format=Answer)
    assert isinstance(parsed.choices[0].message.parsed, Answer)
    assert parsed.choices[0].finish_reason == "stop"
    with client.chat.completions.stream(
        **SEEDED | {"max_tokens": 200}, messages=HELLO, response_format=Answer
    ) as stream:
        assert stream.get_final_completion().choices[0].message.parsed == parsed.choices[0].message.parsed
    choice = client.chat.completions.create(
        **SEEDED, messages=HELLO, extra_body={"structured_outputs": {"choice": ["yes", "no"]}}
    )
    assert choice.choices[0].message.content in ("yes", "no")


def test_structured_output_that_is_cut_off_says_so(client: openai.OpenAI) -> None:
    with pytest.raises(openai.LengthFinishReasonError):
        client.chat.completions.parse(**SEEDED | {"max_tokens": 3}, messages=HELLO, response_format=Answer)


def test_errors_are_the_packages_own(client: openai.OpenAI, guarded_url: str) -> None:
    with pytest.raises(openai.BadRequestError) as bad:
        client.completions.create(model="m", prompt="x", max_tokens=0)
    assert (bad.value.param, bad.value.type) == ("max_tokens", "invalid_request_error")
    with pytest.raises(openai.BadRequestError) as too_long:
        client.completions.create(model="m", prompt=[5] * 4000)
    assert too_long.value.code == "context_length_exceeded"
    with pytest.raises(openai.NotFoundError) as missing:
        client.chat.completions.create(model="other", messages=HELLO)
    assert missing.value.code == "model_not_found"
    with openai.OpenAI(base_url=guarded_url, api_key="wrong", max_retries=0) as stranger:
        with pytest.raises(openai.AuthenticationError) as shut:
            stranger.models.list()
        assert shut.value.code == "invalid_api_key"


def test_time_outs_and_no_server(client: openai.OpenAI) -> None:
    with pytest.raises(openai.APITimeoutError):
        client.with_options(timeout=0.2).completions.create(
            model="m", prompt="x", max_tokens=1500, extra_body={"ignore_eos": True}
        )
    with socket.create_server(("127.0.0.1", 0)) as unused:
        port = unused.getsockname()[1]
    with (
        openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="x", max_retries=0) as nobody,
        pytest.raises(openai.APIConnectionError),
    ):
        nobody.models.list()


def test_a_429_is_retried_after_the_time_that_it_names(guarded_url: str) -> None:
    with openai.OpenAI(base_url=guarded_url, api_key="sesame", max_retries=0, timeout=60) as client:
        stream = client.completions.create(
            model="m", prompt="holds the place", max_tokens=1500, extra_body={"ignore_eos": True}, stream=True
        )
        next(iter(stream))
        with pytest.raises(openai.RateLimitError) as full:
            client.completions.create(model="m", prompt="x", max_tokens=1)
        wait_s = int(full.value.response.headers["retry-after"])
        assert 1 <= wait_s <= 60
        leaves = threading.Timer(0.2, stream.close)
        leaves.start()
        began = time.monotonic()
        answer = client.with_options(max_retries=3).completions.with_raw_response.create(
            model="m", prompt="x", max_tokens=1
        )
        assert answer.retries_taken >= 1 and time.monotonic() - began >= wait_s
        assert answer.parse().choices
        leaves.join()
