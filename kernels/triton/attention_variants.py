"""The attention kernels as a GPU would be given them, to be compiled without one (:mod:`kernels.triton.compiled`)."""

from __future__ import annotations

from collections.abc import Iterator
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
STARCODER = Geometry(48, 1, 128, 16)


def _tile(use: str, geometry: Geometry, dtype: str, pages: str, arch: int) -> Tile:
    if use == "decode":
        return decode_tile(geometry, BYTES[dtype])
    if use == "chunk":
        return chunk_tile(geometry, BYTES[dtype], BYTES[pages], 1 << 13, warpgroups=arch == 90)
    return invariant_tile(geometry, BYTES[dtype], BYTES[pages])


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
    arch: int = 90,
) -> Variant:
    """A chunk's tile is one card's: it is for ``arch`` alone."""
    pages = pages or dtype
    scaled = pages in ("fp8e4nv", "i8")
    tile = _tile(use, geometry, dtype, pages, arch)
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
        name=_name(f"{use}{arch}" if search else use, geometry, dtype, pages, features),
        kernel=paged_attention,
        signature=given,
        constexprs={**dict.fromkeys(absent), **sizes, "PAGE": geometry.block_size, "ROWS": tile.rows, "UPCAST": False},
        num_warps=tile.warps,
        num_stages=tile.stages,
        archs=(arch,) if search else FP8_ARCHS if pages == "fp8e4nv" else EVERY_ARCH,
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
    tile = invariant_tile(geometry, BYTES[dtype], BYTES[dtype]) if fixed else decode_tile(geometry, BYTES[dtype])
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


def _both(geometry: Geometry, dtype: str = "bf16", pages: str | None = None, **features: bool) -> Iterator[Variant]:
    """A decode and, for each card, a chunk."""
    yield _attention("decode", geometry, dtype, pages, **features)
    for arch in FP8_ARCHS if pages == "fp8e4nv" else EVERY_ARCH:
        yield _attention("chunk", geometry, dtype, pages, **features, arch=arch)


VARIANTS = [
    *_both(LLAMA_1B),
    *_both(LLAMA_8B),
    *_both(LLAMA_8B, "fp16"),
    *_both(GEMMA_9B),
    *_both(GEMMA_9B, window=True, softcap=True),
    *_both(LLAMA_1B, window=True, sinks=True),
    *_both(PHI_3),
    *_both(FALCON),
    *_both(STARCODER),
    *_both(LLAMA_1B, "fp32"),
    *_both(GEMMA_9B, "fp32"),
    *(variant for one in (LLAMA_1B, LLAMA_8B, GEMMA_9B) for variant in _both(one, "bf16", "fp8e4nv")),
    *_both(LLAMA_8B, "fp16", "i8"),
    *(_attention("decode", one, split=True) for one in (LLAMA_1B, LLAMA_8B, GEMMA_9B)),
    _attention("decode", LLAMA_8B, "bf16", "fp8e4nv", split=True),
    *(_attention("invariant", one, "bf16", split=split, fixed=True) for one in (LLAMA_1B, LLAMA_8B, GEMMA_9B)
      for split in (False, True)),
    _attention("invariant", LLAMA_8B, "bf16", "fp8e4nv", fixed=True),
    _attention("invariant", LLAMA_8B, "bf16", "i8", fixed=True),
    _merge(LLAMA_8B, "bf16"),
    _merge(LLAMA_8B, "bf16", fixed=True, sinks=True),
    _merge(GEMMA_9B, "bf16"),
]  # fmt: skip
