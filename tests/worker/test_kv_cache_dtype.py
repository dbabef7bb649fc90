"""``--kv-cache-dtype``, from the option to pages, capacity and the hashes of prefixes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from batch_driver import BatchDriver

from kernels.reference import ReferenceAttention
from shared.lifecycle import StartupError
from shared.messages import Sampling
from worker.config import WorkerConfig
from worker.torch_runner import TorchRunner, load_torch_runner

MakeModel = Callable[..., Path]

STORED = {"fp8": torch.float8_e4m3fn, "int8": torch.int8}


def load(folder: Path, dtype: str = "float32", **options: object) -> TorchRunner:
    config = WorkerConfig(model=str(folder), device="cpu", dtype=dtype, kv_cache_memory="1MiB", **options)  # type: ignore[arg-type]
    return load_torch_runner(config)


@pytest.mark.parametrize("asked", STORED)
def test_pages_are_smaller_and_a_sequence_keeps_its_bits_in_any_batch(asked: str, tiny_model: MakeModel) -> None:
    runner = load(tiny_model("llama"), kv_cache_dtype=asked)
    assert isinstance(runner.kernel, ReferenceAttention)
    assert {layer.key.dtype for layer in runner.cache.layers} == {STORED[asked]}
    capacity = runner.capacity
    assert (capacity.dtype, capacity.kv_dtype) == ("float32", str(STORED[asked]).removeprefix("torch."))
    assert capacity.kv_bytes_per_token == 2 * 2 * 2 * (16 + 4)  # K and V, layers, heads, a byte each and a scale
    assert (capacity.num_blocks + 1) * 16 * capacity.kv_bytes_per_token <= 1 << 20
    held = sum(x.numel() * x.element_size() for layer in runner.cache.layers for x in layer.tensors())
    assert held == (capacity.num_blocks + 1) * 16 * capacity.kv_bytes_per_token
    prompts = [[5, 9, 11], list(range(3, 43)), [2] * 20]
    alone = [answers(runner, [prompt])[0] for prompt in prompts]
    assert answers(runner, prompts) == alone


def answers(runner: TorchRunner, prompts: list[list[int]]) -> list[list[int]]:
    driver = BatchDriver(runner)
    sequences = [driver.start(prompt, Sampling(1, 8, temperature=0.0, ignore_eos=True)) for prompt in prompts]
    driver.run_to_end()
    return [sequence.tokens for sequence in sequences]


def test_what_can_not_be_is_said_in_one_line(tiny_model: MakeModel) -> None:
    folder = tiny_model("llama")
    with pytest.raises(StartupError, match=r"^attention-backend cpu: its pages hold what it computes in, not int8$"):
        load(folder, kv_cache_dtype="int8", attention_backend="cpu")
    with pytest.raises(StartupError, match=r"^kv-cache-dtype fp8 is not for a model in float64$"):
        load(folder, "float64", kv_cache_dtype="fp8")
