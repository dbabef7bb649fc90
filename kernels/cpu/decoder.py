"""A Llama-shaped decoder's whole forward pass in one call of the C++ library (``decoder.h``): RMS norms before
attention and before a gated MLP, rotary positions, residual connections.

Owns the packed weights. Knows tensors, not ``transformers``: who recognises a model's shape is :mod:`worker.decoder`.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from kernels.contract import Geometry, LayerAttention, LayerCache, RaggedBatch
from kernels.cpu.attention import DTYPES, contiguous, ragged_struct
from kernels.cpu.library import Layer, Library, Model, Weight

PANEL = 32
"""Columns of a panel of a packed weight."""

ACTIVATIONS = {"silu": 0, "gelu_tanh": 1}

STAGES = ("embed", "norm", "qkv", "rope", "attention", "o_proj", "gate_up", "down", "logits")


class _Piece:
    """Memory of the library's, let go with the last that refers to it."""

    def __init__(self, library: Library, num_bytes: int) -> None:
        self.start = library.c.headrace_alloc(num_bytes)
        if not self.start:
            raise MemoryError(f"no {num_bytes:,} bytes for a weight")
        self.num_bytes = num_bytes
        _at_the_end_of(self, library.c.headrace_free, self.start, num_bytes)


class WeightMemory:
    """Where the packed weights of a model lie, one behind the other in the order of their making.

    The system gives huge pages, of 2 MiB: a page to each matrix would take a small model twice its size.
    """

    PIECE_BYTES = 64 << 20  # taken from the system at once; of what is not written nothing is resident

    def __init__(self, library: Library) -> None:
        self._library = library
        self._piece: _Piece | None = None
        self._used = 0

    def take(self, num_bytes: int) -> tuple[int, object]:
        """The address of ``num_bytes``, zeroed, at a multiple of 64, and what to keep for as long as they are used.
        Raises MemoryError."""
        if self._piece is None or self._used + num_bytes > self._piece.num_bytes:
            self._piece = _Piece(self._library, max(num_bytes, self.PIECE_BYTES))
            self._used = 0
        start = self._piece.start + self._used
        self._used += -(-num_bytes // 64) * 64
        return start, self._piece


class PackedMatrix:
    """A weight ``[n, k]``, with a bias ``[n]`` or none, in the order that the products read.

    ``quantize``: to int8, each of ``n`` with a scale of its own. Without ``memory`` it has memory of its own. Raises
    ValueError for shapes that don't fit, MemoryError.
    """

    def __init__(
        self,
        library: Library,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        quantize: bool = False,
        memory: WeightMemory | None = None,
    ) -> None:
        n, k = weight.shape
        if weight.dtype not in DTYPES or k % 16 or not n * k:
            raise ValueError(f"a weight of {n} x {k} in {weight.dtype} does not fit")
        if bias is not None and bias.shape != (n,):
            raise ValueError(f"a bias of {tuple(bias.shape)} does not fit a weight of {n} x {k}")
        weight = weight.detach()
        if weight.stride(1) != 1:
            weight = weight.contiguous()
        panels = -(-n // PANEL)
        self.num_bytes = panels * PANEL * k * (1 if quantize else weight.element_size())
        start: int
        if memory is None:
            self._kept: object = (own := _Piece(library, self.num_bytes))
            start = own.start
        else:
            start, self._kept = memory.take(self.num_bytes)
        self._scales = torch.zeros(panels * PANEL) if quantize else None
        self._bias = None
        if bias is not None:
            self._bias = torch.zeros(panels * PANEL, dtype=weight.dtype)
            self._bias[:n] = bias.detach()
        scales = None if self._scales is None else self._scales.data_ptr()
        dtype, format_ = DTYPES[weight.dtype], int(quantize)
        library.c.headrace_pack(dtype, weight.data_ptr(), weight.stride(0), n, k, format_, start, scales)
        self.struct = Weight(start, scales, None if self._bias is None else self._bias.data_ptr(), n, k, format_)
        self.dtype = dtype
        self._library = library

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """``[rows, k]`` to ``[rows, n]``, in the weight's own type. Raises ValueError for anything else."""
        if x.dim() != 2 or x.shape[1] != self.struct.k or DTYPES.get(x.dtype) != self.dtype:
            raise ValueError(f"rows {tuple(x.shape)} in {x.dtype} do not fit a weight of {self.struct.k} columns")
        x = x.contiguous()
        out = torch.empty((len(x), self.struct.n), dtype=x.dtype)
        self._library.c.headrace_linear(
            ctypes.byref(self.struct), self.dtype, x.data_ptr(), x.stride(0), len(x), out.data_ptr(), self.struct.n
        )
        return out


def _at_the_end_of(owner: object, function: Callable[..., None], *arguments: object) -> None:
    """Call it when ``owner`` is gone; not when the process ends, since another thread may still compute then."""
    weakref.finalize(owner, function, *arguments).atexit = False


def interleave(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """16 rows of ``gate``, 16 of ``up``, 16 of ``gate``...: a panel holds both halves of what it multiplies."""
    half = PANEL // 2
    rows = gate.shape[0]
    tail = gate.shape[1:]
    return torch.stack([gate.view(rows // half, half, *tail), up.view(rows // half, half, *tail)], dim=1).reshape(
        2 * rows, *tail
    )


@dataclass(frozen=True, slots=True, eq=False)
class DecoderLayer:
    qkv: PackedMatrix  # queries, keys and values: [(heads + 2 kv heads) * head size, hidden]
    out: PackedMatrix
    gate_up: PackedMatrix  # interleaved
    down: PackedMatrix
    attention_norm: torch.Tensor
    mlp_norm: torch.Tensor
    query_norm: torch.Tensor | None
    key_norm: torch.Tensor | None
    rotary: bool


@dataclass(frozen=True, slots=True, eq=False)
class DecoderWeights:
    layers: list[DecoderLayer]
    embedding: torch.Tensor | None  # None: the head's rows
    final_norm: torch.Tensor
    head: PackedMatrix
    hidden: int
    inner: int
    eps: float
    activation: str
    dtype: torch.dtype
    vocab_size: int


class CpuDecoder:
    """Runs forward passes over the pages of ``caches``.

    ``cos`` and ``sin`` are ``[positions, rotated dimensions / 2]``. It keeps the library's number of threads of when it
    was made.
    """

    def __init__(
        self,
        library: Library,
        weights: DecoderWeights,
        geometry: Geometry,
        attention: Sequence[LayerAttention],
        caches: Sequence[LayerCache],
        cos: torch.Tensor,
        sin: torch.Tensor,
    ) -> None:
        if weights.head.struct.n != weights.vocab_size:
            raise ValueError(f"a head of {weights.head.struct.n} rows for {weights.vocab_size} tokens")
        self.weights = weights
        self._library = library
        self._cos, self._sin = cos.to(weights.dtype).contiguous(), sin.to(weights.dtype).contiguous()
        self._caches = list(caches)
        layers = (Layer * len(weights.layers))()
        for struct, layer, how, cache in zip(layers, weights.layers, attention, caches, strict=True):
            struct.qkv, struct.out = layer.qkv.struct, layer.out.struct
            struct.gate_up, struct.down = layer.gate_up.struct, layer.down.struct
            struct.attention_norm, struct.mlp_norm = layer.attention_norm.data_ptr(), layer.mlp_norm.data_ptr()
            struct.query_norm = None if layer.query_norm is None else layer.query_norm.data_ptr()
            struct.key_norm = None if layer.key_norm is None else layer.key_norm.data_ptr()
            struct.key_cache, struct.value_cache = cache.key.data_ptr(), cache.value.data_ptr()
            struct.scaling, struct.window = how.scaling, how.window or 0
            struct.rotary = 2 * cos.shape[1] if layer.rotary else 0
        model = Model()
        model.dtype, model.layers, model.hidden = DTYPES[weights.dtype], len(layers), weights.hidden
        model.heads, model.kv_heads, model.head_dim = geometry.num_heads, geometry.num_kv_heads, geometry.head_dim
        model.inner, model.page = weights.inner, geometry.block_size
        model.activation, model.eps = ACTIVATIONS[weights.activation], weights.eps
        model.embedding_rows = weights.head.struct.n if weights.embedding is None else len(weights.embedding)
        model.embedding = None if weights.embedding is None else weights.embedding.data_ptr()
        model.final_norm, model.head = weights.final_norm.data_ptr(), weights.head.struct
        model.cos, model.sin = self._cos.data_ptr(), self._sin.data_ptr()
        model.rotary_stride, model.positions = self._cos.shape[1], len(self._cos)
        model.layer = layers
        handle = library.c.headrace_decoder_new(ctypes.byref(model))
        self._handle = handle
        _at_the_end_of(self, library.c.headrace_decoder_delete, handle)

    def forward(
        self,
        tokens: npt.NDArray[np.int64],
        positions: npt.NDArray[np.int64],
        batch: RaggedBatch,
        keep: npt.NDArray[np.int64],
    ) -> torch.Tensor:
        """``[T]`` token ids and positions to the logits ``[len(keep), vocab_size]`` of the rows in ``keep``.

        ``keep`` may name rows in any order, and more than once. An id or a position that there is none of is taken for
        the nearest. Raises ValueError for arrays that don't fit one another.
        """
        keep, tokens, positions = (np.ascontiguousarray(x, dtype=np.int64) for x in (keep, tokens, positions))
        batch = contiguous(batch)
        if not len(tokens) == len(positions) == len(batch.write_slots) == batch.num_tokens == batch.query_start[-1]:
            raise ValueError(f"{len(tokens)} tokens and {len(positions)} positions for {batch.num_tokens} queries")
        if len(keep) and not (keep.min() >= 0 and keep.max() < len(tokens)):
            raise ValueError(f"rows {keep.min()} to {keep.max()} are wanted of {len(tokens)}")
        logits = torch.empty((len(keep), self.weights.vocab_size), dtype=self.weights.dtype)
        struct = ragged_struct(batch)
        struct.tokens, struct.positions, struct.keep = tokens.ctypes.data, positions.ctypes.data, keep.ctypes.data
        struct.logits, struct.logits_stride, struct.num_keep = logits.data_ptr(), logits.shape[1], len(keep)
        self._library.c.headrace_decoder_forward(self._handle, ctypes.byref(struct))
        return logits

    def stage_seconds(self) -> dict[str, float]:
        """Seconds that the calling thread spent in each stage since the last call."""
        seconds = (ctypes.c_double * len(STAGES))()
        self._library.c.headrace_decoder_seconds(self._handle, seconds)
        return dict(zip(STAGES, seconds, strict=True))
