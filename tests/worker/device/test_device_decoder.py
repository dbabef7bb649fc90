"""The fused decoder says what ``transformers`` says, whatever the steps, and shares its weights with the model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from ragged_steps import CPU, RaggedSteps, reference

from kernels.contract import Geometry
from kernels.triton import launching
from worker import attention, experts
from worker.decoder import NotThisShape, rotations
from worker.device import trial
from worker.device.decoder import FusedDecoder, fuse
from worker.device.trial import DenseAttention, check, check_whole
from worker.model import read_config, read_weights, run_trial

MakeModel = Callable[..., Path]

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama, tied, MQA": ("llama", {"tie_word_embeddings": True, "num_key_value_heads": 1}),
    "llama, biases, gelu": ("llama", {"attention_bias": True, "mlp_bias": True, "hidden_act": "gelu_pytorch_tanh"}),
    "llama 3 rope": ("llama", {"rope_parameters": {"rope_type": "llama3", "rope_theta": 10000.0, "factor": 4.0,
                               "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                               "original_max_position_embeddings": 64}}),
    "mistral": ("mistral", {"sliding_window": 12}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {"head_dim": 32}),
    "smollm3": ("smollm3", {"num_hidden_layers": 4, "no_rope_layers": [1, 0, 1, 0]}),
}  # fmt: skip


@pytest.fixture(autouse=True)
def plain_torch(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not Triton's interpreter, but where a test is about its kernels."""
    if "interpreted" not in request.fixturenames:
        monkeypatch.setattr("kernels.triton.launching.INTERPRETED", False)


@pytest.fixture
def interpreted() -> None:
    assert launching.INTERPRETED, "tests/conftest.py sees to it"


class Loaded:
    def __init__(self, folder: Path, dtype: torch.dtype, block_size: int = 4) -> None:
        attention.register()
        experts.register()
        self.module: Any = read_weights(str(folder), read_config(str(folder)), dtype).eval().requires_grad_(False)
        found, _ = run_trial(str(folder), self.module, CPU)
        self.layers = found.layers
        self.geometry = Geometry(*next(iter(found.shapes)), block_size)
        self.kernel = DenseAttention(self.geometry, dtype, CPU)
        self.dtype = dtype

    def check(self) -> None:
        check(self.module, self.geometry, self.layers, self.dtype, 2048)

    def decoder(self, **more: Any) -> FusedDecoder:
        turns = rotations(self.module.base_model.rotary_emb, torch.arange(64), self.dtype)
        return FusedDecoder(fuse(self.module, self.geometry), self.kernel, self.layers, turns, **more)

    def steps(self, lengths: tuple[int, ...] = (30, 41, 12), **more: Any) -> RaggedSteps:
        return RaggedSteps(self.decoder(**more), self.kernel, len(self.layers), self.geometry.block_size, lengths)


@pytest.mark.parametrize("case", MODELS)
def test_logits_equal_transformers_in_mixed_steps(case: str, tiny_model: MakeModel) -> None:
    family, config = MODELS[case]
    folder = tiny_model(family, **config)
    loaded = Loaded(folder, torch.float64)
    loaded.check()
    steps = loaded.steps()
    steps.run()
    for got, wanted in zip(steps.logits, reference(folder, steps.tokens, torch.float64), strict=True):
        torch.testing.assert_close(torch.stack(got), wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.usefixtures("interpreted")
def test_the_kernels_in_the_interpreter_say_what_torch_says(
    tiny_model: MakeModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = Loaded(tiny_model("qwen3", num_hidden_layers=1, head_dim=32), torch.float32)
    outputs = []
    for kernels in (True, False):
        monkeypatch.setattr("kernels.triton.launching.INTERPRETED", kernels)
        steps = loaded.steps((6, 3))
        steps.step({0: 3})
        outputs.append(steps.step({0: 1, 1: 2}))
    torch.testing.assert_close(*outputs, rtol=1e-4, atol=1e-4)


def test_only_the_rows_that_are_wanted_have_logits(tiny_model: MakeModel) -> None:
    loaded = Loaded(tiny_model("qwen3", head_dim=32), torch.float32)
    steps, other = loaded.steps(), loaded.steps()
    assert steps.step({0: 7, 1: 3}, keep_all=False).shape == (0, 320)
    other.step({0: 7, 1: 3})
    torch.testing.assert_close(steps.step({0: 1, 1: 5}), other.step({0: 1, 1: 5}))


def test_rows_that_stand_for_nothing_change_nothing(tiny_model: MakeModel) -> None:
    loaded = Loaded(tiny_model("mistral"), torch.float64)
    plain, filled = loaded.steps(), loaded.steps()
    for counts in ({0: 6, 2: 3}, {0: 1, 2: 1}):
        torch.testing.assert_close(plain.step(counts), filled.step(counts, fillers=5)[: sum(counts.values())])


def test_weights_are_there_once_and_the_model_still_runs(tiny_model: MakeModel) -> None:
    loaded = Loaded(tiny_model("llama", attention_bias=True), torch.float32)
    before = {name: weight.clone() for name, weight in loaded.module.named_parameters()}
    weights = fuse(loaded.module, loaded.geometry)
    after = dict(loaded.module.named_parameters())
    for name, weight in before.items():
        assert torch.equal(weight, after[name]), name
    own = {tensor.untyped_storage().data_ptr() for layer in weights.layers for tensor in layer.parameters()
           if tensor.dim() == 2}  # fmt: skip
    theirs = {weight.untyped_storage().data_ptr() for name, weight in after.items() if "proj.weight" in name}
    assert own == theirs and len(own) == 2 * 4
    check_whole(loaded.module, weights, loaded.kernel, loaded.layers, 2048)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_the_trial_notices_what_a_model_does_otherwise(
    dtype: torch.dtype, tiny_model: MakeModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = Loaded(tiny_model("llama"), dtype)
    loaded.check()
    kind = type(loaded.module.base_model.layers[0].mlp)
    forward = kind.forward
    monkeypatch.setattr(kind, "forward", lambda self, x: 1.01 * forward(self, x))
    with pytest.raises(NotThisShape, match="the fused decoder's logits differ from its own by"):
        loaded.check()


def test_the_trials_products_are_exact_whatever_others_have_set(
    tiny_model: MakeModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = Loaded(tiny_model("llama"), torch.float32)
    kind = type(loaded.module.base_model.layers[0].mlp)
    forward, seen = kind.forward, set()

    def watched(self: Any, x: torch.Tensor) -> torch.Tensor:
        seen.add(torch.get_float32_matmul_precision())
        return forward(self, x)  # type: ignore[no-any-return]

    monkeypatch.setattr(kind, "forward", watched)
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        loaded.check()
        assert seen == {"highest"} and torch.get_float32_matmul_precision() == "high"
    finally:
        torch.set_float32_matmul_precision(before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_a_whole_pass_notices_weights_in_the_wrong_place(dtype: torch.dtype, tiny_model: MakeModel) -> None:
    loaded = Loaded(tiny_model("llama"), dtype)
    weights = fuse(loaded.module, loaded.geometry)
    check_whole(loaded.module, weights, loaded.kernel, loaded.layers, 2048)
    weights.layers.reverse()
    with pytest.raises(NotThisShape, match="differ from its own"):
        check_whole(loaded.module, weights, loaded.kernel, loaded.layers, 2048)


def test_a_model_of_another_shape_is_told_by_its_parts(tiny_model: MakeModel) -> None:
    with pytest.raises(NotThisShape, match="an embedding of another kind"):
        Loaded(tiny_model("gemma2"), torch.float32).check()
    with pytest.raises(NotThisShape, match="the fused decoder's logits differ"):
        Loaded(tiny_model("granite"), torch.float32).check()


def test_partial_sums_are_reduced_after_both_products(tiny_model: MakeModel) -> None:
    loaded = Loaded(tiny_model("llama"), torch.float32)
    shapes = []

    def all_reduce(part: torch.Tensor) -> torch.Tensor:
        shapes.append(tuple(part.shape))
        return part

    steps = loaded.steps(all_reduce=all_reduce)
    steps.step({0: 6, 1: 2})
    assert shapes == [(8, 64)] * 4
    assert trial.WHOSE == "the fused decoder"
