"""Grammars on the wire: what survives the trip, what is refused, and what the engine makes of each kind."""

from __future__ import annotations

from typing import Any

import pytest
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from tiny_models import make_tokenizer

from shared.grammar import (
    ENGINE_LIMITS,
    MAX_CHOICES,
    MAX_GRAMMAR_BYTES,
    Grammar,
    GrammarError,
    decode_grammar,
    encode_grammar,
    engine_text,
)

TOKENIZER = LLTokenizer(make_tokenizer().backend_tokenizer.to_str(), eos_token=[0])


def accepts(kind: Any, value: Any, text: str) -> bool:
    grammar = decode_grammar(encode_grammar(Grammar(kind, value)))
    matcher = LLMatcher(TOKENIZER, engine_text(grammar), limits=LLParserLimits(**ENGINE_LIMITS))  # type: ignore[arg-type]
    assert not matcher.is_error(), matcher.get_error()
    tokens = TOKENIZER.tokenize_str(text)
    return bool(matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting())


@pytest.mark.parametrize(
    ("pattern", "text"),
    [
        ("a/b", "a/b"), (r"a\/b", "a/b"), (r"\\/x", "\\/x"), ("a\nb", "a\nb"), ("a\\\nb", "a\nb"), ("//", "//"),
        ("[/]x", "/x"), ('"q"', '"q"'), ("é+", "éé"), ("x#y //z", "x#y //z"), ("", ""), ("(foo|bar)*", "foobar"),
    ],
)  # fmt: skip
def test_a_regex_means_itself(pattern: str, text: str) -> None:
    assert accepts("regex", pattern, text) and not accepts("regex", pattern, text + "!")


@pytest.mark.parametrize("choice", ['é\n"x\\', "a/b", "😀", "//", "", "a"])
def test_a_choice_means_itself(choice: str) -> None:
    assert accepts("choice", [choice, "other"], choice) and accepts("choice", [choice, "other"], "other")
    assert not accepts("choice", [choice, "other"], choice + "!")


def test_many_choices_are_taken() -> None:
    names = [f"value{index}" for index in range(MAX_CHOICES)]
    assert accepts("choice", names, "value999") and not accepts("choice", names, "value1000")


def test_json_kinds() -> None:
    assert accepts("json_object", None, '{"a": [1, {"b": null}]}') and not accepts("json_object", None, "[1]")
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    assert accepts("json_schema", schema, '{"a": 5}') and not accepts("json_schema", schema, '{"b": 5}')


def test_whitespace_is_bounded_whatever_the_schema_says() -> None:
    free = {"type": "object", "x-guidance": {"whitespace_flexible": True, "lenient": True}}
    assert accepts("json_schema", free, "{" + " " * 16 + "}") and not accepts("json_schema", free, "{" + " " * 17 + "}")


def test_a_lark_grammar_is_taken_as_it_is() -> None:
    assert accepts("lark", 'start: "a" b\nb: /[0-9]+/', "a12")


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        ("json_schema", True), ("json_schema", None), ("json_schema", [1]), ("regex", 5), ("regex", None), ("lark", {}),
        ("choice", []), ("choice", "yes"), ("choice", ["a", 1]), ("choice", ["a"] * (MAX_CHOICES + 1)),
        ("regex", "a" * MAX_GRAMMAR_BYTES), ("regex", "\ud83d"),
    ],
)  # fmt: skip
def test_what_is_no_grammar_is_refused(kind: Any, value: Any) -> None:
    with pytest.raises(GrammarError):
        encode_grammar(Grammar(kind, value))


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"kind":"nonsense"}', '{"kind":"regex","value":"a","more":1}'])
def test_noise_on_the_wire_is_refused(text: str) -> None:
    with pytest.raises(GrammarError):
        decode_grammar(text)
