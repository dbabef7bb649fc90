"""GGUF to a Hugging Face folder: a tiny GGUF made here, and the real default model."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.quants import dequantize, quantize
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.convert_slow_tokenizer import bytes_to_unicode

from headrace.models import DEFAULT_MODEL_ID, ModelError, ensure_default_model
from headrace.models.convert import build_tokenizer, convert_gguf

TEMPLATE = "{% for message in messages %}<|im_start|>{{ message['content'] }}<|im_end|>{% endfor %}"
CONTROL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
BYTES = list(bytes_to_unicode().values())
MERGES = ["h e", "2 0", "Ġ he"]
TOKENS = [*CONTROL, *BYTES, "he", "20", "Ġhe"]
HIDDEN, FFN = 64, 96


def fields(pre: str = "smollm") -> dict[str, object]:
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


def write_gguf(path: Path) -> np.ndarray:
    """A one-layer llama in Q4_1. Returns the dequantised FFN weights, the reference for the conversion."""
    noise = np.random.default_rng(0)
    writer = GGUFWriter(path, "llama")
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(1)
    writer.add_feed_forward_length(FFN)
    writer.add_head_count(2)
    writer.add_head_count_kv(1)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_rope_dimension_count(HIDDEN // 2)
    writer.add_vocab_size(len(TOKENS))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(TOKENS)
    writer.add_token_types(fields()["tokenizer.ggml.token_type"])
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_chat_template(TEMPLATE)
    shapes = {
        "token_embd": (len(TOKENS), HIDDEN),
        "blk.0.attn_q": (HIDDEN, HIDDEN),
        "blk.0.attn_k": (HIDDEN // 2, HIDDEN),
        "blk.0.attn_v": (HIDDEN // 2, HIDDEN),
        "blk.0.attn_output": (HIDDEN, HIDDEN),
        "blk.0.ffn_gate": (FFN, HIDDEN),
        "blk.0.ffn_up": (FFN, HIDDEN),
        "blk.0.ffn_down": (HIDDEN, FFN),
    }
    q4_1 = GGMLQuantizationType.Q4_1
    reference = np.zeros(0)
    for name, shape in shapes.items():
        packed = quantize(noise.standard_normal(shape, dtype=np.float32), q4_1)
        writer.add_tensor(f"{name}.weight", packed, raw_dtype=q4_1)
        if name == "blk.0.ffn_up":
            reference = dequantize(packed, q4_1)
    for name in ("output_norm", "blk.0.attn_norm", "blk.0.ffn_norm"):
        writer.add_tensor(f"{name}.weight", np.ones(HIDDEN, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return reference


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, np.ndarray]:
    folder = tmp_path_factory.mktemp("tiny")
    reference = write_gguf(folder / "tiny.gguf")
    convert_gguf(folder / "tiny.gguf", folder / "model")
    return folder / "model", reference


def test_weights_are_the_dequantised_ones_to_the_bit(converted: tuple[Path, np.ndarray]) -> None:
    folder, reference = converted
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert model.dtype == torch.float32
    assert np.array_equal(model.model.layers[0].mlp.up_proj.weight.detach().numpy(), reference)
    assert getattr(model.config, "quantization_config", None) is None
    assert model.generation_config.eos_token_id == 2


def test_the_folder_is_readable_by_everybody(converted: tuple[Path, np.ndarray]) -> None:
    assert {file.stat().st_mode & 0o777 for file in converted[0].iterdir()} == {0o644}


def test_the_saved_tokenizer_is_the_files_own(converted: tuple[Path, np.ndarray]) -> None:
    tokenizer = AutoTokenizer.from_pretrained(converted[0])
    assert tokenizer.convert_ids_to_tokens(list(range(len(tokenizer)))) == TOKENS
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (1, 2, 2)
    assert tokenizer.model_max_length == 128
    assert tokenizer.apply_chat_template([{"role": "user", "content": "he"}], tokenize=False) == (
        "<|im_start|>he<|im_end|>"
    )
    text = "he 20 — né 你 \n"
    assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text


def test_digits_stand_alone_even_where_a_merge_would_join_them() -> None:
    tokenizer = build_tokenizer(fields())
    assert tokenizer.tokenize("he he 2024") == ["he", "Ġhe", "Ġ", "2", "0", "2", "4"]


def test_a_vocabulary_with_another_splitting_is_refused() -> None:
    with pytest.raises(ModelError, match="'llama-bpe' is not known"):
        build_tokenizer(fields(pre="llama-bpe"))


@pytest.mark.model
def test_the_default_model_answers_paris() -> None:
    folder = ensure_default_model(print)
    assert folder.name == DEFAULT_MODEL_ID
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.eos_token == "<|im_end|>"
    assert tokenizer.tokenize("In 2024") == ["In", "Ġ", "2", "0", "2", "4"]
    question = [{"role": "user", "content": "What is the capital of France?"}]
    text = tokenizer.apply_chat_template(question, tokenize=False, add_generation_prompt=True)
    assert text == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
    )
    model = AutoModelForCausalLM.from_pretrained(folder)
    ids = tokenizer(text, return_tensors="pt", add_special_tokens=False)
    output = model.generate(**ids, max_new_tokens=16, do_sample=False)
    answer = tokenizer.decode(output[0, ids["input_ids"].shape[1] :])
    assert answer == "The capital of France is Paris.<|im_end|>"
