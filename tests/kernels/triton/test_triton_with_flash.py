"""Triton's paged kernel with flash-attn beside it: the pages that one writes are those that the other reads."""

from __future__ import annotations

import interpreted  # noqa: F401  makes the interpreter compute as GPUs do
import pytest
import torch
from flash_steps import CPU, MIXED, Step, library

from kernels.contract import LayerAttention
from kernels.flash.attention import FlashAttention
from kernels.flash.parts import Use
from kernels.triton.attention import TritonAttention


@pytest.mark.parametrize("storage", [torch.float16, torch.int8])
def test_a_mixed_step_is_answered_by_both(storage: torch.dtype) -> None:
    step = Step(MIXED, dtype=torch.float16, storage=storage)
    paged = TritonAttention(step.geometry, torch.float16, CPU, storage=storage, num_sms=4)
    flash, fake = library(3)
    uses = [use for use in Use if not flash.refusal(use, step.geometry, torch.float16, storage)]
    kernel = FlashAttention(step.geometry, torch.float16, CPU, paged, dict.fromkeys(uses, flash))
    layer = LayerAttention(0.3, window=20, softcap=4.0)
    out = kernel.attend(kernel.plan(step.batch), step.cache, step.query, step.key, step.value, layer)
    torch.testing.assert_close(out.float(), step.wanted(layer).float(), rtol=4e-3, atol=4e-3)
    assert sum(fake.tokens.values()) == sum(step.rows_of(use) for use in uses)
