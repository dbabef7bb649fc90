"""Models that are checked: the shapes of two Llamas, with random weights made on the device, and a tiny one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from headrace.simulate.hardware import ModelShape, shape_of_config

KV_ROOM = 2 << 30
"""Bytes for KV that a model must leave to be worth measuring, beside its activations."""

LARGEST_SHARE = 0.85
"""Of the memory that is free, for weights and that."""


@dataclass(frozen=True)
class Shape:
    """``fields``: of a ``LlamaConfig``."""

    name: str
    fields: dict[str, Any]

    @property
    def sizes(self) -> ModelShape:
        return shape_of_config(self.fields, self.name)

    def config(self) -> Any:
        from transformers import LlamaConfig

        return LlamaConfig(**self.fields, bos_token_id=None, eos_token_id=None, pad_token_id=0)

    def weight_bytes(self, dtype: torch.dtype) -> int:
        return self.sizes.params * dtype.itemsize

    def kv_bytes_per_token(self, dtype: torch.dtype) -> int:
        return self.sizes.kv_bytes_per_token // self.sizes.bytes_per_value * dtype.itemsize

    def read_bytes(self, dtype: torch.dtype, batch: int, context: int) -> int:
        """What a decode step can't do without reading: every matrix once, and the keys and values of each sequence.

        Of the embedding only the batch's rows are read, unless it is the head too.
        """
        fields = self.fields
        embedding = 0 if fields["tie_word_embeddings"] else fields["vocab_size"] * fields["hidden_size"]
        matrices = (self.sizes.params - embedding) * dtype.itemsize
        return matrices + batch * context * self.kv_bytes_per_token(dtype)


def _llama(
    name: str, layers: int, hidden: int, inner: int, heads: int, kv_heads: int, vocab: int, length: int, tied: bool
) -> Shape:
    return Shape(
        name,
        {
            "hidden_size": hidden,
            "intermediate_size": inner,
            "num_hidden_layers": layers,
            "num_attention_heads": heads,
            "num_key_value_heads": kv_heads,
            "head_dim": hidden // heads,
            "vocab_size": vocab,
            "max_position_embeddings": length,
            "tie_word_embeddings": tied,
            "rms_norm_eps": 1e-5,
        },
    )


LLAMA_8B = _llama("Llama-8B shape", 32, 4096, 14336, 32, 8, 128256, 131072, tied=False)
LLAMA_1B = _llama("Llama-1B shape", 16, 2048, 8192, 32, 8, 128256, 131072, tied=True)
SMALL = _llama("small", 4, 512, 1024, 8, 2, 4096, 4096, tied=False)
"""For comparing tokens: enough layers and heads to go wrong, small enough for float64."""

TINY = _llama("tiny", 2, 64, 128, 4, 2, 320, 2048, tied=False)
"""For rehearsals."""


def fits(shape: Shape, dtype: torch.dtype, free_bytes: int) -> bool:
    return shape.weight_bytes(dtype) + KV_ROOM <= LARGEST_SHARE * free_bytes


def largest(shapes: Sequence[Shape], dtype: torch.dtype, free_bytes: int) -> Shape | None:
    """The first of ``shapes`` that fits; None where none does."""
    return next((shape for shape in shapes if fits(shape, dtype, free_bytes)), None)
