"""Writing keys and values into pages, one launch for both, as they are or in fp8 or int8 with a scale for each token
and head."""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl

from kernels.contract import DeviceBatch, LayerCache
from kernels.quantized_pages import LARGEST_STORED, quantize
from kernels.reference import LARGEST_KEY
from kernels.triton.launching import FUSED, runs_triton, unit_stride
from kernels.triton.variants import EVERY_ARCH, FP8_ARCHS, Variant

TILE = 2048
"""Numbers of a program, or near it: 16 for each thread."""

_SMALLEST_SCALE = tl.constexpr(torch.finfo(torch.float32).tiny)
_TO_WHOLE = tl.constexpr(1.5 * 2**23)
"""Added to a float32 of less than 2^22 it leaves no bits for a fraction: rounded to the nearest, halves to even."""


@triton.jit
def finite(x, largest):  # type: ignore[no-untyped-def]
    """``x`` float32 without NaN (0 in its place), within ``largest``."""
    return tl.where(x == x, tl.minimum(tl.maximum(x, -largest), largest), 0.0)


@triton.jit
def scale_of(largest, LARGEST_STORED: tl.constexpr):  # type: ignore[no-untyped-def]
    """As :func:`kernels.quantized_pages.quantize`, of numbers of which ``largest`` is the largest magnitude."""
    return tl.maximum(tl.div_rn(largest, LARGEST_STORED), _SMALLEST_SCALE)


@triton.jit
def stored(x, scale, DTYPE: tl.constexpr, LARGEST_STORED: tl.constexpr):  # type: ignore[no-untyped-def]
    """What pages of type DTYPE hold of ``x`` float32."""
    if LARGEST_STORED == 0:
        held = x.to(DTYPE)
    else:
        ratio = tl.div_rn(x, scale)
        ratio = tl.minimum(tl.maximum(ratio, -LARGEST_STORED), LARGEST_STORED)
        held = ((ratio + _TO_WHOLE) - _TO_WHOLE).to(DTYPE) if tl.int8 == DTYPE else ratio.to(DTYPE)
    return held


@triton.jit
def write_heads(  # type: ignore[no-untyped-def]
    source, pages, scales, slot, head_stride, first, heads, dim, largest, alive,
    LARGEST_STORED: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """One token's heads ``first .. first + BLOCK_H``, of those that lie ``head_stride`` apart from ``source`` on."""
    head = first + tl.arange(0, BLOCK_H)
    column = tl.arange(0, BLOCK_D)
    mine = head < tl.where(alive, heads, 0)
    inside = mine[:, None] & (column[None, :] < dim)
    at = head[:, None] * head_stride + column[None, :]
    x = finite(tl.load(source + at, mask=inside, other=0.0).to(tl.float32), largest)
    row = slot * heads + head
    scale = x  # not used where numbers are stored as they are
    if LARGEST_STORED != 0:
        of_head = scale_of(tl.max(tl.abs(x), axis=1), LARGEST_STORED)
        tl.store(scales + row, of_head, mask=mine)
        scale = of_head[:, None]
    held = stored(x, scale, pages.dtype.element_ty, LARGEST_STORED)
    tl.store(pages + row[:, None] * dim + column[None, :], held, mask=inside)


# They are slices, aligned as it comes: not a kernel for each case.
@triton.jit(do_not_specialize=["slots", "live"])
def _write_pages(  # type: ignore[no-untyped-def]
    key, value, slots, live, key_pages, value_pages, key_scales, value_scales,
    key_token, key_head, value_token, value_head, heads, dim, largest_key, largest_value,
    LARGEST_STORED: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * BLOCK_H
    alive = token < tl.load(live)
    slot = tl.load(slots + token, mask=alive, other=0)
    write_heads(
        key + token * key_token, key_pages, key_scales, slot, key_head, first, heads, dim, largest_key, alive,
        LARGEST_STORED, BLOCK_H, BLOCK_D,
    )  # fmt: skip
    write_heads(
        value + token * value_token, value_pages, value_scales, slot, value_head, first, heads, dim, largest_value,
        alive, LARGEST_STORED, BLOCK_H, BLOCK_D,
    )  # fmt: skip


@functools.cache
def largest_written(dtype: torch.dtype) -> tuple[float, float]:
    """What a number of a key (see :data:`~kernels.reference.LARGEST_KEY`), and of a value, is limited to: numbers of
    the type itself."""
    largest = torch.finfo(dtype).max
    return torch.tensor(min(LARGEST_KEY, largest), dtype=dtype).item(), largest


def head_tile(heads: int, dim: int) -> tuple[int, int]:
    """(heads, columns) of a program's tile."""
    columns = triton.next_power_of_2(dim)
    return min(triton.next_power_of_2(heads), max(1, TILE // columns)), columns


def write_pages(cache: LayerCache, key: torch.Tensor, value: torch.Tensor, batch: DeviceBatch) -> None:
    """Scatter ``key`` and ``value`` ``[T, num_kv_heads, head_dim]`` to the pages by the batch's write slots.

    Rows behind the last query (``query_start[S]``) are not written: in a captured graph they and their slots are
    what an earlier, larger batch left. Pages lie as :func:`kernels.device_pages.allocate` makes them.
    """
    if not runs_triton(key):
        _write_twin(cache, key, value, batch)
        return
    tokens, heads, dim = key.shape
    if not tokens:
        return
    key, value = unit_stride(key), unit_stride(value)
    block_h, block_d = head_tile(heads, dim)
    _write_pages[(tokens, triton.cdiv(heads, block_h))](
        key, value, batch.write_slots, batch.query_start[-1:],
        cache.key, cache.value, cache.key_scale, cache.value_scale,
        *key.stride()[:2], *value.stride()[:2], heads, dim, *largest_written(key.dtype),
        LARGEST_STORED=LARGEST_STORED.get(cache.key.dtype, 0), BLOCK_H=block_h, BLOCK_D=block_d, **FUSED,
    )  # fmt: skip


def _write_twin(cache: LayerCache, key: torch.Tensor, value: torch.Tensor, batch: DeviceBatch) -> None:
    # Nothing is looked at on the host: it runs where a device's work is rehearsed. Padding leaves slot 0 as it is.
    alive = torch.arange(len(key), device=key.device) < batch.query_start[-1]
    slots = torch.where(alive, batch.write_slots, 0)

    def put(target: torch.Tensor, new: torch.Tensor) -> None:
        mine = alive.view(-1, *[1] * (new.dim() - 1))
        target.index_copy_(0, slots, torch.where(mine, new, target[:1]))

    most = largest_written(key.dtype)
    for pages, scales, new, largest in (
        (cache.key, cache.key_scale, key, most[0]),
        (cache.value, cache.value_scale, value, most[1]),
    ):
        clean = torch.nan_to_num(new.clamp(-largest, largest))
        if scales is not None:
            clean, scale = quantize(clean, pages.dtype)
            put(scales.flatten(0, 1), scale)
        # as bytes: torch indexes no fp8
        put(pages.flatten(0, 1).view(torch.uint8), clean.to(pages.dtype).contiguous().view(torch.uint8))


SCALED = {"fp8": LARGEST_STORED[torch.float8_e4m3fn], "int8": LARGEST_STORED[torch.int8]}
"""By the names of variants."""

TRITON_TYPES = {"fp8": "fp8e4nv", "int8": "i8"}


def _variant(dtype: str, pages: str, heads: int, dim: int) -> Variant:
    scaled = pages in SCALED
    block_h, block_d = head_tile(heads, dim)
    signature = {
        **dict.fromkeys(("key", "value"), f"*{dtype}"),
        **dict.fromkeys(("key_pages", "value_pages"), f"*{TRITON_TYPES.get(pages, pages)}"),
        **dict.fromkeys(("key_scales", "value_scales") if scaled else (), "*fp32"),
        "slots": "*i64",
        "live": "*i32",
        **dict.fromkeys(("key_token", "key_head", "value_token", "value_head", "heads", "dim"), "i32"),
        **dict.fromkeys(("largest_key", "largest_value"), "fp32"),
    }
    constexprs = {"LARGEST_STORED": SCALED.get(pages, 0), "BLOCK_H": block_h, "BLOCK_D": block_d}
    return Variant(
        name=f"write_pages-{dtype}-{pages}-{heads}x{dim}",
        kernel=_write_pages,
        signature=signature,
        constexprs={**constexprs, **({} if scaled else {"key_scales": None, "value_scales": None})},
        archs=FP8_ARCHS if pages == "fp8" else EVERY_ARCH,
        max_registers=128,
        max_shared=8 << 10,
        divisible=frozenset({"key_token", "key_head", "value_token", "value_head", "dim"}),
    )


VARIANTS = [
    *(_variant(dtype, dtype, 8, 128) for dtype in ("bf16", "fp16", "fp32")),
    *(_variant("bf16", pages, 8, 128) for pages in ("fp8", "int8")),
    _variant("bf16", "bf16", 3, 64),
    _variant("bf16", "fp8", 1, 256),
    _variant("fp16", "int8", 32, 96),
]
