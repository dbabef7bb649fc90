"""Choosing tokens from rows of logits on a GPU: what worker/sampling.py says, token for token, and nobody waits.

All filters of a row together are one bound on the order of its tokens (falling score; among equals rising id), its
*edge*: the last token that passes. A token's *rank* is that order as a number: the bits of its score, which is never
above 0, without the sign (its *depth*), then its id. The edge is found without a sort, as the smallest rank with so
many tokens, or so much of their mass, up to it: bit by bit, among few candidates where those are sure to suffice, and
in passes over the row where they are not. Masses are sums of integers (a weight is a multiple of 2**-34), so they are
exact, and neither their order, nor the number of programs, nor the rows beside changes a bit.

The kernels, in :mod:`kernels.triton.sampling_kernel`:

1. ``block_maxima``: the largest logit of each block of 64 tokens.
2. ``best_tokens``: of each row the largest logit and its token, which is a greedy row's answer; how deep the
   candidates for the edge lie, by the order of the maxima.
3. ``gather``: the candidates' ranks, in no order; the mass of all tokens.
4. ``find_edges``
5. ``draw``: Gumbel-max of a part of a row, looking only into the blocks that can hold the winner (worker/noise.py).
6. ``pick``: the best of the parts.

What is guaranteed: scores, weights, counts and masses, so also what the filters leave, have the very bits of the
reference. That takes divisions that round, and no fused multiply-adds (``enable_fp_fusion=False``). The noise is
computed in float64 with the device's own ``log`` and ``exp``, within a unit or two in the last place of any other's:
the winner may differ from another device's where two tokens are that close, some 1e-15 of each other.
"""

from __future__ import annotations

from typing import Any

import torch
import triton

from kernels.triton.launching import EXACT
from kernels.triton.sampling_kernel import BLOCK, best_tokens, block_maxima, draw, find_edges, gather, pick
from kernels.triton.variants import Variant

MAX_VOCABULARY = 1 << 19
"""Up to here, masses are exact in float64."""

CANDIDATES = 4096
"""Room for a row's candidates; a row of no more tokens has all of them there."""

TOP_P_CANDIDATES = 1024
"""Top-p looks among the tokens that are no worse than the best token of the block of this place, blocks ordered by
their best; but at most half of the blocks are better, so that it is not the whole row."""

LARGEST = {
    torch.float32: torch.finfo(torch.float32).max,
    torch.bfloat16: torch.finfo(torch.bfloat16).max,
    torch.float16: torch.finfo(torch.float16).max,
}

MAXIMA_TILE = 64
"""Blocks of a program of ``block_maxima`` and of ``gather``: 4096 tokens."""

DRAW_TILE = 512
"""Blocks of a program of ``draw``."""

ROW_TILE = 4096
"""Tokens at a time of a pass over a row."""


def can_choose(logits: torch.Tensor) -> bool:
    """Whether :func:`choose_tokens` takes such logits."""
    return logits.dtype in LARGEST and 0 < logits.shape[1] <= MAX_VOCABULARY and logits.stride(1) == 1


def choose_tokens(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_p: torch.Tensor,
    low: torch.Tensor,
    top_k: torch.Tensor,
    key: torch.Tensor,
    drawn: bool = True,
    filtered: bool = True,
) -> torch.Tensor:
    """One token id for each row of ``logits`` ``[R, V]``, int64 ``[R]``; 0 for a row in which nothing is finite.

    Of each row: ``temperature`` (float64; 0 is greedy, and nothing else counts), ``top_p`` (float64; from 1 on off),
    ``low`` (float64: the log of min-p, at most 0; minus infinity is off), ``top_k`` (int64; off unless between 0 and
    V), ``key`` (int64, the bits of worker.noise.row_keys). ``drawn`` False promises that all rows are greedy,
    ``filtered`` False that none has top-p or top-k. ``logits`` are left as they are. Nothing waits for the device.
    """
    if not can_choose(logits):
        raise ValueError(f"no tokens can be chosen from {logits.dtype} logits {tuple(logits.shape)}")
    rows, vocabulary = logits.shape
    tokens = torch.empty(rows, dtype=torch.int64, device=logits.device)
    if not rows:
        return tokens
    blocks = triton.cdiv(vocabulary, BLOCK)
    tiles = triton.cdiv(blocks, MAXIMA_TILE)
    parts = triton.cdiv(blocks, DRAW_TILE)
    room = CANDIDATES
    some: dict[str, Any] = {"LARGEST": LARGEST[logits.dtype], **EXACT}
    rooms = _rooms(rows, blocks, parts, room, logits.device, drawn, filtered)
    maxima, bests, cuts, counts, totals, candidates, edges, values, ids = rooms
    stride = logits.stride(0)
    block_maxima[(rows, tiles)](logits, stride, maxima, vocabulary, blocks, TILE=MAXIMA_TILE, **some)
    best_tokens[(rows,)](
        logits, stride, maxima, temperature, top_p, top_k, tokens, bests, cuts, counts, totals, vocabulary, blocks,
        min(TOP_P_CANDIDATES, max(1, blocks // 2)), room,
        BLOCKS=triton.next_power_of_2(blocks), num_warps=8, **some,
    )  # fmt: skip
    if not drawn:
        return tokens
    if filtered:
        gather[(rows, tiles)](
            logits, stride, maxima, temperature, top_p, top_k, bests, cuts, counts, totals, candidates, vocabulary,
            blocks, room, TILE=MAXIMA_TILE, num_warps=8, **some,
        )  # fmt: skip
    find_edges[(rows,)](
        logits, stride, temperature, top_p, low, top_k, bests, counts, totals, candidates, edges, vocabulary,
        ROOM=room, TILE=ROW_TILE, num_warps=16, **some,
    )  # fmt: skip
    draw[(rows, parts)](
        logits, stride, maxima, temperature, key, bests, edges, values, ids, vocabulary, blocks, parts,
        TILE=DRAW_TILE, **some,
    )  # fmt: skip
    pick[(rows,)](temperature, values, ids, tokens, parts, PARTS=triton.next_power_of_2(parts), num_warps=1, **EXACT)
    return tokens


def _rooms(
    rows: int, blocks: int, parts: int, room: int, device: torch.device, drawn: bool, filtered: bool
) -> list[torch.Tensor]:
    """What the kernels hand on to one another: of each row."""
    sizes = {
        "maxima": (blocks, torch.float32),
        "bests": (1, torch.float32),
        "cuts": (1, torch.int32),
        "counts": (1, torch.int32),
        "totals": (1, torch.int64),
        "candidates": (room if drawn and filtered else 0, torch.int64),
        "edges": (1, torch.int64),
        "values": (parts, torch.float64),
        "ids": (parts, torch.int32),
    }
    return [torch.empty((rows, width), dtype=dtype, device=device) for width, dtype in sizes.values()]


def _variants() -> list[Variant]:
    floats, doubles, ints, longs = "*fp32", "*fp64", "*i32", "*i64"
    settings = {"temperatures": doubles, "top_ps": doubles, "lows": doubles, "top_ks": longs, "keys": longs}
    between = {
        "maxima": floats, "bests": floats, "cuts": ints, "counts": ints, "totals": longs, "candidates": longs,
        "edges": longs, "values": doubles, "ids": ints, "tokens": longs,
    }  # fmt: skip
    numbers = dict.fromkeys(("stride", "vocabulary", "blocks", "top_p_place", "room", "parts"), "i32")
    choices: dict[Any, tuple[dict[str, int], int]] = {
        block_maxima: ({"TILE": MAXIMA_TILE}, 4),
        best_tokens: ({"BLOCKS": 2048}, 8),
        gather: ({"TILE": MAXIMA_TILE}, 8),
        find_edges: ({"ROOM": CANDIDATES, "TILE": ROW_TILE}, 16),
        draw: ({"TILE": DRAW_TILE}, 4),
        pick: ({"PARTS": 8}, 1),
    }
    found = []
    for dtype, name in ((torch.bfloat16, "bf16"), (torch.float16, "fp16"), (torch.float32, "fp32")):
        kinds = {**settings, **between, **numbers, "logits": f"*{name}"}
        for kernel, (constexprs, num_warps) in choices.items():
            if "LARGEST" not in kernel.arg_names and name != "fp32":
                continue
            chosen: dict[str, Any] = dict(constexprs)
            if "LARGEST" in kernel.arg_names:
                chosen["LARGEST"] = LARGEST[dtype]
            found.append(
                Variant(
                    name=f"{kernel.__name__}-{name}",
                    kernel=kernel,
                    signature={key: kinds[key] for key in kernel.arg_names if key not in chosen},
                    constexprs=chosen,
                    num_warps=num_warps,
                    max_registers=128,
                    fp_fusion=False,
                )
            )
    return found


VARIANTS = _variants()
