"""Tools as a client declares them: read, checked, and, where a call is forced, turned into a grammar.

``tool_choice`` ``auto`` leaves it to the model whether it calls; its output is parsed (:mod:`gateway.tool_parsers`).
``required`` and a named function are enforced: a grammar made of the tools' schemas admits nothing but calls.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from gateway.errors import ApiError, invalid
from gateway.fields import Fields, unsupported
from gateway.structured import FREE, Constraint, check_schema, schema_grammar

MAX_TOOLS = 128  # OpenAI's limit
MAX_DESCRIPTION_CHARS = 32 << 10

_NAME = re.compile(r"[a-zA-Z0-9_.-]{1,128}")
_NO_PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}


@dataclass(frozen=True, slots=True)
class Tool:
    name: str
    description: str | None
    parameters: dict[str, Any] | None  # a JSON schema

    def definition(self) -> dict[str, Any]:
        """As chat templates take it."""
        function: dict[str, Any] = {"name": self.name}
        if self.description is not None:
            function["description"] = self.description
        function["parameters"] = {"type": "object", "properties": {}} if self.parameters is None else self.parameters
        return {"type": "function", "function": function}


@dataclass(frozen=True, slots=True)
class ToolUse:
    """The tools that the model is shown, and whether it may or must call one."""

    tools: tuple[Tool, ...] = ()
    choice: Literal["none", "auto", "required", "named"] = "none"
    name: str = ""  # the function of a named choice
    parallel: bool = True  # more than one call

    @property
    def constraint(self) -> Constraint:
        """What forces a call; nothing where none is forced. A 400 where a tool's schema cannot be enforced."""
        if self.choice == "named":
            for index, tool in enumerate(self.tools):
                if tool.name == self.name:
                    where = f"tools[{index}].function.parameters"
                    return Constraint(schema_grammar(_object(tool.parameters), where), where)
        if self.choice == "required":
            return Constraint(schema_grammar(_calls_schema(self.tools, self.parallel), "tools"), "tools")
        return FREE


NO_TOOLS = ToolUse()


def read_tools(fields: Fields) -> ToolUse:
    """``tools``, ``tool_choice`` and ``parallel_tool_calls``. With ``none`` the model is not shown the tools at all."""
    tools = _tools(fields.raw("tools"))
    choice, name = _choice(fields.raw("tool_choice"), tools)
    parallel = fields.boolean("parallel_tool_calls", True)
    return NO_TOOLS if choice == "none" else ToolUse(tools, choice, name, parallel)


def _tools(value: Any) -> tuple[Tool, ...]:
    if value is None:
        return ()
    if not isinstance(value, list):
        raise invalid("'tools' must be a list", "tools")
    if len(value) > MAX_TOOLS:
        raise invalid(f"'tools' has {len(value)} entries; {MAX_TOOLS} are taken", "tools")
    tools = tuple(_tool(item, f"tools[{index}]") for index, item in enumerate(value))
    names = [tool.name for tool in tools]
    for index, name in enumerate(names):
        if name in names[:index]:
            raise invalid(f"'tools[{index}].function.name': {name!r} is there twice", f"tools[{index}].function.name")
    return tools


def _tool(value: Any, where: str) -> Tool:
    if not isinstance(value, dict):
        raise invalid(f"'{where}' must be an object", where)
    outer = Fields(value)
    if outer.raw("type") != "function":
        raise invalid(f"'{where}.type' must be 'function'", f"{where}.type")
    function = outer.raw("function")
    if not isinstance(function, dict):
        raise invalid(f"'{where}.function' must be an object", f"{where}.function")
    inner = Fields(function)
    where_inner = f"{where}.function"
    name = inner.raw("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise invalid(
            f"'{where_inner}.name' must have 1 to 128 characters out of a-z A-Z 0-9 _ . -", f"{where_inner}.name"
        )
    description = inner.raw("description")
    if description is not None and (not isinstance(description, str) or len(description) > MAX_DESCRIPTION_CHARS):
        raise invalid(
            f"'{where_inner}.description' must be a string of at most {MAX_DESCRIPTION_CHARS} characters",
            f"{where_inner}.description",
        )
    parameters = inner.raw("parameters")
    if parameters is not None:
        if not isinstance(parameters, dict):
            raise invalid(f"'{where_inner}.parameters' must be a JSON schema: an object", f"{where_inner}.parameters")
        check_schema(parameters, f"{where_inner}.parameters")
    # Where a call is forced, its schema is enforced anyway; under 'auto' it is the model that writes the call.
    if not isinstance(inner.raw("strict"), bool | None):
        raise invalid(f"'{where_inner}.strict' must be true or false", f"{where_inner}.strict")
    for part, at in ((outer, where), (inner, where_inner)):
        try:
            part.finish((), {})
        except ApiError as error:
            raise unsupported(f"{at}.{error.param}") from None
    return Tool(name, description, parameters)


def _choice(value: Any, tools: tuple[Tool, ...]) -> tuple[Literal["none", "auto", "required", "named"], str]:
    field = "tool_choice"
    if value is None or value == "auto":
        return ("auto", "") if tools else ("none", "")
    if value == "none":
        return "none", ""
    if value == "required":
        if not tools:
            raise invalid(f"'{field}' needs 'tools'", field)
        return "required", ""
    function = value.get("function") if isinstance(value, dict) and value.get("type") == "function" else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str):
        raise invalid(
            f"'{field}' must be 'none', 'auto', 'required' or "
            "{\"type\": \"function\", \"function\": {\"name\": ...}}", field,
        )  # fmt: skip
    if name not in [tool.name for tool in tools]:
        raise invalid(f"'{field}' names {name!r:.140}, which is not in 'tools'", field)
    return "named", name


def _calls_schema(tools: tuple[Tool, ...], parallel: bool) -> dict[str, Any]:
    """Of a list of calls, each ``{"name": ..., "parameters": {...}}`` (vLLM's form).

    A tool's schema goes under ``$defs`` as it is, its references turned to where it lies now.
    """
    schema: dict[str, Any] = {
        "$defs": {
            f"tool{index}": _moved(_object(tool.parameters), f"#/$defs/tool{index}") for index, tool in enumerate(tools)
        },
        "type": "array",
        "minItems": 1,
        "items": {
            "anyOf": [
                {
                    "type": "object",
                    "properties": {"name": {"const": tool.name}, "parameters": {"$ref": f"#/$defs/tool{index}"}},
                    "required": ["name", "parameters"],
                    "additionalProperties": False,
                }
                for index, tool in enumerate(tools)
            ]
        },
    }
    if not parallel:
        schema["maxItems"] = 1
    return schema


def _object(parameters: dict[str, Any] | None) -> dict[str, Any]:
    return _NO_PARAMETERS if parameters is None else {"type": "object", **parameters}


def _moved(schema: Any, to: str) -> Any:
    """``schema`` with its references to itself pointing below ``to``. Its depth is bounded (``check_schema``)."""
    if isinstance(schema, list):
        return [_moved(item, to) for item in schema]
    if not isinstance(schema, dict):
        return schema
    moved = {key: _moved(value, to) for key, value in schema.items()}
    reference = moved.get("$ref")
    if isinstance(reference, str) and reference.startswith("#"):
        moved["$ref"] = to + reference[1:]
    return moved


def read_arguments(text: str, where: str) -> dict[str, Any]:
    """The arguments of a call in an earlier message, which travel as JSON text; empty text stands for none."""
    if not text.strip():
        return {}
    try:
        arguments = msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise invalid(f"'{where}' is no JSON: {error}", where) from None
    if not isinstance(arguments, dict):
        raise invalid(f"'{where}' must be the JSON text of an object", where)
    return arguments
