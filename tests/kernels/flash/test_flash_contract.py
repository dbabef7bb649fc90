"""The contract of attention kernels, kept by flash-attn beside a paged kernel."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch
from fake_flash import FakeFlash2, FakeFlash3, FakeFlash4
from paged_attention import Kind
from test_attention_contract import (  # noqa: F401  collected here, with the kinds below
    test_a_page_that_is_copied_when_half_full_belongs_to_a_sequence_of_its_own,
    test_a_sequence_gone_wrong_stays_alone_in_its_batch,
    test_heads_and_blocks_of_every_shape,
    test_pages_that_were_swapped_out_come_back_elsewhere,
    test_ragged_batches_equal_dense_attention,
    test_what_one_sequence_left_in_a_page_cannot_reach_the_next,
    uninitialized_memory_filled,
)
from torch_pages import TorchPages

from kernels.contract import Geometry
from kernels.flash.attention import FlashAttention
from kernels.flash.libraries import FlashAttn2, FlashAttn3, FlashAttn4, Library
from kernels.flash.parts import Use

LIBRARIES = {
    2: lambda: FlashAttn2("2", (8, 0), FakeFlash2()),
    3: lambda: FlashAttn3("3", (9, 0), FakeFlash3()),
    4: lambda: FlashAttn4("4", (9, 0), FakeFlash4()),
}


@dataclass(frozen=True)
class FlashKind(Kind):
    generation: int = 2

    def make(self, geometry: Geometry) -> FlashAttention:
        library: Library = LIBRARIES[self.generation]()
        uses = [use for use in Use if not library.refusal(use, geometry, self.dtype, self.storage or self.dtype)]
        paged = TorchPages(geometry, self.dtype, self.storage)
        return FlashAttention(geometry, self.dtype, torch.device("cpu"), paged, dict.fromkeys(uses, library))


@pytest.fixture(
    params=[
        FlashKind("flash-2", torch.float16, generation=2),
        FlashKind("flash-3", torch.bfloat16, generation=3),
        FlashKind("flash-4", torch.float16, generation=4),
    ],
    ids=str,
)
def kind(request: pytest.FixtureRequest) -> Iterator[Kind]:
    with uninitialized_memory_filled():
        yield request.param
