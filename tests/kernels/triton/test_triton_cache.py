"""Writing of pages: the very bits of the torch twin, in the right slots and no other."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.contract import DeviceBatch, Geometry, LayerCache
from kernels.device_pages import allocate
from kernels.quantized_pages import dequantize
from kernels.reference import LARGEST_KEY
from kernels.triton import cache as cache_module
from kernels.triton.cache import write_pages

CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SMALL = [torch.float8_e4m3fn, torch.int8]


def poisoned(geometry: Geometry, storage: torch.dtype, num_pages: int) -> LayerCache:
    cache = allocate(geometry, storage, num_pages, CPU)
    for tensor in cache.tensors():
        bits = tensor.view(torch.uint8)
        bits.copy_(torch.randint(0, 256, bits.shape, generator=torch.Generator().manual_seed(9)))
    return cache


def copied(cache: LayerCache) -> LayerCache:
    tensors = (cache.key, cache.value, cache.key_scale, cache.value_scale)
    return LayerCache(*(None if tensor is None else tensor.clone() for tensor in tensors))


def same_bits(a: LayerCache, b: LayerCache) -> bool:
    pairs = zip(a.tensors(), b.tensors(), strict=True)
    return all(torch.equal(x.view(torch.uint8), y.view(torch.uint8)) for x, y in pairs)


def batch_of(slots: torch.Tensor, live: int) -> DeviceBatch:
    """``live`` of the rows are queries."""
    start = torch.tensor([0, live // 2, live], dtype=torch.int32)
    tables = torch.zeros((2, 1), dtype=torch.int32)
    return DeviceBatch(start, torch.ones(len(slots), dtype=torch.int32), tables, slots, len(slots), 1)


def by_the_twin(cache: LayerCache, key: torch.Tensor, value: torch.Tensor, batch: DeviceBatch) -> LayerCache:
    expected = copied(cache)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cache_module, "runs_triton", lambda _: False)
        write_pages(expected, key, value, batch)
    return expected


@settings(deadline=None, max_examples=25)
@given(
    tokens=st.integers(0, 6),
    behind=st.integers(0, 3),
    heads=st.integers(1, 5),
    dim=st.integers(1, 70),
    dtype=st.sampled_from(DTYPES),
    small=st.sampled_from([None, *SMALL]),
    merged=st.booleans(),
    wrong=st.lists(st.tuples(st.integers(0, 1 << 20), st.sampled_from([torch.nan, torch.inf, -torch.inf, 1e30, 0.0]))),
    seed=st.integers(0, 1 << 30),
)
def test_same_bits_as_the_twin(
    tokens: int,
    behind: int,
    heads: int,
    dim: int,
    dtype: torch.dtype,
    small: torch.dtype | None,
    merged: bool,
    wrong: list[tuple[int, float]],
    seed: int,
) -> None:
    generator = torch.Generator().manual_seed(seed)
    rows = tokens + behind
    both = torch.randn((rows, 2, heads, dim), generator=generator).to(dtype)
    for place, number in wrong if rows else ():
        both.view(-1)[place % both.numel()] = number
    key, value = both.unbind(1)
    if not merged:
        key, value = key.contiguous(), value.transpose(0, 1).contiguous().transpose(0, 1)
    cache = poisoned(Geometry(heads, heads, dim, 4), small or dtype, 5)
    slots = torch.randperm(16, generator=generator)[:rows] + 4  # behind the scratch page
    slots[tokens:] = 1 << 40  # of rows that are not written
    batch = batch_of(slots, tokens)
    expected = by_the_twin(cache, key, value, batch)
    write_pages(cache, key, value, batch)
    assert same_bits(cache, expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("small", [None, *SMALL])
def test_what_is_read_is_finite_and_near_what_was_written(dtype: torch.dtype, small: torch.dtype | None) -> None:
    key, value = torch.randn((2, 3, 2, 16), generator=torch.Generator().manual_seed(1)).to(dtype)
    key[1, 0, 3], key[1, 1, 2], value[1, 0, 0] = torch.nan, torch.inf, -torch.inf
    cache = poisoned(Geometry(2, 2, 16, 4), small or dtype, 3)
    rows = [8, 5, 11]
    write_pages(cache, key, value, batch_of(torch.tensor(rows), 3))
    for pages, scales, wrote in ((cache.key, cache.key_scale, key), (cache.value, cache.value_scale, value)):
        read = pages.flatten(0, 1).float()[rows]
        if scales is not None:
            read = dequantize(read, scales.flatten(0, 1)[rows], torch.float32)
        assert read.isfinite().all()
        largest = wrote[[0, 2]].float().abs().amax(-1, keepdim=True)
        off = (read[[0, 2]].float() - wrote[[0, 2]].float()).abs()
        assert (off <= largest * (1 / 16 if small else 0)).all()  # fp8 e4m3 has 3 bits of fraction
        if pages is cache.key:
            assert read.float().abs().max() <= 1.01 * LARGEST_KEY
