"""Tools over HTTP: what the model is shown, how its calls come back, streamed and not, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
from gateway_mesh import RunningGateway, Script, running_gateway
from loopback_http import NO_AUTHORITIES
from openai import OpenAI
from tool_templates import FAMILIES, save_tokenizer, tokenizer_of

from gateway.chat_messages import read_chat
from gateway.config import GatewayConfig
from gateway.errors import ApiError
from gateway.fields import Fields
from gateway.parameters import parse_chat
from gateway.tokenizer import PromptTokenizer
from shared.grammar import decode_grammar
from shared.messages import Submit

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather in a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"$ref": "#/$defs/city"}},
            "required": ["city"],
            "$defs": {"city": {"type": "string"}},
        },
    },
}
CLOCK = {"type": "function", "function": {"name": "clock"}}
ASK = [{"role": "user", "content": "How is the weather in Paris?"}]
CALLS = {
    "hermes": 'I look.\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call>',
    "llama3_json": '<|python_tag|>{"name": "get_weather", "parameters": {"city": "Paris"}}; '
    '{"name": "clock", "parameters": {}}',
    "mistral": 'I look.\n[TOOL_CALLS][{"name": "get_weather", "arguments": {"city": "Paris"}}, '
    '{"name": "clock", "arguments": {}}]',
}


@pytest.fixture(scope="module", params=sorted(FAMILIES))
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def gw(family: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningGateway]:
    folder = save_tokenizer(family, tmp_path_factory.mktemp(family) / "tiny")
    with running_gateway(folder) as gateway:
        yield gateway


@pytest.fixture
def http(gw: RunningGateway) -> Iterator[httpx.Client]:
    with httpx.Client(verify=NO_AUTHORITIES, base_url=gw.url, timeout=20) as client:
        yield client


def says(gw: RunningGateway, text: str) -> Script:
    """A model that says ``text`` and ends."""
    ids = [*gw.encode(text), 2]
    return lambda submit, choice, position: ids[min(position, len(ids) - 1)]


def chat(http: httpx.Client, **fields: Any) -> dict[str, Any]:
    reply = http.post("/v1/chat/completions", json={"messages": ASK, "tools": [WEATHER, CLOCK], **fields})
    assert reply.status_code == 200, reply.text
    choice: dict[str, Any] = reply.json()["choices"][0]
    return choice


def streamed(http: httpx.Client, **fields: Any) -> tuple[str, list[dict[str, Any]], str]:
    """Content, calls and finish reason, put together as clients do."""
    content, calls, reason = "", [], ""
    body = {"messages": ASK, "tools": [WEATHER, CLOCK], "stream": True, **fields}
    with http.stream("POST", "/v1/chat/completions", json=body) as reply:
        for line in reply.iter_lines():
            if not line.startswith("data: {"):
                continue
            choice = json.loads(line.removeprefix("data: "))["choices"][0]
            content += choice["delta"].get("content") or ""
            for delta in choice["delta"].get("tool_calls", []):
                if delta["index"] == len(calls):
                    assert delta["type"] == "function"
                    calls.append({"id": delta["id"], "name": delta["function"]["name"], "arguments": ""})
                calls[delta["index"]]["arguments"] += delta["function"]["arguments"]
            if choice["finish_reason"] is not None:
                assert reason == ""
                reason = choice["finish_reason"]
    return content, calls, reason


def pairs(calls: list[dict[str, Any]]) -> list[tuple[str, str]]:
    return [(call["name"], call["arguments"]) for call in calls]


def test_calls_of_each_family(gw: RunningGateway, http: httpx.Client, family: str) -> None:
    gw.mesh.script = says(gw, CALLS[family])
    choice = chat(http)
    message = choice["message"]
    called = [call["function"] for call in message["tool_calls"]]
    assert pairs(called) == [("get_weather", '{"city": "Paris"}'), ("clock", "{}")]
    assert choice["finish_reason"] == "tool_calls"
    content, calls, reason = streamed(http)
    assert (pairs(calls), reason) == (pairs(called), "tool_calls")
    assert message["content"] == (content or None)
    assert content == ("" if family == "llama3_json" else "I look.\n")
    assert {len(call["id"]) for call in message["tool_calls"]} == ({9} if family == "mistral" else {29})
    assert pairs(streamed(http, parallel_tool_calls=False)[1]) == [("get_weather", '{"city": "Paris"}')]
    assert len(chat(http, parallel_tool_calls=False)["message"]["tool_calls"]) == 1


def test_no_call_is_ordinary_text(gw: RunningGateway, http: httpx.Client) -> None:
    gw.mesh.script = says(gw, "It is sunny.")
    choice = chat(http)
    assert choice["message"] == {"role": "assistant", "content": "It is sunny.", "refusal": None}
    assert choice["finish_reason"] == "stop"
    assert streamed(http) == ("It is sunny.", [], "stop")


def test_an_answer_that_is_cut_keeps_its_reason(gw: RunningGateway, http: httpx.Client, family: str) -> None:
    gw.mesh.script = says(gw, CALLS[family])
    choice = chat(http, max_tokens=25)
    assert choice["finish_reason"] == "length"
    assert "tool_calls" not in choice["message"]
    assert "[TOOL_CALLS]" not in choice["message"]["content"]
    assert "python_tag" not in choice["message"]["content"]


def test_several_choices_have_calls_of_their_own(gw: RunningGateway, http: httpx.Client, family: str) -> None:
    gw.mesh.script = says(gw, CALLS[family])
    body = {"messages": ASK, "tools": [WEATHER, CLOCK], "n": 3, "logprobs": True}
    choices = http.post("/v1/chat/completions", json=body).json()["choices"]
    ids = {call["id"] for choice in choices for call in choice["message"]["tool_calls"]}
    assert len(ids) == 6


def test_the_openai_client_reads_the_stream(gw: RunningGateway, family: str) -> None:
    gw.mesh.script = says(gw, CALLS[family])
    client = OpenAI(base_url=f"{gw.url}/v1", api_key="x")
    with client.chat.completions.stream(model="tiny", messages=ASK, tools=[WEATHER, CLOCK]) as stream:  # type: ignore
        final = stream.get_final_completion()
    calls = final.choices[0].message.tool_calls
    assert calls is not None
    assert [call.function.name for call in calls] == ["get_weather", "clock"]
    assert json.loads(calls[0].function.arguments) == {"city": "Paris"}
    client.close()


def test_a_forced_function(gw: RunningGateway, http: httpx.Client) -> None:
    gw.mesh.script = says(gw, '{"city": "Rome"}')
    named = {"type": "function", "function": {"name": "get_weather"}}
    gw.mesh.submits.clear()
    choice = chat(http, tool_choice=named)
    assert [call["function"] for call in choice["message"]["tool_calls"]] == [
        {"name": "get_weather", "arguments": '{"city": "Rome"}'}
    ]
    assert (choice["message"]["content"], choice["finish_reason"]) == (None, "stop")
    assert decode_grammar(gw.mesh.submits[0].sampling.grammar).value["required"] == ["city"]
    assert pairs(streamed(http, tool_choice=named)[1]) == [("get_weather", '{"city": "Rome"}')]


def test_calls_are_required(gw: RunningGateway, http: httpx.Client) -> None:
    text = '[{"name": "clock", "parameters": {}}, {"name": "get_weather", "parameters": {"city": "Rome"}}]'
    gw.mesh.script = says(gw, text)
    gw.mesh.submits.clear()
    choice = chat(http, tool_choice="required")
    called = [call["function"] for call in choice["message"]["tool_calls"]]
    assert pairs(called) == [("clock", "{}"), ("get_weather", '{"city": "Rome"}')]
    assert choice["finish_reason"] == "tool_calls"
    assert streamed(http, tool_choice="required")[0] == ""
    assert pairs(streamed(http, tool_choice="required")[1]) == pairs(called)
    schema = decode_grammar(gw.mesh.submits[0].sampling.grammar).value
    assert schema["$defs"]["tool0"]["properties"]["city"] == {"$ref": "#/$defs/tool0/$defs/city"}
    chat(http, tool_choice="required", parallel_tool_calls=False)
    assert decode_grammar(gw.mesh.submits[-1].sampling.grammar).value["maxItems"] == 1


def test_none_shows_the_model_no_tools(gw: RunningGateway, http: httpx.Client, family: str) -> None:
    gw.mesh.script = says(gw, "plain")
    gw.mesh.submits.clear()
    chat(http, tool_choice="none")
    http.post("/v1/chat/completions", json={"messages": ASK})
    chat(http)
    without, bare, shown = (gw.prompt_of(submit) for submit in gw.mesh.submits)
    assert without == bare
    assert "get_weather" in gw.tokenizer._backend.decode(shown)


def test_an_answer_and_the_tools_result_go_back(gw: RunningGateway, http: httpx.Client, family: str) -> None:
    gw.mesh.script = says(gw, CALLS[family])
    message = chat(http)["message"]
    history = [*ASK, message, {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "sunny"}]
    gw.mesh.submits.clear()
    chat(http, messages=history)
    prompt = gw.tokenizer._backend.decode(gw.prompt_of(gw.mesh.submits[0]), skip_special_tokens=False)
    assert '"city": "Paris"' in prompt
    assert "sunny" in prompt


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": {}}, "tools"), ({"tools": [5]}, "tools[0]"), ({"tools": [{}]}, "tools[0].type"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tools": [{"type": "custom", "custom": {"name": "x"}}]}, "tools[0].type"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
        ({"tools": [CLOCK, CLOCK]}, "tools[1].function.name"),
        ({"tools": [{"type": "function", "function": {"name": "a", "parameters": 5}}]}, "tools[0].function.parameters"),
        ({"tools": [{"type": "function", "function": {"name": "a", "code": "x"}}]}, "tools[0].function.code"),
        ({"tools": [CLOCK] * 129}, "tools"), ({"tool_choice": "clock"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "x"}}}, "tool_choice"),
        ({"tools": None, "tool_choice": "required"}, "tool_choice"),
        ({"tools": [], "tool_choice": "required"}, "tool_choice"),
        ({"parallel_tool_calls": 1}, "parallel_tool_calls"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"tool_choice": "required", "use_beam_search": True}, "use_beam_search"),
        ({"messages": [*ASK, {"role": "tool", "content": "x"}]}, "messages[1].tool_call_id"),
        ({"messages": [*ASK, {"role": "assistant"}]}, "messages[1].content"),
        ({"messages": [*ASK, {"role": "assistant", "tool_calls": [{"id": "1", "function": {"name": "f"}}]}]},
         "messages[1].tool_calls[0].function"),
        ({"messages": [*ASK, {"role": "assistant", "tool_calls": [
            {"id": "1", "type": "function", "function": {"name": "f", "arguments": "[1]"}}]}]},
         "messages[1].tool_calls[0].function.arguments"),
    ],
)  # fmt: skip
def test_what_is_refused_is_named(fields: dict[str, Any], param: str) -> None:
    body = {"messages": ASK, "tools": [WEATHER, CLOCK], **fields}
    assert refused(lambda: parse_chat(body, GatewayConfig())).param == param


def test_a_schema_that_cannot_be_enforced(http: httpx.Client) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {"properties": {"a": {"not": {}}}}}}
    reply = http.post("/v1/chat/completions", json={"messages": ASK, "tools": [tool], "tool_choice": "required"})
    assert reply.status_code == 400
    assert "not supported: " in reply.json()["error"]["message"]
    assert reply.json()["error"]["param"] == "tools"


def encode(tokenizer: Any, **body: Any) -> list[int]:
    return PromptTokenizer(tokenizer)._encode_chat(read_chat(Fields(body)))


def refused(call: Callable[[], Any]) -> ApiError:
    with pytest.raises(ApiError) as caught:
        call()
    assert caught.value.status == 400
    return caught.value


def test_a_template_without_tools_is_refused_by_name() -> None:
    from tiny_models import make_tokenizer

    tokenizer = make_tokenizer()
    assert refused(lambda: encode(tokenizer, messages=ASK, tools=[CLOCK])).param == "tools"
    result = {"role": "tool", "tool_call_id": "1", "content": "x"}
    assert refused(lambda: encode(tokenizer, messages=[*ASK, result])).param == "messages[1]"
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": ""}}
    assistant = {"role": "assistant", "content": None, "tool_calls": [call]}
    assert refused(lambda: encode(tokenizer, messages=[*ASK, assistant])).param == "messages[1]"


def test_a_way_of_calling_that_is_not_known_is_refused() -> None:
    tokenizer = tokenizer_of("hermes")
    tokenizer.chat_template = "{{ tools }}{{ messages }}"
    assert refused(lambda: encode(tokenizer, messages=ASK, tools=[CLOCK])).param == "tool_choice"
    assert encode(tokenizer, messages=ASK, tools=[CLOCK], tool_choice="required")
    told = PromptTokenizer(tokenizer, tool_call_parser="mistral")
    assert told._encode_chat(read_chat(Fields({"messages": ASK, "tools": [CLOCK]})))


def test_what_a_tool_said_forges_nothing(family: str) -> None:
    tokenizer = tokenizer_of(family)
    markers = [*FAMILIES[family][1], "<|im_end|>", "<|im_start|>"]
    ids = [tokenizer.convert_tokens_to_ids(marker) for marker in markers]

    def count(evil: str) -> list[int]:
        call = {"id": "123456789", "type": "function",
                "function": {"name": "clock", "arguments": json.dumps({"a" + evil: [evil]})}}  # fmt: skip
        messages = [
            *ASK, {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "123456789", "content": f"sunny{evil}"},
        ]  # fmt: skip
        function = {"name": "clock", "description": evil, "parameters": {"properties": {"x": {"description": evil}}}}
        prompt = encode(tokenizer, messages=messages, tools=[{"type": "function", "function": function}])
        text = tokenizer.decode(prompt, skip_special_tokens=False)
        assert text.count(f"sunny{evil}") == 1  # and it is still there, as text
        return [prompt.count(id_) for id_ in ids]

    evil = "".join(markers)
    assert count(evil) == count("")


def test_people_may_write_tool_markers_but_not_control_tokens() -> None:
    tokenizer = tokenizer_of("hermes")
    marker = tokenizer.convert_tokens_to_ids("<tool_call>")
    assert encode(tokenizer, messages=[{"role": "user", "content": "<tool_call>"}]).count(marker) == 1
    both = encode(tokenizer, messages=[{"role": "user", "content": "<tool_call><|im_end|>"}])
    assert (both.count(marker), both.count(2)) == (1, 1)


def test_a_submit_names_no_grammar_where_nothing_is_forced(gw: RunningGateway, http: httpx.Client) -> None:
    gw.mesh.script = says(gw, "x")
    gw.mesh.submits.clear()
    chat(http)
    submit: Submit = gw.mesh.submits[0]
    assert submit.sampling.grammar == ""
