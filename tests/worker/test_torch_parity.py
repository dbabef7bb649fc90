"""Token for token what ``transformers`` generates, in float64, whatever the batch and the chunks are."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from batch_driver import BatchDriver, Sequence
from transformers import AutoModelForCausalLM

from shared.messages import Sampling
from worker.torch_runner import TorchRunner

MakeModel = Callable[..., Path]

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama, tied": ("llama", {"tie_word_embeddings": True}),
    "llama, biases, MQA": ("llama", {"attention_bias": True, "mlp_bias": True, "num_key_value_heads": 1}),
    "llama 3 rope": ("llama", {"rope_parameters": {"rope_type": "llama3", "rope_theta": 10000.0, "factor": 4.0,
                               "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                               "original_max_position_embeddings": 64}}),
    "mistral": ("mistral", {}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {}),
    "gemma2": ("gemma2", {}),
    "gemma3": ("gemma3_text", {}),
    "phi3": ("phi3", {}),
    "olmo2": ("olmo2", {}),
    "granite": ("granite", {}),
    "gpt2": ("gpt2", {"n_embd": 64, "n_layer": 2, "n_head": 4}),
    "qwen3_moe": ("qwen3_moe", {}),
    "gpt_oss": ("gpt_oss", {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}),
}  # fmt: skip


def greedy(count: int) -> Sampling:
    return Sampling(seed=0, max_tokens=count, temperature=0.0, ignore_eos=True)


def reference(folder: Path, prompts: list[list[int]], count: int) -> list[list[int]]:
    """What ``generate`` gives for each prompt alone."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    if model.config.model_type in ("qwen3_moe", "gpt_oss"):
        model.set_experts_implementation("eager")  # the default has no float64
    return [
        model.generate(
            torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
            max_new_tokens=count, do_sample=False, eos_token_id=None,
        )[0, len(prompt) :].tolist()
        for prompt in prompts
    ]  # fmt: skip


def make_prompts(lengths: list[int]) -> list[list[int]]:
    rng = random.Random(7)
    return [[rng.randrange(3, 296) for _ in range(length)] for length in lengths]


@pytest.mark.parametrize("block_size", [4, 16])
@pytest.mark.parametrize("case", CASES)
def test_greedy_tokens_equal_transformers_in_mixed_ragged_batches(
    case: str, block_size: int, tiny_model: MakeModel
) -> None:
    family, config = CASES[case]
    folder = tiny_model(family, **config)
    count = 12
    prompts = make_prompts([1, 9, 40, 141])
    wanted = reference(folder, prompts, count)
    runner = TorchRunner.load(folder, dtype="float64", block_size=block_size, num_blocks=600 // block_size)
    driver = BatchDriver(runner)

    # one decodes alone; others join in odd chunks and leave as they end
    first = driver.start(prompts[0], greedy(count))
    driver.step({first.slot: 1})
    driver.step({first.slot: 1})
    waiting = [driver.start(prompt, greedy(count)) for prompt in prompts[1:]]
    for chunk in (7, 1, 13, 64):
        driver.step({s.slot: min(chunk, s.to_run) for s in driver.live.values()})
    driver.run_to_end(chunk=33)

    assert [s.tokens for s in (first, *waiting)] == wanted
    assert runner.kv_bytes_copied == 0


def test_a_sequence_that_leaves_and_resumes_goes_on_with_the_same_tokens(tiny_model: MakeModel) -> None:
    folder = tiny_model("llama")
    prompts = make_prompts([30, 5])
    wanted = reference(folder, prompts, 20)
    driver = BatchDriver(TorchRunner.load(folder, dtype="float64", num_blocks=40))
    preempted, other = (driver.start(prompt, greedy(20)) for prompt in prompts)
    driver.step({s.slot: s.to_run for s in (preempted, other)})
    for _ in range(6):
        driver.step({preempted.slot: 1, other.slot: 1})
    driver.drop(preempted)
    driver.step({other.slot: 1})
    resumed: Sequence = driver.start(prompts[0], greedy(20), generated=preempted.tokens)
    driver.run_to_end(chunk=11)
    assert [resumed.tokens, other.tokens] == wanted


def test_padding_rows_change_nothing(tiny_model: MakeModel) -> None:
    folder = tiny_model("mistral")
    prompts = make_prompts([50, 3])
    wanted = reference(folder, prompts, 10)
    driver = BatchDriver(TorchRunner.load(folder, dtype="float64", num_blocks=40))
    long, short = (driver.start(prompt, greedy(10)) for prompt in prompts)
    driver.step({long.slot: 50, short.slot: 3}, padding=[(short.slot, 47)])
    while driver.live:
        driver.step({s.slot: 1 for s in driver.live.values()}, padding=[(s.slot, 1) for s in driver.live.values()])
    assert [long.tokens, short.tokens] == wanted


def test_copied_pages_are_counted_and_hold_the_same_keys(tiny_model: MakeModel) -> None:
    folder = tiny_model("llama")
    [prompt] = make_prompts([20])
    [wanted] = reference(folder, [prompt], 8)
    runner = TorchRunner.load(folder, dtype="float64", num_blocks=20)
    driver = BatchDriver(runner)
    sequence = driver.start(prompt, greedy(8))
    driver.step({sequence.slot: 20})
    old, new = sequence.pages[1], driver.free.pop()
    driver.batch.tables[sequence.slot, 1] = new
    driver.step({sequence.slot: 1}, copies=[(old, new)])
    runner.cache.layers[0].key[old].fill_(9.0)
    driver.run_to_end()
    assert sequence.tokens == wanted
    assert runner.kv_bytes_copied == 16 * runner.capacity.kv_bytes_per_token
