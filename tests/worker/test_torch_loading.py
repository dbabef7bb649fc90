"""What is loaded, what is refused at start and with which words, and how the KV pool is sized."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from batch_driver import BatchDriver
from safetensors.torch import load_file, save_file
from tiny_models import make_config_folder, make_tiny_model

from shared.lifecycle import StartupError
from shared.messages import Sampling
from worker.config import WorkerConfig
from worker.kv_cache import budget_bytes, pool_size
from worker.model import load_model
from worker.torch_runner import TorchRunner, load_torch_runner

MakeModel = Callable[..., Path]

SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 64}


@pytest.mark.parametrize(
    ("family", "config", "reason"),
    [
        ("bloom", SMALL, "does not route its attention"),
        ("falcon", SMALL, "does not route its attention"),
        ("mamba", {}, "layers of type linear_attention"),
        ("t5", {}, "encoder-decoder"),
        ("vit", {}, "no causal language model"),
        ("qwen3_next", {}, "layers of type linear_attention"),
        ("lfm2", {"num_hidden_layers": 2, "layer_types": ["conv", "full_attention"]}, "layers of type conv"),
        ("llama4_text", {}, "layers of type chunked_attention"),
        ("gemma3n_text", {}, "share one another's KV cache"),
        ("gemma3", {}, "parts beside a language model"),
        ("llama", {"quantization_config": {"quant_method": "gptq", "bits": 4}}, "quantised"),
    ],
)
def test_models_that_cannot_be_served_are_refused_by_their_config(
    family: str, config: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    with pytest.raises(StartupError, match=reason) as refusal:
        load_model(str(make_config_folder(tmp_path, family, **config)))
    assert "\n" not in str(refusal.value) and family in str(refusal.value)


@pytest.mark.parametrize(
    ("family", "config", "reason"),
    [
        ("bert", {"is_decoder": False, "num_key_value_heads": None, "head_dim": None}, "can't be served"),
        ("deepseek_v2", {"kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16,
                         "v_head_dim": 24, "head_dim": None, "first_k_dense_replace": 2}, "do not fit one paged cache"),
    ],
)  # fmt: skip
def test_models_that_cannot_be_served_are_refused_by_a_trial_pass(
    family: str, config: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    folder = make_tiny_model(tmp_path, family, **config)
    with pytest.raises(StartupError, match=reason):
        load_model(str(folder))


@pytest.mark.parametrize(
    ("model", "reason"),
    [("./nowhere", "does not exist"), ("/no/such/folder", "does not exist"), ("a/b/c", "does not exist")],
)
def test_a_missing_folder_is_named(model: str, reason: str) -> None:
    with pytest.raises(StartupError, match=reason):
        load_model(model)


def test_a_file_is_refused_and_what_makes_a_folder_of_it_is_named(tmp_path: Path) -> None:
    (tmp_path / "x.gguf").write_bytes(b"GGUF")
    with pytest.raises(StartupError, match=r"is a file; 'headrace fetch-model \S*x.gguf'"):
        load_model(str(tmp_path / "x.gguf"))


def test_a_folder_without_config_or_weights_is_refused_in_one_line(tmp_path: Path, tiny_model: MakeModel) -> None:
    with pytest.raises(StartupError) as refusal:
        load_model(str(tmp_path))
    assert "\n" not in str(refusal.value)
    (tmp_path / "config.json").write_bytes((tiny_model("llama") / "config.json").read_bytes())
    with pytest.raises(StartupError, match="safetensors"):
        load_model(str(tmp_path))


def test_pickled_weights_are_not_read(tmp_path: Path, tiny_model: MakeModel) -> None:
    source = tiny_model("llama")
    (tmp_path / "config.json").write_bytes((source / "config.json").read_bytes())
    torch.save(load_file(source / "model.safetensors"), tmp_path / "pytorch_model.bin")
    with pytest.raises(StartupError, match="safetensors"):
        load_model(str(tmp_path))


def test_code_in_the_models_folder_is_not_run(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": "mine", "auto_map": {"AutoConfig": "mine.Config", "AutoModelForCausalLM": "mine.M"}})
    )
    (tmp_path / "mine.py").write_text("raise SystemExit('ran')")
    with pytest.raises(StartupError, match="can't be read"):
        load_model(str(tmp_path))


def test_missing_weights_are_refused_and_named(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path, "llama")
    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(StartupError, match=r"layers\.1\.mlp\.up_proj"):
        load_model(str(folder))


@pytest.mark.parametrize(("option", "value"), [("dtype", "int8"), ("device", "tpu"), ("device", "nonsense")])
def test_unknown_types_and_devices_are_refused(option: str, value: str, tiny_model: MakeModel) -> None:
    with pytest.raises(StartupError, match=f"{option} '{value}'"):
        load_model(str(tiny_model("llama")), **{option: value})


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there_is_named(tiny_model: MakeModel) -> None:
    with pytest.raises(StartupError, match="no usable GPU"):
        load_model(str(tiny_model("llama")), device="cuda")


def test_what_ends_a_generation_is_the_generation_configs_word(tiny_model: MakeModel, tmp_path: Path) -> None:
    assert load_model(str(tiny_model("llama"))).eos_token_ids == [0, 2]
    folder = make_tiny_model(tmp_path, "llama", eos_token_id=7)
    (folder / "generation_config.json").unlink()
    assert load_model(str(folder)).eos_token_ids == [7]


def test_rope_that_looks_at_the_whole_batch_limits_the_length(tmp_path: Path) -> None:
    longrope = {"rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.0] * 8, "long_factor": [4.0] * 8,
                "original_max_position_embeddings": 100, "factor": 20.48}  # fmt: skip
    folder = make_tiny_model(tmp_path / "long", "llama", rope_parameters=longrope)
    assert load_model(str(folder)).max_positions == 100
    dynamic = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    folder = make_tiny_model(tmp_path / "dynamic", "llama", rope_parameters=dynamic, max_position_embeddings=300)
    assert load_model(str(folder)).max_positions == 300


def test_capacity_tells_what_the_runner_can_do(tiny_model: MakeModel) -> None:
    folder = tiny_model("llama")
    runner = load_torch_runner(
        WorkerConfig(model=str(folder), dtype="float32", kv_cache_memory="1MiB", max_model_len=500)
    )
    capacity = runner.capacity
    assert capacity.model == folder.name
    assert capacity.kv_bytes_per_token == 2 * 2 * 2 * 16 * 4  # K and V, layers, heads, size, float32
    assert (capacity.num_blocks + 1) * 16 * capacity.kv_bytes_per_token == 1 << 20
    assert (capacity.max_model_len, capacity.vocab_size, capacity.block_size) == (500, 320, 16)
    assert (capacity.eos_token_ids, capacity.device, capacity.dtype) == ([0, 2], "cpu", "float32")
    named = load_torch_runner(WorkerConfig(model=str(folder), kv_cache_memory="1MiB", served_model_name="mine"))
    assert named.capacity.model == "mine"


def test_the_pool_is_described_at_start(tiny_model: MakeModel, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        TorchRunner.load(tiny_model("llama"), dtype="float32", num_blocks=100, max_model_len=400)
    assert (
        "KV cache: 100 pages of 16 tokens = 1,600 tokens, 1 MiB; 4 sequences of the full 400 tokens fit" in caplog.text
    )


def test_the_longest_sequence_is_clamped_to_the_pool(caplog: pytest.LogCaptureFixture) -> None:
    assert pool_size(1 << 20, 512, 16, 2048, None, num_blocks=10).max_model_len == 160
    assert not caplog.records
    assert pool_size(1 << 20, 512, 16, 2048, 1000, num_blocks=10).max_model_len == 160
    assert "max-model-len is 160, not 1000" in caplog.text
    assert pool_size(1 << 20, 512, 16, None, 100).max_model_len == 100


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"budget_bytes": 16 * 512}, "hold no page"),
        ({"max_model_len": 5000}, "more than the model's 2048 positions"),
        ({"model_limit": None}, "set max-model-len"),
    ],
)
def test_pools_that_make_no_sense_are_refused(settings: dict[str, Any], reason: str) -> None:
    usual = {"budget_bytes": 1 << 20, "token_bytes": 512, "block_size": 16, "model_limit": 2048, "max_model_len": None}
    with pytest.raises(StartupError, match=reason):
        pool_size(**(usual | settings))


def test_a_gpus_share_leaves_out_what_is_in_use(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (60, 100))
    cuda = torch.device("cuda")
    assert budget_bytes(cuda, 1 << 30, 0.9) == 50
    assert not caplog.records
    assert budget_bytes(cuda, 1 << 30, 0.97) == 57
    assert "little room" in caplog.text
    assert budget_bytes(torch.device("cpu"), 1 << 30, 0.9) == 1 << 30


def test_min_tokens_holds_back_what_would_end_the_sequence(tiny_model: MakeModel) -> None:
    runner = TorchRunner.load(tiny_model("llama"), dtype="float64", num_blocks=50)
    prompt = [40, 50, 60]

    def generate(**how: Any) -> tuple[list[int], str]:
        driver = BatchDriver(runner)
        sequence = driver.start(prompt, Sampling(0, 12, temperature=0.0, **how))
        driver.run_to_end()
        return sequence.tokens, sequence.ended

    free, _ = generate(ignore_eos=True)
    stopped, reason = generate(stop_token_ids=[free[2]])
    assert (stopped, reason) == (free[: free.index(free[2]) + 1], "stop")
    held, _ = generate(stop_token_ids=[free[2]], min_tokens=6)
    assert free[2] not in held[:6] and len(held) >= 6
