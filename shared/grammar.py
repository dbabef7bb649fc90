"""What an output must match, as it travels in :attr:`shared.messages.Sampling.grammar`. Owns the format and the limits.

The gateway refuses what the engine (llguidance) cannot take before it is submitted; the worker builds a matcher for
each slot from the same text. Both use :func:`engine_grammar` and :data:`ENGINE_LIMITS`, so that what one takes the other
takes. Nothing here needs the engine itself.
"""

from __future__ import annotations

import json
from typing import Any, Literal

import msgspec

from shared.messages import BadMessage

Kind = Literal["json_schema", "json_object", "regex", "choice", "lark"]

MAX_GRAMMAR_BYTES = 64 << 10
"""Of the encoded grammar. It travels in every submit and in every plan that starts a slot."""

ENGINE_LIMITS: dict[str, Any] = {
    "max_items_in_row": 2000,
    "initial_lexer_fuel": 1_000_000,  # some 20 ms
    "step_lexer_fuel": 200_000,  # some 15 ms for a mask
    "step_max_items": 50_000,  # some 3 ms for a mask
    "max_lexer_states": 20_000,  # 1 to 2 kB each
    "max_grammar_size": 50_000,
    "verbose_errors": False,  # an error must not quote the client's grammar into a log
}
"""Keyword arguments of ``llguidance.LLParserLimits``; times are those that llguidance's documentation gives."""

WHITESPACE = r"\n[ \t]{0,40}| {1,2}"
"""Between the tokens of constrained JSON: compact, ``", "``, or indented. Unbounded, a model may emit it for ever."""


class Grammar(msgspec.Struct, frozen=True):
    """``value`` by ``kind``: a schema (an object); nothing; a regular expression; a list of texts; a Lark grammar."""

    kind: Kind
    value: dict[str, Any] | str | list[str] | None = None


_VALUE_TYPES: dict[Kind, type] = {
    "json_schema": dict,
    "json_object": type(None),
    "regex": str,
    "choice": list,
    "lark": str,
}


def encode_grammar(grammar: Grammar) -> str:
    """JSON text, the order of an object's keys kept (it is the order in which a model is made to write them)."""
    return msgspec.json.encode(grammar).decode()


def decode_grammar(text: str) -> Grammar:
    """The inverse of :func:`encode_grammar`; BadMessage for what is none or is too long."""
    if len(text.encode("utf-8", "replace")) > MAX_GRAMMAR_BYTES:
        raise BadMessage(f"a grammar of more than {MAX_GRAMMAR_BYTES} bytes")
    try:
        grammar = msgspec.json.decode(text, type=Grammar)
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise BadMessage(f"grammar: {error}") from None
    if not isinstance(grammar.value, _VALUE_TYPES[grammar.kind]):
        raise BadMessage(f"grammar: the value of {grammar.kind} is a {type(grammar.value).__name__}")
    return grammar


def engine_grammar(grammar: Grammar) -> str:
    """``grammar`` as llguidance's ``LLMatcher`` takes it (its JSON form of a list of grammars)."""
    value = grammar.value
    part: dict[str, Any]
    if grammar.kind in ("json_schema", "json_object"):
        schema: dict[str, Any] = dict(value) if isinstance(value, dict) else {"type": "object"}
        schema["x-guidance"] = {"whitespace_flexible": True, "whitespace_pattern": WHITESPACE}
        part = {"json_schema": schema}
    elif grammar.kind == "regex":
        part = {"lark_grammar": f"start: /{_slashes_escaped(str(value))}/"}
    elif grammar.kind == "choice":
        part = {"lark_grammar": "start: " + " | ".join(json.dumps(text) for text in value or ())}
    else:
        part = {"lark_grammar": value}
    return json.dumps({"grammars": [part]})


def _slashes_escaped(regex: str) -> str:
    """``regex`` for use between slashes: each slash that no backslash precedes gets one; line feeds are spelled out."""
    out: list[str] = []
    escaped = False
    for char in regex:
        if char == "/" and not escaped:
            out.append("\\")
        out.append("\\n" if char == "\n" and not escaped else "n" if char == "\n" else char)
        escaped = char == "\\" and not escaped
    return "".join(out)
