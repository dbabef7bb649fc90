"""What changes rows of logits before the temperature, on a GPU: worker/processors.py, with its very bits.

Each row that asks has a line of a table (int32 ``[n, 5]``): its row; its line of packed bits, a bit for each token that
its grammar allows, lowest first (-1: all are); the part of the list of banned ids that is its own, first and behind the
last; 1 if grammar and ban leave no token.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from kernels.triton.launching import EXACT
from kernels.triton.variants import Variant

TILE = 2048
"""Tokens of a program."""

ENTRIES = 512
"""Counted tokens of a program."""

COLUMNS = 5

_COLUMNS = tl.constexpr(COLUMNS)


@triton.jit
def _allowed(line, bits, bans, token, vocabulary, words):  # type: ignore[no-untyped-def]
    """(what the grammar allows, what the ban leaves of that)"""
    number = tl.load(line + 1)
    inside = (token < vocabulary) & (token // 32 < tl.where(number < 0, 0, words))
    word = tl.load(bits + number.to(tl.int64) * words + token // 32, mask=inside, other=0)
    allowed = (number < 0) | (((word >> (token % 32)) & 1) != 0)
    left = allowed
    for place in range(tl.load(line + 2), tl.load(line + 3)):
        left = left & (token != tl.load(bans + place))
    return allowed, left


@triton.jit
def _forbid(logits, stride, table, bits, bans, vocabulary, words, TILE: tl.constexpr):  # type: ignore[no-untyped-def]
    line = table + tl.program_id(0) * _COLUMNS
    if (tl.load(line + 1) < 0) & (tl.load(line + 2) == tl.load(line + 3)):
        return
    token = tl.program_id(1) * TILE + tl.arange(0, TILE)
    _, left = _allowed(line, bits, bans, token, vocabulary, words)
    left = left & (tl.load(line + 4) == 0)
    place = logits + tl.load(line).to(tl.int64) * stride + token
    tl.store(place, float("-inf"), mask=(token < vocabulary) & (left == 0))


@triton.jit
def _find_possible(logits, stride, table, flags, vocabulary, tiles, TILE: tl.constexpr):  # type: ignore[no-untyped-def]
    """A flag for each tile: whether one of its tokens may come."""
    row = tl.load(table + tl.program_id(0) * _COLUMNS).to(tl.int64)
    token = tl.program_id(1) * TILE + tl.arange(0, TILE)
    x = tl.load(logits + row * stride + token, mask=token < vocabulary, other=float("-inf"))
    possible = tl.max((x > float("-inf")).to(tl.int32), axis=0)
    tl.store(flags + tl.program_id(0) * tiles + tl.program_id(1), possible)


@triton.jit
def _open_up(  # type: ignore[no-untyped-def]
    logits, stride, table, bits, bans, flags, vocabulary, words, tiles, TILE: tl.constexpr, TILES: tl.constexpr
):
    number = tl.arange(0, TILES)
    flag = tl.load(flags + tl.program_id(0) * tiles + number, mask=number < tiles, other=0)
    if tl.max(flag, axis=0) == 1:
        return
    line = table + tl.program_id(0) * _COLUMNS
    token = tl.program_id(1) * TILE + tl.arange(0, TILE)
    allowed, left = _allowed(line, bits, bans, token, vocabulary, words)
    may_come = left | (allowed & (tl.load(line + 4) == 1))
    place = logits + tl.load(line).to(tl.int64) * stride + token
    tl.store(place, tl.where(may_come, 0.0, float("-inf")), mask=token < vocabulary)


@triton.jit
def _penalise(logits, stride, entries, runs, penalties, ENTRIES: tl.constexpr):  # type: ignore[no-untyped-def]
    run = runs + tl.program_id(0) * 3
    number = tl.program_id(1) * ENTRIES + tl.arange(0, ENTRIES)
    inside = number < tl.load(run + 2)
    entry = entries + (tl.load(run + 1) + number) * 2
    token = tl.load(entry, mask=inside, other=0)
    times = tl.load(entry + 1, mask=inside, other=0).to(tl.float32)
    penalty = penalties + tl.program_id(0) * 3
    repetition = tl.load(penalty).to(tl.float32)
    frequency = tl.load(penalty + 1).to(tl.float32)
    presence = tl.load(penalty + 2).to(tl.float32)
    place = logits + tl.load(run).to(tl.int64) * stride + token
    x = tl.load(place, mask=inside, other=0.0)
    x = tl.where(x > 0, tl.math.div_rn(x, repetition), x * repetition)
    x = x - frequency * times
    x = x - tl.where(times > 0, presence, 0.0)
    tl.store(place, x, mask=inside)


def forbid(logits: torch.Tensor, table: torch.Tensor, bits: torch.Tensor, bans: torch.Tensor) -> None:
    """What grammar or ban does not leave becomes minus infinity in float32 ``logits`` ``[R, V]``, in place.

    ``table`` is int32 ``[n, COLUMNS]``, ``bits`` int32 ``[m, words]``, ``bans`` int32.
    """
    vocabulary = logits.shape[1]
    grid = (len(table), triton.cdiv(vocabulary, TILE))
    _forbid[grid](logits, logits.stride(0), table, bits, bans, vocabulary, bits.shape[1], TILE=TILE, **EXACT)


def open_up(logits: torch.Tensor, table: torch.Tensor, bits: torch.Tensor, bans: torch.Tensor) -> None:
    """Those of the rows in which nothing is possible: whatever may come is equally likely. The ban yields where grammar
    and ban leave nothing."""
    vocabulary = logits.shape[1]
    tiles = triton.cdiv(vocabulary, TILE)
    flags = torch.empty((len(table), tiles), dtype=torch.int32, device=logits.device)
    grid = (len(table), tiles)
    _find_possible[grid](logits, logits.stride(0), table, flags, vocabulary, tiles, TILE=TILE, **EXACT)
    _open_up[grid](
        logits, logits.stride(0), table, bits, bans, flags, vocabulary, bits.shape[1], tiles,
        TILE=TILE, TILES=triton.next_power_of_2(tiles), **EXACT,
    )  # fmt: skip


def penalise(
    logits: torch.Tensor, entries: torch.Tensor, runs: torch.Tensor, penalties: torch.Tensor, longest: int
) -> None:
    """Repetition, frequency and presence penalties of float32 ``logits`` ``[R, V]``, in place.

    ``entries`` (int32 ``[places, 2]``) are token ids and how often the output has each; ``runs`` (int32 ``[n, 3]``) a
    row, its first entry and how many it has, up to ``longest``; ``penalties`` (float64 ``[n, 3]``) its repetition,
    frequency and presence penalty.
    """
    _penalise[(len(runs), triton.cdiv(longest, ENTRIES))](
        logits, logits.stride(0), entries, runs, penalties, ENTRIES=ENTRIES, **EXACT
    )


def _variants() -> list[Variant]:
    kinds = {
        "logits": "*fp32", "table": "*i32", "bits": "*i32", "bans": "*i32", "flags": "*i32", "entries": "*i32",
        "runs": "*i32", "penalties": "*fp64", **dict.fromkeys(("stride", "vocabulary", "words", "tiles"), "i32"),
    }  # fmt: skip
    choices: dict[Any, dict[str, int]] = {
        _forbid: {"TILE": TILE},
        _find_possible: {"TILE": TILE},
        _open_up: {"TILE": TILE, "TILES": 64},
        _penalise: {"ENTRIES": ENTRIES},
    }
    return [
        Variant(
            name=kernel.__name__.strip("_"),
            kernel=kernel,
            signature={name: kinds[name] for name in kernel.arg_names if name not in constexprs},
            constexprs=constexprs,
            max_registers=96,
            fp_fusion=False,
        )
        for kernel, constexprs in choices.items()
    ]


VARIANTS = _variants()
