"""JSON Schema of the larger fields of a body: messages, tools, and what the answer must match."""

from __future__ import annotations

from typing import Any

from gateway.chat_messages import MAX_NAME_CHARS, MAX_TEMPLATE_KWARGS
from gateway.structured import MAX_REGEX_CHARS
from gateway.tools import MAX_DESCRIPTION_CHARS, MAX_TOOLS

Schema = dict[str, Any]

ANY: Schema = {}
BOOLEAN: Schema = {"type": "boolean"}
NULL: Schema = {"type": "null"}


def integer(least: int, most: int) -> Schema:
    return {"type": "integer", "minimum": least, "maximum": most}


def number(least: float, most: float, above: bool = False) -> Schema:
    return {"type": "number", "exclusiveMinimum" if above else "minimum": least, "maximum": most}


def text(most: int | None = None) -> Schema:
    return {"type": "string"} if most is None else {"type": "string", "maxLength": most}


def array(items: Schema, least: int = 0, most: int | None = None) -> Schema:
    schema: Schema = {"type": "array", "items": items, "minItems": least}
    return schema if most is None else schema | {"maxItems": most}


def nullable(schema: Schema) -> Schema:
    if schema.get("type") == "null":
        return schema
    if isinstance(schema.get("type"), str) and "enum" not in schema and "const" not in schema:
        return schema | {"type": [schema["type"], "null"]}
    return {"anyOf": [schema, NULL]}


def closed(required: dict[str, Schema], optional: dict[str, Schema] | None = None) -> Schema:
    """An object of a body: optional fields may be null, and other ones too, for null stands for an absent field."""
    properties = required | {name: nullable(schema) for name, schema in (optional or {}).items()}
    return {"type": "object", "properties": properties, "required": list(required), "additionalProperties": NULL}


def messages() -> Schema:
    part = {"type": "object", "properties": {"type": {"const": "text"}, "text": text()}, "required": ["type", "text"]}
    content = {"anyOf": [text(), array(part, 1)]}
    empty = {"annotations": array(ANY, 0, 0), "refusal": text(0)}
    no_calls = empty | {"tool_calls": array(ANY, 0, 0)}
    label = text(MAX_NAME_CHARS)
    function = {
        "type": "object",
        "properties": {"name": label, "arguments": text() | {"description": "the JSON text of an object"}},
        "required": ["name", "arguments"],
    }
    call = {
        "type": "object",
        "properties": {"id": label, "type": {"const": "function"}, "function": function},
        "required": ["id", "function"],
    }
    message = {
        "anyOf": [
            closed({"role": {"enum": ["system", "developer", "user"]}, "content": content}, no_calls | {"name": ANY}),
            closed(
                {"role": {"const": "assistant"}, "content": content}, empty | {"tool_calls": array(call), "name": ANY}
            ),
            closed(  # a message that calls tools needs no text
                {"role": {"const": "assistant"}, "tool_calls": array(call, 1)},
                empty | {"content": array(ANY, 0, 0), "name": ANY},
            ),
            closed({"role": {"const": "tool"}, "content": content, "tool_call_id": label}, no_calls | {"name": label}),
        ]
    }
    return array(message, 1)


def template_kwargs() -> Schema:
    word = {"type": "string", "pattern": "^[A-Za-z0-9_.-]{0,64}$"}
    return {
        "type": "object",
        "propertyNames": {"pattern": "^[a-z][a-z0-9_]{0,63}$"},
        "additionalProperties": {"anyOf": [BOOLEAN, word]},
        "maxProperties": MAX_TEMPLATE_KWARGS,
    }


def tools() -> Schema:
    function = closed(
        {"name": {"type": "string", "pattern": "^[a-zA-Z0-9_.-]{1,128}$"}},
        {"description": text(MAX_DESCRIPTION_CHARS), "parameters": {"type": "object"}, "strict": BOOLEAN},
    )
    return array(closed({"type": {"const": "function"}, "function": function}), 0, MAX_TOOLS)


def tool_choice() -> Schema:
    function = {"type": "object", "properties": {"name": text()}, "required": ["name"]}
    named = {
        "type": "object",
        "properties": {"type": {"const": "function"}, "function": function},
        "required": ["type", "function"],
    }
    return {"anyOf": [{"enum": ["none", "auto", "required"]}, named]}


def response_format() -> Schema:
    named = closed(
        {"name": {"type": "string", "pattern": "^[a-zA-Z0-9_-]{1,64}$"}, "schema": SCHEMA_OR_TEXT},
        {"description": text(4096), "strict": BOOLEAN},
    )
    return {
        "anyOf": [
            closed({"type": {"enum": ["text", "json_object"]}}),
            closed({"type": {"const": "json_schema"}, "json_schema": named}),
        ]
    }


SCHEMA_OR_TEXT: Schema = {"anyOf": [{"type": "object"}, text() | {"pattern": "^\\s*[{]"}]}
REGEX: Schema = text(MAX_REGEX_CHARS) | {"pattern": "\\S"}
GRAMMAR: Schema = text() | {"pattern": "\\S"}
CHOICE: Schema = array(text(), 1)


def structured_outputs() -> Schema:
    """Exactly one kind; the others may be there if they ask for nothing."""
    kinds: dict[str, Schema] = {
        "json": SCHEMA_OR_TEXT,
        "regex": REGEX,
        "choice": CHOICE,
        "grammar": GRAMMAR,
        "json_object": {"const": True},
    }
    switches: dict[str, Schema] = {
        "disable_fallback": BOOLEAN,
        "disable_any_whitespace": {"const": False},
        "disable_additional_properties": {"const": False},
    }
    return {
        "anyOf": [
            closed({kind: schema}, switches | {other: {"const": False} for other in kinds if other != kind})
            for kind, schema in kinds.items()
        ]
    }
