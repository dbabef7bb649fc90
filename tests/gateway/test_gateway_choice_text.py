"""From tokens to a choice's text: ends, stop strings, min_tokens, counts."""

from __future__ import annotations

from tokenizers_under_test import byte_level

from gateway.choice_text import ChoiceText
from gateway.detokenizer import Vocabulary

TOKENIZER = byte_level()
VOCABULARY = Vocabulary(TOKENIZER)
EOS = 0


def ids(text: str) -> list[int]:
    return TOKENIZER.encode(text).ids


def choice(*stops: str, include: bool = False, min_tokens: int = 0) -> ChoiceText:
    return ChoiceText(VOCABULARY.detokenizer([]), stops, include, min_tokens)


def test_length_ends_with_all_text() -> None:
    text = choice()
    assert text.feed(ids("xyz"), "length") == "xyz"
    assert (text.finish_reason, text.num_tokens) == ("length", 3)


def test_the_token_that_stops_is_counted_and_not_shown() -> None:
    for stops in ((), ("q",)):
        text = choice(*stops)
        assert text.feed([*ids("xy"), ids("z")[0]], "stop") == "xy"
        assert (text.finish_reason, text.num_tokens) == ("stop", 3)


def test_eos_first_is_an_empty_answer() -> None:
    text = choice()
    assert text.feed([EOS], "stop") == ""
    assert (text.finish_reason, text.num_tokens) == ("stop", 1)


def test_tokens_behind_a_stop_string_are_neither_shown_nor_counted() -> None:
    text = choice("zw")
    assert text.feed(ids("xyz")) == "xy"
    assert text.feed(ids("wvvv")) == ""
    assert (text.finish_reason, text.num_tokens, text.stopped_here) == ("stop", 4, True)


def test_a_stop_string_at_the_length_limit_is_a_stop() -> None:
    text = choice("yz")
    assert text.feed(ids("xyz"), "length") == "x"
    assert text.finish_reason == "stop"


def test_what_a_stop_string_held_back_comes_at_the_end() -> None:
    text = choice("yzw")
    assert text.feed(ids("xyz")) == "x"
    assert text.feed(ids("q"), "length") == "yzq"
    assert text.finish_reason == "length"
    held = choice("yzw")
    assert held.feed(ids("xyz"), "length") == "xyz"


def test_half_a_character_at_the_end_is_shown_as_such() -> None:
    text = choice()
    assert text.feed(ids("é")[:1], "length") == "\ufffd"


def test_no_stop_string_counts_within_min_tokens() -> None:
    text = choice("y", min_tokens=3)
    assert text.feed(ids("xyyxy")) == "xyyx"
    assert (text.finish_reason, text.num_tokens) == ("stop", 5)


def test_a_stop_string_can_be_included() -> None:
    text = choice("yz", include=True)
    assert text.feed(ids("xyzq")) == "xyz"
