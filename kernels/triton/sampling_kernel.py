"""The kernels that :mod:`kernels.triton.sampling` launches, which says what they do together.

Whether a row of settings begins at a multiple of 16 bytes depends on how many rows there are: it makes no other kernel.
"""

from __future__ import annotations

import math

import triton
import triton.language as tl

BLOCK = 64
"""Tokens whose noise is drawn together (worker/noise.py)."""

_BLOCK = tl.constexpr(BLOCK)
_ID_BITS = tl.constexpr(20)
_ANY_ID = tl.constexpr((1 << 20) - 1)
_RANK_BITS = tl.constexpr(51)
_SIGN = tl.constexpr(-(1 << 31))
_IMPOSSIBLE = tl.constexpr(0x7F800000)  # the depth of minus infinity
_LEAST_WEIGHTY = tl.constexpr(-25.0)
_NO_WEIGHT = tl.constexpr(0x41C80000)  # the depth of that score
_ROUNDING = tl.constexpr(1.5 * 2**23)  # added to a float32 number and taken off again, it leaves an integer
_GRID = tl.constexpr(1.5 / 2048)  # likewise a multiple of 2**-34
_UNITS = tl.constexpr(float(1 << 34))
_LOG_BLOCK = tl.constexpr(math.log(BLOCK))
_GOLDEN = tl.constexpr(0x9E3779B97F4A7C15)
_MIX1 = tl.constexpr(0xBF58476D1CE4E5B9)
_MIX2 = tl.constexpr(0x94D049BB133111EB)
_TOKENS = tl.constexpr(0x5851F42D4C957F2D)


@triton.jit
def _load_logits(row_logits, token, vocabulary, LARGEST: tl.constexpr):  # type: ignore[no-untyped-def]
    """NaN counts as impossible, +inf as the largest finite number."""
    x = tl.load(row_logits + token, mask=token < vocabulary, other=float("-inf")).to(tl.float32)
    return tl.minimum(tl.where(x == x, x, float("-inf")), LARGEST)


@triton.jit
def _depth(logit, best, temperature):  # type: ignore[no-untyped-def]
    return tl.math.div_rn(logit - best, temperature).to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def _score(depth):  # type: ignore[no-untyped-def]
    return (depth | _SIGN).to(tl.float32, bitcast=True)


@triton.jit
def _rank(depth, token):  # type: ignore[no-untyped-def]
    return (depth.to(tl.int64) << _ID_BITS) | token


@triton.jit
def _weight(depth):  # type: ignore[no-untyped-def]
    """exp(score) in units of 2**-34, by the operations of worker/filters.py, one by one."""
    clamped = tl.maximum(_score(depth), _LEAST_WEIGHTY)
    power = (clamped * 1.44269504088896341 + _ROUNDING) - _ROUNDING
    rest = clamped - power * 0.693359375
    rest = rest + power * 2.12194440e-4
    total = rest * 1.9875691500e-4 + 1.3981999507e-3
    total = total * rest + 8.3334519073e-3
    total = total * rest + 4.1665795894e-2
    total = total * rest + 1.6666665459e-1
    total = total * rest + 5.0000001201e-1
    total = total * (rest * rest) + (rest + 1.0)
    total = total * ((power.to(tl.int32) + 127) << 23).to(tl.float32, bitcast=True)
    return (((total + _GRID) - _GRID) * _UNITS).to(tl.int64)


@triton.jit
def _output(state, number):  # type: ignore[no-untyped-def]
    """The number-th output, from 1, of a SplitMix64 generator."""
    x = state + number.to(tl.uint64) * _GOLDEN
    x = (x ^ (x >> 30)) * _MIX1
    x = (x ^ (x >> 27)) * _MIX2
    return x ^ (x >> 31)


@triton.jit
def _uniform(output):  # type: ignore[no-untyped-def]
    return ((output >> 32).to(tl.int64).to(tl.float64) + 0.5) * (1.0 / 4294967296.0)


@triton.jit
def _asks(temperature, top_p, top_k, vocabulary):  # type: ignore[no-untyped-def]
    """Whether a row has a filter whose edge must be looked for. (That of min-p is a score.)"""
    return (temperature > 0) & ((top_p < 1) | ((top_k > 0) & (top_k < vocabulary)))


@triton.jit
def block_maxima(  # type: ignore[no-untyped-def]
    logits, stride, maxima, vocabulary, blocks, LARGEST: tl.constexpr, TILE: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1) * TILE + tl.arange(0, TILE)
    token = block[:, None] * _BLOCK + tl.arange(0, _BLOCK)[None, :]
    x = _load_logits(logits + row * stride, token, vocabulary, LARGEST)
    tl.store(maxima + row * blocks + block, tl.max(x, axis=1), mask=block < blocks)


@triton.jit(do_not_specialize=["temperatures", "top_ps", "top_ks"])
def best_tokens(  # type: ignore[no-untyped-def]
    logits, stride, maxima, temperatures, top_ps, top_ks, tokens, bests, cuts, counts, totals, vocabulary, blocks,
    top_p_place, room, LARGEST: tl.constexpr, BLOCKS: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    block = tl.arange(0, BLOCKS)
    most = tl.load(maxima + row * blocks + block, mask=block < blocks, other=float("-inf"))
    best = tl.max(most, axis=0)
    first = tl.min(tl.where(most == best, block, BLOCKS), axis=0)
    token = first * _BLOCK + tl.arange(0, _BLOCK)
    x = _load_logits(logits + row * stride, token, vocabulary, LARGEST)
    tl.store(tokens + row, tl.min(tl.where(x == best, token, first * _BLOCK + _BLOCK), axis=0).to(tl.int64))
    best = tl.maximum(best, -LARGEST)
    tl.store(bests + row, best)
    tl.store(counts + row, 0)
    tl.store(totals + row, tl.cast(0, tl.int64))
    temperature = tl.load(temperatures + row).to(tl.float32)
    top_k = tl.load(top_ks + row)
    if _asks(temperature, tl.load(top_ps + row), top_k, vocabulary):
        cut = tl.cast(0x7FFFFFFF, tl.int32)
        if vocabulary > room:
            limited = (top_k > 0) & (top_k < vocabulary)
            place = tl.where(limited, top_k, tl.cast(top_p_place, tl.int64))
            depth = _depth(most, best, temperature)
            cut = tl.cast(0, tl.int32)
            for bit in range(31):
                step = 1 << (30 - bit)
                enough = tl.sum((depth <= cut + (step - 1)).to(tl.int32), axis=0) >= place
                cut = tl.where(enough, cut, cut + step)
            cut = tl.where(place > blocks, -1, cut)
        tl.store(cuts + row, cut)


@triton.jit(do_not_specialize=["temperatures", "top_ps", "top_ks"])
def gather(  # type: ignore[no-untyped-def]
    logits, stride, maxima, temperatures, top_ps, top_ks, bests, cuts, counts, totals, candidates, vocabulary, blocks,
    room, LARGEST: tl.constexpr, TILE: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    temperature = tl.load(temperatures + row).to(tl.float32)
    top_k = tl.load(top_ks + row)
    if not _asks(temperature, tl.load(top_ps + row), top_k, vocabulary):
        return
    limited = (top_k > 0) & (top_k < vocabulary)
    best = tl.load(bests + row)
    cut = tl.load(cuts + row)
    block = tl.program_id(1) * TILE + tl.arange(0, TILE)
    most = tl.load(maxima + row * blocks + block, mask=block < blocks, other=float("-inf"))
    least = tl.min(_depth(most, best, temperature), axis=0)
    weighty = (least < _NO_WEIGHT) & (limited == 0)
    if (least <= cut) | weighty:
        token = tl.program_id(1) * TILE * _BLOCK + tl.arange(0, TILE * _BLOCK)
        depth = _depth(_load_logits(logits + row * stride, token, vocabulary, LARGEST), best, temperature)
        if weighty:
            tl.atomic_add(totals + row, tl.sum(_weight(depth), axis=0), sem="relaxed")
        here = ((depth <= cut) & (token < vocabulary)).to(tl.int32)
        number = tl.sum(here, axis=0)
        if number > 0:
            place = tl.atomic_add(counts + row, number, sem="relaxed") + tl.cumsum(here, axis=0) - here
            tl.store(candidates + row * room + place, _rank(depth, token), mask=(here > 0) & (place < room))


@triton.jit
def _edge_among(rank, units, target):  # type: ignore[no-untyped-def]
    """The smallest number up to which ranks have units that add up to the target; all bits set if there is none."""
    edge = tl.cast(0, tl.int64)
    for bit in range(_RANK_BITS):
        step = tl.cast(1, tl.int64) << (_RANK_BITS - 1 - bit)
        enough = tl.sum(tl.where(rank <= edge + (step - 1), units, 0), axis=0) >= target
        edge = tl.where(enough, edge, edge + step)
    return edge


@triton.jit
def _mass_within(  # type: ignore[no-untyped-def]
    row_logits, best, temperature, vocabulary, edge, LARGEST: tl.constexpr, TILE: tl.constexpr
):
    """The mass of a row's tokens with ranks up to the edge."""
    mass = tl.zeros([TILE], tl.int64)
    for first in range(0, vocabulary, TILE):
        token = first + tl.arange(0, TILE)
        depth = _depth(_load_logits(row_logits, token, vocabulary, LARGEST), best, temperature)
        mass += tl.where(_rank(depth, token) <= edge, _weight(depth), 0)
    return tl.sum(mass, axis=0)


@triton.jit
def _units_within(  # type: ignore[no-untyped-def]
    row_logits, best, temperature, vocabulary, low, one, two, three, MASS: tl.constexpr, LARGEST: tl.constexpr,
    TILE: tl.constexpr
):  # fmt: skip
    """Of a row's tokens deeper than ``low``: how many, or how much mass, lie down to each of three rising depths."""
    to_one = tl.zeros([TILE], tl.int64)
    to_two = tl.zeros([TILE], tl.int64)
    to_three = tl.zeros([TILE], tl.int64)
    for first in range(0, vocabulary, TILE):
        token = first + tl.arange(0, TILE)
        depth = _depth(_load_logits(row_logits, token, vocabulary, LARGEST), best, temperature)
        inside = (depth > low) & (depth <= three) & (token < vocabulary)
        if tl.max(inside.to(tl.int32), axis=0) == 1:  # most passes look at a narrow range
            units = tl.where(inside, _weight(depth) if MASS else 1, 0).to(tl.int64)
            to_one += tl.where(depth <= one, units, 0)
            to_two += tl.where(depth <= two, units, 0)
            to_three += units
    return tl.sum(to_one, axis=0), tl.sum(to_two, axis=0), tl.sum(to_three, axis=0)


@triton.jit
def _edge_in_row(  # type: ignore[no-untyped-def]
    row_logits, best, temperature, vocabulary, target, MASS: tl.constexpr, LARGEST: tl.constexpr, TILE: tl.constexpr
):
    """As _edge_among, of all tokens of a row: its depth in passes that leave a quarter each, then among equals."""
    low = tl.cast(-1, tl.int32)
    high = tl.cast(_IMPOSSIBLE, tl.int32)
    wanted = target
    while high - low > 1:  # the target is reached in (low, high]
        quarter = (high - low) // 4
        one = low + quarter
        two = low + (high - low) // 2
        three = high - tl.maximum(quarter, 1)
        to_one, to_two, to_three = _units_within(
            row_logits, best, temperature, vocabulary, low, one, two, three, MASS, LARGEST, TILE
        )  # fmt: skip
        in_one = to_one >= wanted
        in_two = to_two >= wanted
        in_three = to_three >= wanted
        low = tl.where(in_one, low, tl.where(in_two, one, tl.where(in_three, two, three)))
        high = tl.where(in_one, one, tl.where(in_two, two, tl.where(in_three, three, high)))
        wanted -= tl.where(in_one, 0, tl.where(in_two, to_one, tl.where(in_three, to_two, to_three)))
    if MASS:
        each = tl.maximum(_weight(high), 1)
        wanted = (wanted + each - 1) // each
    last = tl.cast(0, tl.int32)
    for first in range(0, vocabulary, TILE):
        token = first + tl.arange(0, TILE)
        depth = _depth(_load_logits(row_logits, token, vocabulary, LARGEST), best, temperature)
        equal = ((depth == high) & (token < vocabulary)).to(tl.int32)
        place = tl.cumsum(equal, axis=0)
        last = tl.maximum(last, tl.max(tl.where((equal == 1) & (place == wanted), token, 0), axis=0))
        wanted -= tl.sum(equal, axis=0)
    return _rank(high, last)


@triton.jit
def _mass_wanted(top_p, total):  # type: ignore[no-untyped-def]
    """Mass is below the product if, and only if, it is below this; the best token passes in any case."""
    return tl.maximum(tl.ceil(top_p * total.to(tl.float64)).to(tl.int64), 1)


@triton.jit(do_not_specialize=["temperatures", "top_ps", "lows", "top_ks"])
def find_edges(  # type: ignore[no-untyped-def]
    logits, stride, temperatures, top_ps, lows, top_ks, bests, counts, totals, candidates, edges, vocabulary,
    LARGEST: tl.constexpr, ROOM: tl.constexpr, TILE: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    temperature = tl.load(temperatures + row).to(tl.float32)
    low = tl.load(lows + row).to(tl.float32).to(tl.int32, bitcast=True) & 0x7FFFFFFF
    edge = _rank(low, _ANY_ID)  # min-p's
    top_p = tl.load(top_ps + row)
    top_k = tl.load(top_ks + row)
    if _asks(temperature, top_p, top_k, vocabulary):
        limited = (top_k > 0) & (top_k < vocabulary)
        total = tl.load(totals + row)
        count = tl.load(counts + row)
        there = tl.arange(0, ROOM) < count
        rank = tl.load(candidates + row * ROOM + tl.arange(0, ROOM), mask=there, other=0)
        one = there.to(tl.int64)
        weight = tl.where(there, _weight((rank >> _ID_BITS).to(tl.int32)), 0)
        enough = tl.where(limited, count >= top_k, tl.sum(weight, axis=0) >= _mass_wanted(top_p, total))
        if enough & (count <= ROOM):
            if limited:
                last = _edge_among(rank, one, top_k)
                total = tl.sum(tl.where(rank <= last, weight, 0), axis=0)
                edge = tl.minimum(edge, last)
            if top_p < 1:
                edge = tl.minimum(edge, _edge_among(rank, weight, _mass_wanted(top_p, total)))
        else:
            best = tl.load(bests + row)
            whole = logits + row * stride
            if limited:
                last = _edge_in_row(whole, best, temperature, vocabulary, top_k, False, LARGEST, TILE)
                if top_p < 1:
                    total = _mass_within(whole, best, temperature, vocabulary, last, LARGEST, TILE)
                edge = tl.minimum(edge, last)
            if top_p < 1:
                wanted = _mass_wanted(top_p, total)
                last = _edge_in_row(whole, best, temperature, vocabulary, wanted, True, LARGEST, TILE)
                edge = tl.minimum(edge, last)
    tl.store(edges + row, edge)


@triton.jit(do_not_specialize=["temperatures", "keys"])
def draw(  # type: ignore[no-untyped-def]
    logits, stride, maxima, temperatures, keys, bests, edges, values, ids, vocabulary, blocks, parts,
    LARGEST: tl.constexpr, TILE: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    temperature = tl.load(temperatures + row).to(tl.float32)
    if temperature == 0:
        return
    edge = tl.load(edges + row)
    best = tl.load(bests + row)
    key = tl.load(keys + row).to(tl.uint64, bitcast=True)
    block = tl.program_id(1) * TILE + tl.arange(0, TILE)
    most = tl.load(maxima + row * blocks + block, mask=block < blocks, other=float("-inf"))
    least = _depth(most, best, temperature)
    largest = -tl.log(-tl.log(_uniform(_output(key, 2 * block + 1)))) + _LOG_BLOCK
    possible = (least < _IMPOSSIBLE) & (_rank(least, block * _BLOCK) <= edge)
    bound = tl.where(possible, _score(least).to(tl.float64) + largest, float("-inf"))
    highest = tl.max(bound, axis=0)
    winner = tl.cast(float("-inf"), tl.float64)
    winner_id = tl.cast(0, tl.int32)
    while (highest >= winner) & (highest > float("-inf")):
        here = tl.min(tl.where(bound == highest, block, (tl.program_id(1) + 1) * TILE), axis=0)
        token = here * _BLOCK + tl.arange(0, _BLOCK)
        depth = _depth(_load_logits(logits + row * stride, token, vocabulary, LARGEST), best, temperature)
        at_most = tl.max(tl.where(block == here, largest, float("-inf")), axis=0)
        place = (_output(key, 2 * here + 2) >> 58).to(tl.int32)
        exponential = -tl.log(_uniform(_output(key ^ _TOKENS, token + 1)))
        noise = tl.where(token == here * _BLOCK + place, at_most, -tl.log(tl.exp(-at_most) + exponential))
        passes = (depth < _IMPOSSIBLE) & (_rank(depth, token) <= edge)
        noisy = tl.where(passes, _score(depth).to(tl.float64) + noise, float("-inf"))
        value = tl.max(noisy, axis=0)
        token_id = tl.min(tl.where(noisy == value, token, here * _BLOCK + _BLOCK), axis=0)
        better = (value > winner) | ((value == winner) & (token_id < winner_id))
        winner_id = tl.where(better, token_id, winner_id)
        winner = tl.where(better, value, winner)
        bound = tl.where(block == here, float("-inf"), bound)
        highest = tl.max(bound, axis=0)
    tl.store(values + row * parts + tl.program_id(1), winner)
    tl.store(ids + row * parts + tl.program_id(1), winner_id)


@triton.jit(do_not_specialize=["temperatures"])
def pick(temperatures, values, ids, tokens, parts, PARTS: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    if tl.load(temperatures + row).to(tl.float32) == 0:
        return
    part = tl.arange(0, PARTS)
    value = tl.load(values + row * parts + part, mask=part < parts, other=float("-inf"))
    token = tl.load(ids + row * parts + part, mask=part < parts, other=0)
    best = tl.max(value, axis=0)
    winner = tl.min(tl.where(value == best, token, 0x7FFFFFFF), axis=0)
    tl.store(tokens + row, tl.where(best > float("-inf"), winner, 0).to(tl.int64))
