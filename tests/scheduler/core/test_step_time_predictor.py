"""The step-time predictor against steps whose cost is known."""

from __future__ import annotations

import random
from functools import partial

import pytest

from scheduler.core.step_time import PlannedWork, StepTimePredictor, attention_pairs

BASE_US, DECODE_US, KNEE, TOKEN_US, PAIR_US = 12_000.0, 12.0, 200, 80.0, 0.004


def cost_us(work: PlannedWork) -> float:
    """A roofline: reading the weights hides the first tokens; attention comes on top."""
    rows = work.decodes + work.prefill
    return BASE_US + max(0, rows - KNEE) * TOKEN_US + work.decodes * DECODE_US + work.pairs * PAIR_US


def chunk(before: int, tokens: int, decodes: int = 16) -> PlannedWork:
    return PlannedWork(decodes, tokens, attention_pairs(before, tokens))


def after_decodes(count: int = 100) -> StepTimePredictor:
    predictor = StepTimePredictor()
    for index in range(count):
        work = PlannedWork(10 + index % 12)
        predictor.observe(work, cost_us(work))
    return predictor


def serve_prompt(predictor: StepTimePredictor, length: int, target_us: float, budget: int = 8192) -> list[float]:
    """Run one prompt in chunks as long as the target allows; what each step took."""
    took, done = [], 0
    while done < length:
        tokens = predictor.prefill_within(target_us, 16, min(budget, length - done), 32, partial(attention_pairs, done))
        assert tokens > 0
        work = chunk(done, tokens)
        took.append(cost_us(work))
        predictor.observe(work, took[-1])
        done += tokens
    return took


def test_nothing_is_known_at_first() -> None:
    predictor = StepTimePredictor()
    assert predictor.predict_us(PlannedWork(8, 100, 5000)) == 0
    assert predictor.decode_us(8) == 0 and predictor.prompt_us(1000) == 0


def test_decodes_are_predicted_from_decodes() -> None:
    predictor = after_decodes()
    for rows in (10, 16, 21, 40):
        assert predictor.predict_us(PlannedWork(rows)) == pytest.approx(cost_us(PlannedWork(rows)), rel=0.01)


def test_what_decodes_taught_outlives_prompts() -> None:
    predictor = after_decodes()
    serve_prompt(predictor, 32_768, 50_000)
    assert predictor.decode_us(16) == pytest.approx(cost_us(PlannedWork(16)), rel=0.01)


def test_the_first_chunk_after_decodes_alone_is_short() -> None:
    """Decode-only steps say nothing of what a prompt token costs: the first chunks are steps of probing."""
    assert after_decodes().prefill_within(50_000, 16, 8192, 32, lambda count: attention_pairs(0, count)) == 32


@pytest.mark.parametrize("target_us", [20_000, 50_000, 200_000])
def test_a_long_prompt_keeps_the_target_from_its_first_chunk_to_its_last(target_us: float) -> None:
    predictor = after_decodes()
    for _ in range(3):
        took = serve_prompt(predictor, 32_768, target_us)
        assert max(took) < 1.2 * target_us  # where arithmetic begins to count is found by stepping over it
        settled = took[len(took) // 3 : -1]
        assert sum(settled) / len(settled) > 0.85 * target_us, "the target is used, not only kept"


def test_a_target_below_what_decodes_take_still_lets_prompts_go_on() -> None:
    """At a third of the pace that they had alone, not at the fewest tokens a step."""
    took = serve_prompt(after_decodes(), 20_000, 5_000)
    decoding = cost_us(PlannedWork(16))
    settled = took[len(took) // 3 : -1]
    assert 1.3 * decoding < sum(settled) / len(settled) < 1.6 * decoding


def test_chunks_of_one_length_are_not_thought_free_or_fixed() -> None:
    """All chunks equal: the data can't tell a fixed cost from one per token, and double the chunk is not free."""
    predictor = after_decodes()
    for _ in range(50):
        predictor.observe(chunk(0, 512), cost_us(chunk(0, 512)))
    assert predictor.predict_us(chunk(0, 512)) == pytest.approx(cost_us(chunk(0, 512)), rel=0.02)
    assert predictor.predict_us(chunk(0, 1024)) > 1.5 * cost_us(chunk(0, 512))


def test_noise_and_outliers_widen_the_margin_and_no_more() -> None:
    predictor, rng = after_decodes(), random.Random(1)
    granted = []
    for _ in range(400):
        tokens = predictor.prefill_within(60_000, 16, 4096, 32, lambda count: attention_pairs(0, count))
        granted.append(tokens)
        took = cost_us(chunk(0, tokens)) * rng.uniform(0.8, 1.2) * (5 if rng.random() < 0.02 else 1)
        predictor.observe(chunk(0, tokens), took)
    ideal = KNEE - 16 + (60_000 - BASE_US) / TOKEN_US
    settled = sorted(granted[100:])
    assert 0.4 * ideal < settled[len(settled) // 2] < 1.05 * ideal


def test_predictions_are_never_negative() -> None:
    predictor, rng = StepTimePredictor(), random.Random(2)
    for _ in range(300):
        predictor.observe(
            PlannedWork(rng.randrange(3), rng.randrange(3), rng.randrange(10_000)), rng.choice((0.0, 1.0, 1e7))
        )
        for work in (PlannedWork(1), PlannedWork(0, 1, 1), PlannedWork(5, 4000, 10**9)):
            assert predictor.predict_us(work) >= 0
        assert predictor.prompt_us(1000) >= 0


def test_a_cold_first_step_does_not_make_every_later_one_long() -> None:
    """The only step without prompts took ten times as long as decodes take: it is forgotten, and the target kept."""
    predictor = StepTimePredictor()
    predictor.observe(PlannedWork(1), 120_000)
    took = serve_prompt(predictor, 20_000, 60_000)
    assert max(took) < 1.2 * 60_000
    settled = took[len(took) // 3 : -1]
    assert sum(settled) / len(settled) > 0.6 * 60_000
