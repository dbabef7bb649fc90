"""LoRA adapters on a CPU: what merging them into the weights gives, many in one batch; rows that keep their bits."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from batch_driver import BatchDriver
from safetensors.torch import load_file, save_file
from tiny_adapters import EVERY_PROJECTION, make_adapter, merged_model

from kernels.cpu.library import Library, find
from shared.lifecycle import StartupError
from shared.messages import Sampling
from worker.__main__ import load
from worker.config import WorkerConfig
from worker.linear import can_pack
from worker.lora_files import read_adapter
from worker.lora_names import are_adapters, parse_adapters
from worker.torch_runner import TorchRunner, load_torch_runner

MakeModel = Callable[..., Path]

COUNT = 5
"""Tokens that are generated."""

PACKS = can_pack(torch.float32, torch.device("cpu"))
NATIVE = isinstance(find(), Library)


def prompts_of(*lengths: int) -> list[list[int]]:
    rng = random.Random(5)
    return [[rng.randrange(3, 296) for _ in range(length)] for length in lengths]


def greedy(count: int, **more: Any) -> Sampling:
    return Sampling(seed=0, max_tokens=count, temperature=0.0, ignore_eos=True, **more)


def generated(model: Any, prompt: list[int], count: int) -> list[int]:
    out = model.generate(
        torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt), dtype=torch.int64), max_new_tokens=count,
        do_sample=False, eos_token_id=None,
    )  # fmt: skip
    return out[0, len(prompt) :].tolist()  # type: ignore[no-any-return]


@pytest.fixture(scope="session")
def adapters(tiny_model: MakeModel, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Of the tiny Llama: one of every projection, one of a few with another rank."""
    folder = tmp_path_factory.mktemp("adapters")
    model = tiny_model("llama")
    return {
        "all": str(make_adapter(folder / "all", model)),
        "some": str(make_adapter(folder / "some", model, ("q_proj", "v_proj", "down_proj"), rank=3, seed=1)),
    }


CASES: dict[str, tuple[str, dict[str, Any], tuple[str, ...]]] = {
    "llama": ("llama", {}, EVERY_PROJECTION),
    "phi3, merged projections": ("phi3", {}, ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")),
    "gpt2, transposed": ("gpt2", {"n_embd": 64, "n_layer": 2, "n_head": 4}, ("c_attn", "c_proj", "c_fc")),
}


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("case", CASES)
def test_each_request_of_a_mixed_batch_gets_the_tokens_of_its_merged_model(
    case: str, tiny_model: MakeModel, tmp_path: Path
) -> None:
    family, config, targets = CASES[case]
    folder = tiny_model(family, **config)
    folders = {name: make_adapter(tmp_path / name, folder, targets, seed=seed) for seed, name in enumerate("ab")}
    runner = TorchRunner.load(
        folder, dtype="float64", num_blocks=60, adapters={name: str(path) for name, path in folders.items()}
    )
    assert runner.capacity.adapters == ["a", "b"]
    whose = ["a", "", "b", "a", "b"]
    prompts = prompts_of(9, 9, 9, 30, 1)
    prompts[1] = prompts[2] = prompts[0]
    driver = BatchDriver(runner)
    sequences = [
        driver.start(prompt, greedy(COUNT), adapter=adapter) for prompt, adapter in zip(prompts, whose, strict=True)
    ]
    driver.run_to_end(chunk=17)
    models = {name: merged_model(folder, folders.get(name)) for name in ("", "a", "b")}
    wanted = [generated(models[adapter], prompt, COUNT) for prompt, adapter in zip(prompts, whose, strict=True)]
    assert [sequence.tokens for sequence in sequences] == wanted
    assert len({tuple(tokens) for tokens in wanted[:3]}) == 3, "the adapters change nothing"


class Seen:
    """The logits that a runner samples from, by request and position."""

    def __init__(self, runner: TorchRunner) -> None:
        self.rows: dict[tuple[str, int], torch.Tensor] = {}
        inner = runner.logits

        def logits(batch, rows, prompts=()):  # type: ignore[no-untyped-def]
            out = inner(batch, rows, prompts)
            for row, values in zip([row for row in rows if row.sample], out, strict=not prompts):
                self.rows[row.slot.request_id, row.start + row.count] = values.clone()
            return out

        runner.logits = logits  # type: ignore[method-assign]


def kinds() -> list[str]:
    bf16 = can_pack(torch.bfloat16, torch.device("cpu"))
    return ["float32", "bfloat16"] if bf16 else ["float32"]


@pytest.mark.usefixtures("one_thread")
@pytest.mark.skipif(not PACKS, reason="without oneDNN no promise is made for a CPU")
@pytest.mark.parametrize("dtype", kinds())
@pytest.mark.parametrize("backend", ["auto", "torch"])
def test_a_row_has_the_same_bits_whatever_adapters_are_beside_it(
    backend: str, dtype: str, tiny_model: MakeModel, adapters: dict[str, str]
) -> None:
    prompts = prompts_of(40, 6, 67, 1)
    whose = ["all", "", "some", "all"]
    runner = TorchRunner.load(
        tiny_model("llama"), dtype=dtype, num_blocks=64, adapters=adapters, attention_backend=backend, self_check=False,
        num_threads=2 if backend == "auto" else None,
    )  # fmt: skip
    assert (runner.decoder is not None) == (NATIVE and backend == "auto")
    seen = Seen(runner)
    outcomes = []
    for schedule in ("alone", "together", "chunks"):
        found: dict[tuple[int, int], torch.Tensor] = {}
        if schedule == "alone":
            for number, (prompt, adapter) in enumerate(zip(prompts, whose, strict=True)):
                driver = BatchDriver(runner)
                driver.start(prompt, Sampling(seed=number, max_tokens=COUNT, ignore_eos=True), adapter=adapter)
                driver.run_to_end()
                found |= {(number, position): row for (_, position), row in seen.rows.items()}
                seen.rows.clear()
        else:
            driver = BatchDriver(runner)
            for number, (prompt, adapter) in enumerate(zip(prompts, whose, strict=True)):
                driver.start(prompt, Sampling(seed=number, max_tokens=COUNT, ignore_eos=True), adapter=adapter)
            driver.run_to_end(chunk=512 if schedule == "together" else 23)
            found = {(int(name.split("-")[1]), position): row for (name, position), row in seen.rows.items()}
            seen.rows.clear()
        outcomes.append(found)
    for other in outcomes[1:]:
        assert other.keys() == outcomes[0].keys()
        for place, row in outcomes[0].items():
            assert torch.equal(row, other[place]), place


@pytest.mark.usefixtures("one_thread")
@pytest.mark.skipif(not PACKS, reason="without oneDNN no promise is made for a CPU")
@pytest.mark.parametrize("backend", ["auto", "torch"])
def test_rows_without_an_adapter_keep_the_bits_of_a_worker_that_has_none(
    backend: str, tiny_model: MakeModel, adapters: dict[str, str]
) -> None:
    rows = []
    for have in ({}, adapters):
        runner = TorchRunner.load(
            tiny_model("llama"), dtype="float32", num_blocks=64, adapters=have, attention_backend=backend,
            self_check=bool(have),
        )  # fmt: skip
        seen = Seen(runner)
        driver = BatchDriver(runner)
        for number, prompt in enumerate(prompts_of(40, 5, 19)):
            driver.start(prompt, greedy(COUNT), adapter="all" if have and number == 1 else "")
        driver.run_to_end(chunk=16)
        rows.append({place: row for place, row in seen.rows.items() if place[0] != "request-1"})
    assert rows[0].keys() == rows[1].keys()
    assert all(torch.equal(row, rows[1][place]) for place, row in rows[0].items())


@pytest.mark.usefixtures("one_thread")
@pytest.mark.skipif(not NATIVE, reason="the C++ kernels are not built or turned off")
@pytest.mark.parametrize("quantize", ["none", "int8"])
def test_beside_the_decoder_rows_with_adapters_run_over_its_weights(
    quantize: str, tiny_model: MakeModel, adapters: dict[str, str]
) -> None:
    folder = tiny_model("llama")
    runner = TorchRunner.load(
        folder, dtype="float32", num_blocks=64, adapters=adapters, quantize=quantize, self_check=False
    )
    assert runner.decoder is not None
    seen = Seen(runner)
    prompts = prompts_of(33, 12)
    driver = BatchDriver(runner)
    for prompt, adapter in zip(prompts, adapters, strict=True):
        driver.start(prompt, greedy(1), adapter=adapter)
    driver.start(prompts[0], greedy(1))
    driver.run_to_end()
    for number, (prompt, adapter) in enumerate(zip(prompts, adapters, strict=True)):
        merged = merged_model(folder, Path(adapters[adapter]))
        with torch.no_grad():
            wanted = merged(torch.tensor([prompt])).logits[0, -1]
        off = (seen.rows[f"request-{number}", len(prompt)] - wanted).norm() / wanted.norm()
        assert off < (1e-4 if quantize == "none" else 0.2), (adapter, off)


@pytest.mark.skipif(not NATIVE, reason="no C++ library here")
@pytest.mark.usefixtures("one_thread")
def test_rows_with_adapters_have_the_threads_of_the_options_and_sampling_has_one(
    tiny_model: MakeModel, adapters: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tiny_model("llama")
    config = WorkerConfig(
        model=str(folder), dtype="float32", device="cpu", threads=2, kv_cache_memory="1MiB",
        lora=f"all={adapters['all']}",
    )  # fmt: skip
    monkeypatch.setattr("worker.torch_runner.rows_keep_their_bits", lambda *_: True)
    runner = load_torch_runner(config)
    assert runner.decoder is not None
    seen: list[int] = []
    run = runner._run
    monkeypatch.setattr(runner, "_run", lambda *given: (seen.append(torch.get_num_threads()), run(*given))[1])
    driver = BatchDriver(runner)
    driver.start(prompts_of(9)[0], greedy(1), adapter="all")
    driver.run_to_end()
    assert seen == [2]
    assert torch.get_num_threads() == 1


@pytest.mark.usefixtures("one_thread")
def test_prompts_are_described_the_same_in_company_of_other_adapters(
    tiny_model: MakeModel, adapters: dict[str, str]
) -> None:
    runner = TorchRunner.load(tiny_model("llama"), dtype="float32", num_blocks=64, adapters=adapters, self_check=False)
    prompts = prompts_of(30, 21, 8)
    how = greedy(3, logprobs=2, prompt_logprobs=1)
    told = []
    for company in (False, True):
        described, tokens = [], []
        drivers = [BatchDriver(runner)] if company else [BatchDriver(runner) for _ in prompts]
        for number, (prompt, adapter) in enumerate(zip(prompts, ("", "all", "some"), strict=True)):
            driver = drivers[0 if company else number]
            tokens.append(driver.start(prompt, how, adapter=adapter))
            if not company:
                driver.run_to_end(chunk=11)
        if company:
            drivers[0].run_to_end(chunk=11)
        for number, sequence in enumerate(tokens):
            driver = drivers[0 if company else number]
            described.append((driver.prompt_logprobs[sequence.slot], driver.logprobs[sequence.slot], sequence.tokens))
        told.append(described)
    assert told[0] == told[1]


@pytest.mark.usefixtures("one_thread")
def test_an_adapter_that_is_not_here_fails_the_step(tiny_model: MakeModel, adapters: dict[str, str]) -> None:
    driver = BatchDriver(
        TorchRunner.load(tiny_model("llama"), dtype="float32", num_blocks=20, adapters=adapters, self_check=False)
    )
    driver.start([5, 6, 7], greedy(2), adapter="other")
    with pytest.raises(ValueError, match="no adapter 'other'"):
        driver.run_to_end()


# --- files ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "ranks", "factor"),
    [
        ({"lora_alpha": 12}, {}, {"q_proj": 3.0, "v_proj": 3.0}),
        ({"lora_alpha": 12, "use_rslora": True}, {}, {"q_proj": 6.0, "v_proj": 6.0}),
        ({"lora_alpha": 12, "alpha_pattern": {"q_proj": 2, "layers.1.self_attn.v_proj": 4}}, {}, {"q_proj": 0.5}),
        ({"lora_alpha": 12, "rank_pattern": {"v_proj": 2}}, {"v_proj": 2}, {"q_proj": 3.0, "v_proj": 6.0}),
        ({"lora_alpha": 12, "alpha_pattern": {r".*\.1\..*": 4}}, {}, {}),
    ],
)
def test_alpha_ranks_and_patterns_make_the_scale(
    config: dict[str, Any], ranks: dict[str, int], factor: dict[str, float], tiny_model: MakeModel, tmp_path: Path
) -> None:
    folder = make_adapter(tmp_path, tiny_model("llama"), ("q_proj", "v_proj"), ranks=ranks, **config)
    tensors = load_file(folder / "adapter_model.safetensors")
    changes = read_adapter("a", str(folder), torch.float64).changes
    assert len(changes) == 4
    for path, change in changes.items():
        own = factor.get(path.rpartition(".")[2], 3.0)
        if "alpha_pattern" in config and path == "model.layers.1.self_attn.v_proj":
            own = 1.0
        if "alpha_pattern" in config and ".1." in path and not factor:
            own = 1.0
        up = tensors[f"base_model.model.{path}.lora_B.weight"].double()
        assert torch.equal(change.up, own * up), path
        assert torch.equal(change.down, tensors[f"base_model.model.{path}.lora_A.weight"].double())


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"peft_type": "IA3"}, "of the type 'IA3'"),
        ({"use_dora": True}, "DoRA"),
        ({"bias": "lora_only"}, "changes biases"),
        ({"modules_to_save": ["embed_tokens"]}, "whole layers of its own"),
        ({"target_parameters": ["experts.gate_up_proj"]}, "no linear layers"),
        ({"arrow_config": {"top_k": 3}}, "Arrow"),
        ({"use_bdlora": {"nblocks": 2}}, "block-diagonal"),
        ({"init_lora_weights": "pissa"}, "initialisation 'pissa' has changed"),
        ({"init_lora_weights": "pissa_niter_16"}, "initialisation 'pissa_niter_16' has changed"),
        ({"init_lora_weights": "OLoRA"}, "initialisation 'OLoRA' has changed"),
        ({"init_lora_weights": "corda"}, "initialisation 'corda' has changed"),
        ({"init_lora_weights": "loftq"}, "initialisation 'loftq' has changed"),
        ({"init_lora_weights": "lora_ga"}, "initialisation 'lora_ga' has changed"),
        ({"alpha_pattern": ["q_proj"]}, "alpha_pattern is no object"),
        ({"lora_alpha": 1e40}, "not finite"),
        ({"alpha_pattern": {"(": 1}}, "no regular expression"),
        ({"lora_alpha": "much"}, "could not convert"),
    ],
)
def test_settings_that_are_not_served_are_refused(
    config: dict[str, Any], reason: str, tiny_model: MakeModel, tmp_path: Path
) -> None:
    folder = make_adapter(tmp_path, tiny_model("llama"), ("q_proj",), **config)
    with pytest.raises(StartupError, match=reason) as refusal:
        read_adapter("sql", str(folder), torch.float32)
    assert "'sql'" in str(refusal.value) and "\n" not in str(refusal.value)


@pytest.mark.parametrize("how", [True, False, "gaussian", "eva", "orthogonal"])
def test_an_initialisation_that_leaves_the_base_model_as_it_is_is_served(
    how: bool | str, tiny_model: MakeModel, tmp_path: Path
) -> None:
    folder = make_adapter(tmp_path, tiny_model("llama"), ("q_proj",), init_lora_weights=how)
    assert read_adapter("sql", str(folder), torch.float32).changes


def test_files_that_are_missing_or_damaged_are_refused(tiny_model: MakeModel, tmp_path: Path) -> None:
    def refused(reason: str) -> None:
        with pytest.raises(StartupError, match=reason):
            read_adapter("sql", str(folder), torch.float32)

    folder = tmp_path / "nowhere"
    refused("no such folder")
    make_adapter(folder, tiny_model("llama"), ("q_proj",))
    weights, config = folder / "adapter_model.safetensors", folder / "adapter_config.json"
    tensors = load_file(weights)
    some = next(key for key in tensors if "lora_A" in key)

    save_file({**tensors, "base_model.model.model.embed_tokens.lora_embedding_A": torch.zeros(2, 2)}, weights)
    refused("weights for base_model.model.model.embed_tokens")
    save_file({key: one for key, one in tensors.items() if key != some}, weights)
    refused("it has weights for")
    save_file({**tensors, some: torch.zeros(600, 64)}, weights)
    refused("do not fit together")
    save_file({**tensors, some: torch.full_like(tensors[some], float("nan"))}, weights)
    refused("not finite")
    save_file({}, weights)
    refused("no weights")
    weights.write_bytes(b"\0" * 20)
    refused("can't be read")
    weights.rename(folder / "adapter_model.bin")
    refused("a pickle")
    config.write_text("[")
    refused("no JSON")
    config.write_text(json.dumps([1]))
    refused("no object")
    config.unlink()
    refused("adapter_config.json")


@pytest.mark.parametrize(
    ("family", "reason"),
    [("qwen3_moe", "gate_proj is no linear layer in the model's blocks"), ("mistral", "for .*, not for")],
)
def test_an_adapter_of_another_model_is_refused(
    family: str, reason: str, tiny_model: MakeModel, tmp_path: Path
) -> None:
    other = tiny_model(family, **({"intermediate_size": 96} if family == "mistral" else {}))
    folder = make_adapter(tmp_path, tiny_model("llama"), ("gate_proj",))
    with pytest.raises(StartupError, match=reason):
        TorchRunner.load(other, dtype="float32", num_blocks=20, adapters={"sql": str(folder)})


def test_the_head_is_not_served(tiny_model: MakeModel, tmp_path: Path) -> None:
    folder = make_adapter(tmp_path, tiny_model("llama"), ("lm_head",))
    with pytest.raises(StartupError, match="lm_head is no linear layer in the model's blocks"):
        TorchRunner.load(tiny_model("llama"), dtype="float32", num_blocks=20, adapters={"sql": str(folder)})


def test_the_option_names_folders() -> None:
    assert parse_adapters(" sql=/a/b , chat = ./c=d,") == {"sql": "/a/b", "chat": "./c=d"}
    assert parse_adapters("") == {}
    assert are_adapters("sql=/a") is None
    for wrong in ("sql", "=x", "sql=", "a=1,a=2", f"{'n' * 300}=x", "a\tb=x"):
        assert "NAME=FOLDER" in (are_adapters(wrong) or ""), wrong


def test_what_can_not_be_together_is_refused_at_start() -> None:
    with pytest.raises(StartupError, match="divided over ranks"):
        load(WorkerConfig(model="m", lora="sql=/a", tensor_parallel=2))
    with pytest.raises(StartupError, match="a name of its own"):
        load(WorkerConfig(model="/some/base", served_model_name="sql", lora="sql=/a"))


def test_a_folder_that_is_not_there_is_known_before_the_model_is_loaded(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match=r"'sql' \(/nowhere\) can't be served: there is no such folder"):
        load(WorkerConfig(model="/no/such/model", lora="sql=/nowhere"))
    with pytest.raises(StartupError, match=r"has no adapter_config\.json"):
        load(WorkerConfig(model="/no/such/model", lora=f"sql={tmp_path}"))


def test_a_simulated_worker_has_adapters_by_name() -> None:
    runner = load(WorkerConfig(model="m", simulate=True, lora="sql=/nowhere,law=/nowhere")).runner
    assert runner.capacity.adapters == ["sql", "law"]


def test_weights_in_halves_round_once(tiny_model: MakeModel, tmp_path: Path) -> None:
    folder = make_adapter(tmp_path, tiny_model("llama"), ("q_proj",), rank=3, lora_alpha=7)
    [*_, change] = read_adapter("a", str(folder), torch.bfloat16).changes.values()
    exact = [*read_adapter("a", str(folder), torch.float64).changes.values()][-1]
    assert torch.equal(change.up, exact.up.to(torch.bfloat16)) and change.up.dtype == torch.bfloat16
    assert np.isclose(float(exact.up.abs().max()), float(change.up.abs().max()), rtol=1e-2)
