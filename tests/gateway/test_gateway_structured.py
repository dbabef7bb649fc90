"""Structured output at the gateway: the forms in which it is asked for, and what is refused before it can hurt."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from gateway_mesh import RunningGateway
from tiny_models import make_tokenizer

from gateway.config import GatewayConfig
from gateway.errors import ApiError
from gateway.grammar_check import GrammarCheck
from gateway.parameters import parse_chat, parse_completion
from gateway.structured import MAX_REGEX_SIZE
from shared.grammar import MAX_GRAMMAR_BYTES, decode_grammar

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name", "age"],
}
PROMPT = {"prompt": "x", "max_tokens": 4}


def parsed(**fields: Any) -> tuple[str, Any]:
    """(kind, value) of the grammar that a completion with ``fields`` asks for."""
    grammar = decode_grammar(parse_completion({**PROMPT, **fields}, GatewayConfig()).decoding.constraint.grammar)
    return grammar.kind, grammar.value


def named(schema: Any, **more: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, **more}}


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"response_format": {"type": "json_object"}}, ("json_object", None)),
        ({"response_format": named(SCHEMA)}, ("json_schema", SCHEMA)),
        ({"response_format": named(SCHEMA, strict=True, description="d")}, ("json_schema", SCHEMA)),
        ({"response_format": named(SCHEMA, strict=None)}, ("json_schema", SCHEMA)),
        ({"structured_outputs": {"json": SCHEMA}}, ("json_schema", SCHEMA)),
        ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, ("json_schema", SCHEMA)),
        ({"structured_outputs": {"json_object": True}}, ("json_object", None)),
        ({"structured_outputs": {"regex": "[a-z]+/"}}, ("regex", "[a-z]+/")),
        ({"structured_outputs": {"choice": ["yes", "no", "yes"]}}, ("choice", ["yes", "no"])),
        ({"structured_outputs": {"grammar": 'start: "a" | "b"', "regex": None}}, ("lark", 'start: "a" | "b"')),
        ({"guided_json": SCHEMA}, ("json_schema", SCHEMA)),
        ({"guided_regex": "a"}, ("regex", "a")),
        ({"guided_choice": ["a"]}, ("choice", ["a"])),
        ({"guided_grammar": 'start: "a"'}, ("lark", 'start: "a"')),
    ],
)
def test_the_forms_in_which_it_is_asked_for(fields: dict[str, Any], expected: tuple[str, Any]) -> None:
    assert parsed(**fields) == expected


def test_gbnf_is_translated() -> None:
    kind, text = parsed(structured_outputs={"grammar": 'root ::= "a" | "b"'})
    assert kind == "lark"
    assert "start:" in text


def test_free_text_has_no_grammar() -> None:
    for fields in ({}, {"response_format": {"type": "text"}}, {"response_format": None}, {"guided_json": None}):
        assert parse_completion({**PROMPT, **fields}, GatewayConfig()).decoding.constraint.grammar == ""


def test_the_grammar_goes_to_the_mesh() -> None:
    from shared.messages import ModelInfo

    decoding = parse_chat(
        {"messages": [{"role": "user", "content": "x"}], "response_format": named(SCHEMA), "n": 2, "stop": "z",
         "logprobs": True},
        GatewayConfig(),
    ).decoding  # fmt: skip
    sampling = decoding.bind(ModelInfo("m", 100, 50, 1), 10, 16)
    assert decode_grammar(sampling.grammar).value == SCHEMA


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": "json_object"}, "response_format"),
        ({"response_format": {}}, "response_format.type"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {"type": "structural_tag"}}, "response_format.type"),
        ({"response_format": {"type": "json_object", "x": 1}}, "response_format.x"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"response_format": named(None)}, "response_format.json_schema.schema"),
        ({"response_format": named([1])}, "response_format.json_schema.schema"),
        ({"response_format": named(SCHEMA, strict=1)}, "strict"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}}, "name"),
        ({"structured_outputs": []}, "structured_outputs"),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs"),
        ({"structured_outputs": {"regex": 5}}, "structured_outputs.regex"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
        ({"structured_outputs": {"choice": [1]}}, "structured_outputs.choice"),
        ({"structured_outputs": {"json": "{"}}, "structured_outputs.json"),
        ({"structured_outputs": {"regex": "a", "whitespace_pattern": " "}}, "structured_outputs.whitespace_pattern"),
        ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs"),
        ({"guided_choice": ["a"], "response_format": named(SCHEMA)}, "guided_choice"),
        ({"response_format": named(SCHEMA), "use_beam_search": True}, "use_beam_search"),
        ({"response_format": named(SCHEMA), "min_tokens": 1}, "min_tokens"),
        ({"response_format": named(SCHEMA), "ignore_eos": True}, "ignore_eos"),
    ],
)
def test_what_is_refused_is_named(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as caught:
        parse_completion({**PROMPT, **fields}, GatewayConfig())
    assert (caught.value.status, caught.value.param) == (400, param)


def nested(depth: int) -> Any:
    schema: Any = {"type": "integer"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}}
    return schema


CHAIN = {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}}
FORK = {"$ref": "#/$defs/a", "$defs": {"a": {"allOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/a"}]}}}
CUBE = {"allOf": [{"anyOf": [{"properties": {f"a{i}": {}}}, {"properties": {f"b{i}": {}}}]} for i in range(20)]}
HOSTILE: dict[str, dict[str, Any]] = {
    "deep": {"response_format": named(nested(33))},
    "deeper": {"response_format": named(nested(400))},
    "references in a circle": {"response_format": named(CHAIN)},
    "references that double": {"response_format": named(FORK)},
    "an exponential product": {"response_format": named(CUBE)},
    "a megabyte": {"response_format": named({"type": "object", "description": "x" * (1 << 20)})},
    "a huge enum": {"response_format": named({"enum": [f"value {number}" for number in range(50_000)]})},
    "many properties": {"response_format": named({"properties": {f"p{number}": {} for number in range(5000)}})},
    "remote": {"response_format": named({"$ref": "http://127.0.0.1:1/schema.json"})},
    "unsatisfiable": {"response_format": named({"type": "object", "properties": {"a": False}, "required": ["a"]})},
    "not supported": {"response_format": named({"not": {"type": "string"}})},
    "a schema's pattern": {"response_format": named({"type": "string", "pattern": "^((a{1,99}){1,99}){1,99}$"})},
    "nested repeats": {"structured_outputs": {"regex": "((((a{1,30}){1,30}){1,30}){1,30}){1,30}"}},
    "a product of repeats": {"structured_outputs": {"regex": "x(a{1000}){1000}"}},
    "a long repeat": {"structured_outputs": {"regex": "a{1000000000}"}},
    "a long expression": {"structured_outputs": {"regex": "a" * 5000}},
    "look-around": {"structured_outputs": {"regex": "(?=a)b"}},
    "no expression": {"structured_outputs": {"regex": "("}},
    "intersections": {"structured_outputs": {"grammar": "start: A\nA: /.*a.{30}/ & /.*b.{35}/ & ~/.*c.{40}/"}},
    "no grammar": {"structured_outputs": {"grammar": "start: ("}},
    "deep GBNF": {"structured_outputs": {"grammar": "root ::= " + "(" * 3000 + '"a"' + ")" * 3000}},
    "long GBNF": {"structured_outputs": {"grammar": "root ::= " + '"a" ' * 9000}},
    "many choices": {"structured_outputs": {"choice": [str(number) for number in range(5000)]}},
    "long choices": {"structured_outputs": {"choice": ["x" * MAX_GRAMMAR_BYTES]}},
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_grammars_are_refused_at_once(http: httpx.Client, gw: RunningGateway, name: str) -> None:
    began_s = time.monotonic()
    reply = http.post("/v1/completions", content=json.dumps({**PROMPT, **HOSTILE[name]}))
    took_s = time.monotonic() - began_s
    assert reply.status_code == 400, reply.text
    error = reply.json()["error"]
    # The field is named, but where the body as a whole was refused.
    assert (error["param"] or "response_format").startswith(next(iter(HOSTILE[name])))
    assert 0 < len(error["message"]) < 600
    assert "\n" not in error["message"]
    assert took_s < 1
    assert not gw.mesh.submits


@pytest.mark.parametrize(
    "constraint",
    [
        {"regex": "|".join(f".*{char}.{{20}}.*" for char in "abcdefghijkl")},
        {"regex": "(.*a.{40}b.*)(.*c.{30}d.*)(.*e.{30}f.*)"},
        {"grammar": "start: e\ne: e e | e e e | /[a-z]/ | /.b/"},
    ],
)
def test_what_explodes_with_the_vocabulary_is_served_or_refused_at_once(
    http: httpx.Client, constraint: dict[str, Any]
) -> None:
    began_s = time.monotonic()
    reply = http.post("/v1/completions", json={**PROMPT, "structured_outputs": constraint})
    assert reply.status_code in (200, 400)
    assert time.monotonic() - began_s < 1


def test_workers_that_take_no_grammars_are_told_of_with_a_400(http: httpx.Client, gw: RunningGateway) -> None:
    gw.mesh.queue = {"grammars": False}
    gw.until(lambda: not gw.takes_grammars())
    answer = http.post("/v1/completions", json={**PROMPT, "structured_outputs": {"regex": "a+"}})
    error = answer.json()["error"]
    assert (answer.status_code, error["param"], "retry-after" in answer.headers) == (400, "structured_outputs", False)
    assert "--simulate" in error["message"] and not gw.mesh.submits
    assert http.post("/v1/completions", json={**PROMPT, "max_tokens": 2}).status_code == 200


def test_others_go_on_while_grammars_are_tried(http: httpx.Client, gw: RunningGateway) -> None:
    """Terminals inside one another defeat the checks of the text; the engine needs a second or more for each."""
    slow = [
        {**PROMPT, "structured_outputs": {"grammar": f'start: "x{number}" A\nA: B{{100}}\nB: C{{100}}\nC: "a"'}}
        for number in range(4)
    ]
    with ThreadPoolExecutor(4) as pool:
        replies = [pool.submit(http.post, "/v1/completions", json=body) for body in slow]
        while not all(reply.done() for reply in replies):
            assert http.post("/v1/completions", json=PROMPT).status_code == 200
    assert {reply.result().status_code for reply in replies} <= {200, 400}


@pytest.fixture
def check() -> Iterator[GrammarCheck]:
    made = GrammarCheck(make_tokenizer().backend_tokenizer.to_str(), 0)
    yield made
    made.close()


@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": {"type": "json_object"}}, {"response_format": named(SCHEMA)},
        {"response_format": named({"$ref": "#/$defs/n", "$defs": {"n": {"type": "object", "properties": {
            "next": {"$ref": "#/$defs/n"}}}}})},
        {"response_format": named({"type": "array", "minItems": 1, "maxItems": 1000, "items": {"type": "number"}})},
        {"response_format": named({"type": "string", "format": "email", "maxLength": 10_000})},
        {"response_format": named({"enum": [f"value {number}" for number in range(900)]})},
        {"response_format": named({"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(100)},
                                   "required": [f"p{i}" for i in range(100)]})},
        {"structured_outputs": {"regex": r"\d{4}-\d{2}-\d{2}T\d{2}:\d{2}:\d{2}(\.\d{1,9})?(Z|[+-]\d{2}:\d{2})"}},
        {"structured_outputs": {"regex": r"(\w+\s){1,200}"}},
        {"structured_outputs": {"choice": ["a", "é😀", "\"\\\n"]}},
        {"structured_outputs": {"grammar": 'start: "(" start ")" | "x"'}},
        {"structured_outputs": {"grammar": 'root ::= expr\nexpr ::= [0-9]+ ("+" expr)?'}},
    ],
)  # fmt: skip
def test_ordinary_grammars_pass(check: GrammarCheck, fields: dict[str, Any]) -> None:
    assert check.verdict(parse_completion({**PROMPT, **fields}, GatewayConfig()).decoding.constraint.grammar) == ""


def test_keywords_that_the_engine_lacks_are_named(check: GrammarCheck) -> None:
    fields = {"response_format": named({"properties": {"a": {"not": {}, "uniqueItems": True}}})}
    verdict = check.verdict(parse_completion({**PROMPT, **fields}, GatewayConfig()).decoding.constraint.grammar)
    assert verdict == "keywords that are not supported: not, uniqueItems"


def test_a_repeat_up_to_the_limit_is_taken() -> None:
    parsed(structured_outputs={"regex": f"([ab]c){{{MAX_REGEX_SIZE // 2}}}"})
    with pytest.raises(ApiError):
        parsed(structured_outputs={"regex": f"([ab]c){{{MAX_REGEX_SIZE // 4}}}{{3}}"})


def test_a_verdict_is_kept(http: httpx.Client, gw: RunningGateway, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    verdict = gw.tokenizer.grammars.verdict

    def counted(grammar: str) -> str:
        asked.append(grammar)
        return verdict(grammar)

    monkeypatch.setattr(gw.tokenizer.grammars, "verdict", counted)
    for pattern, status in (("ab+c", 200), ("(?<=x)y", 400)):
        for _ in range(3):
            reply = http.post("/v1/completions", json={**PROMPT, "structured_outputs": {"regex": pattern}})
            assert reply.status_code == status
    assert len(asked) == 2
