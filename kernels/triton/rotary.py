"""From the merged product of a layer's queries, keys and values to rotated queries and written pages, in one launch.

Rotary embedding (Su et al., "RoFormer", 2021) in the half layout of Llama: dimension ``i`` turns with ``i + half``.
Rounds as ``transformers``' modules do: each product to the model's type, then the sum; with norms of each head (Qwen3)
as LlamaRMSNorm.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from kernels.contract import DeviceBatch, Geometry, LayerCache
from kernels.quantized_pages import LARGEST_STORED
from kernels.triton.cache import (
    SCALED,
    TILE,
    TRITON_TYPES,
    finite,
    largest_written,
    scale_of,
    stored,
    write_heads,
    write_pages,
)
from kernels.triton.launching import FUSED, runs_triton, unit_stride
from kernels.triton.norm import rms_norm
from kernels.triton.variants import EVERY_ARCH, FP8_ARCHS, Variant


@dataclass(frozen=True, slots=True, eq=False)
class Rotation:
    """What a layer does to the heads of its queries and keys before they meet."""

    cos: torch.Tensor | None = None  # [positions, rotated dimensions / 2]; None: a layer that rotates nothing
    sin: torch.Tensor | None = None
    query_norm: torch.Tensor | None = None  # [head_dim]
    key_norm: torch.Tensor | None = None
    eps: float = 0.0


@triton.jit
def _rounded(x, DTYPE: tl.constexpr):  # type: ignore[no-untyped-def]
    """What a tensor of DTYPE keeps of ``x``, in float32."""
    return x.to(DTYPE).to(tl.float32)


@triton.jit
def _normal(x, scale, weight, column, DTYPE: tl.constexpr, DIM: tl.constexpr):  # type: ignore[no-untyped-def]
    gain = tl.load(weight + column, mask=column < DIM, other=0.0).to(tl.float32)
    return _rounded(_rounded(x * scale, DTYPE) * gain[None, :], DTYPE)


@triton.jit
def _rotated(  # type: ignore[no-untyped-def]
    source, weight, cos, sin, at, mine, eps,
    DIM: tl.constexpr, HALF: tl.constexpr, BLOCK_HALF: tl.constexpr, BLOCK_REST: tl.constexpr,
):  # fmt: skip
    """The heads that begin at ``at`` ``[heads, 1]``: first half, second half, and what does not turn, in float32."""
    DTYPE: tl.constexpr = source.dtype.element_ty
    column = tl.arange(0, BLOCK_HALF)
    inside = mine & (column < HALF)[None, :]
    first = tl.load(source + at + column[None, :], mask=inside, other=0.0).to(tl.float32)
    second = tl.load(source + at + (HALF + column)[None, :], mask=inside, other=0.0).to(tl.float32)
    rest = first
    if BLOCK_REST > 0:
        behind = 2 * HALF + tl.arange(0, BLOCK_REST)
        rest = tl.load(source + at + behind[None, :], mask=mine & (behind < DIM)[None, :], other=0.0).to(tl.float32)
    if weight is not None:
        squares = tl.sum(first * first, axis=1) + tl.sum(second * second, axis=1)
        if BLOCK_REST > 0:
            squares += tl.sum(rest * rest, axis=1)
        scale = tl.rsqrt(squares / DIM + eps)[:, None]
        first = _normal(first, scale, weight, column, DTYPE, DIM)
        second = _normal(second, scale, weight, HALF + column, DTYPE, DIM)
        if BLOCK_REST > 0:
            rest = _normal(rest, scale, weight, behind, DTYPE, DIM)
    if cos is not None:
        c = tl.load(cos + column, mask=column < HALF, other=0.0).to(tl.float32)[None, :]
        s = tl.load(sin + column, mask=column < HALF, other=0.0).to(tl.float32)[None, :]
        turned = _rounded(_rounded(first * c, DTYPE) - _rounded(second * s, DTYPE), DTYPE)
        second = _rounded(_rounded(second * c, DTYPE) + _rounded(first * s, DTYPE), DTYPE)
        first = turned
    return first, second, rest


# They are slices, aligned as it comes: not a kernel for each case.
@triton.jit(do_not_specialize=["positions", "slots", "live"])
def _rotate_and_write(  # type: ignore[no-untyped-def]
    qkv, positions, cos, sin, slots, live, query_norm, key_norm, query,
    key_pages, value_pages, key_scales, value_scales,
    qkv_stride, cos_stride, sin_stride, heads, kv_heads, eps, largest_key, largest_value,
    DIM: tl.constexpr, HALF: tl.constexpr, LARGEST_STORED: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_HALF: tl.constexpr, BLOCK_REST: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    alive = token < tl.load(live)
    query_blocks = tl.cdiv(heads, BLOCK_H)
    kv_blocks = tl.cdiv(kv_heads, BLOCK_H)
    row = qkv + token * qkv_stride
    column = tl.arange(0, BLOCK_HALF)
    behind = 2 * HALF + tl.arange(0, BLOCK_REST if BLOCK_REST > 0 else 1)
    if cos is not None:
        position = tl.load(positions + token, mask=alive, other=0)
        cos += position * cos_stride
        sin += position * sin_stride
    if block < query_blocks:
        head = (block * BLOCK_H + tl.arange(0, BLOCK_H))[:, None]
        mine = head < tl.where(alive, heads, 0)
        first, second, rest = _rotated(
            row, query_norm, cos, sin, head * DIM, mine, eps, DIM, HALF, BLOCK_HALF, BLOCK_REST
        )
        at = query + (token * heads + head) * DIM
        inside = mine & (column < HALF)[None, :]
        tl.store(at + column[None, :], first.to(query.dtype.element_ty), mask=inside)
        tl.store(at + (HALF + column)[None, :], second.to(query.dtype.element_ty), mask=inside)
        if BLOCK_REST > 0:
            tl.store(at + behind[None, :], rest.to(query.dtype.element_ty), mask=mine & (behind < DIM)[None, :])
    elif block < query_blocks + kv_blocks:
        slot = tl.load(slots + token, mask=alive, other=0)
        head = ((block - query_blocks) * BLOCK_H + tl.arange(0, BLOCK_H))[:, None]
        mine = head < tl.where(alive, kv_heads, 0)
        first, second, rest = _rotated(
            row, key_norm, cos, sin, (heads + head) * DIM, mine, eps, DIM, HALF, BLOCK_HALF, BLOCK_REST
        )
        first = finite(first, largest_key)
        second = finite(second, largest_key)
        rest = finite(rest, largest_key)
        page_row = slot * kv_heads + head
        scale = first  # not used where numbers are stored as they are
        if LARGEST_STORED != 0:
            largest = tl.maximum(tl.max(tl.abs(first), axis=1), tl.max(tl.abs(second), axis=1))
            if BLOCK_REST > 0:
                largest = tl.maximum(largest, tl.max(tl.abs(rest), axis=1))
            scale = scale_of(largest, LARGEST_STORED)[:, None]
            tl.store(key_scales + page_row, scale, mask=mine)
        STORED: tl.constexpr = key_pages.dtype.element_ty
        at = key_pages + page_row * DIM
        inside = mine & (column < HALF)[None, :]
        tl.store(at + column[None, :], stored(first, scale, STORED, LARGEST_STORED), mask=inside)
        tl.store(at + (HALF + column)[None, :], stored(second, scale, STORED, LARGEST_STORED), mask=inside)
        if BLOCK_REST > 0:
            held = stored(rest, scale, STORED, LARGEST_STORED)
            tl.store(at + behind[None, :], held, mask=mine & (behind < DIM)[None, :])
    else:
        slot = tl.load(slots + token, mask=alive, other=0)
        write_heads(
            row + (heads + kv_heads) * DIM, value_pages, value_scales, slot, DIM, (block - query_blocks - kv_blocks)
            * BLOCK_H, kv_heads, DIM, largest_value, alive, LARGEST_STORED, BLOCK_H, BLOCK_D,
        )  # fmt: skip


def rotate_and_write(
    qkv: torch.Tensor,
    positions: torch.Tensor,
    batch: DeviceBatch,
    cache: LayerCache,
    geometry: Geometry,
    rotation: Rotation,
) -> torch.Tensor:
    """Queries ``[T, num_heads, head_dim]``, rotated, of ``qkv`` ``[T, (num_heads + 2 * num_kv_heads) * head_dim]``;
    keys, rotated, and values go to the pages, as :func:`~kernels.triton.cache.write_pages` would write them.

    ``positions`` int64 ``[T]`` are rows of the rotation's tables. Rows behind the last query are left as they come.
    """
    g = geometry
    if not runs_triton(qkv):
        return _twin(qkv, positions, batch, cache, g, rotation)
    qkv = unit_stride(qkv)
    cos, sin = (None if table is None else unit_stride(table) for table in (rotation.cos, rotation.sin))
    query = torch.empty((len(qkv), g.num_heads, g.head_dim), dtype=qkv.dtype, device=qkv.device)
    half = g.head_dim // 2 if cos is None else cos.shape[-1]
    tile = _tile(g, half)
    blocks = triton.cdiv(g.num_heads, tile["BLOCK_H"]) + 2 * triton.cdiv(g.num_kv_heads, tile["BLOCK_H"])
    if len(qkv):
        _rotate_and_write[(len(qkv), blocks)](
            qkv, positions, cos, sin, batch.write_slots, batch.query_start[-1:], rotation.query_norm, rotation.key_norm,
            query, cache.key, cache.value, cache.key_scale, cache.value_scale,
            qkv.stride(0), 0 if cos is None else cos.stride(0), 0 if sin is None else sin.stride(0),
            g.num_heads, g.num_kv_heads, rotation.eps, *largest_written(qkv.dtype),
            DIM=g.head_dim, HALF=half, LARGEST_STORED=LARGEST_STORED.get(cache.key.dtype, 0), **tile,
            num_warps=_num_warps(tile), **FUSED,
        )  # fmt: skip
    return query


def _tile(g: Geometry, half: int) -> dict[str, int]:
    """The blocks of a program: some heads, and of each the two halves that turn and the rest."""
    columns = triton.next_power_of_2(g.head_dim)
    heads = min(max(4, triton.next_power_of_2(g.num_kv_heads)), max(1, TILE // columns))
    rest = g.head_dim - 2 * half
    return {
        "BLOCK_H": heads,
        "BLOCK_D": columns,
        "BLOCK_HALF": triton.next_power_of_2(half),
        "BLOCK_REST": triton.next_power_of_2(rest) if rest else 0,
    }


def _num_warps(tile: dict[str, int]) -> int:
    return max(1, min(4, tile["BLOCK_H"] * tile["BLOCK_D"] // 256))


def _twin(
    qkv: torch.Tensor,
    positions: torch.Tensor,
    batch: DeviceBatch,
    cache: LayerCache,
    g: Geometry,
    rotation: Rotation,
) -> torch.Tensor:
    heads = qkv.view(len(qkv), g.num_heads + 2 * g.num_kv_heads, g.head_dim)
    query, key, value = torch.split(heads, [g.num_heads, g.num_kv_heads, g.num_kv_heads], dim=1)
    if rotation.query_norm is not None:
        query = rms_norm(query, rotation.query_norm, rotation.eps)
    if rotation.key_norm is not None:
        key = rms_norm(key, rotation.key_norm, rotation.eps)
    if rotation.cos is not None and rotation.sin is not None:
        cos, sin = (table[positions, None] for table in (rotation.cos, rotation.sin))
        query, key = _rotate(query, cos, sin), _rotate(key, cos, sin)
    write_pages(cache, key, value, batch)
    return query.contiguous()


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    half = cos.shape[-1]
    first, second, rest = torch.split(x, [half, half, x.shape[-1] - 2 * half], dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], dim=-1)


def _variant(
    name: str, dtype: str, pages: str, g: Geometry, half: int | None = None, norms: bool = False, turns: bool = True
) -> Variant:
    half = g.head_dim // 2 if half is None else half
    tile = _tile(g, half)
    absent = [
        *(() if turns else ("cos", "sin")),
        *(() if norms else ("query_norm", "key_norm")),
        *(() if pages in SCALED else ("key_scales", "value_scales")),
    ]
    signature = {
        **dict.fromkeys(("qkv", "cos", "sin", "query_norm", "key_norm", "query"), f"*{dtype}"),
        **dict.fromkeys(("key_pages", "value_pages"), f"*{TRITON_TYPES.get(pages, pages)}"),
        **dict.fromkeys(("key_scales", "value_scales"), "*fp32"),
        **dict.fromkeys(("positions", "slots"), "*i64"),
        "live": "*i32",
        **dict.fromkeys(("qkv_stride", "cos_stride", "sin_stride", "heads", "kv_heads"), "i32"),
        **dict.fromkeys(("eps", "largest_key", "largest_value"), "fp32"),
    }
    constexprs = {"DIM": g.head_dim, "HALF": half, "LARGEST_STORED": SCALED.get(pages, 0), **tile}
    return Variant(
        name=f"rotate_and_write-{name}",
        kernel=_rotate_and_write,
        signature={key: kind for key, kind in signature.items() if key not in absent},
        constexprs={**constexprs, **dict.fromkeys(absent)},
        num_warps=_num_warps(tile),
        archs=FP8_ARCHS if pages == "fp8" else EVERY_ARCH,
        max_registers=168,
        max_shared=16 << 10,
        divisible=frozenset({"qkv_stride", "cos_stride", "sin_stride"}),
    )


_LLAMA_8B = Geometry(32, 8, 128, 16)

VARIANTS = [
    *(_variant(f"{dtype}-32x8x128", dtype, dtype, _LLAMA_8B) for dtype in ("bf16", "fp16", "fp32")),
    *(_variant(f"bf16-{pages}-32x8x128", "bf16", pages, _LLAMA_8B) for pages in ("fp8", "int8")),
    _variant("bf16-9x3x64", "bf16", "bf16", Geometry(9, 3, 64, 16)),
    _variant("bf16-norms-32x8x128", "bf16", "bf16", _LLAMA_8B, norms=True),
    _variant("bf16-fp8-norms-40x8x128", "bf16", "fp8", Geometry(40, 8, 128, 16), norms=True),
    _variant("bf16-partial-16x4x80", "bf16", "bf16", Geometry(16, 4, 80, 16), half=16),
    _variant("bf16-int8-norms-partial-48x1x256", "bf16", "int8", Geometry(48, 1, 256, 16), half=32, norms=True),
    _variant("bf16-still-16x4x128", "bf16", "bf16", Geometry(16, 4, 128, 16), turns=False),
]
