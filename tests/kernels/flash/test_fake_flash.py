"""The stand-ins for flash-attn are as strict as the libraries, and mean the same as PyTorch's own attention: otherwise
what is tested on them says nothing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fake_flash import FakeFlash2, FakeFlash3, FakeFlash4, attention

STARTS = torch.tensor([0, 1, 4], dtype=torch.int32)
KEYS = torch.tensor([3, 5], dtype=torch.int32)
TABLE = torch.tensor([[1], [2]], dtype=torch.int32)
PAGES = torch.zeros((3, 16, 2, 16), dtype=torch.float16)
ROWS, HEADS = torch.randn((3, 4, 2, 16), generator=torch.Generator().manual_seed(0)).half().split([1, 2])
QUERY, (KEY, VALUE) = ROWS[0], HEADS


def varlen(
    fake: Any, q: torch.Tensor = QUERY, starts: torch.Tensor = STARTS, longest: int = 3, **more: Any
) -> torch.Tensor:
    """A call that is right, unless something in it is replaced."""
    key, value = (x.to(q.dtype) for x in (KEY, VALUE))
    out: torch.Tensor = fake.flash_attn_varlen_func(q, key, value, starts, STARTS, longest, 3, causal=True, **more)
    return out


def kvcache(fake: Any, keys: torch.Tensor = KEYS, **more: Any) -> torch.Tensor:
    out: torch.Tensor = fake.flash_attn_with_kvcache(QUERY[:2, None], PAGES, PAGES, cache_seqlens=keys, **more)
    return out


def cute(arch: int = 90, **more: Any) -> torch.Tensor:
    right = {"seqused_k": KEYS, "page_table": TABLE}
    return FakeFlash4(arch).flash_attn_varlen_func(QUERY[:2, None], PAGES, PAGES, **{**right, **more})[0]


WRONG = {
    "fp16 and bf16": lambda: varlen(FakeFlash2(), QUERY.float()),
    "dtype int32": lambda: varlen(FakeFlash3(), starts=STARTS.long()),
    "longest": lambda: varlen(FakeFlash2(), longest=2),
    "does not begin at 0": lambda: varlen(FakeFlash3(), starts=STARTS + 1),
    "falls": lambda: varlen(FakeFlash2(), starts=torch.tensor([0, 4, 1], dtype=torch.int32)),
    "ends at 5 of 4": lambda: varlen(FakeFlash2(), starts=torch.tensor([0, 1, 5], dtype=torch.int32), longest=4),
    "contiguous": lambda: varlen(FakeFlash3(), starts=STARTS.repeat_interleave(2)[::2]),
    "contiguous last dimension": lambda: varlen(FakeFlash2(), QUERY.transpose(1, 2).contiguous().transpose(1, 2)),
    "divisible by 256": lambda: kvcache(FakeFlash2(), block_table=TABLE),
    "a page that is not there": lambda: kvcache(FakeFlash3(), page_table=TABLE + 1),
    "do not fit a table": lambda: kvcache(FakeFlash3(), KEYS + 14, page_table=TABLE),
    "without keys": lambda: kvcache(FakeFlash3(), KEYS - 3, page_table=TABLE),
    "build does not support paged KV": lambda: kvcache(FakeFlash3(paging=False), page_table=TABLE),
    "page_table is not supported": lambda: cute(cu_seqlens_k=STARTS),
    "paged KV not supported": lambda: cute(80),
    "SplitKV not supported": lambda: cute(90, num_splits=2),
    "sink is not supported": lambda: FakeFlash4(80).flash_attn_varlen_func(
        QUERY, KEY, VALUE, None, STARTS, STARTS, 3, 3, learnable_sink=torch.zeros(2)
    ),
}


@pytest.mark.parametrize("what", WRONG)
def test_a_call_that_the_library_would_not_stand_is_refused(what: str) -> None:
    varlen(FakeFlash2())
    varlen(FakeFlash3())
    kvcache(FakeFlash3(), page_table=TABLE)
    cute()
    with pytest.raises((RuntimeError, AssertionError), match=what):
        WRONG[what]()


def test_attention_is_that_of_pytorch() -> None:
    hidden = torch.tensor([[0, 1, 1], [0, 0, 1], [1, 0, 0]]).bool()  # causal, and a window of two
    mask = torch.zeros((3, 3)).masked_fill(hidden, -torch.inf)
    q, k, v = (x[1:].float().transpose(0, 1) for x in (QUERY, KEY, VALUE))
    wanted = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=0.3).transpose(0, 1)
    for out in (
        varlen(FakeFlash2(), softmax_scale=0.3, window_size=(1, 0)),
        varlen(FakeFlash3(), softmax_scale=0.3, window_size=(1, 0)),
    ):
        torch.testing.assert_close(out[1:].float(), wanted, rtol=0, atol=2e-3)


def test_a_mask_is_aligned_to_the_last_key() -> None:
    seen = attention(QUERY[:1], KEY, VALUE, 0.25, True, (-1, -1), 0.0)
    q, k, v = (x.float().transpose(0, 1) for x in (QUERY[:1], KEY, VALUE))
    wanted = torch.nn.functional.scaled_dot_product_attention(q, k, v, scale=0.25).transpose(0, 1)
    torch.testing.assert_close(seen.float(), wanted, rtol=0, atol=2e-3)
