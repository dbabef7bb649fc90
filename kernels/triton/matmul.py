"""Linear layers whose rows keep their bits whatever rows stand beside them.

One tile configuration for each weight, whatever the number of rows, and no splitting of the sum: a row's products are
added in the same order alone and in company (He, "Defeating Nondeterminism in LLM Inference", Thinking Machines Lab,
2025). Libraries choose tiles and splits by the number of rows, which is quicker for few of them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from kernels.triton.launching import FUSED, runs_triton, unit_stride
from kernels.triton.variants import Variant

GROUP = 8
"""Row tiles that take a column tile in turn, so that its weights are read from the L2 cache by all but the first."""

WIDE = 8192
"""Output columns from which on wide tiles keep a large GPU's multiprocessors in work."""


@dataclass(frozen=True, slots=True)
class Tile:
    """Rows, columns and depth of what a program multiplies at once."""

    rows: int
    columns: int
    depth: int
    num_warps: int
    num_stages: int


def tile_for(dtype: torch.dtype, columns: int) -> Tile:
    """By what does not change from batch to batch."""
    if dtype == torch.float32:
        return Tile(32, 64, 32, 4, 2)
    return Tile(64, 128 if columns >= WIDE else 64, 64, 4, 4 if columns < WIDE else 3)


# One kernel whatever the number of rows: others may differ in their bits, and take seconds to compile.
@triton.jit(do_not_specialize=["rows"])
def _linear(  # type: ignore[no-untyped-def]
    x, weight, bias, out, rows, columns, inner, x_stride, weight_stride,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    row_tiles = tl.cdiv(rows, BLOCK_M)
    column_tiles = tl.cdiv(columns, BLOCK_N)
    group = tile // (GROUP * column_tiles)
    first = group * GROUP
    size = tl.minimum(row_tiles - first, GROUP)
    within = tile % (GROUP * column_tiles)
    row = (first + within % size) * BLOCK_M + tl.arange(0, BLOCK_M)
    column = (within // size) * BLOCK_N + tl.arange(0, BLOCK_N)
    depth = tl.arange(0, BLOCK_K)
    # Past the end the first row and column are read again, and not written: no mask in the loop.
    row_read = tl.where(row < rows, row, 0).to(tl.int64)
    column_read = tl.where(column < columns, column, 0).to(tl.int64)
    left = x + row_read[:, None] * x_stride + depth[None, :]
    right = weight + column_read[None, :] * weight_stride + depth[:, None]
    total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for start in range(0, inner, BLOCK_K):
        if WHOLE:
            a = tl.load(left + start)
            b = tl.load(right + start)
        else:
            a = tl.load(left + start, mask=(start + depth < inner)[None, :], other=0.0)
            b = tl.load(right + start, mask=(start + depth < inner)[:, None], other=0.0)
        total = tl.dot(a, b, total, input_precision="ieee")
    if bias is not None:
        total += tl.load(bias + column_read).to(tl.float32)[None, :]
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    at = row.to(tl.int64)[:, None] * columns + column[None, :]
    tl.store(out + at, total.to(out.dtype.element_ty), mask=inside)


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """``x`` ``[..., in]`` times ``weight`` ``[out, in]`` transposed, plus ``bias`` ``[out]``; float32 sums, in x's type
    at the end. All of one type: bf16, fp16 or float32."""
    if not runs_triton(x):
        return torch.nn.functional.linear(x, weight, bias)
    flat = unit_stride(x.flatten(0, -2) if x.dim() != 2 else x)
    weight = unit_stride(weight)
    rows, inner = flat.shape
    columns = len(weight)
    out = torch.empty((rows, columns), dtype=x.dtype, device=x.device)
    tile = tile_for(x.dtype, columns)
    if rows:
        _linear[(triton.cdiv(rows, tile.rows) * triton.cdiv(columns, tile.columns),)](
            flat, weight, None if bias is None else bias.contiguous(), out, rows, columns, inner,
            flat.stride(0), weight.stride(0),
            BLOCK_M=tile.rows, BLOCK_N=tile.columns, BLOCK_K=tile.depth, GROUP=GROUP, WHOLE=inner % tile.depth == 0,
            num_warps=tile.num_warps, num_stages=tile.num_stages, **FUSED,
        )  # fmt: skip
    return out.view(*x.shape[:-1], columns)


_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def _variant(dtype: str, columns: int, bias: bool = False, whole: bool = True) -> Variant:
    tile = tile_for(_DTYPES[dtype], columns)
    pointers = ["x", "weight", "out", *(["bias"] if bias else [])]
    scalars = ("rows", "columns", "inner", "x_stride", "weight_stride")
    strides = {"columns", "inner", "x_stride", "weight_stride"} if whole else {"columns"}
    blocks = {"BLOCK_M": tile.rows, "BLOCK_N": tile.columns, "BLOCK_K": tile.depth}
    return Variant(
        name=f"linear-{dtype}-{'wide' if columns >= WIDE else 'narrow'}{'-bias' * bias}{'-odd' * (not whole)}",
        kernel=_linear,
        signature={**dict.fromkeys(pointers, f"*{dtype}"), **dict.fromkeys(scalars, "i32")},
        constexprs={**blocks, "GROUP": GROUP, "WHOLE": whole, **({} if bias else {"bias": None})},
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        divisible=frozenset(strides),
    )


VARIANTS = [
    *(_variant(dtype, columns) for dtype in ("bf16", "fp16", "fp32") for columns in (4096, 28672)),
    _variant("bf16", 6144, bias=True),
    _variant("bf16", 4096, whole=False),
]
