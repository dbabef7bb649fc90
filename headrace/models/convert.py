"""GGUF to a Hugging Face folder: float32 safetensors, config, generation config, tokenizer with its chat template.

Weights and config go through transformers' own GGUF loader. The tokenizer does not: that loader drops the
pre-tokenizer's digit splitting (``tokenizer.ggml.pre = smollm``), and "2024" would then be encoded as ids that the
model never saw in training.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from gguf import GGUFReader
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedTokenizerFast

from headrace.models.error import ModelError

CONTROL_TOKEN = 3  # gguf's TokenType.CONTROL


def convert_gguf(gguf: Path, folder: Path) -> None:
    """Write ``folder`` from ``gguf``. Raises :class:`ModelError` for a vocabulary whose splitting is not known here."""
    fields = {name: field for name, field in GGUFReader(gguf).fields.items() if name.startswith("tokenizer.")}
    tokenizer = build_tokenizer({name: field.contents() for name, field in fields.items()})
    loaded = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    # A model that came through a quantised loader refuses to be saved, and its config would send the next loader
    # looking for a GGUF. What is saved is an ordinary float32 model with the same values.
    settings = {key: value for key, value in loaded.config.to_dict().items()
                if key not in ("quantization_config", "_model_name_or_path", "_name_or_path")}  # fmt: skip
    model = AutoModelForCausalLM.from_config(type(loaded.config).from_dict(settings), dtype=torch.float32)
    model.load_state_dict(loaded.state_dict())
    model.generation_config = GenerationConfig(
        bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
    )
    folder.mkdir()
    model.save_pretrained(folder)
    tokenizer.model_max_length = model.config.max_position_embeddings
    tokenizer.save_pretrained(folder)
    for file in folder.iterdir():
        file.chmod(0o644)  # safetensors files come out private, and a container's user may not be their owner


def build_tokenizer(fields: dict[str, Any]) -> PreTrainedTokenizerFast:
    """The tokenizer that a GGUF's ``tokenizer.*`` metadata describes (byte-level BPE with the SmolLM splitting).

    Source of the splitting: llama.cpp's ``LLAMA_VOCAB_PRE_TYPE_SMOLLM``: each digit alone, then GPT-2's pattern.
    """
    kind, pre = fields.get("tokenizer.ggml.model"), fields.get("tokenizer.ggml.pre")
    if (kind, pre) != ("gpt2", "smollm"):
        raise ModelError(f"GGUF vocabulary {kind!r} with splitting {pre!r} is not known; gpt2 with smollm is")
    tokens: list[str] = list(fields["tokenizer.ggml.tokens"])
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"]]
    backend = Tokenizer(models.BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\p{N}"), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    control = [token for token, kind in zip(tokens, fields["tokenizer.ggml.token_type"], strict=True)
               if kind == CONTROL_TOKEN]  # fmt: skip
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in control])

    def named(role: str) -> str:
        return tokens[int(fields[f"tokenizer.ggml.{role}_token_id"])]

    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token=named("bos"),
        eos_token=named("eos"),
        unk_token=named("unknown"),
        pad_token=named("padding"),
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = fields["tokenizer.chat_template"]
    return tokenizer
