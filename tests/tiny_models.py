"""Tiny random-weight models in local folders, for every test that needs one: config, safetensors, tokenizer.

Random weights make ``transformers`` an exact reference and bytes-like text; the weights are drawn wide enough that
greedy decoding does not fall into one repeated token at once, and that sampled text is full of broken UTF-8.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedTokenizerFast

EOS, IM_START, IM_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
SPECIAL_TOKENS = (EOS, IM_START, IM_END)
"""Ids 0, 1 and 2. ``<|endoftext|>`` is EOS, ``<|im_end|>`` ends a turn (both end a generation), none is BOS."""

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

_MERGES = (
    "Ġ t", "h e", "i n", "Ġ a", "r e", "o n", "Ġt he", "e r", "Ġ s", "a t", "Ġ w", "Ġ o", "e n", "Ġ c", "i t", "i s",
    "a n", "o r", "e s", "Ġ b", "e d", "Ġ f", "in g", "Ġ p", "o u", "Ġa n", "a l", "a r", "Ġt o", "Ġ m", "Ġo f",
    "Ġ in", "Ġ d", "Ġ h", "Ġan d", "i c", "o m",
)  # fmt: skip

_SHAPE: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "initializer_range": 0.3,
    "tie_word_embeddings": False,
}

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": 24},
    "qwen2": {},
    "qwen3": {},
    "gemma2": {
        "sliding_window": 24,
        "query_pre_attn_scalar": 16,
        "attn_logit_softcapping": 5.0,
        "final_logit_softcapping": 30.0,
    },
    "gemma3_text": {"sliding_window": 24, "num_hidden_layers": 6, "query_pre_attn_scalar": 16},
    "phi3": {"head_dim": None},
    "qwen3_moe": {
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 48,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "norm_topk_prob": True,
    },
    "gpt_oss": {
        "sliding_window": 24,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "olmo2": {"head_dim": None},
    "granite": {"head_dim": None, "attention_multiplier": 0.2, "residual_multiplier": 0.5, "logits_scaling": 2.0},
}
"""Model type -> what its config needs beyond the shape that all share."""


def make_tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer: 3 special tokens, all 256 bytes, some merges; it adds no BOS and no EOS."""
    vocab: dict[str, int] = {}
    for token in [*SPECIAL_TOKENS, *sorted(pre_tokenizers.ByteLevel.alphabet())]:
        vocab[token] = len(vocab)
    merges = [(left, right) for left, right in (merge.split() for merge in _MERGES)]
    for left, right in merges:
        vocab[left + right] = len(vocab)
    bpe = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    bpe.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        eos_token=EOS,
        additional_special_tokens=[IM_START, IM_END],
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def make_tiny_model(
    folder: Path,
    family: str = "llama",
    *,
    seed: int = 0,
    vocab_size: int = 320,
    max_position_embeddings: int = 2048,
    **config: Any,
) -> Path:
    """Write a random-weight model of ``family`` (a ``model_type``), tokenizer and chat template; returns the folder.

    ``vocab_size`` is the rows of the embedding and may exceed the tokenizer's 296 tokens. ``config`` overrides fields
    of the model's config. Weights are float32; the same arguments give the same weights.
    """
    folder.mkdir(parents=True, exist_ok=True)
    fields = {
        **_SHAPE,
        **FAMILIES.get(family, {}),
        "vocab_size": vocab_size,
        "max_position_embeddings": max_position_embeddings,
        "bos_token_id": None,
        "eos_token_id": 0,
        "pad_token_id": 0,
        **config,
    }
    model_config = AutoConfig.for_model(family, **{key: value for key, value in fields.items() if value is not None})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(model_config, dtype=torch.float32)
    model.generation_config = GenerationConfig(eos_token_id=[0, 2], pad_token_id=0, bos_token_id=None)
    model.save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return folder


def make_config_folder(folder: Path, family: str, **config: Any) -> Path:
    """A folder with a config alone: enough for what must be refused before any weight is read."""
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps(AutoConfig.for_model(family, **config).to_dict() | {"architectures": None})
    (folder / "config.json").write_text(text)
    return folder
