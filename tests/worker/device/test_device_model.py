"""Models run module by module: what ``transformers`` says, and nothing that waits for the device."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from ragged_steps import CPU, RaggedSteps, reference
from torch import nn
from transformers import AutoModelForCausalLM

from worker import attention, experts
from worker.device.model import ANY_NUMBER, ModuleModel, freeze_rotations, replace_linears, waits
from worker.device.prepare import InvariantLinear, prepare
from worker.device.trial import DenseAttention
from worker.experts import STATIC_TOKENS, is_experts, one_by_one, through_all
from worker.model import read_config, read_weights

MakeModel = Callable[..., Path]

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma2": ("gemma2", {}),
    "phi3": ("phi3", {}),
    "granite": ("granite", {}),
    "gpt2": ("gpt2", {"n_embd": 64, "n_layer": 2, "n_head": 4}),
    "qwen3_moe": ("qwen3_moe", {}),
    "gpt_oss": ("gpt_oss", {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}),
}  # fmt: skip


def read(folder: Path, dtype: torch.dtype) -> Any:
    attention.register()
    experts.register()
    return read_weights(str(folder), read_config(str(folder)), dtype)


def dense(geometry: Any, _: Any, dtype: torch.dtype) -> DenseAttention:
    return DenseAttention(geometry, dtype, CPU)


@pytest.mark.parametrize("case", MODELS)
def test_logits_equal_transformers_in_mixed_steps(case: str, tiny_model: MakeModel) -> None:
    family, config = MODELS[case]
    folder = tiny_model(family, **config)
    prepared = prepare(family, read(folder, torch.float64), CPU, dense, block_size=4)
    model = prepared.model
    assert isinstance(model, ModuleModel)
    steps = RaggedSteps(model, prepared.kernel, len(prepared.layers), 4, (30, 41, 12))
    steps.run()
    for got, wanted in zip(steps.logits, reference(folder, steps.tokens, torch.float64), strict=True):
        torch.testing.assert_close(torch.stack(got), wanted, rtol=1e-5, atol=1e-5)
    other = RaggedSteps(model, prepared.kernel, len(prepared.layers), 4, (9,))
    assert other.step({0: 3}, keep_all=False).shape == (0, model.vocab_size)


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_experts_of_few_tokens_are_found_without_looking_at_the_routing(family: str, tiny_model: MakeModel) -> None:
    more = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}} if family == "gpt_oss" else {}
    module = read(tiny_model(family, **more), torch.float64)
    part: Any = next(part for part in module.modules() if is_experts(part))
    generator = torch.Generator().manual_seed(0)
    for tokens in (1, 7, STATIC_TOKENS):
        x = torch.randn(tokens, 64, dtype=torch.float64, generator=generator)
        routing = torch.stack([torch.randperm(part.num_experts, generator=generator)[:2] for _ in range(tokens)])
        weights = torch.rand(tokens, 2, dtype=torch.float64, generator=generator)
        got: list[torch.Tensor] = []
        assert not waits(lambda: got.append(through_all(part, x, routing, weights)))  # noqa: B023  called here
        torch.testing.assert_close(got[0], one_by_one(part, x, routing, weights))
        x[0, 0] = float("nan")  # a row that has gone wrong reaches no other
        assert torch.isfinite(through_all(part, x, routing, weights)[1:]).all()


def test_what_waits_for_a_device_is_found() -> None:
    x = torch.arange(6.0)
    assert waits(lambda: x[x > 2]) == {"index"}
    assert waits(lambda: x.nonzero()) == {"nonzero"}
    assert waits(lambda: x.sum().item())
    assert waits(lambda: x.repeat_interleave(torch.tensor([1] * 6))) == {"repeat_interleave"}
    assert not waits(lambda: x[torch.tensor([1, 2])].softmax(0).cumsum(0))
    there = torch.empty(2, device="meta")
    for makes in (
        lambda: torch.tensor([1, 2], device="meta"),
        lambda: torch.as_tensor(data=3.0, device="meta"),
        lambda: torch.asarray([1.0], device="meta"),
        lambda: there.new_tensor([1, 2]),
    ):
        assert waits(makes) == {"a tensor of the host's numbers"}
    assert not waits(lambda: torch.as_tensor(there).new_zeros(3) + torch.arange(3, device="meta"))


def test_a_model_whose_code_waits_has_no_graphs(
    tiny_model: MakeModel, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    module = read(tiny_model("gemma2"), torch.float32)
    caplog.set_level("INFO")
    assert prepare("gemma2", module, CPU, dense).model.graph_tokens == ANY_NUMBER
    kind = type(module.base_model.layers[0].mlp)
    forward = kind.forward
    monkeypatch.setattr(kind, "forward", lambda self, x: forward(self, x) if x.sum().item() else x)
    assert prepare("gemma2", module, CPU, dense).model.graph_tokens == 0
    assert "waits for the device (item)" in caplog.text


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0},
        {"rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.1] * 8, "long_factor": [3.0] * 8,
         "original_max_position_embeddings": 64},
    ],
    ids=["dynamic", "longrope"],
)  # fmt: skip
def test_rotations_that_look_at_the_positions_are_frozen_as_they_begin(
    rope: dict[str, Any], tiny_model: MakeModel
) -> None:
    module = read(tiny_model("llama", rope_parameters=rope, max_position_embeddings=128), torch.float32)
    rotary, x, near = module.base_model.rotary_emb, torch.zeros(1, 1, 1), torch.arange(64)[None]
    wanted = rotary(x, near)
    assert waits(lambda: rotary(x, near)) or rope["rope_type"] == "longrope"
    freeze_rotations(module)
    assert not waits(lambda: rotary(x, near))
    far = rotary(x, torch.arange(128)[None])
    for before, after in zip(wanted, far, strict=True):
        assert torch.equal(before, after[:, :64])


def test_linear_layers_are_replaced_with_their_hooks(tiny_model: MakeModel) -> None:
    tokens = torch.arange(5)[None]
    for family, more in (("llama", {}), ("gpt2", {"n_embd": 64, "n_layer": 2, "n_head": 4})):
        module: Any = AutoModelForCausalLM.from_pretrained(tiny_model(family, **more), dtype=torch.float64)
        called = []
        linear = module.get_output_embeddings()
        linear.register_forward_hook(lambda *_: called.append(1))  # noqa: B023  called here
        with torch.inference_mode():
            wanted = module(tokens).logits
            replace_linears(module, InvariantLinear)
            assert not any(type(part) is nn.Linear for part in module.modules())
            torch.testing.assert_close(module(tokens).logits, wanted)
        assert len(called) == 2
