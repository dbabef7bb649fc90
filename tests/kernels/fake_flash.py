"""flash-attn without a GPU: the functions of each generation with the very signatures of its source, the checks that it
makes, and plain attention in float32 behind them. What a library would believe and read out of bounds, these look at.

Outputs that a library leaves unwritten are NaN here. Each call is noted. That tensors are on a GPU is not asked.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

import torch

HALF = (torch.float16, torch.bfloat16)


def check(true: bool, message: str) -> None:
    """TORCH_CHECK."""
    if not true:
        raise RuntimeError(message)


def attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scale: float,
    causal: bool,
    window: tuple[int, int],
    softcap: float,
    sink: torch.Tensor | None = None,
) -> torch.Tensor:
    """One sequence, ``[n, heads, dim]`` over ``[m, kv heads, dim]``, aligned to the bottom right."""
    group = query.shape[1] // key.shape[1]
    q, k, v = query.float(), key.float().repeat_interleave(group, 1), value.float().repeat_interleave(group, 1)
    scores = torch.einsum("qhd,khd->hqk", q, k) * scale
    if softcap > 0:
        scores = softcap * torch.tanh(scores / softcap)
    left, right = window
    if causal:
        right = 0
    n, m = len(query), len(key)
    at = torch.arange(n)[:, None] + m - n
    other = torch.arange(m)[None, :]
    hidden = torch.zeros((n, m), dtype=torch.bool)
    if right >= 0:
        hidden |= other > at + right
    if left >= 0:
        hidden |= other < at - left
    scores = scores.masked_fill(hidden, float("-inf"))
    if sink is not None:
        scores = torch.cat([scores, sink.float()[:, None, None].expand(-1, n, 1)], -1)
    weights = torch.nan_to_num(scores.softmax(-1))[..., :m]
    return torch.einsum("hqk,khd->qhd", weights, v).to(query.dtype)


Part = tuple[slice | int, torch.Tensor, torch.Tensor]
"""One sequence's rows of the queries, and its keys and values."""


class Fake:
    """What the generations share: notes of calls, and checks of arguments."""

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()
        self.tokens: Counter[str] = Counter()  # queries

    def note(self, name: str, tokens: int) -> None:
        self.calls[name] += 1
        self.tokens[name] += tokens

    def heads(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        check(q.dtype in HALF, "FlashAttention only support fp16 and bf16 data type")
        check(k.dtype == q.dtype, "query and key must have the same dtype")
        check(v.dtype == q.dtype, "query and value must have the same dtype")
        for tensor in (q, k, v):
            check(tensor.stride(-1) == 1, "Input tensor must have contiguous last dimension")
        check(q.shape[-1] <= 256, "FlashAttention forward only supports head dimension at most 256")
        check(q.shape[-1] % 8 == 0, "head_size should be a multiple of 8")
        check(q.shape[-2] % k.shape[-2] == 0, "Number of heads in key/value must divide number of heads in query")
        check(k.shape == v.shape and k.shape[-1] == q.shape[-1], "k and v must have the head size of q")

    def lengths(self, name: str, starts: torch.Tensor, total: int | None, longest: int | None) -> list[int]:
        """Of the sequences between ``starts``; which a kernel would believe without looking."""
        check(starts.dtype == torch.int32, f"{name} must have dtype int32")
        check(starts.dim() == 1 and starts.is_contiguous(), f"{name} must be contiguous")
        check(len(starts) > 1, "batch size must be positive")
        edges = starts.tolist()
        assert edges[0] == 0, f"{name} does not begin at 0"
        assert edges == sorted(edges), f"{name} falls"
        if total is not None:
            assert edges[-1] <= total, f"{name} ends at {edges[-1]} of {total}"
        sizes = [b - a for a, b in itertools.pairwise(edges)]
        if longest is not None:
            assert isinstance(longest, int)
            assert max(sizes) == longest, f"the longest of {name} is {max(sizes)}, not {longest}"
        return sizes

    def int32s(self, name: str, tensor: torch.Tensor, size: int) -> list[int]:
        check(tensor.dtype == torch.int32, f"{name} must have dtype int32")
        check(tensor.shape == (size,) and tensor.is_contiguous(), f"{name} must be contiguous, of shape ({size},)")
        numbers: list[int] = tensor.tolist()
        return numbers

    def paged(self, pages: torch.Tensor, table: torch.Tensor, keys: int) -> torch.Tensor:
        """The first ``keys`` tokens of a sequence, ``[keys, kv heads, dim]``."""
        size = pages.shape[1]
        used = -(-keys // size)
        assert keys >= 1, "a sequence without keys"
        assert used <= len(table), f"{keys} keys do not fit a table of {len(table)} pages of {size}"
        numbers = table[:used].long()
        assert bool(((numbers >= 0) & (numbers < len(pages))).all()), "the table names a page that is not there"
        return pages[numbers].flatten(0, 1)[:keys]

    def table(self, table: torch.Tensor, sequences: int) -> None:
        check(table.dtype == torch.int32, "block_table must have dtype torch.int32")
        check(table.dim() == 2 and table.shape[0] == sequences, "block_table must have shape (batch_size, P)")
        check(table.stride(-1) == 1, "block_table must have contiguous last dimension")

    def side_by_side(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens_q: torch.Tensor,
        cu_seqlens_k: torch.Tensor, max_seqlen_q: int, max_seqlen_k: int, paged: bool = False,
    ) -> tuple[list[slice], list[slice]]:  # fmt: skip
        """What both varlen functions ask; where each sequence's queries lie, and its keys (unless ``paged``)."""
        self.heads(q, k, v)
        check(q.dim() == 3, "q must be (total_q, nheads, headdim)")
        queries = self.lengths("cu_seqlens_q", cu_seqlens_q, len(q), max_seqlen_q)
        keys = self.lengths("cu_seqlens_k", cu_seqlens_k, None if paged else len(k), max_seqlen_k)
        check(len(queries) == len(keys), "cu_seqlens_k must have shape (batch_size + 1)")
        return slices(cu_seqlens_q, queries), slices(cu_seqlens_k, keys)

    def rows_over_pages(
        self, rows: Iterable[slice | int], k: torch.Tensor, v: torch.Tensor, tables: torch.Tensor, keys: list[int]
    ) -> Iterator[Part]:
        """Each sequence's rows with its keys and values, out of its pages."""
        for where, table, count in zip(rows, tables, keys, strict=True):
            yield where, self.paged(k, table, count), self.paged(v, table, count)

    def answer(
        self, q: torch.Tensor, parts: Iterable[Part],
        softmax_scale: float | None, causal: bool, window: tuple[int, int], softcap: float,
        sink: torch.Tensor | None = None,
    ) -> torch.Tensor:  # fmt: skip
        """Of each part's rows of ``q``, over its keys and values; NaN elsewhere."""
        scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
        out = torch.full_like(q, math.nan, memory_format=torch.contiguous_format)
        for where, key, value in parts:
            out[where] = attention(q[where], key, value, scale, causal, window, softcap, sink)
        return out


def slices(starts: torch.Tensor, sizes: list[int]) -> list[slice]:
    return [slice(start, start + size) for start, size in zip(starts.tolist(), sizes, strict=False)]


class FakeFlash2(Fake):
    """``flash_attn.flash_attn_interface`` of 2.8."""

    def flash_attn_varlen_func(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        cu_seqlens_q: torch.Tensor,
        cu_seqlens_k: torch.Tensor,
        max_seqlen_q: int,
        max_seqlen_k: int,
        dropout_p: float = 0.0,
        softmax_scale: float | None = None,
        causal: bool = False,
        window_size: tuple[int, int] = (-1, -1),
        softcap: float = 0.0,
        alibi_slopes: Any = None,
        deterministic: bool = False,
        return_attn_probs: bool = False,
        block_table: torch.Tensor | None = None,
    ) -> Any:
        assert dropout_p == 0.0
        assert alibi_slopes is None
        queries, keys = self.side_by_side(
            q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, paged=block_table is not None
        )
        if max_seqlen_q == 1 and q.shape[1] > k.shape[-2] and tuple(window_size) == (-1, -1):
            check(len(q) == len(queries), "shape is invalid for input of this size")  # queries swapped into heads
        if block_table is not None:
            check(k.shape[1] % 256 == 0, "Paged KV cache block size must be divisible by 256")
            self.table(block_table, len(queries))
        self.note("varlen" if block_table is None else "varlen paged", len(q))
        parts: Iterable[Part]
        if block_table is None:
            parts = ((rows, k[own], v[own]) for rows, own in zip(queries, keys, strict=True))
        else:
            parts = self.rows_over_pages(queries, k, v, block_table, [own.stop - own.start for own in keys])
        out = self.answer(q, parts, softmax_scale, causal, window_size, softcap)
        return (out, None, None) if return_attn_probs else out

    def flash_attn_with_kvcache(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        k: torch.Tensor | None = None,
        v: torch.Tensor | None = None,
        rotary_cos: torch.Tensor | None = None,
        rotary_sin: torch.Tensor | None = None,
        cache_seqlens: int | torch.Tensor | None = None,
        cache_batch_idx: torch.Tensor | None = None,
        cache_leftpad: torch.Tensor | None = None,
        block_table: torch.Tensor | None = None,
        softmax_scale: float | None = None,
        causal: bool = False,
        window_size: tuple[int, int] = (-1, -1),
        softcap: float = 0.0,
        rotary_interleaved: bool = True,
        alibi_slopes: Any = None,
        num_splits: int = 0,
        return_softmax_lse: bool = False,
    ) -> Any:
        assert k is v is rotary_cos is rotary_sin is cache_batch_idx is cache_leftpad is alibi_slopes is None
        assert isinstance(cache_seqlens, torch.Tensor)
        assert block_table is not None
        check(q.dim() == 4, "q must be (batch_size, seqlen, nheads, headdim)")
        self.heads(q, k_cache, v_cache)
        check(k_cache.shape[1] % 256 == 0, "Paged KV cache block size must be divisible by 256")
        self.table(block_table, len(q))
        keys = self.int32s("seqlens_k", cache_seqlens, len(q))
        self.note("kvcache", len(q) * q.shape[1])
        parts = self.rows_over_pages(range(len(q)), k_cache, v_cache, block_table, keys)
        out = self.answer(q, parts, softmax_scale, causal, window_size, softcap)
        return (out, None) if return_softmax_lse else out


class FakeFlash3(Fake):
    """``flash_attn_interface`` of flash-attn 3. ``paging=False``: built without paged KV, as some wheels are."""

    def __init__(self, paging: bool = True) -> None:
        super().__init__()
        self.paging = paging

    def flash_attn_varlen_func(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        cu_seqlens_q: torch.Tensor,
        cu_seqlens_k: torch.Tensor,
        max_seqlen_q: int,
        max_seqlen_k: int,
        seqused_q: torch.Tensor | None = None,
        seqused_k: torch.Tensor | None = None,
        softmax_scale: float | None = None,
        causal: bool = False,
        qv: Any = None,
        q_descale: Any = None,
        k_descale: Any = None,
        v_descale: Any = None,
        window_size: tuple[int, int] = (-1, -1),
        attention_chunk: int = 0,
        softcap: float = 0.0,
        num_splits: int = 1,
        pack_gqa: bool | None = None,
        deterministic: bool = False,
        sm_margin: int = 0,
        return_attn_probs: bool = False,
    ) -> Any:
        assert seqused_q is seqused_k is qv is q_descale is k_descale is v_descale is None
        queries, keys = self.side_by_side(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
        self.note("varlen", len(q))
        parts = ((rows, k[own], v[own]) for rows, own in zip(queries, keys, strict=True))
        out = self.answer(q, parts, softmax_scale, causal, window_size, softcap)
        return (out, None) if return_attn_probs else out

    def flash_attn_with_kvcache(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        k: torch.Tensor | None = None,
        v: torch.Tensor | None = None,
        qv: Any = None,
        rotary_cos: torch.Tensor | None = None,
        rotary_sin: torch.Tensor | None = None,
        cache_seqlens: int | torch.Tensor | None = None,
        cache_batch_idx: torch.Tensor | None = None,
        cache_leftpad: torch.Tensor | None = None,
        page_table: torch.Tensor | None = None,
        cu_seqlens_q: torch.Tensor | None = None,
        cu_seqlens_k_new: torch.Tensor | None = None,
        max_seqlen_q: int | None = None,
        rotary_seqlens: torch.Tensor | None = None,
        q_descale: Any = None,
        k_descale: Any = None,
        v_descale: Any = None,
        softmax_scale: float | None = None,
        causal: bool = False,
        window_size: tuple[int, int] = (-1, -1),
        attention_chunk: int = 0,
        softcap: float = 0.0,
        rotary_interleaved: bool = True,
        scheduler_metadata: Any = None,
        num_splits: int = 0,
        pack_gqa: bool | None = None,
        sm_margin: int = 0,
        return_softmax_lse: bool = False,
    ) -> Any:
        assert k is v is qv is rotary_cos is rotary_sin is cache_batch_idx is cache_leftpad is None
        assert cu_seqlens_k_new is rotary_seqlens is q_descale is k_descale is v_descale is scheduler_metadata is None
        assert isinstance(cache_seqlens, torch.Tensor)
        assert page_table is not None
        check(self.paging, "This flash attention build does not support paged KV.")
        self.heads(q, k_cache, v_cache)
        check(q.dim() == (4 if cu_seqlens_q is None else 3), "q has the wrong shape")
        check(cu_seqlens_q is None or max_seqlen_q is not None, "max_seqlen_q must be provided with cu_seqlens_q")
        sequences = len(q) if cu_seqlens_q is None else len(cu_seqlens_q) - 1
        self.table(page_table, sequences)
        keys = self.int32s("seqused_k", cache_seqlens, sequences)
        rows: Iterable[slice | int] = range(sequences)
        if cu_seqlens_q is not None:
            rows = slices(cu_seqlens_q, self.lengths("cu_seqlens_q", cu_seqlens_q, len(q), max_seqlen_q))
        self.note("kvcache" if cu_seqlens_q is None else "kvcache varlen", q.shape[:-2].numel())
        parts = self.rows_over_pages(rows, k_cache, v_cache, page_table, keys)
        out = self.answer(q, parts, softmax_scale, causal, window_size, softcap)
        return (out, None) if return_softmax_lse else out


class FakeFlash4(Fake):
    """``flash_attn.cute`` of 4.0.0b36, on a card of compute capability ``arch / 10``."""

    def __init__(self, arch: int = 90) -> None:
        super().__init__()
        self.arch = arch

    def flash_attn_varlen_func(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        qv: torch.Tensor | None = None,
        cu_seqlens_q: torch.Tensor | None = None,
        cu_seqlens_k: torch.Tensor | None = None,
        max_seqlen_q: int | None = None,
        max_seqlen_k: int | None = None,
        min_seqlen_k: int | None = None,
        seqused_q: torch.Tensor | None = None,
        seqused_k: torch.Tensor | None = None,
        gather_kv_indices: torch.Tensor | None = None,
        page_table: torch.Tensor | None = None,
        softmax_scale: float | None = None,
        causal: bool = False,
        window_size: tuple[int | None, int | None] = (None, None),
        learnable_sink: torch.Tensor | None = None,
        softcap: float = 0.0,
        num_splits: int = 1,
        pack_gqa: bool | None = None,
        deterministic: bool = False,
        score_mod: Any = None,
        score_mod_bwd: Any = None,
        mask_mod: Any = None,
        block_sparse_tensors: Any = None,
        aux_tensors: list[Any] | None = None,
        aux_scalars: tuple[Any, ...] | None = None,
        return_lse: bool = False,
        scheduler_metadata: Any = None,
        seqlen_k_per_split: int | None = None,
        disable_scheduler_metadata: bool = False,
        gather_bwd_recompute_p: bool = False,
        gather_bwd_token_chunk: int | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        assert qv is seqused_q is gather_kv_indices is score_mod is mask_mod is None
        assert self.arch // 10 in (8, 9, 10, 11, 12), "Unsupported compute capability"
        assert q.dtype in HALF, "inputs must be float16 or bfloat16"
        self.heads(q, k, v)
        batch_size = len(q) if cu_seqlens_q is None else len(cu_seqlens_q) - 1
        assert q.dim() == (4 if cu_seqlens_q is None else 3)
        if self.arch // 10 in (10, 11):
            assert q.shape[-1] <= 128 or q.shape[-1] == 256, "head_dim is not supported on SM100/SM110"
        if page_table is not None:
            assert cu_seqlens_k is None, "page_table is not supported with cu_seqlens_k"
            assert self.arch // 10 in (9, 10, 11), "paged KV not supported"
            self.table(page_table, batch_size)
            assert seqused_k is not None
            keys = self.int32s("seqused_k", seqused_k, batch_size)
        else:
            assert cu_seqlens_k is not None
            keys = self.lengths("cu_seqlens_k", cu_seqlens_k, len(k), max_seqlen_k)
        assert num_splits <= 1 or self.arch // 10 in (10, 11), "SplitKV not supported"
        if learnable_sink is not None:
            assert self.arch // 10 in (9, 10, 11), "Learnable sink is not supported in this kernel"
            assert learnable_sink.shape == (q.shape[-2],)
        window = (-1 if window_size[0] is None else window_size[0], -1 if window_size[1] is None else window_size[1])
        rows: Iterable[slice | int] = range(batch_size)
        if cu_seqlens_q is not None:
            rows = slices(cu_seqlens_q, self.lengths("cu_seqlens_q", cu_seqlens_q, len(q), max_seqlen_q))
        kind = "varlen" if page_table is None else "rows paged" if cu_seqlens_q is None else "varlen paged"
        self.note(kind, q.shape[:-2].numel())
        parts: Iterable[Part]
        if page_table is not None:
            parts = self.rows_over_pages(rows, k, v, page_table, keys)
        else:
            assert cu_seqlens_k is not None
            parts = ((where, k[own], v[own]) for where, own in zip(rows, slices(cu_seqlens_k, keys), strict=True))
        return self.answer(q, parts, softmax_scale, causal, window, softcap, learnable_sink), None
