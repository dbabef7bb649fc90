"""GGUF to a Hugging Face folder: a tiny GGUF made here, and the real default model."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from tiny_gguf import TOKENS, fields, write_gguf
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from headrace.models import DEFAULT_MODEL_ID, ModelError, ensure_default_model
from headrace.models.convert import build_tokenizer, convert_gguf, load_tokenizer


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


def test_a_vocabulary_with_a_splitting_that_nobody_knows_is_refused(tmp_path: Path) -> None:
    write_gguf(tmp_path / "x.gguf", pre="deepseek-coder")
    with pytest.raises(ModelError, match="'deepseek-coder' is not known"):
        convert_gguf(tmp_path / "x.gguf", tmp_path / "model")
    assert not (tmp_path / "model").exists()


def test_a_vocabulary_that_transformers_knows_splits_as_its_own_kind(tmp_path: Path) -> None:
    write_gguf(tmp_path / "x.gguf", pre="llama-bpe", add_bos=True)
    convert_gguf(tmp_path / "x.gguf", tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    assert tokenizer.tokenize("he 2024") == ["he", "Ġ", "20", "2", "4"]  # up to three digits are one word
    assert tokenizer("he")["input_ids"][0] == tokenizer.bos_token_id == 1
    assert tokenizer.convert_ids_to_tokens(list(range(len(tokenizer)))) == TOKENS
    assert tokenizer.chat_template == fields()["tokenizer.chat_template"]


def test_bos_is_added_where_the_file_says_so(tmp_path: Path) -> None:
    plain, asked = fields(), fields() | {"tokenizer.ggml.add_bos_token": True}
    texts = [load_tokenizer(tmp_path, one)("he")["input_ids"] for one in (plain, asked)]
    assert texts == [[TOKENS.index("he")], [1, TOKENS.index("he")]]


def llama3_divisors(original: int = 8192) -> torch.Tensor:
    """What llama.cpp's converter writes for a llama3 scaling of 8."""
    config = AutoConfig.for_model("llama", hidden_size=64, num_attention_heads=2)
    scaling = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    config.rope_parameters = {"rope_type": "llama3", "rope_theta": 10000.0, **scaling,
                              "original_max_position_embeddings": original}  # fmt: skip
    plain = 1.0 / 10000.0 ** (torch.arange(0, 32, 2) / 32)
    return plain / ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))[0]


def test_llama3_scaling_is_recovered_from_the_frequencies(tmp_path: Path) -> None:
    divisors = llama3_divisors()
    assert divisors.max() == 8 > divisors.min()
    write_gguf(tmp_path / "x.gguf", more_tensors={"rope_freqs.weight": divisors.numpy()})
    convert_gguf(tmp_path / "x.gguf", tmp_path / "model")
    config = AutoConfig.from_pretrained(tmp_path / "model")
    found = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))[0]
    assert torch.allclose(found, 1.0 / 10000.0 ** (torch.arange(0, 32, 2) / 32) / divisors)


def test_other_frequencies_are_refused(tmp_path: Path) -> None:
    write_gguf(tmp_path / "x.gguf", more_tensors={"rope_freqs.weight": np.linspace(1, 3, 16, dtype=np.float32)})
    with pytest.raises(ModelError, match="rotary frequencies"):
        convert_gguf(tmp_path / "x.gguf", tmp_path / "model")


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
