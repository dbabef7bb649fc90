"""Tool calls through the official clients: ``openai`` and LangChain."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Literal

import openai
import pytest
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel

pytestmark = pytest.mark.mesh

HELLO: list[Any] = [{"role": "user", "content": "hello"}]
SEEDED: dict[str, Any] = {"model": "m", "seed": 5, "max_tokens": 200}

WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Paris", "Rome"]}, "celsius": {"type": "boolean"}},
            "required": ["city", "celsius"],
            "additionalProperties": False,
        },
        "strict": True,
    },
}


@tool
def get_weather(city: Literal["Paris", "Rome"]) -> str:
    """The weather of a city."""
    return f"rain in {city}"


class Answer(BaseModel):
    """An answer."""

    colour: Literal["red", "green", "blue"]
    sure: bool


@pytest.fixture(scope="module")
def client(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=url, api_key="unused", max_retries=0, timeout=60) as client:
        yield client


@pytest.fixture
def chat(url: str) -> ChatOpenAI:
    options: dict[str, Any] = {"api_key": "unused", "max_retries": 0, "timeout": 60}
    return ChatOpenAI(model="m", base_url=url, temperature=1, seed=3, max_tokens=200, **options)


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "get_weather"}}], ids=str)
def test_tools(client: openai.OpenAI, choice: Any) -> None:
    request = {**SEEDED, "messages": HELLO, "tools": [WEATHER], "tool_choice": choice,
               "parallel_tool_calls": False}  # fmt: skip
    whole = client.chat.completions.create(**request)
    message = whole.choices[0].message
    assert whole.choices[0].finish_reason in ("tool_calls", "stop") and message.tool_calls
    call = message.tool_calls[0]
    assert call.type == "function" and call.function.name == "get_weather" and call.id
    arguments = json.loads(call.function.arguments)
    assert arguments["city"] in ("Paris", "Rome") and isinstance(arguments["celsius"], bool)

    with client.chat.completions.stream(**request) as stream:
        final = stream.get_final_completion()
    streamed = final.choices[0].message.tool_calls
    assert streamed and [(one.function.name, one.function.arguments) for one in streamed] == [
        (one.function.name, one.function.arguments) for one in message.tool_calls
    ]
    assert final.choices[0].finish_reason == whole.choices[0].finish_reason

    result = {"role": "tool", "tool_call_id": call.id, "content": "12 degrees"}
    history = [*HELLO, message.model_dump(exclude_none=True), result]
    answer = client.chat.completions.create(
        **SEEDED | {"max_tokens": 20}, messages=history, tools=[WEATHER], tool_choice="none"
    )
    assert answer.choices[0].message.content is not None


def test_tools_are_parsed_into_models(client: openai.OpenAI) -> None:
    class Paint(BaseModel):
        colour: Literal["red", "green"]

    parsed = client.chat.completions.parse(
        **SEEDED, messages=HELLO, tools=[openai.pydantic_function_tool(Paint)],
        tool_choice="required", parallel_tool_calls=False,
    )  # fmt: skip
    assert parsed.choices[0].message.tool_calls
    assert isinstance(parsed.choices[0].message.tool_calls[0].function.parsed_arguments, Paint)


def test_bound_tools_are_called(chat: ChatOpenAI) -> None:
    # Strict: no properties beyond the declared ones, of which random weights would not come to an end.
    bound = chat.bind_tools([get_weather], tool_choice="get_weather", strict=True)
    answer = bound.invoke("what is the weather in Rome?")
    assert isinstance(answer, AIMessage)
    (call,) = answer.tool_calls
    assert call["name"] == "get_weather" and call["args"]["city"] in ("Paris", "Rome")
    result = get_weather.invoke(call)
    assert isinstance(result, ToolMessage)
    unforced = chat.bind_tools([get_weather], tool_choice="none")
    assert unforced.invoke([HumanMessage("what is the weather?"), answer, result]) is not None


def test_structured_output_by_a_call(chat: ChatOpenAI) -> None:
    assert isinstance(chat.with_structured_output(Answer, method="function_calling").invoke("a colour"), Answer)
