"""The loads that every engine gets: their lengths, what they share, and that a seed is all they depend on."""

from __future__ import annotations

import statistics

import pytest

from benchmarks.peers.workloads import (
    FIRST_ID,
    LOADS,
    LONG_LOW,
    OWN_TOKENS,
    PREFIX_TOKENS,
    PREFIXES,
    WARM_OUTPUT,
    shots_of,
    warm_up_of,
)

VOCAB = 49152


def prompts(name: str, seed: int, count: int = 64) -> set[tuple[int, ...]]:
    return {tuple(shot.prompt) for shot in shots_of(LOADS[name], seed, VOCAB, count)}


@pytest.mark.parametrize("name", LOADS)
def test_a_seed_gives_the_same_requests_and_more_of_them_begin_alike(name: str) -> None:
    few, many = (shots_of(LOADS[name], 7, VOCAB, count) for count in (20, 40))
    assert many[:20] == few
    assert few == shots_of(LOADS[name], 7, VOCAB, 20)


def test_no_prompt_recurs_in_another_load_another_seed_or_a_warm_up() -> None:
    groups = [prompts(name, seed) for name in LOADS for seed in (1, 2)]
    groups += [{tuple(shot.prompt) for shot in warm_up_of(load, 1, VOCAB)} for load in LOADS.values()]
    assert len(set().union(*groups)) == sum(len(group) for group in groups)


def test_chat_has_the_medians_and_limits_that_it_names() -> None:
    found = shots_of(LOADS["chat16"], 3, VOCAB, 4000)
    lengths, outputs = [len(shot.prompt) for shot in found], [shot.max_tokens for shot in found]
    assert statistics.median(lengths) == pytest.approx(60, rel=0.05)
    assert statistics.median(outputs) == pytest.approx(40, rel=0.05)
    assert (min(lengths), max(lengths), min(outputs), max(outputs)) == (10, 400, 5, 300)


def test_uniform_is_uniform() -> None:
    assert {(len(shot.prompt), shot.max_tokens) for shot in shots_of(LOADS["uniform32"], 1, VOCAB, 50)} == {(64, 50)}


def test_each_prefix_comes_once_in_eight_requests_and_what_follows_is_its_own() -> None:
    found = shots_of(LOADS["prefix16"], 1, VOCAB, 5 * PREFIXES)
    for begin in range(0, len(found), PREFIXES):
        assert len({tuple(shot.prompt[:PREFIX_TOKENS]) for shot in found[begin : begin + PREFIXES]}) == PREFIXES
    assert len({tuple(shot.prompt[:PREFIX_TOKENS]) for shot in found}) == PREFIXES
    assert len({tuple(shot.prompt[PREFIX_TOKENS:]) for shot in found}) == len(found)
    assert {len(shot.prompt) for shot in found} == {PREFIX_TOKENS + OWN_TOKENS}


def test_one_prompt_in_every_ten_of_longmix_is_long() -> None:
    found = [len(shot.prompt) for shot in shots_of(LOADS["longmix16"], 1, VOCAB, 200)]
    for begin in range(0, 200, 10):
        assert sum(length >= LONG_LOW for length in found[begin : begin + 10]) == 1
    assert max(found) <= 4000
    assert len({place % 10 for place, length in enumerate(found) if length >= LONG_LOW}) > 3


def test_prompts_hold_ordinary_tokens_and_lengths_do_not_depend_on_the_vocabulary() -> None:
    large, small = (shots_of(LOADS["chat1"], 1, size, 30) for size in (VOCAB, 320))
    assert min(min(shot.prompt) for shot in large) >= FIRST_ID
    assert all(160 <= token < 320 for shot in small for token in shot.prompt)
    assert [(len(shot.prompt), shot.max_tokens) for shot in large] == [
        (len(shot.prompt), shot.max_tokens) for shot in small
    ]


@pytest.mark.parametrize("load", LOADS.values(), ids=LOADS)
def test_a_warm_up_is_one_short_answer_for_each_user(load: object) -> None:
    found = warm_up_of(load, 1, VOCAB)  # type: ignore[arg-type]
    assert len(found) == load.concurrency  # type: ignore[attr-defined]
    assert max(shot.max_tokens for shot in found) <= WARM_OUTPUT
