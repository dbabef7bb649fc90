"""The OpenAPI document against what it describes: the parsers, the routes, real answers, and docs/api.md."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import jsonschema_rs
import pytest
from gateway_mesh import MAX_MODEL_LEN, MODEL, VOCAB_SIZE, RunningGateway, running_gateway
from loopback_http import NO_AUTHORITIES
from starlette.routing import Route

from gateway.app import make_app
from gateway.config import GatewayConfig
from gateway.errors import ApiError
from gateway.fields import Fields
from gateway.openapi import document
from gateway.parameters import HARMLESS, NEUTRAL, parse_chat, parse_completion, parse_generate
from gateway.request_schemas import ANSWERING, body_schema, fields
from gateway.text_routes import parse_detokenize, parse_tokenize
from shared.messages import ModelInfo

LIMITS = GatewayConfig(max_n=8, max_prompts=4, max_choices=32)
INFO = ModelInfo(MODEL, MAX_MODEL_LEN, VOCAB_SIZE, 1)
TABLE = fields(LIMITS, INFO)
CHAT = {"messages": [{"role": "user", "content": "x"}]}
Parser = Callable[[dict[str, Any]], Any]
PARSERS: dict[str, tuple[Parser, dict[str, Any]]] = {
    "completions": (lambda body: parse_completion(body, LIMITS), {"prompt": "x"}),
    "chat": (lambda body: parse_chat(body, LIMITS), CHAT),
    "generate": (lambda body: parse_generate(body, LIMITS), {"prompt": "x"}),
    "tokenize": (parse_tokenize, {"prompt": "x"}),
    "tokenize chat": (parse_tokenize, CHAT),
    "detokenize": (parse_detokenize, {"tokens": [5]}),
}


def own(endpoint: str) -> dict[str, Any]:
    return {field.name: field for field in TABLE if endpoint in field.endpoints}


@pytest.mark.parametrize("endpoint", PARSERS)
def test_the_table_has_exactly_what_the_parser_reads(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    parse, body = PARSERS[endpoint]
    read: set[str] = set()
    raw = Fields.raw

    def recording(self: Fields, name: str) -> Any:
        if self._body is body:
            read.add(name)
        return raw(self, name)

    monkeypatch.setattr(Fields, "raw", recording)
    parse(body)
    asked = {"prompt", "messages"} if endpoint.startswith("tokenize") else set()  # which of the two it is
    assert read - asked == set(own(endpoint)) - asked


@pytest.mark.parametrize("endpoint", PARSERS)
def test_a_name_is_there_once(endpoint: str) -> None:
    names = [field.name for field in TABLE if endpoint in field.endpoints]
    assert len(names) == len(set(names))


VALUES: list[Any] = [
    True, False, 0, 1, -1, 2, 3, 20, 21, 100, 101, -100, -101, 0.5, -0.5, 1.5, 2.5, -2.5, 10.5, 2**31, 2**31 + 1,
    2**32, 2**63, -(2**63) - 1, 1e300, "", "x", "5", "auto", "x" * 257, "x" * 1025, [], [1], ["x"], [""], [True], [1.5],
    [-1], [[]], [[1]], [["x"]], ["x"] * 17, [1] * 257, [{}], {}, {"x": 1}, {"1": 1}, {"1": 101}, {"01": 1}, {"1": "x"},
    {"include_usage": True}, {"include_usage": 1}, {"usage": True}, {"enable_thinking": True}, {"X": True},
    {"x": "a b"},
    {"type": "text"}, {"type": "x"}, [{"role": "user", "content": "x"}], [{"role": "user"}], [{"content": "x"}],
    [{"role": "x", "content": "x"}], [{"role": "user", "content": None}], [{"role": "user", "content": []}],
    [{"role": "user", "content": [{"type": "text", "text": "x"}]}], [{"role": "user", "content": "x", "y": 1}],
    [{"role": "user", "content": [{"type": "text", "text": 1}]}],
    [{"role": "user", "content": [{"type": "image_url"}]}],
    {"type": "json_object"}, {"type": "json_object", "x": 1}, {"type": "json_schema"},
    {"type": "json_object", "x": None},
    {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "object"}}},
    {"type": "json_schema", "json_schema": {"name": "a b", "schema": {}}},
    {"type": "json_schema", "json_schema": {"name": "a", "schema": []}},
    {"type": "json_schema", "json_schema": {"name": "a", "schema": {}, "strict": 1}},
    {"regex": "a+"}, {"regex": "a+", "choice": ["x"]}, {"regex": " "}, {"regex": "a", "json": False}, {"choice": []},
    {"json_object": True}, {"json_object": 1}, {"json": {}, "disable_fallback": True}, {"grammar": "start: \"a\""},
    {"json": {}, "disable_any_whitespace": True}, "{}", "[]", " {", "none", "required",
    {"type": "function", "function": {"name": "x"}}, {"type": "function", "function": {}},
    [{"type": "function", "function": {"name": "f"}}], [{"type": "function", "function": {"name": "f g"}}],
    [{"type": "function", "function": {"name": "f", "parameters": []}}],
    [{"type": "function", "function": {"name": "f", "parameters": {}, "strict": True, "description": "x"}}],
    [{"type": "function", "function": {"name": "f", "x": 1}}], [{"type": "x", "function": {"name": "f"}}],
    [{"role": "assistant", "content": None}], [{"role": "tool", "content": "x"}],
    [{"role": "tool", "content": "x", "tool_call_id": "a"}], [{"role": "user", "content": "x", "tool_calls": [{}]}],
    [{"role": "assistant", "tool_calls": [{"id": "a", "function": {"name": "f", "arguments": "{}"}}]}],
    [{"role": "assistant", "tool_calls": [{"id": "a", "function": {"name": "f", "arguments": {}}}]}],
    [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]}],
]  # fmt: skip


def refusal(parse: Parser, body: dict[str, Any]) -> ApiError | None:
    try:
        parse(body)
    except ApiError as error:
        return error
    return None


# What the schema of one field cannot say.
TOGETHER = (
    "less than n", "needs 'stream'", "needs 'logprobs'", "needs a final message", "must be at least 1", "exclude",
    "is no JSON", "needs 'tools'", "not in 'tools'",
)  # fmt: skip
LENGTHS = ("max_tokens", "max_completion_tokens", "min_tokens")


@pytest.mark.parametrize("endpoint", PARSERS)
def test_parser_and_schema_judge_alike(endpoint: str) -> None:
    parse, base = PARSERS[endpoint]
    validator = jsonschema_rs.Draft202012Validator(body_schema(endpoint, TABLE))
    asked = {"prompt", "messages"} if endpoint.startswith("tokenize") else set()
    for name in sorted({*own(endpoint), *HARMLESS, *NEUTRAL, "no_such_field"} - asked):
        for value in [None, *VALUES]:
            body = {**base, name: value}
            error = refusal(parse, body)
            if name in LENGTHS and type(value) is int and value > 1:
                continue  # too long or not: that shows where the request meets its model
            if not validator.is_valid(body):
                assert error is not None, (name, value)
            elif error is not None:
                assert any(reason in error.message for reason in TOGETHER), (name, value, error.message)


def bounded(schema: dict[str, Any]) -> list[tuple[Any, Any]]:
    """(value at a bound, value beyond it)."""
    step = 1 if schema.get("type") == "integer" else 0.001
    pairs = []
    if "minimum" in schema:
        pairs.append((schema["minimum"], schema["minimum"] - step))
    if "exclusiveMinimum" in schema:
        pairs.append((schema["exclusiveMinimum"] + step, schema["exclusiveMinimum"]))
    if "maximum" in schema:
        pairs.append((schema["maximum"], schema["maximum"] + step))
    if "maxLength" in schema:
        pairs.append(("x" * schema["maxLength"], "x" * (schema["maxLength"] + 1)))
    return pairs


@pytest.mark.parametrize("endpoint", ANSWERING)
def test_bounds_are_the_parsers(endpoint: str) -> None:
    parse, base = PARSERS[endpoint]
    helpful = {"top_logprobs": {"logprobs": True}, "max_tokens": {"echo": True, "logprobs": 0}}
    for field in own(endpoint).values():
        for at, beyond in bounded(field.schema):
            more = helpful.get(field.name, {}) if endpoint != "generate" else {}
            if field.name == "max_tokens" and endpoint == "chat":
                more = {}
            assert refusal(parse, {**base, **more, field.name: at}) is None, (field.name, at)
            if field.name in LENGTHS and beyond > 1:
                continue
            error = refusal(parse, {**base, **more, field.name: beyond})
            assert error is not None and error.param == field.name, (field.name, beyond)


def test_every_route_is_there(gw: RunningGateway) -> None:
    described = document(LIMITS, INFO, "1", keys_required=False)["paths"]
    routed = {
        route.path.replace(":path", ""): {method.lower() for method in route.methods or () if method != "HEAD"}
        for route in make_app(gw.gateway).routes
        if isinstance(route, Route)
    }
    assert {path: set(operations) for path, operations in described.items()} == routed


def references(tree: Any) -> set[str]:
    if isinstance(tree, dict):
        return {str(tree["$ref"])} if "$ref" in tree else {ref for value in tree.values() for ref in references(value)}
    return {ref for item in tree for ref in references(item)} if isinstance(tree, list) else set()


def test_references_lead_somewhere_and_everything_is_used(http: httpx.Client) -> None:
    told = http.get("/openapi.json").json()
    assert told["openapi"] == "3.1.0"
    names = {f"#/components/schemas/{name}" for name in told["components"]["schemas"]}
    assert references(told) <= names
    assert names == references(told)


def test_limits_follow_the_model(http: httpx.Client) -> None:
    tokens = http.get("/openapi.json").json()["components"]["schemas"]["DetokenizeRequest"]["properties"]["tokens"]
    assert tokens["items"]["maximum"] == VOCAB_SIZE - 1
    schemas = document(LIMITS, None, "1", keys_required=False)["components"]["schemas"]
    assert schemas["DetokenizeRequest"]["properties"]["tokens"]["items"]["maximum"] == 2**32 - 1


def test_keys_are_declared_where_they_are_needed() -> None:
    closed, open_ = (document(LIMITS, INFO, "1", keys_required=required) for required in (True, False))
    assert closed["security"] and closed["paths"]["/health"]["get"]["security"] == []
    assert "security" not in open_


def validator_of(told: dict[str, Any], path: str, method: str, answer: httpx.Response) -> Any:
    declared = told["paths"][path][method]["responses"][str(answer.status_code)]
    content = declared["content"][answer.headers["content-type"].split(";")[0]]["schema"]
    return jsonschema_rs.Draft202012Validator({**content, "components": told["components"]})


EVERYTHING = {
    "max_tokens": 6, "n": 2, "return_token_ids": True, "prompt_logprobs": 2, "seed": 1, "temperature": 1,
}  # fmt: skip


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "x", "max_tokens": 2}),
        ("/v1/completions", {"prompt": ["你好", "b"], "logprobs": 3, "echo": True, **EVERYTHING}),
        ("/v1/completions", {"prompt": "x", "n": 99}),
        ("/v1/chat/completions", {**CHAT, "max_tokens": 2}),
        ("/v1/chat/completions", {**CHAT, "logprobs": True, "top_logprobs": 3, **EVERYTHING}),
        ("/v1/chat/completions", {**CHAT, "model": "other"}),
        ("/generate", {"prompt": "x", "n": 2}),
        ("/generate", {"prompt": "x", "nonsense": True}),
        ("/tokenize", {"prompt": "x", "return_token_strs": True}),
        ("/tokenize", CHAT),
        ("/detokenize", {"tokens": [5, 6]}),
        ("/v1/models", None), ("/v1/models/tiny", None), ("/v1/models/other", None), ("/health", None),
        ("/ready", None), ("/version", None), ("/openapi.json", None),
    ],
)  # fmt: skip
def test_answers_match_their_schemas(http: httpx.Client, path: str, body: dict[str, Any] | None) -> None:
    told = http.get("/openapi.json").json()
    method = "get" if body is None else "post"
    answer = http.request(method, path, json=body)
    template = re.sub(r"^/v1/models/.+", "/v1/models/{name}", path)
    validator_of(told, template, method, answer).validate(answer.json())
    if answer.status_code == 200 and body is not None:
        schema = told["components"]["schemas"][f"{told['paths'][path]['post']['operationId'].capitalize()}Request"]
        jsonschema_rs.Draft202012Validator(schema).validate(body)


def test_a_gateway_without_a_mesh_is_described_too(tokenizer_folder: Path) -> None:
    gateway = running_gateway(tokenizer_folder)
    with gateway as running, httpx.Client(verify=NO_AUTHORITIES, base_url=running.url) as http:
        running.mesh.workers = 0
        running.until(lambda: http.get("/ready").status_code == 503)
        told = http.get("/openapi.json").json()
        for path, body in (("/v1/completions", {"prompt": "x"}), ("/tokenize", {"prompt": "x"})):
            answer = http.post(path, json=body)
            assert (answer.status_code, "retry-after" in answer.headers) == (503, True)
            validator_of(told, path, "post", answer).validate(answer.json())


def documented() -> dict[str, set[str]]:
    """Field -> endpoints, of the table in docs/api.md."""
    text = (Path(__file__).parents[2] / "docs" / "api.md").read_text("utf-8")
    rows: dict[str, set[str]] = {}
    for row in re.findall(r"^\| (`\w+`(?:, `\w+`)*) \| ([a-z, ]+) \|", text, re.MULTILINE):
        endpoints = ANSWERING if row[1] == "all" else row[1].split(", ")
        for name in re.findall(r"`(\w+)`", row[0]):
            rows.setdefault(name, set()).update(endpoints)
    return rows


def test_the_documentation_has_the_same_table() -> None:
    table: dict[str, set[str]] = {}
    for field in TABLE:
        table.setdefault(field.name, set()).update(set(field.endpoints) & set(ANSWERING))
    assert documented() == {name: endpoints for name, endpoints in table.items() if endpoints}


def test_the_document_is_plain_json(http: httpx.Client) -> None:
    def refuse(name: str) -> None:
        raise AssertionError(name)

    json.loads(http.get("/openapi.json").content, parse_constant=refuse)


def test_empty_prompts_are_described_as_the_tokenizer_has_them() -> None:
    for empty, least in ((True, None), (False, 1)):
        schemas = document(LIMITS, INFO, "1", keys_required=False, empty_prompts=empty)["components"]["schemas"]
        assert schemas["GenerateRequest"]["properties"]["prompt"].get("minLength") == least
        assert jsonschema_rs.is_valid(schemas["CompletionsRequest"], {"prompt": ["x", ""]}) == empty
        assert jsonschema_rs.is_valid(schemas["TokenizeRequest"], {"prompt": ""})


@pytest.mark.parametrize("seconds", ["", "1", "0.5", "99999.999", "007", "0", "0.0", "-1", "1e3", "x", "1.", "9999999"])
def test_the_deadlines_header_is_described_as_it_is_read(gw: RunningGateway, http: httpx.Client, seconds: str) -> None:
    told = http.get("/openapi.json").json()["paths"]["/generate"]["post"]["parameters"][0]["schema"]
    answer = http.post("/generate", json={"prompt": "x", "max_tokens": 1}, headers={"X-Request-Timeout": seconds})
    assert (answer.status_code != 400) == jsonschema_rs.is_valid(told, seconds)


@pytest.mark.parametrize("key", ["", "a", "a b", "x" * 255, "x" * 256, "!~", "{}"])
def test_the_idempotency_keys_are_described_as_they_are_read(gw: RunningGateway, http: httpx.Client, key: str) -> None:
    told = http.get("/openapi.json").json()["paths"]["/generate"]["post"]["parameters"][1]
    answer = http.post("/generate", json={"prompt": "x", "max_tokens": 1}, headers={told["name"]: key})
    assert (answer.status_code != 400) == jsonschema_rs.is_valid(told["schema"], key)


def test_event_ids_are_described_where_there_are_some(gw: RunningGateway, http: httpx.Client) -> None:
    paths = http.get("/openapi.json").json()["paths"]
    headers = {path: {told["name"] for told in paths[path]["post"].get("parameters", ())} for path in paths if
               "post" in paths[path]}  # fmt: skip
    assert {path for path in headers if "Last-Event-ID" in headers[path]} == {"/v1/completions", "/v1/chat/completions"}
    told = next(told for told in paths["/v1/completions"]["post"]["parameters"] if told["name"] == "Last-Event-ID")
    body = {"prompt": "x", "n": 128, "max_tokens": 1, "stream": True}
    raw = http.post("/v1/completions", json=body, headers={"Idempotency-Key": "a"}).text
    ids = re.findall("^id: (.*)$", raw, re.MULTILINE)
    assert len(ids) > 128
    assert all(jsonschema_rs.is_valid(told["schema"], event_id) for event_id in ["", *ids])
    assert not jsonschema_rs.is_valid(told["schema"], "5")
