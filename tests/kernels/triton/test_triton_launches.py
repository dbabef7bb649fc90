"""What launchers ask Triton to compile as steps go by, looked at without a GPU or a compiler: in a process of its own,
since here Triton interprets."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

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
from kernels.triton.attention import TritonAttention
from kernels.triton.moves import PageMoves
from kernels.triton.rotary import Rotation, rotate_and_write
from kernels.triton.sampling import choose_tokens

class Card:
    get_current_device = staticmethod(lambda: 0)
    get_current_stream = staticmethod(lambda device: 0)
    get_current_target = staticmethod(lambda: GPUTarget("cuda", 90, 32))

asked = collections.defaultdict(set)  # kernels by what is meant to make another one

def record(self, key, signature, device, constexprs, *rest):
    meant = {path[0]: value for path, value in constexprs.items() if self.params[path[0]].is_constexpr}
    absent = [path[0] for path, value in constexprs.items() if value is None]
    types = [kind for kind in signature.values() if kind.startswith("*")]
    asked[str((self.fn.__name__, sorted(meant.items()), absent, types))].add(key)

driver.set_active(Card())
JITFunction._do_compile = record

geometry = Geometry(8, 2, 32, 16)
kernel = TritonAttention(geometry, torch.bfloat16, torch.device("cpu"), num_sms=4)
cache = kernel.allocate(4)
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
    for window in (None, 16, 1000, 4096):
        kernel.attend(kernel.plan_device(batch), cache, query, key, value, LayerAttention(0.1, window))
    rows = torch.zeros(5, sequences, dtype=torch.float64)
    numbers_of = [row.view(torch.int64) if index > 2 else row for index, row in enumerate(rows)]
    choose_tokens(torch.zeros(sequences, 1000), *numbers_of)
    pages = numbers(sequences, torch.int64, shift)
    moves.copy(pages, pages)
print(json.dumps({kernel: len(keys) for kernel, keys in asked.items()}))
"""


@pytest.fixture(scope="module")
def asked() -> dict[str, int]:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", STEPS], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, int] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_every_kernel_is_launched(asked: dict[str, int]) -> None:
    names = {kernel.split("'")[1] for kernel in asked}
    assert {"paged_attention", "merge_pieces", "_rotate_and_write", "_write_pages", "_move_pages", "pick"} <= names


def test_sizes_and_alignments_of_a_step_make_no_other_kernel(asked: dict[str, int]) -> None:
    assert {kernel: times for kernel, times in asked.items() if times > 1} == {}
