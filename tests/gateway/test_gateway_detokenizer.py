"""Joined pieces are exactly the tokenizer's decoding of all ids, for every kind of tokenizer and any cut."""

from __future__ import annotations

import random
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer
from tokenizers_under_test import KINDS, byte_level, llama_style

from gateway.detokenizer import Vocabulary

TOKENIZERS = {name: make() for name, make in KINDS.items()}
VOCABULARIES = {name: Vocabulary(tokenizer) for name, tokenizer in TOKENIZERS.items()}


def decode(tokenizer: Tokenizer, ids: list[int]) -> str:
    return tokenizer.decode(ids, skip_special_tokens=True)


def pieces_of(name: str, ids: list[int], prompt: list[int], cuts: random.Random) -> list[str]:
    detokenizer = VOCABULARIES[name].detokenizer(prompt)
    pieces = []
    at = 0
    while at < len(ids):
        size = cuts.randint(1, 3)
        pieces.append(detokenizer.feed(ids[at : at + size]))
        at += size
    return [*pieces, detokenizer.finish()]


@pytest.mark.parametrize("name", KINDS)
def test_random_ids_special_and_unknown_ones_too(name: str) -> None:
    tokenizer = TOKENIZERS[name]
    for seed in range(200):
        rng = random.Random(seed)
        ids = [rng.randrange(tokenizer.get_vocab_size() + 8) for _ in range(rng.randint(0, 64))]
        assert "".join(pieces_of(name, ids, [], rng)) == decode(tokenizer, ids), f"seed {seed}"


@pytest.mark.parametrize("name", ["llama_style", "metaspace"])
def test_a_text_behind_a_prompt_keeps_its_space(name: str) -> None:
    tokenizer = TOKENIZERS[name]
    words = [id_ for id_ in range(tokenizer.get_vocab_size()) if id_ > 258]
    for seed in range(200):
        rng = random.Random(seed)
        prompt = [rng.choice(words) for _ in range(rng.randint(1, 5))] + [2] * rng.randint(0, 2)
        ids = [rng.choice(words) if rng.random() < 0.5 else rng.randrange(259) for _ in range(rng.randint(0, 40))]
        expected = decode(tokenizer, prompt + ids)[len(decode(tokenizer, prompt)) :]
        assert "".join(pieces_of(name, ids, prompt, rng)) == expected, f"seed {seed}"


@given(st.text(), st.randoms(use_true_random=False))
def test_any_text_comes_back(text: str, cuts: random.Random) -> None:
    ids = TOKENIZERS["byte_level"].encode(text).ids
    pieces = pieces_of("byte_level", ids, [], cuts)
    assert "".join(pieces) == text
    if "\ufffd" not in text:
        assert not any("\ufffd" in piece for piece in pieces)


@pytest.mark.parametrize("name", ["byte_level", "llama_style"])
def test_a_character_of_four_tokens_comes_whole(name: str) -> None:
    tokenizer = TOKENIZERS[name]
    ids = [tokenizer.token_to_id(f"<0x{byte:02X}>") for byte in "😀".encode()]
    if name == "byte_level":
        ids = tokenizer.encode("😀").ids
    detokenizer = VOCABULARIES[name].detokenizer([])
    assert [detokenizer.feed([token]) for token in ids[:3]] == ["", "", ""]
    after = detokenizer.feed(ids[3:])
    following = detokenizer.feed(tokenizer.encode("x").ids[-1:])
    assert (after + following).rstrip("x") == "😀"


def test_a_run_of_broken_bytes_is_let_out_at_the_end() -> None:
    tokenizer = llama_style()
    ids = [tokenizer.token_to_id(token) for token in ("<0xC3>", "<0xA9>", "<0xFF>")]
    detokenizer = VOCABULARIES["llama_style"].detokenizer([])
    assert [detokenizer.feed([token]) for token in ids] == ["", "", ""]
    assert detokenizer.finish() == decode(tokenizer, ids) == "\ufffd" * 3


@pytest.mark.parametrize("name", ["byte_level", "llama_style"])
def test_the_cost_of_a_token_does_not_grow(name: str) -> None:
    detokenizer = VOCABULARIES[name].detokenizer([])
    rng = random.Random(0)
    ids = [rng.randrange(TOKENIZERS[name].get_vocab_size()) for _ in range(20_000)]
    began = time.process_time()
    for token in ids:
        detokenizer.feed([token])
    assert time.process_time() - began < 4  # quadratic work would take minutes


def test_longest_token() -> None:
    assert Vocabulary(byte_level()).longest_token_chars == len("<|endoftext|>")


@pytest.mark.parametrize("name", KINDS)
def test_special_tokens_are_shown_if_asked_for(name: str) -> None:
    tokenizer = TOKENIZERS[name]
    for seed in range(200):
        rng = random.Random(seed)
        ids = [rng.randrange(tokenizer.get_vocab_size() + 8) for _ in range(rng.randint(0, 40))]
        detokenizer = VOCABULARIES[name].detokenizer([], special_tokens=True)
        text = "".join([detokenizer.feed([token]) for token in ids]) + detokenizer.finish()
        assert text == tokenizer.decode(ids, skip_special_tokens=False), f"seed {seed}"


@pytest.mark.parametrize("name", KINDS)
def test_the_bytes_of_tokens_join_to_their_text(name: str) -> None:
    """Behind an ordinary token; broken runs of byte tokens, of which text makes U+FFFD as a whole, are left out."""
    tokenizer, vocabulary = TOKENIZERS[name], VOCABULARIES[name]
    special = set(vocabulary.special_tokens)
    ordinary = [id_ for id_ in range(tokenizer.get_vocab_size()) if id_ not in special]
    if name in ("llama_style", "metaspace"):
        ordinary = [id_ for id_ in ordinary if id_ > 258]
    for seed in range(100):
        rng = random.Random(seed)
        prompt = [rng.choice(ordinary)]
        ids = [rng.choice(ordinary) for _ in range(20)]
        detokenizer = vocabulary.detokenizer(prompt)
        text = detokenizer.feed(ids) + detokenizer.finish()
        assert b"".join(map(vocabulary.token_bytes, ids)).decode("utf-8", "replace") == text, f"seed {seed}"


def test_the_bytes_of_single_tokens() -> None:
    llama = VOCABULARIES["llama_style"]
    assert llama.token_bytes(3 + 0xC3) == b"\xc3"
    assert llama.token_bytes(1) == b"<s>"
    assert llama.token_bytes(10**6) == b""
    hello = TOKENIZERS["llama_style"].token_to_id("▁hello")
    assert llama.token_bytes(hello) == b" hello"
