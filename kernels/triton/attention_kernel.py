"""The attention kernel proper: one for decodes, chunks of prompts and batches of both.

A program takes a *block* of query rows: some query tokens of one sequence times the query heads that share a key/value
head, so that a decode too fills the 16 rows of a matrix instruction. It reads the keys tile by tile through the block
table, with the softmax kept up as it goes (FlashAttention-2, Dao 2023). Where blocks are too few to fill the device,
several programs share one's keys, each its *pieces* of them, and a second kernel merges the pieces (Flash-Decoding, Dao
et al. 2023). Laid out like vLLM's unified kernel (Ringlein et al., "The Anatomy of a Triton Attention Kernel", 2025).

Scores are kept in base 2: ``exp2(x * log2(e))``. Numbers of pages with scales are multiplied as they are stored, and
the scales then go to the scores and the weights: one product for each key instead of one for each number.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _locate(query_start, block, sequences, QUERIES: tl.constexpr, SEARCH: tl.constexpr):  # type: ignore[no-untyped-def]
    """(sequence, which of its query tokens is the block's first).

    Without ``SEARCH`` there is one block for each sequence. With it a sequence's blocks begin at number ``query_start
    // QUERIES + sequence``: enough room for all, without knowing the lengths on the host; what is over has no queries.
    """
    sequence = block
    first = 0
    if SEARCH:
        low = 0
        high = sequences
        while high - low > 1:
            middle = (low + high) // 2
            if tl.load(query_start + middle) // QUERIES + middle <= block:
                low = middle
            else:
                high = middle
        sequence = low
        first = (block - tl.load(query_start + low) // QUERIES - low) * QUERIES
    return sequence, first


@triton.jit
def _pieces(low, high, splits, piece_tiles, FIXED: tl.constexpr):  # type: ignore[no-untyped-def]
    """How tiles ``low .. high`` are cut: (first tile of piece 0, tiles of a piece, pieces).

    ``FIXED``: at multiples of ``piece_tiles``, whatever the batch. Else evenly, into ``splits`` pieces or fewer.
    """
    if FIXED:
        first = low // piece_tiles * piece_tiles
        tiles = piece_tiles
    else:
        first = low
        tiles = tl.maximum(piece_tiles, tl.cdiv(high - low, splits))
    return first, tiles, tl.cdiv(high - first, tiles)


@triton.jit
def _dot(a, b, UPCAST: tl.constexpr):  # type: ignore[no-untyped-def]
    """``a @ b`` in float32. ``UPCAST``, which changes no number, is for the interpreter: it can't multiply bfloat16."""
    if UPCAST:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, input_precision="ieee")


@triton.jit
def _operand(stored, like):  # type: ignore[no-untyped-def]
    """Stored numbers in the type that they are multiplied in, which has room for each fp8 and int8 number."""
    if stored.dtype == tl.int8:
        stored = stored.to(tl.float32)
    return stored.to(like)


@triton.jit
def _attend(  # type: ignore[no-untyped-def]
    q, seen, first_key, end_key, low, high, table, keys, values, key_scales, value_scales, kv_head, scale, softcap,
    window, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, PAGE: tl.constexpr, WIDTH: tl.constexpr,
    ROWS: tl.constexpr, TILE: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Rows ``q`` against tiles ``low .. high`` of keys: (weighted values, highest score, sum of the weights).

    Values are not divided by the sum. A row that sees no key there has zeros, ``-inf`` and 0. A tile that a row does
    not see changes no bit of it. No key outside ``first_key .. end_key`` is read.
    """
    dim = tl.arange(0, WIDTH)
    place = tl.arange(0, TILE)
    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, WIDTH], tl.float32)
    # In float16 a weight times a small scale would lose its last bits: for so long it is larger, by a power of two.
    LARGER: tl.constexpr = 64.0 if q.dtype == tl.float16 else 1.0
    # The page of a tile is read one tile ahead, so that its keys can be asked for without waiting.
    key = low * TILE + place
    page = tl.load(table + key // PAGE, mask=(key >= first_key) & (key < end_key), other=0)
    for tile in range(low, high):
        key = tile * TILE + place
        live = (key >= first_key) & (key < end_key)
        row = (page.to(tl.int64) * PAGE + key % PAGE) * KV_HEADS + kv_head
        ahead = key + TILE
        page = tl.load(table + ahead // PAGE, mask=(ahead >= first_key) & (ahead < end_key), other=0)
        k = tl.load(
            keys + row[None, :] * HEAD_DIM + dim[:, None], mask=(dim < HEAD_DIM)[:, None] & live[None, :], other=0.0
        )
        v = tl.load(
            values + row[:, None] * HEAD_DIM + dim[None, :], mask=live[:, None] & (dim < HEAD_DIM)[None, :], other=0.0
        )
        scores = _dot(q, _operand(k, q.dtype), UPCAST)
        if key_scales is not None:
            scores *= (tl.load(key_scales + row, mask=live, other=0.0) * scale)[None, :]
        else:
            scores *= scale
        if softcap is not None:  # cap * tanh(x / cap); the scores are 2 log2(e) x / cap, the cap is in base 2
            scores = softcap * (1 - 2 / (1 + tl.exp2(tl.minimum(scores, 120.0))))
        visible = key[None, :] < seen[:, None]
        if window is not None:
            visible = visible & (key[None, :] >= seen[:, None] - window)
        scores = tl.where(visible, scores, float("-inf"))
        highest = tl.maximum(top, tl.max(scores, axis=1))
        base = tl.where(highest == float("-inf"), 0.0, highest)
        weights = tl.exp2(scores - base[:, None])
        shrink = tl.exp2(top - base)
        total = total * shrink + tl.sum(weights, axis=1)
        top = highest
        if value_scales is not None:
            weights *= (tl.load(value_scales + row, mask=live, other=0.0) * LARGER)[None, :]
        acc = acc * shrink[:, None] + _dot(weights.to(q.dtype), _operand(v, q.dtype), UPCAST)
    if value_scales is not None:
        acc *= 1 / LARGER
    return acc, top, total


@triton.jit
def _merge(acc, top, total, more, more_top, more_total):  # type: ignore[no-untyped-def]
    """Two pieces of keys as one. Explicit fused multiply-adds: the same bits in whichever kernel it is compiled.

    With a piece that has seen nothing, the other comes out unchanged.
    """
    highest = tl.maximum(top, more_top)
    base = tl.where(highest == float("-inf"), 0.0, highest)
    a = tl.exp2(top - base)
    b = tl.exp2(more_top - base)
    return (
        tl.fma(acc, tl.broadcast_to(a[:, None], acc.shape), more * b[:, None]),
        highest,
        tl.fma(total, a, more_total * b),
    )


@triton.jit
def _store(  # type: ignore[no-untyped-def]
    out, acc, top, total, sinks, token, head, inside, HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr
):
    """Divide by the sum of the weights, the sink's among them, and write."""
    if sinks is not None:
        sink = tl.load(sinks + head, mask=inside, other=0.0).to(tl.float32) * 1.4426950408889634
        highest = tl.maximum(top, sink)
        shrink = tl.exp2(top - highest)
        share = shrink / tl.fma(total, shrink, tl.exp2(sink - highest))
    else:
        share = 1.0 / tl.where(total == 0.0, 1.0, total)  # 0: no row of the batch
    dim = tl.arange(0, WIDTH)
    place = (token.to(tl.int64) * HEADS + head)[:, None] * HEAD_DIM + dim[None, :]
    mask = inside[:, None] & (dim < HEAD_DIM)[None, :]
    tl.store(out + place, (acc * share[:, None]).to(out.dtype.element_ty), mask=mask)


# Of a part of a batch they are slices, aligned as it comes: not a kernel for each case.
_SLICES = ["query_start", "visible", "tables"]
_BOUNDS = ["sequences", "window", "fewest", "most", "splits", "piece_tiles", "slots"]


@triton.jit(do_not_specialize=[*_SLICES, *_BOUNDS, "table_stride"])
def paged_attention(  # type: ignore[no-untyped-def]
    out, partials, sums, query, keys, values, key_scales, value_scales, sinks, query_start, visible, tables,
    sequences, table_stride, token_stride, head_stride, scale, softcap, window, fewest, most, splits, piece_tiles,
    slots, HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, PAGE: tl.constexpr,
    WIDTH: tl.constexpr, ROWS: tl.constexpr, QUERIES: tl.constexpr, TILE: tl.constexpr, SEARCH: tl.constexpr,
    FIXED: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Grid: (blocks * KV_HEADS, splits). Does the sequences that have ``fewest .. most`` query tokens.

    ``partials`` None: a program does all pieces of its block and writes ``out``. Else pieces ``split``, ``split +
    splits``, ... of at most ``slots``, and writes what :func:`merge_pieces` needs: ``partials`` ``[blocks * KV_HEADS,
    slots, QUERIES * group, WIDTH]`` and ``sums`` ``[..., 2]``, float32.
    """
    GROUP: tl.constexpr = HEADS // KV_HEADS
    program = tl.program_id(0)
    kv_head = program % KV_HEADS  # neighbours read neighbouring memory
    block = program // KV_HEADS
    if SEARCH:  # the last blocks of long sequences have the most keys: they begin first
        block = tl.num_programs(0) // KV_HEADS - 1 - block
    sequence, first = _locate(query_start, block, sequences, QUERIES, SEARCH)
    start = tl.load(query_start + sequence)
    count = tl.load(query_start + sequence + 1) - start
    if (count < fewest) | (count > most) | (first >= count):
        return
    row = tl.arange(0, ROWS)
    local = first + row // GROUP
    token = start + local
    head = kv_head * GROUP + row % GROUP
    inside = (row < QUERIES * GROUP) & (local < count)
    seen = tl.load(visible + token, mask=inside, other=0)
    end_key = tl.load(visible + start + tl.minimum(first + QUERIES, count) - 1)
    first_key = 0
    if window is not None:
        first_key = tl.maximum(tl.load(visible + start + first) - window, 0)
    low = first_key // TILE
    high = tl.cdiv(end_key, TILE)
    begin, tiles, pieces = _pieces(low, high, splits, piece_tiles, FIXED)
    split = tl.program_id(1)
    if split >= pieces:
        return
    dim = tl.arange(0, WIDTH)
    q = tl.load(
        query + token[:, None].to(tl.int64) * token_stride + head[:, None] * head_stride + dim[None, :],
        mask=inside[:, None] & (dim < HEAD_DIM)[None, :],
        other=0.0,
    )
    table = tables + sequence.to(tl.int64) * table_stride
    if partials is not None:
        base = (block * KV_HEADS + kv_head).to(tl.int64) * slots
        for piece in range(split, pieces, splits):
            acc, top, total = _attend(
                q, seen, first_key, end_key, tl.maximum(low, begin + piece * tiles),
                tl.minimum(high, begin + (piece + 1) * tiles), table, keys, values, key_scales, value_scales, kv_head,
                scale, softcap, window, KV_HEADS, HEAD_DIM, PAGE, WIDTH, ROWS, TILE, UPCAST,
            )  # fmt: skip
            to = (base + piece) * (QUERIES * GROUP) + row
            tl.store(partials + to[:, None] * WIDTH + dim[None, :], acc, mask=inside[:, None])
            tl.store(sums + to * 2, top, mask=inside)
            tl.store(sums + to * 2 + 1, total, mask=inside)
    elif FIXED:
        acc = tl.zeros([ROWS, WIDTH], tl.float32)
        top = tl.full([ROWS], float("-inf"), tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        for piece in range(pieces):
            more, more_top, more_total = _attend(
                q, seen, first_key, end_key, tl.maximum(low, begin + piece * tiles),
                tl.minimum(high, begin + (piece + 1) * tiles), table, keys, values, key_scales, value_scales, kv_head,
                scale, softcap, window, KV_HEADS, HEAD_DIM, PAGE, WIDTH, ROWS, TILE, UPCAST,
            )  # fmt: skip
            acc, top, total = _merge(acc, top, total, more, more_top, more_total)
        _store(out, acc, top, total, sinks, token, head, inside, HEADS, HEAD_DIM, WIDTH)
    else:
        acc, top, total = _attend(
            q, seen, first_key, end_key, low, high, table, keys, values, key_scales, value_scales, kv_head,
            scale, softcap, window, KV_HEADS, HEAD_DIM, PAGE, WIDTH, ROWS, TILE, UPCAST,
        )  # fmt: skip
        _store(out, acc, top, total, sinks, token, head, inside, HEADS, HEAD_DIM, WIDTH)


@triton.jit(do_not_specialize=[*_SLICES, *_BOUNDS])
def merge_pieces(  # type: ignore[no-untyped-def]
    out, partials, sums, sinks, query_start, visible, sequences, window, fewest, most, splits, piece_tiles, slots,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr,
    QUERIES: tl.constexpr, TILE: tl.constexpr, SEARCH: tl.constexpr, FIXED: tl.constexpr,
):  # fmt: skip
    """Grid: (blocks * KV_HEADS, QUERIES * group / ROWS, rounded up). Rows' pieces, in their order."""
    GROUP: tl.constexpr = HEADS // KV_HEADS
    program = tl.program_id(0)
    first_row = tl.program_id(1) * ROWS
    sequence, first = _locate(query_start, program // KV_HEADS, sequences, QUERIES, SEARCH)
    start = tl.load(query_start + sequence)
    count = tl.load(query_start + sequence + 1) - start
    if (count < fewest) | (count > most) | (first + first_row // GROUP >= count):
        return
    row = first_row + tl.arange(0, ROWS)
    local = first + row // GROUP
    inside = (row < QUERIES * GROUP) & (local < count)
    end_key = tl.load(visible + start + tl.minimum(first + QUERIES, count) - 1)
    first_key = 0
    if window is not None:
        first_key = tl.maximum(tl.load(visible + start + first) - window, 0)
    _, _, pieces = _pieces(first_key // TILE, tl.cdiv(end_key, TILE), splits, piece_tiles, FIXED)
    dim = tl.arange(0, WIDTH)
    acc = tl.zeros([ROWS, WIDTH], tl.float32)
    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    base = program.to(tl.int64) * slots
    for piece in tl.range(0, pieces, loop_unroll_factor=4):
        at = (base + piece) * (QUERIES * GROUP) + row
        more = tl.load(partials + at[:, None] * WIDTH + dim[None, :], mask=inside[:, None], other=0.0)
        more_top = tl.load(sums + at * 2, mask=inside, other=float("-inf"))
        more_total = tl.load(sums + at * 2 + 1, mask=inside, other=0.0)
        acc, top, total = _merge(acc, top, total, more, more_top, more_total)
    head = (program % KV_HEADS) * GROUP + row % GROUP
    _store(out, acc, top, total, sinks, start + local, head, inside, HEADS, HEAD_DIM, WIDTH)
