"""From a model's folder, or its config alone, to a runner that serves it: its tokens, its memory, and refusals."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from batch_driver import BatchDriver
from ragged_steps import CPU
from rehearsal_port import RehearsalPort
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from shared.lifecycle import StartupError
from shared.messages import Sampling
from worker import attention, experts
from worker.config import WorkerConfig
from worker.device import load, provision
from worker.device.decoder import FusedDecoder
from worker.device.load import check_options, load_on, random_model
from worker.device.memory import GIB
from worker.device.model import ModuleModel
from worker.device.prepare import InvariantLinear, prepare
from worker.device.provision import Room, device_runner
from worker.device.trial import DenseAttention
from worker.grammar import Grammars
from worker.model import load_model

MakeModel = Callable[..., Path]


@pytest.fixture(autouse=True)
def plain_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not Triton's interpreter; and ``transformers`` knows what its models are read with."""
    attention.register()
    experts.register()
    monkeypatch.setattr("kernels.triton.launching.INTERPRETED", False)


@dataclasses.dataclass
class FakeMemory:
    """A card of 1 GiB on which nothing but weights and a step's activations are."""

    activations: int = 100 << 20

    def allocated(self) -> int:
        return 200 << 20

    def peak(self) -> int:
        return (200 << 20) + self.activations

    def reset_peak(self) -> None: ...

    def free_and_total(self) -> tuple[int, int]:
        return 824 << 20, GIB


def dense(geometry: Any, _: Any, dtype: torch.dtype) -> DenseAttention:
    return DenseAttention(geometry, dtype, CPU)


def config(folder: Path, **more: Any) -> WorkerConfig:
    given = {"dtype": "float64", "max_batched_tokens": 64, "warm_up_s": 0.0, **more}
    return WorkerConfig(model=str(folder), served_model_name="m", **given)


def loaded(folder: Path, dtype: torch.dtype = torch.float64, **more: Any) -> Any:
    return load_on(config(folder, **more), dtype, RehearsalPort(3), FakeMemory(), dense)


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_greedy_tokens_equal_transformers(family: str, tiny_model: MakeModel) -> None:
    folder = tiny_model(family)
    rng = random.Random(7)
    prompts = [[rng.randrange(3, 296) for _ in range(length)] for length in (1, 9, 60)]
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    wanted = [
        reference.generate(
            torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt), dtype=torch.int64), max_new_tokens=10,
            do_sample=False, eos_token_id=None,
        )[0, len(prompt) :].tolist()
        for prompt in prompts
    ]  # fmt: skip
    runner = loaded(folder)
    assert isinstance(runner.model, FusedDecoder if family == "llama" else ModuleModel)
    driver = BatchDriver(runner)
    sequences = []
    for prompt in prompts:
        sequences.append(driver.start(prompt, Sampling(0, 10, temperature=0.0, ignore_eos=True)))
        driver.step({s.slot: min(s.to_run, 7) for s in driver.live.values()})
    driver.run_to_end(chunk=23)
    assert [sequence.tokens for sequence in sequences] == wanted
    assert runner.graphs.replays


def test_pages_get_what_the_rest_leaves(tiny_model: MakeModel, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    runner = loaded(tiny_model("llama"), max_model_len=512, swap_space="1MiB")
    capacity = runner.capacity
    token_bytes = 2 * 2 * 2 * 16 * 8  # keys and values, layers, heads, numbers, bytes
    assert capacity.kv_bytes_per_token == token_bytes
    left = int(0.9 * GIB) - (200 << 20) - (100 << 20) - GIB // 32 - (256 << 20)
    assert capacity.num_blocks == left // (16 * token_bytes) - 1
    assert len(runner.model.caches) == 2 and len(runner.model.caches[0].key) == capacity.num_blocks + 1
    assert (capacity.max_model_len, capacity.max_batched_tokens, capacity.host_blocks) == (512, 64, 64)
    assert "float64 on cpu, fused, dense attention" in caplog.text
    assert "activations of 64 tokens 0.10 GiB" in caplog.text


def test_steps_are_captured_before_anybody_asks_for_them(tiny_model: MakeModel) -> None:
    runner = loaded(tiny_model("llama"), max_model_len=100, cuda_graph_rows=3, warm_up_s=3600.0)
    assert len(runner.graphs) == 3 and not runner.graphs.replays


def test_a_card_on_which_no_page_fits_is_refused(tiny_model: MakeModel) -> None:
    with pytest.raises(StartupError, match=r"leave -\d.\d+ GiB for keys and values.*weights 0.20 GiB"):
        loaded(tiny_model("llama"), gpu_memory_utilization=0.55)
    with pytest.raises(StartupError, match=r"the weights take 0.00 GiB, and 5% of .* have room for 0.00"):
        loaded(tiny_model("llama"), gpu_memory_utilization=0.05)


def test_batch_invariance_is_kept_or_refused(tiny_model: MakeModel, monkeypatch: pytest.MonkeyPatch) -> None:
    def prepared(family: str, **more: Any) -> Any:
        module = random_model(AutoConfig.from_pretrained(tiny_model(family)), torch.float32, CPU)
        return prepare(family, module, CPU, dense, batch_invariant=True, **more)

    def kinds(module: nn.Module) -> set[type]:
        return {type(part) for part in module.modules() if "Linear" in type(part).__name__}

    fused, modules = prepared("llama"), prepared("gemma2")
    assert kinds(nn.ModuleList([*fused.model.weights.layers, fused.model.weights.head])) == {InvariantLinear}
    assert kinds(modules.model.module) == {InvariantLinear}
    with pytest.raises(StartupError, match="can't be served with --batch-invariant: it has a mixture of experts"):
        prepared("qwen3_moe")

    monkeypatch.setattr(provision, "rows_keep_their_bits", lambda *_: False)
    room = Room(step_tokens=64, num_blocks=40)
    given = (RehearsalPort(), FakeMemory(), room, "m", Grammars(lambda: None))  # type: ignore[arg-type,return-value]
    with pytest.raises(StartupError, match="batch-invariant: a row's bits depend on the rows beside it here"):
        device_runner(fused, *given, batch_invariant=True)
    assert device_runner(fused, *given).capacity.num_blocks == 40


def test_the_bits_are_looked_at_in_passes_of_the_device_model(tiny_model: MakeModel) -> None:
    module = random_model(AutoConfig.from_pretrained(tiny_model("llama")), torch.float32, CPU)
    prepared = prepare("llama", module, CPU, dense)
    given = (RehearsalPort(), FakeMemory(), Room(step_tokens=64, num_blocks=40), "m", Grammars(lambda: None))  # type: ignore[arg-type,return-value]
    forward, calls = prepared.model.forward, []

    def leaning(*args: Any) -> torch.Tensor:
        calls.append(len(args[0]))
        return forward(*args) + len(args[0])

    device_runner(prepared, *given, self_check=False)
    prepared.model.forward = leaning  # type: ignore[method-assign]
    with pytest.raises(StartupError, match="batch-invariant"):
        device_runner(prepared, *given, batch_invariant=True)
    assert 150 in calls and 300 in calls


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_layers_are_quantised_one_by_one_and_served(
    family: str, tiny_model: MakeModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []

    def double(module: nn.Module, scheme: str) -> None:
        for part in module.modules():
            if type(part) is nn.Linear:
                part.weight = nn.Parameter(part.weight * 2, requires_grad=False)
                seen.append(scheme)

    monkeypatch.setattr("worker.device.quantize.quantize", double)
    tie = {"tie_word_embeddings": True}
    folder = tiny_model(family, **tie)
    read = load.read_weights(str(folder), load.read_config(str(folder)), torch.float64)
    prepared = prepare(family, read, CPU, dense, scheme="int4")
    assert seen == ["int4"] * (2 * (4 if family == "llama" else 7))
    if isinstance(prepared.model, FusedDecoder):
        weights = prepared.model.weights
        assert weights.head.weight.data_ptr() == weights.embedding.data_ptr()
    with pytest.raises(StartupError, match="can't be served with --quantize int8: it has a mixture of experts"):
        moe = tiny_model("qwen3_moe")
        module = load.read_weights(str(moe), load.read_config(str(moe)), torch.float64)
        prepare("moe", module, CPU, dense, scheme="int8")


def test_what_cannot_be_together_is_refused(tiny_model: MakeModel, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(StartupError, match="can't be quantised to int4 here: a CPU has int8"):
        load_model(str(tiny_model("llama")), quantize="int4", device="cpu")
    monkeypatch.setattr("worker.device.quantize.check", lambda *_: None)
    quantised = WorkerConfig(quantize="int8")
    check_options(quantised, torch.bfloat16, (9, 0))
    with pytest.raises(StartupError, match="products of quantised weights depend on the batch"):
        check_options(dataclasses.replace(quantised, batch_invariant=True), torch.bfloat16, (9, 0))
    with pytest.raises(StartupError, match="divided over ranks"):
        check_options(dataclasses.replace(quantised, tensor_parallel=2), torch.bfloat16, (9, 0))
    with pytest.raises(StartupError, match=r"compute capability 8\.0 or more, this one has 7\.5"):
        check_options(WorkerConfig(), torch.bfloat16, (7, 5))


def test_random_weights_are_those_of_their_seed(tiny_model: MakeModel) -> None:
    settings = AutoConfig.from_pretrained(tiny_model("qwen3"))
    state = torch.random.get_rng_state()
    one, same, other = (random_model(settings, torch.bfloat16, CPU, seed) for seed in (1, 1, 2))
    assert torch.equal(state, torch.random.get_rng_state())
    for (name, weight), twin in zip(one.named_parameters(), same.parameters(), strict=True):
        assert weight.dtype == torch.bfloat16 and torch.equal(weight, twin), name
    assert not torch.equal(one.lm_head.weight, other.lm_head.weight)
    assert load.weight_bytes(settings, torch.bfloat16) == sum(2 * weight.numel() for weight in one.parameters())
