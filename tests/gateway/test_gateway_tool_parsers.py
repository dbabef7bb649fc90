"""Tool calls out of a text, however it is cut: what is content, what is a call, and what only looks like one."""

from __future__ import annotations

import json
import random
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tool_templates import FAMILIES

from gateway.json_scan import JsonValue
from gateway.tool_calls import Event, Parsed, ToolParser, are_json, assemble, call_id
from gateway.tool_parsers import MARKERS, family_of, make_parser
from gateway.tools import Tool, ToolUse

TOOLS = tuple(Tool(name, None, None) for name in ("get_weather", "add", "f.x-1"))
AUTO = ToolUse(TOOLS, "auto")
HIDDEN = {"hermes": (), "llama3_json": MARKERS["llama3_json"], "mistral": MARKERS["mistral"]}
WEATHER = '{"city": "Paris }]\\"{", "days": [1, {"a": null}]}'


def parser(family: str, use: ToolUse = AUTO) -> ToolParser:
    return make_parser(family, use, HIDDEN[family])


def run(made: ToolParser, pieces: list[str]) -> list[Event]:
    events = [event for piece in pieces for event in made.feed(piece)]
    return events + made.finish()


def parse(family: str, text: str, use: ToolUse = AUTO) -> tuple[str, list[tuple[str, str]], bool]:
    made = parser(family, use)
    parsed = assemble(run(made, [text]))
    return parsed.content, [(call.name, call.arguments) for call in parsed.calls], made.broken


WELL_FORMED = [
    ("hermes", "just text < tool", "just text < tool", []),
    ("hermes", f'<tool_call>\n{{"name": "get_weather", "arguments": {WEATHER}}}\n</tool_call>', "",
     [("get_weather", WEATHER)]),
    ("hermes", 'Let me see. <tool_call>{"arguments": {"a": 1}, "name": "add"}</tool_call>\n\n'
     '<tool_call> {"name":"add","arguments":{}} </tool_call>\n', "Let me see. ", [("add", '{"a": 1}'), ("add", "{}")]),
    ("hermes", '\n\n<tool_call>{"name": "add", "id": [1, "}"], "arguments": {}}</tool_call> done', " done",
     [("add", "{}")]),
    ("hermes", '<tool_call>{"name": "add", "arguments": "{\\"a\\": \\"\\u00e9\\"}"}</tool_call>', "",
     [("add", '{"a": "é"}')]),
    ("hermes", '<tool_call>{"name": "add", "arguments": {}}', "", [("add", "{}")]),
    ("hermes", '<tool_call>{"name": "add", "arguments": {}}\n</tool_', "", [("add", "{}")]),
    ("llama3_json", "hello {", "hello {", []),
    ("llama3_json", f' {{"name": "get_weather", "parameters": {WEATHER}}}', "", [("get_weather", WEATHER)]),
    ("llama3_json", '<|python_tag|>{"type": "function", "name": "add", "parameters": {"a": 1}}; '
     '{"name": "f.x-1", "arguments": {}}', "", [("add", '{"a": 1}'), ("f.x-1", "{}")]),
    ("mistral", f'[TOOL_CALLS] [{{"name": "get_weather", "arguments": {WEATHER}}}, '
     '{"name": "add", "arguments": {}}]', "", [("get_weather", WEATHER), ("add", "{}")]),
    ("mistral", f'Sure.[TOOL_CALLS]get_weather[ARGS]{WEATHER}[TOOL_CALLS]add{{}}', "Sure.",
     [("get_weather", WEATHER), ("add", "{}")]),
    ("mistral", '[TOOL_CALLS]add[CALL_ID]abc[ARGS]{"a": 1}', "", [("add", '{"a": 1}')]),
    ("mistral", "a list [1, 2] and [TOOL", "a list [1, 2] and [TOOL", []),
]  # fmt: skip

MALFORMED = [
    ("hermes", '<tool_call>{"name": "add", "arguments": {}, }</tool_call>'),
    ("hermes", '<tool_call>{"name": "add"}</tool_call> x'),
    ("hermes", '<tool_call>{"arguments": {}}</tool_call>'),
    ("hermes", "<tool_call>no JSON</tool_call>"),
    ("hermes", '<tool_call>{"name": 5, "arguments": {}}'),
    ("hermes", '<tool_call>{"name": "add", "arguments": [1]}</tool_call>'),
    ("hermes", '<tool_call>{"name": "add", "arguments": {"a": [1}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "add", "argum'),
    ("hermes", '<tool_call>{"name": "add", "arguments": {"a": 1'),
    ("hermes", '<tool_call>{"name": "add", "arguments": {}} and more</tool_call>'),
    ("hermes", '<tool_call>{"name": "<tool_call>{"name": "add", "arguments": {}}</tool_call>'),
    ("hermes", "<tool_call><tool_call><tool_call>"),
    ("llama3_json", '{"name": "Bob", "age": 5}'),
    ("llama3_json", '{"name": "unknown", "parameters": {}}'),
    ("llama3_json", '{"name": "add", "parameters": {"a"'),
    ("llama3_json", "<|python_tag|>brave_search.call(query=\"x\")"),
    ("mistral", '[TOOL_CALLS] [{"name": "add"}]'),
    ("mistral", "[TOOL_CALLS]add me to the list"),
    ("mistral", "[TOOL_CALLS]"),
    ("mistral", '[TOOL_CALLS] [{"name": "add", "arguments": {}} {"name": "add", "arguments": {}}]'),
    ("mistral", '[TOOL_CALLS]add[ARGS]{"a": 1'),
]  # fmt: skip


@pytest.mark.parametrize(("family", "text", "content", "calls"), WELL_FORMED)
def test_calls_and_content(family: str, text: str, content: str, calls: list[tuple[str, str]]) -> None:
    assert parse(family, text) == (content, calls, False)


@pytest.mark.parametrize(("family", "text"), MALFORMED)
def test_malformed_and_half_finished_calls_are_told(family: str, text: str) -> None:
    _, _, broken = parse(family, text)
    assert broken


def test_what_is_no_call_is_content() -> None:
    assert parse("llama3_json", '{"name": "Bob", "age": 5}')[:2] == ('{"name": "Bob", "age": 5}', [])
    assert parse("hermes", "a <tool_call>nothing</tool_call> b")[:2] == ("a <tool_call>nothing</tool_call> b", [])
    # The text of special tokens is never shown.
    assert parse("llama3_json", "<|python_tag|>f()")[:2] == ("f()", [])
    assert parse("mistral", "x [TOOL_CALLS] 5")[:2] == ("x  5", [])


def test_an_answer_in_json_that_is_no_call_is_not_held_back() -> None:
    made = parser("llama3_json")
    assert made.feed('{"city": ') == [Event('{"city": ')]


def test_arguments_come_in_pieces_as_soon_as_the_name_is_known() -> None:
    made = parser("hermes")
    assert made.feed('<tool_call>{"name": "add", "arguments"') == []
    assert made.feed(': {"a": ') == [Event("", 0, "add"), Event('{"a": ', 0)]
    assert made.feed("1") == [Event("1", 0)]
    assert made.feed("}}</tool_call>") == [Event("}", 0)]
    assert made.finish() == []


def test_text_that_may_be_a_marker_is_held_and_nothing_else() -> None:
    made = parser("hermes")
    assert made.feed("so <tool") == [Event("so ")]
    assert made.feed("box>") == [Event("<toolbox>")]


def cut(text: str, places: list[int]) -> list[str]:
    ends = sorted({0, len(text), *(place % (len(text) + 1) for place in places)})
    return [text[start:end] for start, end in pairwise(ends)]


def joined(events: list[Event]) -> tuple[str, list[tuple[str, str]]]:
    parsed = assemble(events)
    return parsed.content, [(call.name, call.arguments) for call in parsed.calls]


TEXTS = [(family, text) for family, text, *_ in WELL_FORMED] + MALFORMED


@pytest.mark.parametrize(("family", "text"), TEXTS)
def test_however_the_text_is_cut_the_joined_events_are_the_same(family: str, text: str) -> None:
    whole = parser(family)
    expected = joined(run(whole, [text]))
    dice = random.Random(text)
    splits = [[*range(len(text))], *([dice.randrange(len(text) + 1) for _ in range(5)] for _ in range(20))]
    for places in splits:
        made = parser(family)
        assert joined(run(made, cut(text, places))) == expected
        assert made.broken == whole.broken


FRAGMENTS = st.sampled_from([
    "<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "<|python_tag|>", "{", "}", "[", "]", ",",
    ":", ";", '"', "\\", " ", "\n", '"name"', '"arguments"', '"parameters"', '"add"', "add", "text", "1",
    '{"name": "add", "arguments": {"a": 1}}', '{"name": "add", "parameters": {}}', '{"a": ["}"]}',
])  # fmt: skip


@given(st.sampled_from(sorted(MARKERS)), st.lists(FRAGMENTS, max_size=14).map("".join), st.lists(st.integers(0, 200)))
def test_any_text_is_split_alike(family: str, text: str, places: list[int]) -> None:
    whole, pieces = parser(family), parser(family)
    assert joined(run(whole, [text])) == joined(run(pieces, cut(text, places)))
    assert whole.broken == pieces.broken


JSON_OBJECTS = st.dictionaries(
    st.text(max_size=5),
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(max_size=8),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
        max_leaves=6,
    ),
    max_size=3,
)


def written(family: str, calls: list[tuple[str, Any]]) -> str:
    key = "parameters" if family == "llama3_json" else "arguments"
    objects = [json.dumps({"name": name, key: arguments}) for name, arguments in calls]
    if family == "hermes":
        return "\n".join(f"<tool_call>\n{text}\n</tool_call>" for text in objects)
    return "[TOOL_CALLS] [" + ", ".join(objects) + "]" if family == "mistral" else "; ".join(objects)


@given(
    st.sampled_from(sorted(MARKERS)),
    st.lists(st.tuples(st.sampled_from(["add", "get_weather"]), JSON_OBJECTS), min_size=1, max_size=3),
    st.lists(st.integers(0, 400)),
)
def test_what_a_family_writes_is_read(family: str, calls: list[tuple[str, Any]], places: list[int]) -> None:
    made = parser(family)
    parsed = assemble(run(made, cut(written(family, calls), places)))
    assert not made.broken
    assert parsed.content == ""
    assert [(call.name, json.loads(call.arguments)) for call in parsed.calls] == calls
    assert are_json(parsed.calls)


def test_a_forced_function_and_a_forced_list() -> None:
    named = make_parser("", ToolUse(TOOLS, "named", "add"))
    assert joined(run(named, ['{"a"', ": 1}"])) == ("", [("add", '{"a": 1}')])
    text = '[{"name": "add", "parameters": {"a": 1}}, {"name": "f.x-1", "parameters": {}}]'
    for places in ([], [*range(len(text))]):
        required = make_parser("hermes", ToolUse(TOOLS, "required"))
        assert joined(run(required, cut(text, places))) == ("", [("add", '{"a": 1}'), ("f.x-1", "{}")])


@given(st.recursive(st.none() | st.floats(allow_nan=False) | st.text(), lambda inner: st.lists(inner, max_size=3)))
def test_where_a_json_value_ends(tree: Any) -> None:
    text = json.dumps(tree)
    for behind in (",", "}", " "):
        value = JsonValue()
        at = 0
        for end in range(1, len(text) + 2):
            at = value.feed((text + behind)[:end], at)
        assert value.done
        assert at == len(text)


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_the_template_tells_the_family(family: str) -> None:
    assert family_of(FAMILIES[family][0]) == family


def test_templates_of_no_known_family() -> None:
    assert family_of("{{ messages }}") == ""
    assert family_of("<tool_call>\n<function=name>") == ""  # Qwen3-Coder's XML


def test_ids_of_calls() -> None:
    assert len(call_id("chatcmpl-1", 0, 0, short=True)) == 9
    assert call_id("chatcmpl-1", 0, 0, short=False).startswith("call_")
    places = [(answer, choice, call, short) for answer in "ab" for choice in range(3) for call in range(12)
              for short in (True, False)]  # fmt: skip
    assert len({call_id(*place) for place in places}) == len(places)
    assert call_id("a", 1, 2, True) == call_id("a", 1, 2, True)


def test_nothing_parsed() -> None:
    assert assemble([]) == Parsed("")
