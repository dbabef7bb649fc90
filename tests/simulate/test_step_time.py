"""The roofline against figures worked out by hand from the cards' data sheets."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from headrace.simulate.hardware import Deployment, UnknownHardware, gpu_named, model_named
from headrace.simulate.step_time import Roofline, StepWork


def ms(model: str, gpu: str, work: StepWork, tp: int = 1, ef: float = 1.0, eb: float = 1.0) -> float:
    return Roofline(Deployment(model_named(model), gpu_named(gpu), tp), t0_ms=0, ef=ef, eb=eb).ns(work) / 1e6


@pytest.mark.parametrize(
    ("model", "gpu", "tp", "expected"),
    [
        ("llama-2-13b", "a100-40", 1, 16.7), ("llama-2-13b", "h100", 1, 7.8), ("llama-3.1-8b", "a100-80", 1, 7.9),
        ("llama-3.1-8b", "h200", 1, 3.35), ("llama-3.1-70b", "a100-80", 4, 17.3), ("llama-3.1-70b", "h200", 2, 14.7),
    ],
)  # fmt: skip
def test_a_small_step_takes_the_time_to_read_the_weights(model: str, gpu: str, tp: int, expected: float) -> None:
    assert ms(model, gpu, StepWork(rows=1), tp) == pytest.approx(expected, rel=0.01)


@pytest.mark.parametrize(
    ("model", "gpu", "expected_us"),
    [("llama-2-13b", "a100-80", 139), ("llama-2-13b", "h100", 43.9), ("llama-3.1-8b", "a100-40", 85.8)],
)
def test_a_large_step_takes_the_time_of_its_arithmetic(model: str, gpu: str, expected_us: float) -> None:
    assert ms(model, gpu, StepWork(rows=10_000), ef=0.6) * 1e3 / 10_000 == pytest.approx(expected_us, rel=0.01)


@pytest.mark.parametrize(
    ("model", "gpu", "expected_us"), [("llama-2-13b", "a100-40", 527), ("llama-3.1-8b", "h100", 39)]
)
def test_decoding_reads_the_context(model: str, gpu: str, expected_us: float) -> None:
    empty = ms(model, gpu, StepWork(rows=1))
    full = ms(model, gpu, StepWork(rows=1, context=1000, kv_tokens=1000))
    assert (full - empty) * 1e3 == pytest.approx(expected_us, rel=0.02)


def test_a_chunk_attends_to_what_came_before_it_and_to_itself() -> None:
    work = StepWork()
    work.add_rows(100, 3)
    assert (work.rows, work.context, work.kv_tokens) == (3, 101 + 102 + 103, 103)


@pytest.mark.parametrize(
    ("model", "gpu", "tp", "tokens"),
    [
        ("llama-2-13b", "a100-40", 1, 13_600), ("llama-2-13b", "a100-80", 1, 60_800),
        ("llama-3.1-8b", "h100", 1, 453_000), ("llama-3.1-70b", "a100-80", 4, 495_000),
    ],
)  # fmt: skip
def test_what_is_left_for_the_cache(model: str, gpu: str, tp: int, tokens: int) -> None:
    assert Deployment(model_named(model), gpu_named(gpu), tp).kv_tokens == pytest.approx(tokens, rel=0.01)


def test_a_model_from_its_config(tmp_path: Path) -> None:
    config = {
        "model_type": "llama", "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32,
        "num_key_value_heads": 8, "intermediate_size": 14336, "vocab_size": 128256, "torch_dtype": "bfloat16",
        "max_position_embeddings": 131072, "tie_word_embeddings": False,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    read, known = model_named(str(tmp_path)), model_named("llama-3.1-8b")
    assert (read.params, read.kv_bytes_per_token) == (known.params, known.kv_bytes_per_token)
    assert read.params == 8_030_261_248


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("{", "Expecting"), ("[]", "not a JSON object"), ('{"hidden_size": 64}', "not a decoder"),
        ('{"hidden_size": 64, "num_experts": 8}', "experts"),
    ],
)  # fmt: skip
def test_a_config_that_is_none(tmp_path: Path, text: str, complaint: str) -> None:
    path = tmp_path / "config.json"
    path.write_text(text)
    with pytest.raises(UnknownHardware, match=complaint):
        model_named(str(path))


def test_a_model_that_does_not_fit_says_so() -> None:
    with pytest.raises(UnknownHardware, match="--tp"):
        _ = Deployment(model_named("llama-3.1-70b"), gpu_named("h100")).kv_tokens
