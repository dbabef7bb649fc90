"""Penalties, biases and bans: against ``transformers`` and plain formulas, and what a row may depend on."""

from __future__ import annotations

import random

import pytest
import torch
from transformers import RepetitionPenaltyLogitsProcessor

from shared.messages import Sampling
from worker.processors import Shape, bias_of, process
from worker.sampling import SampleRow, sample
from worker.token_counts import TokenCounts

VOCABULARY = 97


def random_logits(count: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(count, VOCABULARY, generator=torch.Generator().manual_seed(seed)) * 3


def shape_of(tokens: list[int], prompt_len: int, **how: object) -> Shape:
    sampling = Sampling(0, 16, **how)  # type: ignore[arg-type]
    counts = TokenCounts(prompt_len, with_prompt=sampling.repetition_penalty != 1)
    counts.follow(tokens)
    return Shape(sampling, counts=counts, bias=bias_of(sampling, VOCABULARY))


def naive(logits: torch.Tensor, tokens: list[int], prompt_len: int, sampling: Sampling) -> torch.Tensor:
    """OpenAI's and vLLM's formulas, one token at a time, in float32."""
    out = logits.clone()
    for token, value in sampling.logit_bias:
        out[token] += value
    for token in set(tokens):
        penalty = sampling.repetition_penalty
        out[token] = out[token] / penalty if out[token] > 0 else out[token] * penalty
    output = tokens[prompt_len:]
    for token in set(output):
        out[token] -= torch.tensor(sampling.frequency_penalty) * output.count(token)
        out[token] -= torch.tensor(sampling.presence_penalty)
    return out


@pytest.mark.parametrize("penalty", [0.7, 1.3, 2.0])
def test_repetition_penalty_is_that_of_transformers(penalty: float) -> None:
    rng = random.Random(1)
    rows = [[rng.randrange(VOCABULARY) for _ in range(30)] for _ in range(6)]
    logits = random_logits(6)
    wanted = RepetitionPenaltyLogitsProcessor(penalty)(torch.tensor(rows), logits.clone())
    shapes = {number: shape_of(row, 20, repetition_penalty=penalty) for number, row in enumerate(rows)}
    assert torch.equal(process(logits, shapes), wanted)


@pytest.mark.parametrize(
    "how",
    [{"presence_penalty": 1.5}, {"frequency_penalty": 0.3}, {"frequency_penalty": -2.0, "presence_penalty": 0.7},
     {"repetition_penalty": 1.2, "frequency_penalty": 0.5, "presence_penalty": -0.5},
     {"repetition_penalty": 1.2, "presence_penalty": 1.0, "logit_bias": [(5, 4.0), (96, -100.0), (0, 0.25)]}],
    ids=str,
)  # fmt: skip
def test_penalties_are_the_formulas(how: dict[str, object]) -> None:
    rng = random.Random(2)
    tokens = [rng.randrange(20) for _ in range(40)]
    logits = random_logits(1)
    shape = shape_of(tokens, 15, **how)
    assert torch.equal(process(logits.clone(), {0: shape})[0], naive(logits[0], tokens, 15, shape.sampling))


def test_presence_and_frequency_leave_the_prompt_alone() -> None:
    logits = random_logits(1)
    shape = shape_of([1, 2, 3], 3, presence_penalty=2.0, frequency_penalty=2.0)
    assert torch.equal(process(logits.clone(), {0: shape}), logits)


def test_rows_that_do_not_ask_keep_their_bits() -> None:
    logits = random_logits(5)
    changed = process(logits.clone(), {3: shape_of([1, 2, 1], 1, presence_penalty=2.0)})
    assert torch.equal(changed[[0, 1, 2, 4]], logits[[0, 1, 2, 4]]) and not torch.equal(changed[3], logits[3])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_a_row_does_not_depend_on_the_rows_beside_it(dtype: torch.dtype) -> None:
    rng = random.Random(3)
    logits = random_logits(9).to(dtype)
    asked = [{"repetition_penalty": 1.1}, {"presence_penalty": 0.5, "logit_bias": [(4, 3.0)]}, {"frequency_penalty": 1}]
    rows = []
    for number in range(9):
        tokens = [rng.randrange(VOCABULARY) for _ in range(10 + number)]
        shape = shape_of(tokens, 5, temperature=float(number % 2), **asked[number % 3])  # type: ignore[arg-type]
        rows.append(SampleRow(shape.sampling, number, 0, len(tokens), shape if number != 4 else None))
    together = sample(logits.clone(), rows)
    assert together == [sample(logits[n : n + 1].clone(), [rows[n]])[0] for n in range(9)]
    assert together == sample(logits.flip(0), rows[::-1])[::-1]


def test_counts_taken_in_token_by_token_are_those_taken_in_at_once() -> None:
    rng = random.Random(4)
    tokens = [rng.randrange(50) for _ in range(300)]
    for with_prompt in (False, True):
        steps = TokenCounts(40, with_prompt)
        for length in (40, 41, 42, 50, 299, 300):
            steps.follow(tokens[:length])
        once = TokenCounts(40, with_prompt)
        once.follow(tokens)
        seen = dict(zip(steps.ids.tolist(), steps.counts.tolist(), strict=True))
        assert seen == dict(zip(once.ids.tolist(), once.counts.tolist(), strict=True))
        wanted = {token: tokens[40:].count(token) for token in (tokens if with_prompt else tokens[40:])}
        assert seen == wanted


def test_biases_outside_the_vocabulary_are_ignored() -> None:
    assert bias_of(Sampling(0, 16, logit_bias=[(VOCABULARY, 5.0), (10**6, 5.0), (-1, 5.0)]), VOCABULARY) is None


def test_logits_need_not_be_contiguous() -> None:
    wide = random_logits(4)
    narrow = wide[:, :90]
    sampling = Sampling(0, 16, logit_bias=[(89, 50.0)])
    shapes = {1: Shape(sampling, banned=(3,), bias=bias_of(sampling, 90))}
    changed = process(narrow.clone(), shapes)
    assert torch.equal(process(narrow, shapes), changed) and changed[1].argmax() == 89


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("how", [{}, {"top_k": 3}, {"top_p": 0.4}, {"min_p": 0.9}], ids=str)
@pytest.mark.parametrize("broken", [float("-inf"), float("nan"), None])
def test_what_is_not_allowed_never_comes(temperature: float, how: dict[str, float], broken: float | None) -> None:
    allowed = torch.zeros(13 * 8, dtype=torch.bool)
    allowed[[7, 70, 71]] = True
    bits = (allowed.view(13, 8).int() * torch.tensor([1 << n for n in range(8)])).sum(-1).to(torch.uint8).numpy()
    logits = random_logits(60)
    if broken is not None:
        logits[:, allowed[:VOCABULARY]] = broken
    sampling = Sampling(0, 16, temperature=temperature, **how)  # type: ignore[arg-type]
    rows = [SampleRow(sampling, 0, 0, n, Shape(sampling, banned=(7,), allowed=bits)) for n in range(60)]
    assert set(sample(logits.clone(), rows)) <= {70, 71}
    only = [SampleRow(sampling, 0, 0, n, Shape(sampling, banned=(7, 70, 71), allowed=bits)) for n in range(60)]
    assert set(sample(logits.clone(), only)) <= {7, 70, 71}  # the grammar is kept where the ban leaves nothing
