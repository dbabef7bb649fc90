"""The simulated runner's made-up log-probabilities: whole, repeatable, and the same whatever the chunks."""

from __future__ import annotations

import pytest

from shared.messages import Capacity, Sampling, SlotStart, StepPlan, TokenEntry, pack_tokens
from worker.batch import Batch
from worker.simulated import SimulatedRunner, StepTime

PROMPT = list(range(40, 60))


def run(chunk: int, count: int = 5, **how: object) -> list[TokenEntry]:
    runner = SimulatedRunner(Capacity("m", 256, 16, 20, 1000, []), StepTime())
    batch = Batch(16, 20, 256, frozenset())
    sampling = Sampling(3, count, **how)  # type: ignore[arg-type]
    starts = [SlotStart(0, "r", 1, 0, "g", pack_tokens(PROMPT), len(PROMPT), [1, 2, 3], sampling)]
    entries: list[TokenEntry] = []
    left = len(PROMPT)
    while not entries or not entries[-1].end:
        run = min(left, chunk) or 1
        plan = StepPlan(0, "w", 0, 1, starts=starts, **({"chunks": [(0, run)]} if left else {"decodes": [0]}))  # type: ignore[arg-type]
        left -= min(left, run)
        starts = []
        step = batch.stage(plan)
        settled = batch.settle(step, runner.forward(batch, step))
        entries += [entry for _, entry in settled.entries]
    return entries


@pytest.mark.parametrize("chunk", [1, 7, 20])
def test_each_token_has_its_log_probability(chunk: int) -> None:
    entries = run(chunk, logprobs=3, prompt_logprobs=2)
    prompt = {
        index: one for entry in entries for index, one in enumerate(entry.prompt_logprobs, entry.prompt_offset)
    }  # fmt: skip
    assert sorted(prompt) == list(range(1, len(PROMPT)))
    rest = [entry for entry in entries if entry.tokens]
    assert len(rest) == 5 and all(len(entry.logprobs) == 1 for entry in rest)
    for entry in rest:
        [one] = entry.logprobs
        assert len(one.top_ids) == 3 and one.top_log_probs == sorted(one.top_log_probs, reverse=True)
        assert (one.rank <= 3) == (entry.tokens[0] in one.top_ids)
    assert [entry for entry in run(20, logprobs=3, prompt_logprobs=2) if entry.tokens] == rest


def test_nobody_asks_nobody_gets() -> None:
    assert all(not entry.logprobs and not entry.prompt_logprobs for entry in run(20))


def test_a_grammar_is_refused_in_words() -> None:
    [entry] = run(20, grammar='{"kind":"regex","value":"a"}')
    assert entry.end == "failed" and "simulated" in entry.reason and not entry.tokens
