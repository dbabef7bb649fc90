"""Whole pages of all layers, moved in one launch: to the byte, and nothing beside them."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.triton.moves import BLOCK, PageMoves

PAGES = 7


def pools_of(shapes: list[tuple[int, int]]) -> list[torch.Tensor]:
    """Of random bytes; of each, how many a page has and how many bytes one of its numbers."""
    types = {1: torch.int8, 2: torch.bfloat16, 4: torch.float32}
    generator = torch.Generator().manual_seed(1)
    return [
        torch.randint(0, 256, (PAGES, count * size), generator=generator, dtype=torch.uint8).view(types[size])
        for count, size in shapes
    ]


def bits(pools: list[torch.Tensor]) -> list[torch.Tensor]:
    return [pool.view(torch.uint8).clone() for pool in pools]


@settings(deadline=None, max_examples=20)
@given(
    shapes=st.lists(st.tuples(st.integers(1, 40), st.sampled_from([1, 2, 4])), min_size=1, max_size=4),
    pages=st.permutations(range(PAGES)),
    count=st.integers(0, 3),
)
def test_there_and_back(shapes: list[tuple[int, int]], pages: list[int], count: int) -> None:
    pools = pools_of(shapes)
    moves = PageMoves(pools)
    assert moves.page_bytes == sum(count * size for count, size in shapes)
    expected = bits(pools)
    sources, targets = torch.tensor(pages[:count]).long(), torch.tensor(pages[3 : 3 + count]).long()
    moves.copy(sources, targets)
    for pool in expected:
        pool[targets] = pool[sources]
    assert all(map(torch.equal, bits(pools), expected))
    buffer = torch.full((4, -(-moves.page_bytes // 16) * 16), 7, dtype=torch.uint8)
    moves.gather(sources, buffer)
    assert torch.equal(buffer[:count, : moves.page_bytes], torch.cat([pool[sources] for pool in expected], dim=1))
    assert (buffer[count:] == 7).all() and (buffer[:, moves.page_bytes :] == 7).all()
    moves.scatter(buffer, targets.flip(0))
    for pool in expected:
        pool[targets.flip(0)] = pool[sources]
    assert all(map(torch.equal, bits(pools), expected))


def test_pages_of_several_programs() -> None:
    pools = pools_of([(8 * BLOCK + 8, 2), (4, 4)])
    expected = bits(pools)
    PageMoves(pools).copy(torch.tensor([1, 1]), torch.tensor([2, 6]))
    for pool in expected:
        pool[[2, 6]] = pool[1].clone()
    assert all(map(torch.equal, bits(pools), expected))


def test_a_buffer_out_of_line_is_refused() -> None:
    moves = PageMoves(pools_of([(8, 4)]))
    with pytest.raises(ValueError, match="aligned"):
        moves.gather(torch.tensor([0]), torch.zeros((2, 33), dtype=torch.uint8))
