"""The generations of flash-attn: what each can be asked for on which card, and how it is called.

From their sources: ``flash_attn/flash_attn_interface.py`` and ``csrc/flash_attn/flash_api.cpp`` (2.8),
``hopper/flash_attn_interface.py`` and ``hopper/flash_api.cpp`` (3), ``flash_attn/cute/interface.py`` (4.0.0b36).
All align a causal mask to the bottom right: the last query sees the last key.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from kernels.contract import Geometry, LayerAttention, LayerCache
from kernels.flash.parts import Use

Compute = tuple[int, int]
"""A card's compute capability: (8, 0) is an A100, (9, 0) a Hopper, (10, 0) and (12, 0) are Blackwells."""

HALF = (torch.float16, torch.bfloat16)


@dataclass(frozen=True, slots=True, eq=False)
class Fresh:
    """Sequences whose whole context is in this step."""

    starts: torch.Tensor  # int32 [S + 1]: of queries and keys alike
    longest: int  # no sequence has more tokens
    slots: torch.Tensor  # int64 [tokens]: where the pages have them


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """Single queries, each over pages."""

    tables: torch.Tensor  # int32 [rows, P]
    keys: torch.Tensor  # int32 [rows]: how many each sees


@dataclass(frozen=True, slots=True, eq=False)
class Chunks:
    """Sequences of several queries, which are the last of their tokens, over pages."""

    tables: torch.Tensor  # int32 [S, P]
    keys: torch.Tensor  # int32 [S]: how many each has, those of its queries among them
    key_starts: torch.Tensor  # int32 [S + 1]: the same, summed up
    starts: torch.Tensor  # int32 [S + 1]: of queries
    max_query: int  # no sequence has more queries
    max_keys: int  # nor more keys


class Library(ABC):
    """An installed flash-attn on a card. Nothing is imported before the first call."""

    module: str
    distributions: tuple[str, ...]
    evidence = ""
    """A top-level module of this generation alone, which may have been installed under another name."""

    def __init__(self, version: str, compute: Compute, functions: Any = None) -> None:
        """``functions``: in place of the module."""
        self.name = f"flash-attn {version}"
        self.compute = compute
        self._functions = functions

    @property
    def functions(self) -> Any:
        """Raises ImportError, or whatever a broken library raises when it is imported."""
        if self._functions is None:
            self._functions = importlib.import_module(self.module)
        return self._functions

    def refusal(self, use: Use, geometry: Geometry, dtype: torch.dtype, storage: torch.dtype) -> str:
        """Why it can't serve a use; empty if it can. ``storage`` is the type of what pages hold."""
        if reason := self.card_refusal():
            return reason
        if dtype not in HALF:
            return f"it computes in float16 and bfloat16, not in {_name(dtype)}"
        if geometry.head_dim % 8 or not self.has_head(geometry.head_dim):
            return f"it has no heads of {geometry.head_dim} dimensions"
        if use is Use.FRESH:
            return ""
        if storage != dtype:
            return f"it reads no pages in {_name(storage)} with a scale for each token"
        return self.paging_refusal(geometry.block_size)

    @abstractmethod
    def card_refusal(self) -> str: ...

    def has_head(self, head_dim: int) -> bool:
        return head_dim <= 256

    @abstractmethod
    def paging_refusal(self, block_size: int) -> str: ...

    def layer_refusal(self, layer: LayerAttention) -> str:
        """Why it can't serve such a layer; empty if it can."""
        return "it knows no attention sinks" if layer.sinks is not None else ""

    @abstractmethod
    def fresh(
        self, asked: Fresh, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, layer: LayerAttention
    ) -> torch.Tensor:
        """``[tokens, heads, head_dim]``, all of them."""

    @abstractmethod
    def rows(self, asked: Rows, cache: LayerCache, query: torch.Tensor, layer: LayerAttention) -> torch.Tensor: ...

    @abstractmethod
    def chunks(self, asked: Chunks, cache: LayerCache, query: torch.Tensor, layer: LayerAttention) -> torch.Tensor: ...


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _output(returned: Any) -> torch.Tensor:
    """Some return the log-sum-exp too."""
    output = returned[0] if isinstance(returned, tuple) else returned
    assert isinstance(output, torch.Tensor)
    return output


class _Compiled(Library):
    """What generations 2 and 3 have in common."""

    def fresh(
        self, asked: Fresh, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, layer: LayerAttention
    ) -> torch.Tensor:
        return _output(
            self.functions.flash_attn_varlen_func(
                query, key, value, asked.starts, asked.starts, asked.longest, asked.longest, **self._options(layer)
            )
        )

    def _options(self, layer: LayerAttention) -> dict[str, Any]:
        window = (-1, -1) if layer.window is None else (layer.window - 1, 0)
        softcap = layer.softcap or 0.0  # off
        return {"softmax_scale": layer.scaling, "causal": True, "window_size": window, "softcap": softcap}


class FlashAttn2(_Compiled):
    module = "flash_attn.flash_attn_interface"
    distributions = ("flash-attn",)
    evidence = "flash_attn_2_cuda"

    def card_refusal(self) -> str:
        return "" if self.compute >= (8, 0) else "it needs compute capability 8.0"

    def paging_refusal(self, block_size: int) -> str:
        return f"its pages hold a multiple of 256 tokens, not {block_size}" if block_size % 256 else ""

    def rows(self, asked: Rows, cache: LayerCache, query: torch.Tensor, layer: LayerAttention) -> torch.Tensor:
        output = self.functions.flash_attn_with_kvcache(
            query[:, None], cache.key, cache.value, cache_seqlens=asked.keys, block_table=asked.tables,
            **self._options(layer),
        )  # fmt: skip
        return _output(output).squeeze(1)

    def chunks(self, asked: Chunks, cache: LayerCache, query: torch.Tensor, layer: LayerAttention) -> torch.Tensor:
        return _output(
            self.functions.flash_attn_varlen_func(
                query, cache.key, cache.value, asked.starts, asked.key_starts, asked.max_query, asked.max_keys,
                block_table=asked.tables, **self._options(layer),
            )
        )  # fmt: skip


class FlashAttn3(_Compiled):
    module = "flash_attn_interface"
    distributions = ("flash-attn-3", "flashattn-hopper")
    evidence = "flash_attn_interface"

    def card_refusal(self) -> str:
        return "" if self.compute == (9, 0) else "it is built for compute capability 9.0"

    def paging_refusal(self, block_size: int) -> str:
        return ""

    def rows(self, asked: Rows, cache: LayerCache, query: torch.Tensor, layer: LayerAttention) -> torch.Tensor:
        output = self.functions.flash_attn_with_kvcache(
            query[:, None], cache.key, cache.value, cache_seqlens=asked.keys, page_table=asked.tables,
            **self._options(layer),
        )  # fmt: skip
        return _output(output).squeeze(1)

    def chunks(self, asked: Chunks, cache: LayerCache, query: torch.Tensor, layer: LayerAttention) -> torch.Tensor:
        return _output(
            self.functions.flash_attn_with_kvcache(
                query, cache.key, cache.value, cache_seqlens=asked.keys, page_table=asked.tables,
                cu_seqlens_q=asked.starts, max_seqlen_q=asked.max_query, **self._options(layer),
            )
        )  # fmt: skip


class FlashAttn4(Library):
    """Compiled when first called, for each kind of call. Everything by keyword: betas differ in their order."""

    module = "flash_attn.cute"
    distributions = ("flash-attn-4",)

    def card_refusal(self) -> str:
        return "" if 8 <= self.compute[0] <= 12 else "it needs compute capability 8.0 to 12.x"

    def has_head(self, head_dim: int) -> bool:
        """On 8.x and 12.x it does not check; larger heads need more shared memory than all of those cards have."""
        return head_dim <= 128 or (self.compute[0] in (9, 10, 11) and (head_dim == 256 or self.compute[0] == 9))

    def paging_refusal(self, block_size: int) -> str:
        return "" if self.compute[0] in (9, 10, 11) else "it reads no pages on compute capability 8.x and 12.x"

    def layer_refusal(self, layer: LayerAttention) -> str:
        if layer.sinks is not None and self.compute[0] not in (9, 10, 11):
            return "it knows no attention sinks on compute capability 8.x and 12.x"
        return ""

    def fresh(
        self, asked: Fresh, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, layer: LayerAttention
    ) -> torch.Tensor:
        return self._call(
            query, key, value, layer, cu_seqlens_q=asked.starts, cu_seqlens_k=asked.starts,
            max_seqlen_q=asked.longest, max_seqlen_k=asked.longest,
        )  # fmt: skip

    def rows(self, asked: Rows, cache: LayerCache, query: torch.Tensor, layer: LayerAttention) -> torch.Tensor:
        splits = 0 if self.compute[0] in (10, 11) else 1  # 0: as many as it finds best; Hopper has no split keys
        return self._call(
            query[:, None], cache.key, cache.value, layer, seqused_k=asked.keys, page_table=asked.tables,
            num_splits=splits,
        ).squeeze(1)  # fmt: skip

    def chunks(self, asked: Chunks, cache: LayerCache, query: torch.Tensor, layer: LayerAttention) -> torch.Tensor:
        return self._call(
            query, cache.key, cache.value, layer, cu_seqlens_q=asked.starts, max_seqlen_q=asked.max_query,
            seqused_k=asked.keys, page_table=asked.tables,
        )  # fmt: skip

    def _call(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, layer: LayerAttention, **more: Any
    ) -> torch.Tensor:
        window = (None, None) if layer.window is None else (layer.window - 1, 0)
        return _output(
            self.functions.flash_attn_varlen_func(
                query, key, value, softmax_scale=layer.scaling, causal=True, window_size=window,
                softcap=layer.softcap or 0.0, learnable_sink=layer.sinks, **more,
            )
        )  # fmt: skip


GENERATIONS: dict[int, type[FlashAttn2] | type[FlashAttn3] | type[FlashAttn4]] = {
    2: FlashAttn2,
    3: FlashAttn3,
    4: FlashAttn4,
}


def installed() -> Iterator[tuple[int, str]]:
    """(generation, version) of each that is there; nothing is imported."""
    for number, generation in GENERATIONS.items():
        versions = [version for name in generation.distributions if (version := _version(name))]
        if generation.evidence and importlib.util.find_spec(generation.evidence) is None:
            continue
        if versions or generation.evidence:
            yield number, versions[0] if versions else str(number)


def _version(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return ""
