"""Tokens to text, the whole way (detokenizer and stop strings): exact for every kind of tokenizer and any cut.

CASES B09 and B10. The oracle is the tokenizer's own decoding of all ids, and ``str.find``.
"""

from __future__ import annotations

from itertools import chain

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import Tokenizer
from tokenizers_under_test import KINDS

from gateway.choice_text import ChoiceText
from gateway.detokenizer import Vocabulary

TOKENIZERS: dict[str, Tokenizer] = {name: make() for name, make in KINDS.items()}
VOCABULARIES = {name: Vocabulary(tokenizer) for name, tokenizer in TOKENIZERS.items()}
FIRST_WORD = {"llama_style": 259, "metaspace": 259, "byte_level": 3, "word_piece": 1}  # ids of ordinary text from there


def decode(name: str, ids: list[int]) -> str:
    return TOKENIZERS[name].decode(ids, skip_special_tokens=True)


def feed_all(name: str, text: ChoiceText, ids: list[int], sizes: list[int]) -> list[str]:
    """The pieces of ``ids`` cut into ``sizes``, over and over, until a stop string ends the choice."""
    pieces, at, turn = [], 0, 0
    while at < len(ids) and text.finish_reason is None:
        size = sizes[turn % len(sizes)]
        turn += 1
        pieces.append(text.feed(ids[at : at + size], "length" if at + size >= len(ids) else ""))
        at += size
    return pieces


def token_lists(name: str) -> st.SearchStrategy[list[int]]:
    """Ids of any kind, but often a character's bytes in a row, as byte-fallback tokenizers write what they lack."""
    size = TOKENIZERS[name].get_vocab_size()
    anything = st.integers(0, size + 4).map(lambda id_: [id_])
    if TOKENIZERS[name].token_to_id("<0x00>") is None:
        return st.lists(anything, max_size=40).map(lambda runs: list(chain.from_iterable(runs)))
    spelled = st.characters(exclude_categories=["Cs"]).map(lambda char: [3 + byte for byte in char.encode()])
    words = st.integers(FIRST_WORD[name], size - 1).map(lambda id_: [id_])
    return st.lists(st.one_of(anything, spelled, words), max_size=24).map(lambda runs: list(chain.from_iterable(runs)))


@pytest.mark.parametrize("name", KINDS)
@given(data=st.data(), sizes=st.lists(st.integers(1, 5), min_size=1, max_size=6))
def test_joined_pieces_are_the_decoding_of_all_ids(name: str, data: st.DataObject, sizes: list[int]) -> None:
    ids = data.draw(token_lists(name).filter(len))
    text = ChoiceText(VOCABULARIES[name].detokenizer([]), [], False, 0)
    pieces = feed_all(name, text, ids, sizes)
    whole = decode(name, ids)
    assert "".join(pieces) == whole
    if "\ufffd" not in whole:
        assert not any("\ufffd" in piece for piece in pieces)  # no half character, not even for a moment


@pytest.mark.parametrize("name", KINDS)
@given(
    data=st.data(),
    sizes=st.lists(st.integers(1, 5), min_size=1, max_size=6),
    include=st.booleans(),
    absent=st.text("qz<", min_size=1, max_size=3),
)
def test_the_earliest_stop_string_ends_the_text_wherever_tokens_end(
    name: str, data: st.DataObject, sizes: list[int], include: bool, absent: str
) -> None:
    ids = data.draw(token_lists(name).filter(len))
    whole = decode(name, ids)
    stops = [absent]
    for _ in range(
        data.draw(st.integers(0, 2)) if whole else 0
    ):  # substrings, which cross tokens and characters' bytes
        start = data.draw(st.integers(0, len(whole) - 1))
        stops.append(whole[start : start + data.draw(st.integers(1, 6))])
    text = ChoiceText(VOCABULARIES[name].detokenizer([]), stops, include, 0)
    out = "".join(feed_all(name, text, ids, sizes))
    found = [(whole.find(stop), len(stop)) for stop in stops if stop in whole]
    if not found:
        assert (out, text.finish_reason) == (whole, "length")
        return
    start, size = min(found)
    assert out == (whole[: start + size] if include else whole[:start])
    assert text.finish_reason == "stop"


@pytest.mark.parametrize("name", ["llama_style", "metaspace", "byte_level"])
@given(data=st.data(), sizes=st.lists(st.integers(1, 5), min_size=1, max_size=6))
def test_a_text_goes_on_where_its_prompt_ended(name: str, data: st.DataObject, sizes: list[int]) -> None:
    tokenizer = TOKENIZERS[name]
    words = st.lists(st.integers(FIRST_WORD[name], tokenizer.get_vocab_size() - 1), min_size=1, max_size=5)
    prompt = data.draw(words) if name != "byte_level" else tokenizer.encode(data.draw(st.text(min_size=1))).ids
    ids = data.draw(token_lists(name).filter(len))
    text = ChoiceText(VOCABULARIES[name].detokenizer(prompt), [], False, 0)
    out = "".join(feed_all(name, text, ids, sizes))
    assert out == decode(name, prompt + ids)[len(decode(name, prompt)) :]


@given(st.text(min_size=1), st.lists(st.integers(1, 5), min_size=1, max_size=6))
@example("👩\u200d👩\u200d👧 é e\u0301 \u2028 \x85 ß", [1])
def test_any_text_comes_back_from_byte_level_ids(written: str, sizes: list[int]) -> None:
    ids = TOKENIZERS["byte_level"].encode(written).ids
    text = ChoiceText(VOCABULARIES["byte_level"].detokenizer([]), [], False, 0)
    assert "".join(feed_all("byte_level", text, ids, sizes)) == decode("byte_level", ids)
