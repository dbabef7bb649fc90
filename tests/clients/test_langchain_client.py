"""LangChain's ``ChatOpenAI`` against a whole mesh."""

from __future__ import annotations

import asyncio
from typing import Any, Literal

import pytest
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage
from langchain_openai import ChatOpenAI
from pydantic import BaseModel

pytestmark = pytest.mark.mesh


class Answer(BaseModel):
    """An answer."""

    colour: Literal["red", "green", "blue"]
    sure: bool


@pytest.fixture
def chat(url: str) -> ChatOpenAI:
    options: dict[str, Any] = {"api_key": "unused", "max_retries": 0, "timeout": 60}
    return ChatOpenAI(model="m", base_url=url, temperature=1, seed=3, max_tokens=200, **options)


def test_invoke(chat: ChatOpenAI) -> None:
    messages = [SystemMessage("be brief"), HumanMessage("hello")]
    answer = chat.invoke(messages)
    assert isinstance(answer, AIMessage) and isinstance(answer.content, str) and answer.content
    assert answer.usage_metadata is not None and answer.usage_metadata["output_tokens"] > 0
    assert answer.response_metadata["finish_reason"] in ("stop", "length")
    assert chat.invoke(messages).content == answer.content
    again = chat.invoke([*messages, answer, HumanMessage([{"type": "text", "text": "and?"}])])
    assert again.content


def test_stream_is_what_invoke_gives(chat: ChatOpenAI) -> None:
    whole = chat.invoke("hello")
    chunks = list(chat.stream("hello", stream_usage=True))
    assert "".join(str(chunk.content) for chunk in chunks) == whole.content
    gathered = chunks[0]
    for chunk in chunks[1:]:
        gathered += chunk
    assert gathered.usage_metadata is not None and whole.usage_metadata is not None
    assert gathered.usage_metadata["output_tokens"] == whole.usage_metadata["output_tokens"]


def test_batch_keeps_its_order(chat: ChatOpenAI) -> None:
    prompts = [f"number {index}" for index in range(6)]
    assert [answer.content for answer in chat.batch(prompts)] == [chat.invoke(prompt).content for prompt in prompts]


def test_async(chat: ChatOpenAI) -> None:
    async def use() -> None:
        whole = await chat.ainvoke("hello")
        assert "".join([str(chunk.content) async for chunk in chat.astream("hello")]) == whole.content

    asyncio.run(use())


def test_structured_output(chat: ChatOpenAI) -> None:
    assert isinstance(chat.with_structured_output(Answer, method="json_schema").invoke("a colour"), Answer)
