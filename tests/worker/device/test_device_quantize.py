"""What torchao is asked for, and what is refused before anything is loaded. torchao itself is replaced by what has its
signatures: it brings all of torch's compiler, and most of its schemes run on a GPU alone."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

from shared.lifecycle import StartupError
from worker.device.quantize import check, quantize


class Rounded(torch.Tensor):
    """Stands for a tensor of torchao's."""


@dataclass
class PerRow:
    dim: int = -1


@dataclass
class Int8WeightOnlyConfig:
    set_inductor_config: bool = True
    version: int = 2


@dataclass
class Int4WeightOnlyConfig:
    group_size: int = 128
    set_inductor_config: bool = True
    int4_packing_format: str = "plain"


@dataclass
class Float8DynamicActivationFloat8WeightConfig:
    granularity: Any = None
    set_inductor_config: bool = True


@dataclass
class Torchao:
    asked: list[tuple[tuple[int, ...], Any]] = field(default_factory=list)
    leaves: bool = False

    def quantize_(self, model: nn.Module, config: Any, filter_fn: Any = None, device: Any = None) -> None:
        for name, part in model.named_modules():
            if filter_fn(part, name):
                self.asked.append((tuple(part.weight.shape), config))
                if not self.leaves:
                    part.weight = nn.Parameter(part.weight.detach().as_subclass(Rounded), requires_grad=False)


@pytest.fixture
def torchao(monkeypatch: pytest.MonkeyPatch) -> Torchao:
    stand_in = Torchao()
    module: Any = ModuleType("torchao.quantization")
    module.quantize_ = stand_in.quantize_
    for kind in (PerRow, Int8WeightOnlyConfig, Int4WeightOnlyConfig, Float8DynamicActivationFloat8WeightConfig):
        setattr(module, kind.__name__, kind)
    monkeypatch.setitem(sys.modules, "torchao", ModuleType("torchao"))
    monkeypatch.setitem(sys.modules, "torchao.quantization", module)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    return stand_in


def parts() -> nn.ModuleDict:
    return nn.ModuleDict(
        {"wide": nn.Linear(256, 48), "narrow": nn.Linear(96, 32), "norm": nn.LayerNorm(8)}
    ).requires_grad_(False)  # fmt: skip


@pytest.mark.parametrize(
    ("scheme", "wanted"),
    [
        ("int8", [Int8WeightOnlyConfig(False)] * 2),
        ("int4", [Int4WeightOnlyConfig(size, False, "tile_packed_to_4d") for size in (128, 32)]),
        ("fp8", [Float8DynamicActivationFloat8WeightConfig(PerRow(), False)] * 2),
    ],
)
def test_every_linear_layer_is_asked_for_in_its_scheme(scheme: str, wanted: list[Any], torchao: Torchao) -> None:
    quantize(parts(), scheme)
    assert torchao.asked == list(zip([(48, 256), (32, 96)], wanted, strict=True))


def test_what_stays_as_it_is_is_told(torchao: Torchao) -> None:
    with pytest.raises(StartupError, match=r"int4: odd \[16, 40\] has inputs that are no multiple of 32"):
        quantize(nn.ModuleDict({"odd": nn.Linear(40, 16)}), "int4")
    with pytest.raises(StartupError, match="no linear layers"):
        quantize(nn.ModuleDict({"norm": nn.LayerNorm(8)}), "int8")
    torchao.leaves = True
    with pytest.raises(StartupError, match=r"torchao leaves wide \[48, 256\] as it is"):
        quantize(parts(), "fp8")


@pytest.mark.parametrize(
    ("scheme", "dtype", "capability", "reason"),
    [
        ("fp8", torch.bfloat16, (8, 6), "fp8 needs a GPU of compute capability 8.9; this one's is 8.6"),
        ("int4", torch.bfloat16, (7, 5), "int4 needs a GPU of compute capability 8.0"),
        ("int4", torch.float16, (9, 0), "int4 needs --dtype bfloat16, not float16"),
        ("fp8", torch.float32, (9, 0), "fp8 needs --dtype bfloat16, not float32"),
    ],
)
def test_what_a_card_cannot_do_is_refused_before_anything_is_loaded(
    scheme: str, dtype: torch.dtype, capability: tuple[int, int], reason: str, torchao: Torchao
) -> None:
    with pytest.raises(StartupError, match=reason):
        check(scheme, dtype, capability)


def test_what_a_card_can_do_is_not(torchao: Torchao) -> None:
    for scheme in ("int8", "int4", "fp8"):
        check(scheme, torch.bfloat16, (9, 0))
    check("int8", torch.float16, (8, 0))


def test_without_torchao_nothing_is_quantised(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(StartupError, match=r"needs torchao on a GPU: install headrace\[gpu\]"):
        check("int8", torch.bfloat16, (9, 0))
