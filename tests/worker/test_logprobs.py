"""Log-probabilities against ``log_softmax`` of ``transformers``' logits: of the output, of the prompt, in chunks."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from batch_driver import BatchDriver
from transformers import AutoModelForCausalLM

from shared.messages import Sampling, SlotStart, StepPlan, TokenEntry, TokenLogprob, pack_tokens
from worker.batch import Batch
from worker.logprobs import FLOOR, describe, log_probabilities
from worker.service import split_entries
from worker.torch_runner import TorchRunner

MakeModel = Callable[..., Path]


def make_prompt(length: int, seed: int = 7) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, 296) for _ in range(length)]


def reference(folder: Path, tokens: list[int]) -> torch.Tensor:
    """``[length, vocabulary]`` log-probabilities of the token after each."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    with torch.inference_mode():
        return torch.log_softmax(model(torch.tensor([tokens])).logits[0], dim=-1)


def check(got: TokenLogprob, token: int, row: torch.Tensor, top: int) -> None:
    assert got.log_prob == pytest.approx(float(row[token]), abs=1e-4)
    assert got.rank == int((row > row[token]).sum()) + 1
    best = torch.topk(row, top)
    assert got.top_ids == best.indices.tolist()
    assert got.top_log_probs == pytest.approx(best.values.tolist(), abs=1e-4)


@pytest.mark.parametrize(
    "how",
    [{"temperature": 0.0}, {"temperature": 0.3, "top_k": 4}, {"presence_penalty": 2.0, "logit_bias": [(9, 30.0)]},
     {"min_tokens": 8, "temperature": 2.0}],
    ids=str,
)  # fmt: skip
def test_they_are_the_models_own_whatever_the_sampling(how: dict[str, object], tiny_model: MakeModel) -> None:
    folder = tiny_model("llama")
    prompt = make_prompt(40)
    driver = BatchDriver(TorchRunner.load(folder, dtype="float32", num_blocks=64))
    sampling = Sampling(5, 8, ignore_eos=True, logprobs=5, **how)  # type: ignore[arg-type]
    sequence = driver.start(prompt, sampling)
    beside = driver.start(make_prompt(9), Sampling(6, 8, ignore_eos=True, logprobs=0))
    silent = driver.start(make_prompt(8), Sampling(7, 8, ignore_eos=True))
    driver.run_to_end(chunk=17)
    wanted = reference(folder, prompt + sequence.tokens)
    assert len(driver.logprobs[sequence.slot]) == len(sequence.tokens) == 8
    for place, (token, got) in enumerate(zip(sequence.tokens, driver.logprobs[sequence.slot], strict=True)):
        check(got, token, wanted[len(prompt) - 1 + place], 5)
    assert [(one.top_ids, one.rank > 0) for one in driver.logprobs[beside.slot]] == [([], True)] * 8
    assert silent.slot not in driver.logprobs


@pytest.mark.parametrize("chunk", [1, 16, 23, 512])
def test_the_prompts_come_once_for_each_token_whatever_the_chunks(chunk: int, tiny_model: MakeModel) -> None:
    folder = tiny_model("llama")
    prompts = {top: make_prompt(length, length) for top, length in ((3, 70), (0, 1), (20, 2))}
    driver = BatchDriver(TorchRunner.load(folder, dtype="float32", num_blocks=64))
    sequences = {
        top: driver.start(prompt, Sampling(5, 3, ignore_eos=True, prompt_logprobs=top))
        for top, prompt in prompts.items()
    }
    driver.start(make_prompt(50), Sampling(5, 3, ignore_eos=True))
    driver.run_to_end(chunk=chunk)
    for top, prompt in prompts.items():
        got = driver.prompt_logprobs.get(sequences[top].slot, {})
        assert sorted(got) == list(range(1, len(prompt)))
        wanted = reference(folder, prompt)
        for place, one in got.items():
            check(one, prompt[place], wanted[place - 1], top)


def test_a_prompts_piece_is_small_enough_for_a_message(tiny_model: MakeModel) -> None:
    driver = BatchDriver(TorchRunner.load(tiny_model("llama"), dtype="float32", num_blocks=64))
    sequence = driver.start(make_prompt(700), Sampling(5, 1, ignore_eos=True, prompt_logprobs=20))
    driver.run_to_end(chunk=700)
    assert len(driver.prompt_logprobs[sequence.slot]) == 699
    assert max(len(entry.prompt_logprobs) for entry in driver.entries) <= 256


def test_a_sequence_that_resumes_does_not_say_its_prompt_again(tiny_model: MakeModel) -> None:
    driver = BatchDriver(TorchRunner.load(tiny_model("llama"), dtype="float32", num_blocks=64))
    sampling = Sampling(5, 6, ignore_eos=True, prompt_logprobs=2, logprobs=1)
    whole = driver.start(make_prompt(30), sampling)
    driver.run_to_end()
    before = dict(driver.prompt_logprobs)
    first = driver.logprobs.pop(whole.slot)
    driver.prompt_logprobs.clear()
    driver.start(make_prompt(30), sampling, generated=whole.tokens[:4])
    driver.run_to_end(chunk=8)
    assert before and not driver.prompt_logprobs
    assert driver.logprobs[whole.slot] == first[4:]


def test_forks_carry_their_own_and_the_first_choice_the_prompts(tiny_model: MakeModel) -> None:
    runner = TorchRunner.load(tiny_model("llama"), dtype="float32", num_blocks=64)
    batch = Batch(16, 64, 256, frozenset())
    prompt = make_prompt(20)
    sampling = Sampling(3, 4, temperature=2.0, logprobs=2, prompt_logprobs=0)
    starts = [SlotStart(0, "r", 1, 1, "g", pack_tokens(prompt), 20, [1, 2], sampling, computed=0)]
    starts += [SlotStart(n, "r", 1, n + 1, "g", b"", 20, [], sampling, computed=20, parent=0) for n in (1, 2)]
    plan = StepPlan(0, "w", 0, 1, starts=starts, chunks=[(0, 20)])
    step = batch.stage(plan)
    settled = batch.settle(step, runner.forward(batch, step))
    prompts = [entry for _, entry in settled.entries if entry.prompt_logprobs]
    rows = [entry for _, entry in settled.entries if entry.tokens]
    assert [(entry.choice, entry.prompt_offset, len(entry.prompt_logprobs)) for entry in prompts] == [(0, 1, 19)]
    assert [entry.choice for entry in rows] == [1, 2, 3] and all(entry.cached == 0 for entry in rows)
    assert len({(entry.tokens[0], entry.logprobs[0].log_prob) for entry in rows}) > 1
    assert len({tuple(entry.logprobs[0].top_ids) for entry in rows}) == 1


def test_what_is_no_number_is_the_floor() -> None:
    logits = torch.full((2, 5), float("-inf"))
    logits[0, 2] = 0.0
    got = describe(log_probabilities(logits), [1, 0], [2, 2])
    assert got[0].log_prob == FLOOR and got[0].top_ids[0] == 2 and got[0].top_log_probs == [0.0, FLOOR]
    assert got[1].log_prob == FLOOR and got[1].top_log_probs == [FLOOR, FLOOR]


def test_ties_come_in_the_order_of_their_ids_and_share_a_rank() -> None:
    [one] = describe(log_probabilities(torch.zeros(1, 6)), [4], [6])
    assert one.top_ids == list(range(6)) and one.rank == 1


@pytest.mark.parametrize("vocabulary", [7, 640, 12_800, 12_801])
def test_the_best_are_found_in_any_vocabulary(vocabulary: int) -> None:
    log_probs = log_probabilities(torch.randn(4, vocabulary, generator=torch.Generator().manual_seed(2)))
    log_probs[0, -1] = 1.0
    wanted = torch.topk(log_probs, 6)
    got = describe(log_probs, [0] * 4, [6] * 4)
    assert [one.top_ids for one in got] == wanted.indices.tolist()
    assert [one.top_log_probs for one in got] == wanted.values.tolist()


def test_bits_do_not_depend_on_the_rows_beside() -> None:
    logits = torch.randn(9, 5000, generator=torch.Generator().manual_seed(1))
    together = describe(log_probabilities(logits), list(range(9)), [5] * 9)
    assert together == [describe(log_probabilities(logits[n : n + 1]), [n], [5])[0] for n in range(9)]


@pytest.mark.parametrize("vocabulary", [300, 12_801])
def test_equal_ones_do_not_depend_on_how_many_the_rows_beside_ask_for(vocabulary: int) -> None:
    logits = torch.randn(40, vocabulary, generator=torch.Generator().manual_seed(3)).mul_(2).round_()  # many ties
    log_probs = log_probabilities(logits)
    alone = describe(log_probs, [0] * 40, [2] * 40)
    for beside in (3, 20):
        assert describe(log_probs, [0] * 40, [2] * 39 + [beside])[:39] == alone[:39]
    for one, row in zip(alone, log_probs.tolist(), strict=True):
        assert one.top_ids == sorted(range(vocabulary), key=lambda token: (-row[token], token))[:2]


def test_entries_with_log_probabilities_are_split_by_their_size() -> None:
    rich = TokenLogprob(-1.0, 1, list(range(20)), [-1.0] * 20)
    entries = [TokenEntry("r", 1, n, 0, [1], logprobs=[rich]) for n in range(100)]
    parts = split_entries(entries, 20_000)
    assert len(parts) > 3 and [entry for part in parts for entry in part] == entries


def test_a_beams_candidates_are_the_models_though_it_may_not_end_yet(tiny_model: MakeModel) -> None:
    """As in transformers: the ban of min_tokens leaves ends out and shares their probability with nobody."""
    folder = tiny_model("llama")
    runner = TorchRunner.load(folder, dtype="float32", num_blocks=64)
    runner.model.eos_token_ids[:] = list(range(150))  # so that much is banned
    batch = Batch(16, 64, 256, frozenset(runner.model.eos_token_ids))
    prompt = make_prompt(20)
    start = SlotStart(0, "r", 1, 0, "g", pack_tokens(prompt), 20, [1, 2], Sampling(3, 4, beam_width=2, min_tokens=2))
    plan = StepPlan(0, "w", 0, 1, starts=[start], chunks=[(0, 20)])
    step = batch.stage(plan)
    [(_, tokens, log_probs)] = batch.settle(step, runner.forward(batch, step)).candidates
    wanted = reference(folder, prompt)[-1]
    assert min(tokens) >= 150 and log_probs == pytest.approx(wanted[tokens].tolist(), abs=1e-4)
