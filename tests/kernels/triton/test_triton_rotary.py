"""From a merged product to rotated queries and written pages: transformers' bits, in one kernel."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_triton_cache import CPU, DTYPES, SMALL, batch_of, copied, poisoned, same_bits
from test_triton_norm import by_transformers
from transformers.models.phi3.modeling_phi3 import apply_rotary_pos_emb

from kernels.contract import DeviceBatch, Geometry, LayerCache
from kernels.device_pages import allocate
from kernels.triton import cache as cache_module
from kernels.triton import norm, rotary
from kernels.triton.rotary import Rotation, rotate_and_write

POSITIONS = 30


def rotation_of(dim: int, half: int, dtype: torch.dtype, norms: bool, turns: bool = True) -> Rotation:
    generator = torch.Generator().manual_seed(half)
    angle = torch.rand((POSITIONS, half), generator=generator) * 6
    cos, sin = angle.cos().to(dtype), torch.cat([angle.sin(), angle], dim=1).to(dtype)[:, :half]  # rows apart
    query_norm, key_norm = torch.randint(1, 5, (2, dim), generator=generator).to(dtype)
    rotation = Rotation(cos, sin, query_norm, key_norm, 1e-5)
    if not norms:
        rotation = dataclasses.replace(rotation, query_norm=None, key_norm=None)
    return rotation if turns else dataclasses.replace(rotation, cos=None, sin=None)


def by_the_twin(
    qkv: torch.Tensor, positions: torch.Tensor, batch: DeviceBatch, cache: LayerCache, g: Geometry, rotation: Rotation
) -> tuple[torch.Tensor, LayerCache]:
    expected = copied(cache)
    with pytest.MonkeyPatch.context() as patch:
        for module in (cache_module, norm, rotary):
            patch.setattr(module, "runs_triton", lambda _: False)
        return rotate_and_write(qkv, positions, batch, expected, g, rotation), expected


@settings(deadline=None, max_examples=25)
@given(
    tokens=st.integers(0, 4),
    behind=st.integers(0, 2),
    group=st.integers(1, 5),
    kv_heads=st.integers(1, 5),
    dim=st.integers(2, 40),
    part=st.integers(0, 100),
    dtype=st.sampled_from(DTYPES),
    small=st.sampled_from([None, *SMALL]),
    norms=st.booleans(),
    turns=st.booleans(),
    apart=st.booleans(),
    seed=st.integers(0, 1 << 30),
)
def test_same_bits_as_the_twin(
    tokens: int,
    behind: int,
    group: int,
    kv_heads: int,
    dim: int,
    part: int,
    dtype: torch.dtype,
    small: torch.dtype | None,
    norms: bool,
    turns: bool,
    apart: bool,
    seed: int,
) -> None:
    generator = torch.Generator().manual_seed(seed)
    geometry = Geometry(group * kv_heads, kv_heads, dim, 4)
    rows = tokens + behind
    # Small whole numbers: with norms, their squares add up exactly in any order.
    qkv = torch.randint(-9, 10, (rows, (group + 2) * kv_heads * dim), generator=generator).to(dtype)
    if apart:
        qkv = torch.cat([qkv, torch.full_like(qkv, torch.nan)], dim=1)[:, : qkv.shape[1]]
    rotation = rotation_of(dim, 1 + part % (dim // 2), dtype, norms, turns)
    positions = torch.randint(0, POSITIONS, (rows,), generator=generator)
    slots = torch.randperm(16, generator=generator)[:rows] + 4  # behind the scratch page
    positions[tokens:] = slots[tokens:] = 1 << 40  # of rows that are not read
    batch = batch_of(slots, tokens)
    cache = poisoned(geometry, small or dtype, 5)
    queries = batch_of(slots[:tokens], tokens)
    expected, pages = by_the_twin(qkv[:tokens], positions[:tokens], queries, cache, geometry, rotation)
    query = rotate_and_write(qkv, positions, batch, cache, geometry, rotation)
    assert query.shape == (rows, geometry.num_heads, dim) and query.dtype == dtype
    assert torch.equal(query[:tokens], expected)
    assert same_bits(cache, pages)


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64])
@pytest.mark.parametrize("half", [3, 8])
@pytest.mark.parametrize("norms", [False, True])
def test_the_twin_is_transformers_own(dtype: torch.dtype, half: int, norms: bool) -> None:
    geometry = Geometry(4, 2, 16, 4)
    generator = torch.Generator().manual_seed(1)
    qkv = torch.randn((5, 8 * 16), generator=generator).to(dtype)
    positions = torch.randint(0, POSITIONS, (5,), generator=generator)
    rotation = rotation_of(16, half, dtype, norms)
    slots = torch.tensor([3, 9, 4, 10, 5])
    cache = allocate(geometry, dtype, 3, CPU)
    query, pages = by_the_twin(qkv, positions, batch_of(slots, 5), cache, geometry, rotation)
    heads = qkv.view(5, 8, 16).transpose(0, 1)[None]
    q, k, v = heads[:, :4], heads[:, 4:6], heads[:, 6:]
    if norms:
        q, k = by_transformers(q, rotation.query_norm, 1e-5), by_transformers(k, rotation.key_norm, 1e-5)
    cos, sin = (torch.cat([table[positions]] * 2, dim=-1)[None] for table in (rotation.cos, rotation.sin))
    q, k = apply_rotary_pos_emb(q, k, cos, sin)
    assert torch.equal(query, q[0].transpose(0, 1))
    assert torch.equal(pages.key.flatten(0, 1)[slots], k[0].transpose(0, 1))
    assert torch.equal(pages.value.flatten(0, 1)[slots], v[0].transpose(0, 1))


def test_a_tokens_bits_do_not_depend_on_its_company() -> None:
    geometry = Geometry(6, 2, 20, 4)
    generator = torch.Generator().manual_seed(2)
    qkv = torch.randn((4, 10 * 20), generator=generator)
    positions, slots = torch.arange(4) * 3, torch.arange(4) + 4
    rotation = rotation_of(20, 7, torch.float32, norms=True)
    together, alone = (allocate(geometry, torch.int8, 2, CPU) for _ in range(2))
    query = rotate_and_write(qkv, positions, batch_of(slots, 4), together, geometry, rotation)
    for row in range(4):
        one = slice(row, row + 1)
        out = rotate_and_write(qkv[one], positions[one], batch_of(slots[one], 1), alone, geometry, rotation)
        assert torch.equal(out, query[one])
    assert same_bits(alone, together)
