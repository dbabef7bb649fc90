"""LoRA adapters on a device: each row says what its merged model says, in passes, steps and graphs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from batch_driver import BatchDriver
from ragged_steps import CPU, RaggedSteps
from test_device_load import loaded
from tiny_adapters import EVERY_PROJECTION, make_adapter, merged_model

from shared.messages import Sampling
from worker import attention, experts
from worker.device.decoder import FusedDecoder
from worker.device.model import ANY_NUMBER, ModuleModel
from worker.device.prepare import Prepared, prepare
from worker.device.trial import DenseAttention
from worker.lora_files import read_adapter
from worker.model import read_config, read_weights

MakeModel = Callable[..., Path]

TARGETS = {
    "llama": (EVERY_PROJECTION, ("v_proj", "down_proj", "gate_proj")),
    "phi3": (("qkv_proj", "gate_up_proj"), ("o_proj", "down_proj")),
}


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(autouse=True)
def plain_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not Triton's interpreter; and ``transformers`` knows what its models are read with."""
    attention.register()
    experts.register()
    monkeypatch.setattr("kernels.triton.launching.INTERPRETED", False)


def adapters_of(family: str, model: Path, folder: Path) -> list[Path]:
    return [
        make_adapter(folder / str(number), model, targets, rank=2 + number, seed=number)
        for number, targets in enumerate(TARGETS[family])
    ]


def prepared(model: Path, folders: list[Path], **more: Any) -> Prepared:
    return prepare(
        "m", read_weights(str(model), read_config(str(model)), torch.float64), CPU,
        lambda geometry, _, dtype: DenseAttention(geometry, dtype, CPU), block_size=4,
        adapters=[read_adapter(one.name, str(one), torch.float64) for one in folders], **more,
    )  # fmt: skip


def steps_of(made: Prepared, adapters: list[int] | None, lengths: tuple[int, ...] = (30, 41, 12)) -> RaggedSteps:
    steps = RaggedSteps(made.model, made.kernel, len(made.layers), 4, lengths)
    steps.adapters = adapters
    return steps


@pytest.mark.parametrize("family", TARGETS)
def test_each_sequence_of_mixed_steps_has_the_logits_of_its_merged_model(
    family: str, tiny_model: MakeModel, tmp_path: Path
) -> None:
    model = tiny_model(family)
    folders = adapters_of(family, model, tmp_path)
    made = prepared(model, folders)
    assert isinstance(made.model, FusedDecoder if family == "llama" else ModuleModel)
    assert made.model.graph_tokens == ANY_NUMBER and made.loaded.adapters == ("0", "1")
    whose = [1, -1, 0]
    steps = steps_of(made, whose)
    steps.run()
    for adapter, tokens, got in zip(whose, steps.tokens, steps.logits, strict=True):
        merged = merged_model(model, folders[adapter] if adapter >= 0 else None)
        with torch.inference_mode():
            wanted = merged(torch.tensor([tokens])).logits[0]
        torch.testing.assert_close(torch.stack(got), wanted, rtol=1e-6, atol=1e-6)


def test_rows_without_an_adapter_have_the_bits_of_a_pass_without_any(tiny_model: MakeModel, tmp_path: Path) -> None:
    model = tiny_model("llama")
    made = prepared(model, adapters_of("llama", model, tmp_path))
    rows = []
    for adapters in (None, [0, -1, 1]):
        steps = steps_of(made, adapters)
        steps.step({0: 7, 1: 9, 2: 4})
        rows.append(steps.step({0: 1, 1: 5, 2: 1}))
    assert torch.equal(rows[0][1:6], rows[1][1:6])
    assert not torch.allclose(rows[0][:1], rows[1][:1]) and not torch.allclose(rows[0][6:], rows[1][6:])


def test_other_adapters_beside_it_change_no_bit_of_a_row(tiny_model: MakeModel, tmp_path: Path) -> None:
    model = tiny_model("llama")
    made = prepared(model, adapters_of("llama", model, tmp_path))
    rows = []
    for others in (0, 1, -1):
        steps = steps_of(made, [others, 1, others])
        steps.step({0: 7, 1: 9, 2: 4})
        rows.append(steps.step({0: 1, 1: 5, 2: 1})[1:6])
    assert torch.equal(rows[0], rows[1]) and torch.equal(rows[0], rows[2])


def test_a_runner_has_the_adapters_that_its_options_name(tiny_model: MakeModel, tmp_path: Path) -> None:
    model = tiny_model("llama")
    folders = adapters_of("llama", model, tmp_path)
    lora = ",".join(f"a{index}={folder}" for index, folder in enumerate(folders))
    runner = loaded(model, lora=lora, cuda_graph_rows=3, max_model_len=64, warm_up_s=3600.0)
    assert runner.capacity.adapters == ["a0", "a1"]
    ahead = runner.graphs.ahead()
    assert {adapters for _, _, adapters in ahead} == {False, True} and len(runner.graphs) == len(ahead)
    driver = BatchDriver(runner)
    prompts = [[7, 8, 9, 10 + place] for place in range(3)]
    whose = ["a1", "", "a0"]
    sequences = [
        driver.start(prompt, Sampling(0, 6, temperature=0.0, ignore_eos=True), adapter=adapter)
        for prompt, adapter in zip(prompts, whose, strict=True)
    ]
    driver.run_to_end(chunk=3)
    assert runner.graphs.replays, "its decodes were no graphs"
    assert len(runner.graphs) == len(ahead), "some were captured while it served"
    for adapter, prompt, sequence in zip(whose, prompts, sequences, strict=True):
        merged = merged_model(model, folders[int(adapter[1:])] if adapter else None)
        out = merged.generate(
            torch.tensor([prompt]), attention_mask=torch.ones(1, 4, dtype=torch.int64), max_new_tokens=6,
            do_sample=False, eos_token_id=None,
        )  # fmt: skip
        assert sequence.tokens == out[0, 4:].tolist(), adapter
