"""What tells a model that the C++ decoder runs from one that only looks so: a cutting, and a pass of the whole."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import make_tiny_model
from torch import nn

from kernels.contract import Geometry
from kernels.cpu.library import Library, find
from shared.lifecycle import StartupError
from worker import attention, decoder_trial, experts
from worker.decoder import NotThisShape, check
from worker.decoder_trial import TRIAL_TOKENS, check_cutting, checked_weights, kinds_of_layers, trial_positions
from worker.model import read_config, read_weights, run_trial
from worker.self_check import rows_keep_their_bits
from worker.torch_runner import TorchRunner

MakeModel = Callable[..., Path]

CPU = torch.device("cpu")

pytestmark = pytest.mark.skipif(not isinstance(find(), Library), reason="the C++ kernels are not built or turned off")


class Loaded:
    """A module as it is before anything of it is packed."""

    def __init__(self, folder: Path, dtype: torch.dtype = torch.float32) -> None:
        attention.register()
        experts.register()
        self.module: Any = read_weights(str(folder), read_config(str(folder)), dtype).eval().requires_grad_(False)
        trial, _ = run_trial(str(folder), self.module, CPU)
        self.layers = trial.layers
        self.geometry = Geometry(*next(iter(trial.shapes)), 16)
        self.dtype = dtype

    @property
    def first(self) -> Any:
        return self.module.base_model.layers[0]

    def check(self) -> None:
        check(self.module, self.geometry, self.layers, self.dtype)

    def check_cutting(self, limit: int | None = 2048) -> None:
        library = find()
        assert isinstance(library, Library)
        check_cutting(library, self.module, self.geometry, self.layers, limit)


def test_positions_are_the_first_and_the_last() -> None:
    assert trial_positions(None).tolist() == list(range(TRIAL_TOKENS))
    assert trial_positions(20).tolist() == list(range(TRIAL_TOKENS))
    half = TRIAL_TOKENS // 2
    assert trial_positions(5000).tolist() == [*range(half), *range(5000 - half, 5000)]


def test_one_layer_of_each_kind_is_tried(tiny_model: MakeModel) -> None:
    loaded = Loaded(tiny_model("llama", num_hidden_layers=6))
    assert kinds_of_layers(loaded.module, loaded.layers) == [0]
    loaded.module.base_model.layers[4].self_attn.scale_of_its_own = 0.5
    loaded.module.base_model.layers[5].mlp.act_fn = nn.GELU()
    assert kinds_of_layers(loaded.module, loaded.layers) == [0, 4, 5]
    mixed = Loaded(tiny_model("smollm3", num_hidden_layers=4, no_rope_layers=[1, 1, 0, 1]))
    assert kinds_of_layers(mixed.module, mixed.layers) == [0, 2]


def test_a_cutting_leaves_the_model_as_it_is(tiny_model: MakeModel) -> None:
    loaded = Loaded(tiny_model("qwen3"), torch.bfloat16)
    before = {name: (weight.data_ptr(), weight.clone()) for name, weight in loaded.module.named_parameters()}
    loaded.check()
    loaded.check_cutting()
    after = dict(loaded.module.named_parameters())
    assert after.keys() == before.keys()
    for name, (place, weight) in before.items():
        assert after[name].data_ptr() == place and torch.equal(after[name], weight)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_small_changes_of_how_a_layer_computes_are_noticed(
    dtype: torch.dtype, tiny_model: MakeModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = Loaded(tiny_model("llama"), dtype)
    loaded.check_cutting()
    for part, factor in (("mlp", 1.01), ("self_attn", 0.99), ("input_layernorm", 1.01)):
        kind = type(getattr(loaded.first, part))
        forward = kind.forward

        def scaled(self: Any, *args: Any, forward: Any = forward, factor: float = factor, **given: Any) -> Any:
            out = forward(self, *args, **given)
            return (out[0] * factor, *out[1:]) if isinstance(out, tuple) else out * factor

        with monkeypatch.context() as patch:
            patch.setattr(kind, "forward", scaled)
            with pytest.raises(NotThisShape, match="the C\\+\\+ decoder's logits differ from its own by"):
                loaded.check_cutting()


@pytest.mark.parametrize("quantize", [False, True], ids=["plain", "int8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_whole_pass_notices_weights_that_were_packed_wrongly(
    dtype: torch.dtype, quantize: bool, tiny_model: MakeModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = find()
    assert isinstance(library, Library)
    for broken in (False, True):
        loaded = Loaded(tiny_model("llama"), dtype)
        if broken:
            swapped = decoder_trial.pack

            def pack(*args: Any, swapped: Any = swapped) -> Any:
                weights = swapped(*args)
                weights.layers.reverse()
                return weights

            monkeypatch.setattr(decoder_trial, "pack", pack)
        arguments = (library, loaded.module, loaded.geometry, loaded.layers, dtype, quantize, 2048)
        if broken:
            with pytest.raises(NotThisShape, match="differ from its own"):
                checked_weights(*arguments)
        else:
            checked_weights(*arguments)


def test_parts_that_the_library_would_read_past_are_told(tiny_model: MakeModel) -> None:
    def changed(change: Callable[[Loaded], object]) -> str:
        loaded = Loaded(tiny_model("llama"))
        loaded.check()
        change(loaded)
        with pytest.raises(NotThisShape) as caught:
            loaded.check()
        return str(caught.value)

    def linear(n: int, k: int) -> nn.Linear:
        return nn.Linear(k, n, bias=False).requires_grad_(False)

    def wider_mlp(loaded: Loaded) -> None:
        mlp = loaded.module.base_model.layers[1].mlp
        mlp.gate_proj, mlp.up_proj, mlp.down_proj = linear(128, 64), linear(128, 64), linear(64, 128)

    def last_mlp_gelu(loaded: Loaded) -> None:
        loaded.module.base_model.layers[1].mlp.act_fn = nn.GELU(approximate="tanh")

    assert changed(wider_mlp) == "projections of other shapes"
    assert changed(lambda m: setattr(m.first.self_attn, "q_proj", linear(128, 64))) == "projections of other shapes"
    assert changed(lambda m: setattr(m.module, "lm_head", linear(400, 64))) == "a head of other rows than the embedding"
    assert changed(lambda m: m.module.base_model.norm.double()) == "weights that are not in float32"
    assert changed(lambda m: m.layers.pop()) == "layers without attention of their own"
    assert changed(last_mlp_gelu) == "the activation GELU"


def test_logits_that_are_not_finite_are_named_as_such(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path / "broken")
    weights = load_file(folder / "model.safetensors")
    weights["model.layers.0.mlp.gate_proj.weight"][7] = float("nan")
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(StartupError, match="are not finite"):
        TorchRunner.load(folder, dtype="float32", num_blocks=64, quantize="int8")
    assert rows_keep_their_bits(TorchRunner.load(folder, dtype="float32", num_blocks=64, self_check=False))
