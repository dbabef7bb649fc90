"""Models that the C++ decoder runs: the tokens of ``transformers``, bits that are a row's own, and models that only
seem to be such, which are served module by module."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from batch_driver import BatchDriver
from transformers import AutoModelForCausalLM

from kernels.cpu.library import Library, find
from shared.lifecycle import StartupError
from shared.messages import Sampling
from worker.torch_runner import TorchRunner

MakeModel = Callable[..., Path]

pytestmark = pytest.mark.skipif(not isinstance(find(), Library), reason="the C++ kernels are not built or turned off")

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama, tied, MQA": ("llama", {"tie_word_embeddings": True, "num_key_value_heads": 1}),
    "llama, biases": ("llama", {"attention_bias": True, "mlp_bias": True, "vocab_size": 301}),
    "llama, gelu, MHA": ("llama", {"hidden_act": "gelu_pytorch_tanh", "num_key_value_heads": 4}),
    "llama 3 rope": ("llama", {"rope_parameters": {"rope_type": "llama3", "rope_theta": 10000.0, "factor": 4.0,
                               "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                               "original_max_position_embeddings": 64}}),
    "mistral": ("mistral", {"sliding_window": 24}),
    "qwen2": ("qwen2", {}),
    "qwen2, some layers with a window": ("qwen2", {"use_sliding_window": True, "sliding_window": 20,
                                                   "max_window_layers": 1, "num_hidden_layers": 3}),
    "qwen3": ("qwen3", {"head_dim": 32, "tie_word_embeddings": True}),
    "smollm3": ("smollm3", {"num_hidden_layers": 4, "no_rope_layers": [1, 0, 1, 0]}),
    "seed_oss": ("seed_oss", {}),
    "ministral3": ("ministral3", {}),
    "cwm": ("cwm", {"sliding_window": 24}),
}  # fmt: skip

SEEMING: dict[str, tuple[str, dict[str, Any]]] = {
    "granite": ("granite", {}),
    "granite, a residual scaled by 0.9": ("granite", {"attention_multiplier": 0.25, "residual_multiplier": 0.9,
                                                       "embedding_multiplier": 1.0, "logits_scaling": 1.0}),
    "helium, rotated in pairs": ("helium", {}),
    "ernie4_5, rotated in pairs": ("ernie4_5", {}),
    "ministral3, queries scaled at far positions": ("ministral3", {"max_position_embeddings": 8192,
        "rope_parameters": {"rope_theta": 1e6, "rope_type": "yarn", "factor": 4.0, "beta_fast": 32.0, "beta_slow": 1.0,
                            "mscale": 1.0, "mscale_all_dim": 1.0, "original_max_position_embeddings": 2048,
                            "max_position_embeddings": 2048, "llama_4_scaling_beta": 0.1}}),
}  # fmt: skip

OTHER_PARTS = {
    "gemma3_text": "an embedding of another kind",
    "phi3": "attention of other parts",
    "olmo2": "a layer of other parts",
    "qwen3_moe": "an MLP of other parts",
    "gpt2": "parts beside a decoder and a head",
}


def load(folder: Path, **settings: Any) -> TorchRunner:
    return TorchRunner.load(folder, num_blocks=40, self_check=False, **settings)


def prompts(lengths: tuple[int, ...] = (1, 9, 40, 141)) -> list[list[int]]:
    rng = random.Random(7)
    return [[rng.randrange(3, 296) for _ in range(length)] for length in lengths]


def greedy(count: int, **more: Any) -> Sampling:
    return Sampling(seed=0, max_tokens=count, temperature=0.0, ignore_eos=True, **more)


def run(runner: TorchRunner, chunk: int = 512, count: int = 10, together: bool = True) -> list[list[int]]:
    """Tokens of all prompts, joined one after the other in chunks of odd sizes."""
    sequences = []
    driver = BatchDriver(runner)
    for number, prompt in enumerate(prompts()):
        sequences.append(driver.start(prompt, greedy(count)))
        if not together:
            driver.run_to_end(chunk)
        elif number < 3:
            driver.step({s.slot: min(s.to_run, 7 + 5 * number) for s in driver.live.values()})
    driver.run_to_end(chunk)
    return [s.tokens for s in sequences]


def reference(folder: Path, count: int = 10) -> list[list[int]]:
    """What ``generate`` gives in float32 for each prompt alone, up to where its two best tokens are nearly equal."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    wanted = []
    for prompt in prompts():
        out = model.generate(
            torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt), dtype=torch.int64), max_new_tokens=count,
            do_sample=False, eos_token_id=None, return_dict_in_generate=True, output_logits=True,
        )  # fmt: skip
        best = torch.cat(out.logits).topk(2).values
        near = (best[:, 0] - best[:, 1] < 1e-3).tolist()
        wanted.append(out.sequences[0, len(prompt) :].tolist()[: near.index(True) if any(near) else count])
    return wanted


def assert_equal_as_far_as_clear(got: list[list[int]], wanted: list[list[int]]) -> None:
    assert sum(map(len, wanted)) > 30, "the reference is clear almost everywhere"
    assert [tokens[: len(clear)] for tokens, clear in zip(got, wanted, strict=True)] == wanted


@pytest.mark.parametrize("case", MODELS)
def test_greedy_tokens_equal_transformers(case: str, tiny_model: MakeModel) -> None:
    family, config = MODELS[case]
    folder = tiny_model(family, **config)
    runner = load(folder, dtype="float32", block_size=32 if case == "llama" else 16)
    assert runner.decoder is not None
    assert_equal_as_far_as_clear(run(runner, chunk=33), reference(folder))


@pytest.mark.parametrize(("dtype", "quantize"), [("float32", "none"), ("bfloat16", "none"), ("bfloat16", "int8")])
@pytest.mark.parametrize("case", ["llama, tied, MQA", "llama, biases", "mistral", "qwen3"])
def test_logits_are_bit_equal_in_any_company_and_chunks(
    case: str, quantize: str, dtype: str, tiny_model: MakeModel
) -> None:
    family, config = MODELS[case]
    runner = load(tiny_model(family, **config), dtype=dtype, quantize=quantize)
    assert runner.decoder is not None
    seen: dict[tuple[int, int], torch.Tensor] = {}
    inner = runner.logits

    def logits(batch, rows, asked=()):  # type: ignore[no-untyped-def]
        out = inner(batch, rows, asked)
        for row, values in zip([row for row in rows if row.sample], out, strict=True):
            key = (row.slot.prompt_len, row.start + row.count)
            assert torch.equal(seen.setdefault(key, values.clone()), values), key
        return out

    runner.logits = logits  # type: ignore[method-assign]
    alone = run(runner, together=False)
    assert run(runner, chunk=23) == alone
    assert run(runner, chunk=4) == alone


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("case", SEEMING)
def test_what_only_seems_to_be_such_a_model_is_served_module_by_module(
    case: str, dtype: str, tiny_model: MakeModel, caplog: pytest.LogCaptureFixture
) -> None:
    family, config = SEEMING[case]
    folder = tiny_model(family, **config)
    with caplog.at_level(logging.INFO):
        runner = load(folder, dtype=dtype)
    assert runner.decoder is None
    assert "module by module: the C++ decoder's logits differ from its own" in caplog.text
    if dtype == "float32":
        assert_equal_as_far_as_clear(run(runner, chunk=33), reference(folder))


@pytest.mark.parametrize("family", OTHER_PARTS)
def test_other_parts_are_named(family: str, tiny_model: MakeModel, caplog: pytest.LogCaptureFixture) -> None:
    more = {"n_embd": 64, "n_layer": 2, "n_head": 4} if family == "gpt2" else {}
    with caplog.at_level(logging.INFO):
        assert load(tiny_model(family, **more), dtype="float32").decoder is None
    assert f"module by module: {OTHER_PARTS[family]}" in caplog.text


@pytest.mark.parametrize(
    ("family", "settings", "reason"),
    [
        ("granite", {"dtype": "float32"}, "the C++ decoder's logits differ from its own by"),
        ("granite", {"dtype": "bfloat16"}, "the C++ decoder's logits differ from its own by"),
        ("olmo2", {"dtype": "float32"}, "a layer of other parts"),
        ("llama", {"dtype": "float64"}, "it computes in float32 and bfloat16, not in float64"),
        ("llama", {"dtype": "float32", "block_size": 8}, "its pages hold a multiple of 16 tokens, not 8"),
    ],
)
def test_a_model_that_cannot_be_quantised_is_refused_in_one_line(
    family: str, settings: dict[str, Any], reason: str, tiny_model: MakeModel
) -> None:
    with pytest.raises(StartupError, match="can't be quantised to int8 here: ") as caught:
        load(tiny_model(family), quantize="int8", **settings)
    assert reason in str(caught.value)
    assert "\n" not in str(caught.value)


def test_without_the_library_nothing_is_quantised(tiny_model: MakeModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("worker.torch_runner.cpu_library.load", lambda: None)
    with pytest.raises(StartupError, match="there is no library"):
        load(tiny_model("llama"), dtype="float32", quantize="int8")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_int8_logits_are_near_those_of_the_weights_that_were_rounded(dtype: str, tiny_model: MakeModel) -> None:
    """Measured: 5 to 7 % on random weights of two layers."""
    folder = tiny_model("llama")
    outputs = []
    for quantize in ("none", "int8"):
        runner = load(folder, dtype=dtype, quantize=quantize)
        driver = BatchDriver(runner)
        sequence = driver.start(prompts()[3], greedy(1, prompt_logprobs=0))
        driver.run_to_end()
        outputs.append(torch.tensor([one.log_prob for one in driver.prompt_logprobs[sequence.slot].values()]))
    assert 1e-3 < (outputs[0] - outputs[1]).norm() / outputs[0].std() / len(outputs[0]) ** 0.5 < 0.15


def test_log_probabilities_of_prompts_and_outputs_equal_the_modules(
    tiny_model: MakeModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows that are wanted beside those that sample, some of them twice: of the prompt's last token."""
    described = []
    for native in (True, False):
        if not native:
            monkeypatch.setattr("worker.torch_runner.cpu_library.load", lambda: None)
        runner = load(tiny_model("qwen2"), dtype="float32")
        assert (runner.decoder is not None) == native
        driver = BatchDriver(runner)
        sequences = [driver.start(prompt, greedy(4, logprobs=2, prompt_logprobs=2)) for prompt in prompts()]
        driver.run_to_end(chunk=50)
        described.append([(driver.prompt_logprobs.get(s.slot, {}), driver.logprobs[s.slot]) for s in sequences])
    for (prompt, output), (other_prompt, other_output) in zip(*described, strict=True):
        assert prompt.keys() == other_prompt.keys()
        pairs = [(prompt[key], other_prompt[key]) for key in prompt] + list(zip(output, other_output, strict=True))
        for one, other in pairs:
            assert (one.rank, one.top_ids) == (other.rank, other.top_ids)
            assert one.log_prob == pytest.approx(other.log_prob, abs=1e-4)


def test_padding_rows_change_nothing(tiny_model: MakeModel) -> None:
    runner = load(tiny_model("mistral"), dtype="bfloat16")
    plain = BatchDriver(runner)
    wanted = [plain.start(prompt, greedy(6)) for prompt in prompts((50, 3))]
    plain.run_to_end()
    driver = BatchDriver(runner)
    long, short = (driver.start(prompt, greedy(6)) for prompt in prompts((50, 3)))
    driver.step({long.slot: 50, short.slot: 3}, padding=[(short.slot, 47)])
    while driver.live:
        driver.step({s.slot: 1 for s in driver.live.values()}, padding=[(s.slot, 1) for s in driver.live.values()])
    assert [long.tokens, short.tokens] == [s.tokens for s in wanted]
