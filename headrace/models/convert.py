"""GGUF to a Hugging Face folder: float32 safetensors, config, generation config, tokenizer with its chat template.

Weights and config go through transformers' own GGUF loader, and so does the tokenizer where that knows how the
vocabulary splits text. It silently takes GPT-2's splitting for what it does not know; "2024" would then be encoded as
ids that a SmolLM never saw in training.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from gguf import GGUFReader
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, PreTrainedTokenizerFast
from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from headrace.models.error import ModelError
from headrace.models.gguf_file import one_line

CONTROL_TOKEN = 3  # gguf's TokenType.CONTROL

DIGIT_SPLITS = ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b")
"""Vocabularies of GPT-2's kind that split each digit off first (llama.cpp's llama-vocab.cpp)."""

GPT2_SPLITS = ("gpt-2", "phi-2", "mpt", "olmo", "jais")
"""Vocabularies that split as GPT-2 does, which is what transformers' loader does unless it knows better."""

ROPE_FREQS = "rope_freqs.weight"


def convert_gguf(gguf: Path, folder: Path) -> None:
    """Write ``folder`` from ``gguf``. Raises :class:`ModelError`, one line, for a model that can't be read right."""
    reader = GGUFReader(gguf)
    fields = {name: field.contents() for name, field in reader.fields.items() if name.startswith("tokenizer.")}
    rope_freqs = next((tensor.data for tensor in reader.tensors if tensor.name == ROPE_FREQS), None)
    tokenizer = load_tokenizer(gguf, fields)
    model = load_weights(gguf)
    if rope_freqs is not None:
        _set_llama3_rope(model.config, torch.tensor(rope_freqs))
    named = {tokenizer.eos_token_id, *(fields.get(f"tokenizer.ggml.{role}_token_id") for role in ("eot", "eom"))}
    ends = sorted(int(token) for token in named if token is not None)
    model.generation_config = GenerationConfig(
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=ends[0] if len(ends) == 1 else ends or None,
        pad_token_id=tokenizer.pad_token_id,
    )
    folder.mkdir()
    model.save_pretrained(folder)
    tokenizer.model_max_length = model.config.max_position_embeddings
    tokenizer.save_pretrained(folder)
    for file in folder.iterdir():
        file.chmod(0o644)  # safetensors files come out private, and a container's user may not be their owner


def load_weights(gguf: Path) -> Any:
    """The model in float32, dequantised, as one that was never anything else. Raises :class:`ModelError`."""
    try:
        loading: Any = AutoModelForCausalLM.from_pretrained(
            gguf.parent, gguf_file=gguf.name, dtype=torch.float32, output_loading_info=True
        )
    except (ValueError, NotImplementedError, KeyError, TypeError, AttributeError, RuntimeError, OSError) as error:
        raise ModelError(f"{gguf.name}: its model can't be read: {one_line(error)}") from None
    loaded, report = loading
    missing = sorted([*report["missing_keys"], *report["mismatched_keys"]], key=str)
    if missing:  # they would have been filled in at random
        raise ModelError(f"{gguf.name}: lacks weights that its model needs, e.g. {missing[0]}")
    # A model that came through a quantised loader refuses to be saved, and its config would send the next loader
    # looking for a GGUF. What is saved is an ordinary float32 model around the same tensors.
    settings = {key: value for key, value in loaded.config.to_dict().items()
                if key not in ("quantization_config", "_model_name_or_path", "_name_or_path")}  # fmt: skip
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(type(loaded.config).from_dict(settings), dtype=torch.float32)
    model.load_state_dict(loaded.state_dict(), assign=True)
    model.tie_weights()
    return model


def load_tokenizer(gguf: Path, fields: dict[str, Any]) -> Any:
    """The tokenizer that the ``tokenizer.*`` metadata describes. Raises :class:`ModelError` where it is not known."""
    kind, pre = fields.get("tokenizer.ggml.model"), fields.get("tokenizer.ggml.pre")
    if kind == "gpt2" and pre in DIGIT_SPLITS:
        return build_tokenizer(fields)
    if kind == "gpt2" and pre not in GGUF_PRE_TOKENIZER_SPLITS and pre not in GPT2_SPLITS:
        raise ModelError(f"GGUF vocabulary {kind!r} with splitting {pre!r} is not known; take the model's safetensors")
    try:
        tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    except (ValueError, NotImplementedError, KeyError, TypeError, RuntimeError, ImportError, OSError) as error:
        raise ModelError(f"{gguf.name}: its tokenizer can't be read: {one_line(error)}") from None
    if "tokenizer.chat_template" in fields:
        tokenizer.chat_template = fields["tokenizer.chat_template"]
    return tokenizer


def build_tokenizer(fields: dict[str, Any]) -> PreTrainedTokenizerFast:
    """The tokenizer that a GGUF's ``tokenizer.*`` metadata describes (byte-level BPE with the SmolLM splitting).

    Source of the splitting: llama.cpp's ``LLAMA_VOCAB_PRE_TYPE_SMOLLM``: each digit alone, then GPT-2's pattern.
    """
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

    def named(role: str) -> str | None:
        token = fields.get(f"tokenizer.ggml.{role}_token_id")
        return None if token is None else tokens[int(token)]

    more = {} if not fields.get("tokenizer.ggml.add_bos_token") else {"add_bos_token": True}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token=named("bos"),
        eos_token=named("eos"),
        unk_token=named("unknown"),
        pad_token=named("padding"),
        clean_up_tokenization_spaces=False,
        **more,
    )
    tokenizer.chat_template = fields.get("tokenizer.chat_template")
    return tokenizer


def _set_llama3_rope(config: Any, divisors: torch.Tensor) -> None:
    """Give ``config`` the rotary scaling that ``rope_freqs.weight`` holds the result of.

    llama.cpp divides the frequencies by that tensor; its converter (``convert_hf_to_gguf.py``) writes it for ``llama3``
    scaling only, whose parameters are recovered and checked. Raises :class:`ModelError` for anything else.
    """
    plain = dict(config.rope_parameters)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    wanted = 1.0 / (plain["rope_theta"] ** (torch.arange(0, head_dim, 2) / head_dim)) / divisors
    for original in (8192, 4096, 16384, 32768):
        config.rope_parameters = plain | {
            "rope_type": "llama3",
            "factor": float(divisors.max()),
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": original,
        }
        found = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))[0]
        if found.shape == wanted.shape and torch.allclose(found, wanted, rtol=1e-4, atol=0):
            return
    raise ModelError(f"the rotary frequencies in {ROPE_FREQS} are none that llama3 scaling gives")
