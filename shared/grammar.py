"""What a grammar is on the wire, how big one may be, and the text that the engine compiles.

``Sampling.grammar`` is the JSON text of a :class:`Grammar`. A gateway compiles it before it accepts a request, the
worker compiles it again for its own tokenizer; both compile :func:`engine_text` under :data:`ENGINE_LIMITS`, so that
what the one accepts the other takes. The engine is `llguidance <https://github.com/guidance-ai/llguidance>`_; nothing
here imports it.
"""

from __future__ import annotations

import json
from typing import Any, Literal

import msgspec

MAX_GRAMMAR_BYTES = 64 * 1024
"""Of a grammar's JSON text. It travels with every start of a sequence, so it is kept well below a message's size."""

MAX_CHOICES = 1000

MAX_WHITESPACE = 16
"""Between two parts of a JSON text. Without a bound, a model may pad with spaces until its max_tokens."""

ENGINE_LIMITS: dict[str, int | bool] = {
    "max_items_in_row": 600,  # an ambiguous grammar's masks cost its square: 35 ms; 2,000 would be 900 ms
    "initial_lexer_fuel": 1_000_000,  # some 20 ms of compiling
    "step_lexer_fuel": 200_000,  # some 15 ms of one step's mask
    "step_max_items": 50_000,  # some 3 ms of one step's mask
    "max_lexer_states": 20_000,  # 1 to 2 kB each
    "max_grammar_size": 100_000,
    "verbose_errors": False,  # errors reach logs and clients: nothing of what was generated in them
}
"""Arguments of llguidance's ``LLParserLimits``: they bound the time and memory of one grammar, compiled or run."""


class GrammarError(ValueError):
    """No grammar that can be compiled; the message is for the client, one line."""


class Grammar(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``value``: a schema (object) of ``json_schema``, nothing for ``json_object``, the pattern of ``regex`` (the whole
    output must match it), the strings of ``choice``, the text of ``lark`` (llguidance's dialect, its rule ``start``).
    """

    kind: Literal["json_schema", "json_object", "regex", "choice", "lark"]
    value: Any = None


def encode_grammar(grammar: Grammar) -> str:
    """The text for ``Sampling.grammar``. Raises GrammarError if it is no grammar or too big."""
    engine_text(grammar)
    try:
        text = json.dumps({"kind": grammar.kind, "value": grammar.value}, ensure_ascii=False, separators=(",", ":"))
        size = len(text.encode())
    except (ValueError, TypeError, RecursionError) as error:  # UnicodeEncodeError is a ValueError
        raise GrammarError(f"the grammar is no JSON: {type(error).__name__}") from None
    if size > MAX_GRAMMAR_BYTES:
        raise GrammarError(f"the grammar has {size} bytes; {MAX_GRAMMAR_BYTES} are allowed")
    return text


def decode_grammar(text: str) -> Grammar:
    """The inverse of :func:`encode_grammar`. Raises GrammarError."""
    try:
        return msgspec.json.decode(text, type=Grammar)
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise GrammarError(f"the grammar can't be read: {type(error).__name__}") from None


def engine_text(grammar: Grammar) -> str:
    """What llguidance's ``LLMatcher`` takes. Raises GrammarError if ``value`` is not of its kind's type."""
    kind, value = grammar.kind, grammar.value
    if kind == "json_object":
        return _engine({"json_schema": _with_options({"type": "object"})})
    if kind == "json_schema":
        if not isinstance(value, dict):
            raise GrammarError("a JSON schema must be an object")
        return _engine({"json_schema": _with_options(value)})
    if kind == "choice":
        if not isinstance(value, list) or not value or not all(isinstance(one, str) for one in value):
            raise GrammarError("choice must be a list of strings, at least one")
        if len(value) > MAX_CHOICES:
            raise GrammarError(f"{len(value)} choices; {MAX_CHOICES} are allowed")
        # one terminal, not one rule per string: the parser's rows stay short
        return _engine({"lark_grammar": "start: CHOICE\nCHOICE: " + " | ".join(json.dumps(one) for one in value)})
    if not isinstance(value, str):
        raise GrammarError(f"{kind} must be a string")
    return _engine({"lark_grammar": f"start: /{_escape_slashes(value)}/" if kind == "regex" else value})


def _engine(grammar: dict[str, Any]) -> str:
    try:
        return json.dumps({"grammars": [grammar]})
    except (ValueError, TypeError, RecursionError) as error:
        raise GrammarError(f"the grammar is no JSON: {type(error).__name__}") from None


def _with_options(schema: dict[str, Any]) -> dict[str, Any]:
    """With the compiler's options as we want them, whatever the client put there."""
    return {**schema, "x-guidance": {"whitespace_pattern": f"[ \\n\\r\\t]{{0,{MAX_WHITESPACE}}}"}}


def _escape_slashes(pattern: str) -> str:
    """A pattern as it stands between two slashes on one line."""
    out: list[str] = []
    escaped = False
    for char in pattern:
        if char == "/" and not escaped:
            out.append("\\/")
        elif char in "\n\r":  # after a backslash this is an escaped newline too: \n
            out.append(("" if escaped else "\\") + ("n" if char == "\n" else "r"))
        else:
            out.append(char)
        escaped = char == "\\" and not escaped
    return "".join(out)
