"""Tiny random-weight llamas as GGUF files, for tests that need one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.quants import dequantize, quantize
from transformers.convert_slow_tokenizer import bytes_to_unicode

TEMPLATE = "{% for message in messages %}<|im_start|>{{ message['content'] }}<|im_end|>{% endfor %}"
CONTROL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
BYTES = list(bytes_to_unicode().values())
MERGES = ["h e", "2 0", "Ġ he"]
TOKENS = [*CONTROL, *BYTES, "he", "20", "Ġhe"]
HIDDEN, FFN, HEAD = 64, 96, 32


def fields(pre: str = "smollm") -> dict[str, Any]:
    """The tokenizer's metadata."""
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": TOKENS,
        "tokenizer.ggml.token_type": [3] * len(CONTROL) + [1] * (len(TOKENS) - len(CONTROL)),
        "tokenizer.ggml.merges": MERGES,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.padding_token_id": 2,
        "tokenizer.chat_template": TEMPLATE,
    }


def write_gguf(
    path: Path, *, pre: str = "smollm", architecture: str = "llama", without: str = "", parts: int = 0,
    add_bos: bool = False, rope_scaling: str = "", more_tensors: dict[str, np.ndarray] | None = None, seed: int = 0,
) -> np.ndarray:  # fmt: skip
    """A one-layer llama in Q4_1, less the tensor ``without``. Returns the dequantised FFN weights for comparison."""
    noise = np.random.default_rng(seed)
    writer = GGUFWriter(path, architecture)
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(1)
    writer.add_feed_forward_length(FFN)
    writer.add_head_count(2)
    writer.add_head_count_kv(1)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_rope_dimension_count(HEAD)
    writer.add_vocab_size(len(TOKENS))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(TOKENS)
    writer.add_token_types(fields()["tokenizer.ggml.token_type"])
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_chat_template(TEMPLATE)
    if add_bos:
        writer.add_add_bos_token(True)
    if parts:
        writer.add_uint16("split.count", parts)
    if rope_scaling:
        writer.add_string(f"{architecture}.rope.scaling.type", rope_scaling)
    shapes = {
        "token_embd": (len(TOKENS), HIDDEN),
        "blk.0.attn_q": (HIDDEN, HIDDEN),
        "blk.0.attn_k": (HEAD, HIDDEN),
        "blk.0.attn_v": (HEAD, HIDDEN),
        "blk.0.attn_output": (HIDDEN, HIDDEN),
        "blk.0.ffn_gate": (FFN, HIDDEN),
        "blk.0.ffn_up": (FFN, HIDDEN),
        "blk.0.ffn_down": (HIDDEN, FFN),
    }
    q4_1 = GGMLQuantizationType.Q4_1
    reference = np.zeros(0)
    for name, shape in shapes.items():
        packed = quantize(noise.standard_normal(shape, dtype=np.float32), q4_1)
        if name != without:
            writer.add_tensor(f"{name}.weight", packed, raw_dtype=q4_1)
        if name == "blk.0.ffn_up":
            reference = dequantize(packed, q4_1)
    for name in ("output_norm", "blk.0.attn_norm", "blk.0.ffn_norm"):
        writer.add_tensor(f"{name}.weight", np.ones(HIDDEN, dtype=np.float32))
    for name, values in (more_tensors or {}).items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return reference
