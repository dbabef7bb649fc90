"""From tokens to a choice's text: ends, stop strings, min_tokens, counts."""

from __future__ import annotations

import random

from tokenizers_under_test import byte_level

from gateway.choice_text import ChoiceText, DetailedChoiceText, NoText
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


def detailed(*stops: str, offset: int = 0, min_tokens: int = 0, include: bool = False) -> DetailedChoiceText:
    return DetailedChoiceText(VOCABULARY.detokenizer([]), stops, include, min_tokens, offset)


def tokens_of(text: ChoiceText) -> list[int]:
    return [detail.token for detail in text.take_details()]


def test_details_come_with_the_text_that_they_settle() -> None:
    text = detailed("yzw")
    x, y, z, q = (ids(char)[0] for char in "xyzq")
    assert (text.feed([x, y]), tokens_of(text)) == ("x", [x])
    assert (text.feed([z]), tokens_of(text)) == ("", [])
    assert (text.feed([q]), tokens_of(text)) == ("yzq", [y, z, q])


def test_half_a_character_waits_for_its_other_half() -> None:
    text = detailed()
    first, second = ids("é")
    assert (text.feed([first]), tokens_of(text)) == ("", [])
    assert text.feed([second]) == "é"
    assert [(detail.token, detail.offset) for detail in text.take_details()] == [(first, 0), (second, 0)]


def test_what_waits_comes_at_the_end() -> None:
    text = detailed("yzw")
    y, z = ids("yz")
    assert (text.feed([y, z, EOS], "stop"), tokens_of(text)) == ("yz", [y, z, EOS])
    cut = detailed()
    assert (cut.feed(ids("é")[:1], "length"), tokens_of(cut)) == ("\ufffd", ids("é")[:1])


def test_tokens_behind_a_stop_string_have_no_details() -> None:
    text = detailed("yz")
    assert text.feed(ids("xyzq")) == "x"
    assert tokens_of(text) == ids("xyz")
    assert (text.num_tokens, text.finish_reason) == (3, "stop")


def test_offsets_count_what_precedes_the_text() -> None:
    text = detailed(offset=7)
    text.feed(ids("xy"))
    assert [detail.offset for detail in text.take_details()] == [7, 8]


def test_details_change_nothing_about_the_text() -> None:
    for seed in range(300):
        rng = random.Random(seed)
        tokens = [rng.randrange(3, 296) for _ in range(rng.randint(1, 40))]
        stops = rng.choice([(), ("a",), ("\ufffd", "ab"), ("th", "e")])
        end = rng.choice(["stop", "length"])
        include, min_tokens = rng.random() < 0.5, rng.choice([0, 5])
        plain = choice(*stops, include=include, min_tokens=min_tokens)
        told = detailed(*stops, include=include, min_tokens=min_tokens)
        seen: list[int] = []
        at = 0
        while at < len(tokens) and plain.finish_reason is None:
            size = rng.randint(1, 4)
            piece, last = tokens[at : at + size], end if at + size >= len(tokens) else ""
            assert told.feed(piece, last) == plain.feed(piece, last), f"seed {seed}"
            seen += tokens_of(told)
            at += size
        assert (told.num_tokens, told.finish_reason) == (plain.num_tokens, plain.finish_reason), f"seed {seed}"
        assert seen == tokens[: told.num_tokens], f"seed {seed}"


def test_who_only_looks_at_the_prompt_gets_no_text() -> None:
    text = NoText(VOCABULARY.detokenizer([]), (), False, 0)
    assert (text.feed(ids("x")), text.num_tokens, text.finish_reason) == ("", 0, "length")
