"""A row's bits are its own: logits are bit-equal alone, in company, and with the prompt in chunks; so are tokens."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from batch_driver import BatchDriver
from torch import nn

from shared.messages import Sampling
from worker import torch_runner
from worker.linear import PackedLinear, can_pack
from worker.self_check import rows_keep_their_bits
from worker.torch_runner import TorchRunner

MakeModel = Callable[..., Path]

FAMILIES = ["llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3_text", "phi3", "qwen3_moe"]

pytestmark = pytest.mark.skipif(
    not can_pack(torch.float32, torch.device("cpu")), reason="without oneDNN no promise is made for a CPU"
)


def kinds() -> list[str]:
    bf16 = can_pack(torch.bfloat16, torch.device("cpu"))
    return ["float32", "bfloat16"] if bf16 else ["float32"]  # emulated bfloat16 is not promised anything


class Recorder:
    """Keeps the logits that a runner samples from, by (slot, position)."""

    def __init__(self, runner: TorchRunner) -> None:
        self.seen: dict[tuple[str, int], torch.Tensor] = {}
        inner = runner.logits

        def logits(batch, rows, prompts=()):  # type: ignore[no-untyped-def]
            out = inner(batch, rows, prompts)
            for row, values in zip([row for row in rows if row.sample], out, strict=not prompts):
                self.seen[row.slot.request_id, row.start + row.count] = values.clone()
            return out

        runner.logits = logits  # type: ignore[method-assign]


@pytest.mark.parametrize("dtype", kinds())
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_bit_equal_alone_in_company_and_in_chunks(family: str, dtype: str, tiny_model: MakeModel) -> None:
    folder = tiny_model(family)
    rng = random.Random(3)
    prompts = [[rng.randrange(3, 296) for _ in range(n)] for n in (137, 6, 61, 255, 1, 19)]
    sampling = [Sampling(seed=11 + n, max_tokens=9, temperature=float(n % 2), ignore_eos=True) for n in range(6)]
    outcomes = []
    for schedule in ("alone", "together", "chunks"):
        runner = TorchRunner.load(folder, dtype=dtype, num_blocks=64, self_check=False)
        recorder = Recorder(runner)
        tokens = []
        seen = {}
        if schedule == "alone":
            for number, (prompt, how) in enumerate(zip(prompts, sampling, strict=True)):
                driver = BatchDriver(runner)
                sequence = driver.start(prompt, how)
                driver.run_to_end()
                tokens.append(sequence.tokens)
                seen |= {(number, position): row for (_, position), row in recorder.seen.items()}
                recorder.seen.clear()
        else:
            driver = BatchDriver(runner)
            sequences = [driver.start(prompt, how) for prompt, how in zip(prompts, sampling, strict=True)]
            driver.run_to_end(chunk=512 if schedule == "together" else 23)
            tokens = [sequence.tokens for sequence in sequences]
            seen = {(int(name.split("-")[1]), position): row for (name, position), row in recorder.seen.items()}
        outcomes.append((tokens, seen))
    (tokens, seen), *others = outcomes
    for other_tokens, other_seen in others:
        assert other_seen.keys() == seen.keys()
        assert [key for key in seen if not torch.equal(seen[key], other_seen[key])] == []
        assert other_tokens == tokens


@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_the_self_check_passes_here(family: str, tiny_model: MakeModel) -> None:
    assert rows_keep_their_bits(TorchRunner.load(tiny_model(family), dtype="float32", num_blocks=64, self_check=False))


def test_the_self_check_notices_rows_that_lean_on_each_other(
    tiny_model: MakeModel, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Leaning(PackedLinear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * (1 + 1e-3 * (x.shape[1] > 100))

    class Loading:
        def __call__(self, *args, **kwargs):  # type: ignore[no-untyped-def]
            model = load_model(*args[:3])  # module by module, without the C++ library
            for module in list(model.module.modules()):
                for child in module.children():
                    if isinstance(child, PackedLinear):
                        child.__class__ = Leaning
            return model

    load_model = torch_runner.load_model
    monkeypatch.setattr(torch_runner, "load_model", Loading())
    TorchRunner.load(tiny_model("llama"), dtype="float32", num_blocks=64)
    assert "bits depend on the rows beside it" in caplog.text


def test_every_linear_layer_is_packed(tiny_model: MakeModel) -> None:
    module = TorchRunner.load(tiny_model("qwen3_moe"), dtype="float32", num_blocks=64, self_check=False).model.module
    assert not [name for name, child in module.named_modules() if type(child) is nn.Linear]
    assert not [name for name, weight in module.named_parameters() if "expert" in name]
