"""The attention kernels as a GPU would be given them, to be compiled without one (:mod:`kernels.triton.compiled`)."""

from __future__ import annotations

from typing import Any

from kernels.contract import Geometry
from kernels.triton.attention_kernel import merge_pieces, paged_attention
from kernels.triton.attention_shapes import (
    MERGED_ROWS,
    MERGING_WARPS,
    Tile,
    chunk_tile,
    decode_tile,
    invariant_tile,
    power_of_two,
)
from kernels.triton.variants import EVERY_ARCH, FP8_ARCHS, Variant

BYTES = {"fp32": 4, "bf16": 2, "fp16": 2, "fp8e4nv": 1, "i8": 1}

INTEGERS = ("sequences", "fewest", "most", "splits", "piece_tiles", "slots")

LLAMA_8B = Geometry(32, 8, 128, 16)
LLAMA_1B = Geometry(32, 8, 64, 16)
GEMMA_9B = Geometry(16, 8, 256, 16)
PHI_3 = Geometry(32, 32, 96, 16)
FALCON = Geometry(71, 1, 64, 16)


def _tile(use: str, geometry: Geometry, dtype: str, pages: str) -> Tile:
    if use == "decode":
        return decode_tile(geometry, BYTES[dtype], BYTES[pages])
    if use == "chunk":
        return chunk_tile(geometry, BYTES[dtype], 1 << 13)
    return invariant_tile(geometry, BYTES[dtype])


def _name(what: str, geometry: Geometry, dtype: str, pages: str, features: str) -> str:
    heads = f"{geometry.num_heads}-{geometry.num_kv_heads}x{geometry.head_dim}"
    return f"{what}-{dtype}{'' if pages == dtype else '-' + pages}-{heads}{features}"


def _attention(
    use: str,
    geometry: Geometry,
    dtype: str = "bf16",
    pages: str | None = None,
    *,
    split: bool = False,
    fixed: bool = False,
    window: bool = False,
    softcap: bool = False,
    sinks: bool = False,
) -> Variant:
    pages = pages or dtype
    scaled = pages in ("fp8e4nv", "i8")
    tile = _tile(use, geometry, dtype, pages)
    search = use == "chunk"
    given = {
        "out": f"*{dtype}", "query": f"*{dtype}", "keys": f"*{pages}", "values": f"*{pages}", "query_start": "*i32",
        "visible": "*i32", "tables": "*i32", **dict.fromkeys((*INTEGERS, "table_stride"), "i32"),
        "token_stride": "i32", "head_stride": "i32", "scale": "fp32",
    }  # fmt: skip
    absent: list[str] = []
    for there, names, kind in (
        (split, ("partials", "sums"), "*fp32"), (scaled, ("key_scales", "value_scales"), "*fp32"),
        (sinks and not split, ("sinks",), f"*{dtype}"), (softcap, ("softcap",), "fp32"), (window, ("window",), "i32"),
    ):  # fmt: skip
        if there:
            given |= dict.fromkeys(names, kind)
        else:
            absent += names
    sizes = _sizes(geometry, tile, search, fixed)
    features = "".join(f"-{name}" for name, there in (
        ("split", split), ("fixed", fixed), ("window", window), ("softcap", softcap), ("sinks", sinks)) if there
    )  # fmt: skip
    return Variant(
        name=_name(use, geometry, dtype, pages, features),
        kernel=paged_attention,
        signature=given,
        constexprs={**dict.fromkeys(absent), **sizes, "PAGE": geometry.block_size, "ROWS": tile.rows, "UPCAST": False},
        num_warps=tile.warps,
        num_stages=tile.stages,
        archs=FP8_ARCHS if pages == "fp8e4nv" else EVERY_ARCH,
        divisible=frozenset({"token_stride", "head_stride"}),
    )


def _sizes(geometry: Geometry, tile: Tile, search: bool, fixed: bool) -> dict[str, Any]:
    queries = tile.queries(geometry.group) if search else max(1, 16 // geometry.group)
    return {
        "HEADS": geometry.num_heads, "KV_HEADS": geometry.num_kv_heads, "HEAD_DIM": geometry.head_dim,
        "WIDTH": power_of_two(geometry.head_dim), "QUERIES": queries, "TILE": tile.keys, "SEARCH": search,
        "FIXED": fixed,
    }  # fmt: skip


def _merge(geometry: Geometry, dtype: str, *, fixed: bool = False, sinks: bool = False) -> Variant:
    tile = invariant_tile(geometry, BYTES[dtype]) if fixed else decode_tile(geometry, BYTES[dtype], BYTES[dtype])
    given = {
        "out": f"*{dtype}", "partials": "*fp32", "sums": "*fp32", "query_start": "*i32", "visible": "*i32",
        **dict.fromkeys(INTEGERS, "i32"), **({"sinks": f"*{dtype}"} if sinks else {}),
    }  # fmt: skip
    features = ("-fixed" if fixed else "") + ("-sinks" if sinks else "")
    return Variant(
        name=_name("merge", geometry, dtype, dtype, features),
        kernel=merge_pieces,
        signature=given,
        constexprs={
            **({} if sinks else {"sinks": None}),
            "window": None,
            "ROWS": MERGED_ROWS,
            **_sizes(geometry, tile, False, fixed),
        },
        num_warps=MERGING_WARPS,
        max_registers=128,
        max_shared=8 << 10,
    )


VARIANTS = [
    *(_attention("decode", one, dtype, split=split) for one in (LLAMA_1B, LLAMA_8B, GEMMA_9B)
      for dtype in ("bf16", "fp16") for split in (False, True)),
    *(_attention("chunk", one, dtype) for one in (LLAMA_1B, LLAMA_8B, GEMMA_9B) for dtype in ("bf16", "fp16")),
    *(_attention(use, one, "bf16", "fp8e4nv", split=use == "decode") for one in (LLAMA_1B, LLAMA_8B, GEMMA_9B)
      for use in ("decode", "chunk")),
    *(_attention(use, LLAMA_8B, "fp16", "i8") for use in ("decode", "chunk")),
    *(_attention("invariant", one, "bf16", split=split, fixed=True) for one in (LLAMA_1B, LLAMA_8B, GEMMA_9B)
      for split in (False, True)),
    _attention("invariant", LLAMA_8B, "bf16", "fp8e4nv", fixed=True),
    *(_attention(use, GEMMA_9B, window=True, softcap=True) for use in ("decode", "chunk")),
    *(_attention(use, LLAMA_1B, window=True, sinks=True) for use in ("decode", "chunk")),
    *(_attention(use, one) for one in (PHI_3, FALCON) for use in ("decode", "chunk")),
    *(_attention(use, one, "fp32") for one in (LLAMA_1B, GEMMA_9B) for use in ("decode", "chunk")),
    _merge(LLAMA_8B, "bf16"),
    _merge(LLAMA_8B, "bf16", fixed=True, sinks=True),
    _merge(GEMMA_9B, "bf16"),
]  # fmt: skip
