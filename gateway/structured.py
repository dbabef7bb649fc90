"""What an answer must match, as clients ask for it, read into a :class:`shared.grammar.Grammar`.

OpenAI's ``response_format``, vLLM's ``structured_outputs`` and its older ``guided_*`` fields. Everything that can be
told from the text alone is told here; whether the engine takes a grammar is tried in :mod:`gateway.grammar_check`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import msgspec
from llguidance.gbnf_to_lark import any_to_lark

from gateway.errors import ApiError, invalid
from gateway.fields import Fields, unsupported
from shared.grammar import Grammar, GrammarError, encode_grammar
from shared.messages import ModelInfo

MAX_SCHEMA_DEPTH = 64
"""Objects and lists inside one another in the text of a schema."""

MAX_SCHEMA_PROPERTIES = 1000
MAX_ENUM_VALUES = 1000  # OpenAI's limit
MAX_REGEX_CHARS = 4096
MAX_REGEX_SIZE = 20_000  # characters and classes, with repeats written out
MAX_GBNF_CHARS = 16 << 10
MAX_REPEATS = 10_000  # in x{n} of a regular expression, a schema's pattern or a grammar

_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")
_REPEATS = re.compile(r"\\.|\{\s*(\d+)\s*(?:,\s*(\d*)\s*)?\}", re.DOTALL)
_PART = re.compile(r"\\.|\[(?:\\.|[^\]\\])*\]|\{\s*(\d+)\s*(?:,\s*(\d*)\s*)?\}|.", re.DOTALL)
_GUIDED = {"guided_json": "json", "guided_regex": "regex", "guided_choice": "choice", "guided_grammar": "grammar"}
# Of vLLM's structured_outputs: switches of other engines, with the value that asks for nothing.
_NEUTRAL = {
    "disable_fallback": (False, True),
    "disable_any_whitespace": (False,),
    "disable_additional_properties": (False,),
}


@dataclass(frozen=True, slots=True)
class Constraint:
    """``grammar``: for ``Sampling.grammar``, empty if the answer is free; ``field``: what asked for it."""

    grammar: str = ""
    field: str = ""


FREE = Constraint()


def read_constraint(fields: Fields) -> Constraint:
    """What the answer must match. A 400 names the field at fault."""
    found = {
        "response_format": _response_format(fields.raw("response_format")),
        "structured_outputs": _structured_outputs(fields.raw("structured_outputs")),
        **{name: _constraint(kind, fields.raw(name), name) for name, kind in _GUIDED.items()},
    }
    asked = [name for name, grammar in found.items() if grammar]
    if len(asked) > 1:
        raise invalid(f"'{asked[0]}' and '{asked[1]}' exclude each other", asked[1])
    return Constraint(found[asked[0]], asked[0]) if asked else FREE


def check_served(constraint: Constraint, model: ModelInfo) -> None:
    """Refuse a grammar that a worker of the model would refuse, as a simulated one does."""
    if constraint.grammar and not model.grammars:
        message = f"'{constraint.field}': the workers of {model.name!r} take no grammars (--simulate has no tokenizer)"
        raise invalid(message, constraint.field)


def check_alone(constraint: Constraint, beam_width: int, min_tokens: int, ignore_eos: bool) -> None:
    """Refuse what cannot go with a grammar, which alone decides where the answer ends."""
    if not constraint.grammar:
        return
    for name, asked in (
        ("use_beam_search", beam_width > 0),
        ("min_tokens", min_tokens > 0),
        ("ignore_eos", ignore_eos),
    ):
        if asked:
            raise invalid(f"'{name}' cannot go with '{constraint.field}'", name)


def schema_grammar(schema: Any, where: str) -> str:
    """The text of a ``json_schema`` grammar; a 400 that names ``where`` for what is no schema or too big a one."""
    if isinstance(schema, str):  # vLLM takes a schema as text, too
        try:
            schema = msgspec.json.decode(schema)
        except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
            raise invalid(f"'{where}' is no JSON: {error}", where) from None
    if not isinstance(schema, dict):
        raise invalid(f"'{where}' must be a JSON schema: an object", where)
    check_schema(schema, where)
    return _encoded(Grammar("json_schema", schema), where)


def _response_format(value: Any) -> str:
    name = "response_format"
    if value is None:
        return ""
    if not isinstance(value, dict):
        raise invalid(f"'{name}' must be an object", name)
    inner = Fields(value)
    kind = inner.raw("type")
    if kind not in ("text", "json_object", "json_schema"):
        raise invalid(f"'{name}.type' must be 'text', 'json_object' or 'json_schema'", f"{name}.type")
    named = inner.raw("json_schema") if kind == "json_schema" else None
    _finish(inner, name)
    if kind == "text":
        return ""
    if kind == "json_object":
        return _encoded(Grammar("json_object"), name)
    where = f"{name}.json_schema"
    if not isinstance(named, dict):
        raise invalid(f"'{where}' must be an object with 'name' and 'schema'", where)
    described = Fields(named)
    if not isinstance(label := described.required("name"), str) or not _NAME.fullmatch(label):
        raise invalid(f"'{where}.name' must have 1 to 64 characters out of a-z A-Z 0-9 _ -", f"{where}.name")
    described.string("description", "", 4096)
    described.boolean("strict", False)  # a schema is always enforced
    schema = described.raw("schema")
    if schema is None:
        raise invalid(f"'{where}.schema' is required", f"{where}.schema")
    _finish(described, where)
    return schema_grammar(schema, f"{where}.schema")


def _structured_outputs(value: Any) -> str:
    name = "structured_outputs"
    if value is None:
        return ""
    if not isinstance(value, dict):
        raise invalid(f"'{name}' must be an object", name)
    inner = Fields(value)
    kinds = ("json", "regex", "choice", "grammar", "json_object")
    asked = [kind for kind in kinds if inner.raw(kind) not in (None, False)]
    if len(asked) != 1:
        raise invalid(f"'{name}' must have exactly one of {', '.join(kinds)}", name)
    _finish(inner, name, _NEUTRAL)
    return _constraint(asked[0], value[asked[0]], f"{name}.{asked[0]}")


def _constraint(kind: str, value: Any, where: str) -> str:
    """One of vLLM's constraints; empty for null."""
    if value is None:
        return ""
    if kind == "json":
        return schema_grammar(value, where)
    if kind == "json_object":
        if value is not True:
            raise invalid(f"'{where}' must be true or false", where)
        return _encoded(Grammar("json_object"), where)
    if kind == "choice":
        if not isinstance(value, list) or not value or not all(isinstance(text, str) for text in value):
            raise invalid(f"'{where}' must be a list of strings, at least one", where)
        return _encoded(Grammar("choice", list(dict.fromkeys(value))), where)
    if not isinstance(value, str) or not value.strip():
        raise invalid(f"'{where}' must be a string that is not empty", where)
    if kind == "regex":
        _check_regex(value, where)
        return _encoded(Grammar("regex", value), where)
    _check_repeats(value, where)
    return _encoded(Grammar("lark", _lark(value, where)), where)


def _lark(text: str, where: str) -> str:
    """A grammar in llguidance's dialect of Lark; one in GBNF (llama.cpp's EBNF) is translated, as vLLM does."""
    if "::=" not in text:
        return text
    if len(text) > MAX_GBNF_CHARS:
        raise invalid(f"'{where}' in GBNF must have at most {MAX_GBNF_CHARS} characters", where)
    try:
        return any_to_lark(text)
    except Exception as error:  # noqa: BLE001 - the translator raises bare Exceptions, and RecursionError
        raise invalid(f"'{where}' is no grammar: {str(error)[:200] or type(error).__name__}", where) from None


def _encoded(grammar: Grammar, where: str) -> str:
    try:
        return encode_grammar(grammar)
    except GrammarError as error:
        raise invalid(f"'{where}': {error}", where) from None


def _finish(fields: Fields, where: str, neutral: dict[str, tuple[Any, ...]] | None = None) -> None:
    try:
        fields.finish((), neutral or {})
    except ApiError as error:
        raise unsupported(f"{where}.{error.param}") from None


def check_schema(schema: dict[str, Any], where: str) -> None:
    """Refuse a schema that is too deep or too wide. Iterative: its depth is the client's."""
    properties = 0
    level: list[Any] = [schema]
    for _ in range(MAX_SCHEMA_DEPTH):
        below: list[Any] = []
        for node in level:
            if isinstance(node, dict):
                listed = node.get("properties")
                properties += len(listed) if isinstance(listed, dict) else 0
                if isinstance(values := node.get("enum"), list) and len(values) > MAX_ENUM_VALUES:
                    raise invalid(f"'{where}' has an enum of {len(values)} values; {MAX_ENUM_VALUES} are taken", where)
                if isinstance(pattern := node.get("pattern"), str):
                    _check_regex(pattern, where)
                below += node.values()
            elif isinstance(node, list):
                below += node
        if properties > MAX_SCHEMA_PROPERTIES:
            raise invalid(f"'{where}' has more than {MAX_SCHEMA_PROPERTIES} properties", where)
        if not below:
            return
        level = below
    raise invalid(f"'{where}' is nested more than {MAX_SCHEMA_DEPTH} deep", where)


def _check_regex(pattern: str, where: str) -> None:
    """Refuse a regular expression that is long, or would be with its repeats, those in one another too, written out."""
    if len(pattern) > MAX_REGEX_CHARS:
        raise invalid(f"'{where}' has a regular expression of more than {MAX_REGEX_CHARS} characters", where)
    _check_repeats(pattern, where)
    size = last = 0  # of what is open now, and of the part before
    outer: list[int] = []
    for found in _PART.finditer(pattern):
        part = found.group()
        if part == "(":
            outer.append(size)
            size = 0
        elif part == ")" and outer:
            last = size
            size += outer.pop()
        elif found.group(1):
            times = max(int(count or 0) for count in found.groups())
            size += last * (times - 1) if times else 0
            last *= max(times, 1)
        else:
            last = 1
            size += 1
        if size > MAX_REGEX_SIZE:
            raise invalid(f"'{where}' has repeats that come to more than {MAX_REGEX_SIZE} parts", where)


def _check_repeats(pattern: str, where: str) -> None:
    for found in _REPEATS.finditer(pattern):
        for count in found.groups():
            if count and (len(count) > 9 or int(count) > MAX_REPEATS):
                raise invalid(f"'{where}' repeats something {count:.20} times; {MAX_REPEATS} are taken", where)
