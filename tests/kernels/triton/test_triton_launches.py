"""What launchers ask Triton to compile as steps go by, looked at without a GPU or a compiler: in a process of its own,
since here Triton interprets."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[3]

STEPS = """
import collections, json
import numpy as np
import torch
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction
from kernels.triton import launching

launching.INTERPRETED = True  # so that launchers take tensors of the CPU

from kernels.contract import DeviceBatch, Geometry, LayerAttention
from kernels.triton.activation import gated
from kernels.triton.attention import TritonAttention
from kernels.triton.compiled import choices
from kernels.triton.matmul import linear
from kernels.triton.moves import PageMoves
from kernels.triton.norm import rms_norm
from kernels.triton.rotary import Rotation, rotate_and_write
from kernels.triton.sampling import choose_tokens
from kernels.triton.shaping import COLUMNS, forbid, open_up, penalise

class Card:
    get_current_device = staticmethod(lambda: 0)
    get_current_stream = staticmethod(lambda device: 0)
    get_current_target = staticmethod(lambda: GPUTarget("cuda", 90, 32))

asked = collections.defaultdict(set)  # kernels by what is meant to make another one
keys_of = collections.defaultdict(set)
fused = collections.defaultdict(set)  # whether products and sums round once

def record(self, key, signature, device, constexprs, options, *rest):
    meant = {path[0]: value for path, value in constexprs.items() if self.params[path[0]].is_constexpr}
    absent = [path[0] for path, value in constexprs.items() if value is None]
    types = [kind for kind in signature.values() if kind.startswith("*")]
    asked[str((self.fn.__name__, sorted(meant.items()), absent, types))].add(key)
    keys_of[self.fn.__name__].add(key)
    fused[self.fn.__name__].add(options.enable_fp_fusion)

driver.set_active(Card())
JITFunction._do_compile = record

geometry = Geometry(8, 2, 32, 16)
kernels = [
    TritonAttention(geometry, torch.bfloat16, torch.device("cpu"), num_sms=4, batch_invariant=invariant)
    for invariant in (False, True)
]
cache = kernels[0].allocate(4)
layers = [LayerAttention(0.1), LayerAttention(0.1, 16), LayerAttention(0.1, softcap=5.0, sinks=torch.zeros(8))]
for kernel in kernels:
    for launch in kernel.warm_ups(cache, layers):
        launch()
warm = {name: set(keys) for name, keys in keys_of.items()}
moves = PageMoves(cache.tensors())
turns = torch.zeros(64, 16, dtype=torch.bfloat16)

def numbers(count, dtype, shift):
    return torch.zeros(count + shift, dtype=dtype)[shift:]

for tokens, sequences, longest, keys, shift in [
    (1, 1, 1, 1, 0), (16, 16, 1, 4000, 0), (17, 17, 1, 4000, 1), (3, 3, 1, 9000, 3),
    (40, 2, 39, 4000, 0), (41, 3, 39, 50, 1), (64, 1, 64, 64, 0), (65, 16, 50, 9000, 2), (300, 1, 300, 300, 5),
]:
    batch = DeviceBatch(
        numbers(sequences + 1, torch.int32, shift), numbers(tokens, torch.int32, shift),
        torch.zeros(sequences + shift, 600, dtype=torch.int32)[shift:, shift:], numbers(tokens, torch.int64, shift),
        longest, keys,
    )
    qkv = torch.zeros(tokens, 12 * 32, dtype=torch.bfloat16)
    positions = numbers(tokens, torch.int64, shift)
    query = rotate_and_write(qkv, positions, batch, cache, geometry, Rotation(turns, turns))
    key = value = torch.zeros(tokens, 2, 32, dtype=torch.bfloat16)
    for kernel in kernels:
        for layer in [*layers, LayerAttention(0.1, 1000), LayerAttention(0.1, 4096)]:
            kernel.attend(kernel.plan_device(batch), cache, query, key, value, layer)
    rows = torch.zeros(5, sequences, dtype=torch.float64)
    numbers_of = [row.view(torch.int64) if index > 2 else row for index, row in enumerate(rows)]
    choose_tokens(torch.zeros(sequences, 1000), *numbers_of)
    pages = numbers(sequences, torch.int64, shift)
    moves.copy(pages, pages)
x = torch.zeros(2, 64, dtype=torch.bfloat16)
rms_norm(gated(linear(x, torch.zeros(128, 64, dtype=torch.bfloat16)), "silu"), x[0], 1e-5)
table = torch.zeros(1, COLUMNS, dtype=torch.int32)
of_rows = torch.zeros(2, 1000), table, table, table[0]
forbid(*of_rows)
open_up(*of_rows)
penalise(of_rows[0], table, table, torch.zeros(1, 3, dtype=torch.float64), 1)
print(json.dumps({
    "keys": {kernel: len(keys) for kernel, keys in asked.items()},
    "late": {name: len(keys_of[name] - warm[name]) for name in warm},
    "fused": {name: sorted(values) for name, values in fused.items()},
    "table": {variant.kernel.fn.__name__: [variant.fp_fusion] for _, variant, _ in choices()},
}))
"""


@pytest.fixture(scope="module")
def asked() -> dict[str, Any]:
    """Triton's own answer to whether products and sums are fused is the other one, as it will be from 3.10 on."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_DEFAULT_FP_FUSION"] = "0"
    done = subprocess.run(
        [sys.executable, "-c", STEPS], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_every_kernel_is_launched(asked: dict[str, Any]) -> None:
    assert set(asked["table"]) <= set(asked["fused"])


def test_sizes_and_alignments_of_a_step_make_no_other_kernel(asked: dict[str, Any]) -> None:
    assert {kernel: times for kernel, times in asked["keys"].items() if times > 1} == {}


def test_once_warmed_up_no_batch_asks_for_another_attention_kernel(asked: dict[str, Any]) -> None:
    assert asked["late"] == {"paged_attention": 0, "merge_pieces": 0}


def test_kernels_are_launched_with_the_rounding_that_they_are_compiled_with_ahead(asked: dict[str, Any]) -> None:
    assert {name: asked["fused"][name] for name in asked["table"]} == asked["table"]
