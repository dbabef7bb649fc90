"""``--attention-backend`` and ``--batch-invariant``, from the option to the kernel."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import pytest
from batch_driver import BatchDriver

from kernels.reference import ReferenceAttention
from shared.lifecycle import StartupError
from shared.messages import Sampling
from worker.config import WorkerConfig
from worker.torch_runner import TorchRunner, load_torch_runner

MakeModel = Callable[..., Path]


def load(folder: Path, **options: object) -> TorchRunner:
    config = WorkerConfig(model=str(folder), device="cpu", dtype="float32", kv_cache_memory="4MiB", **options)  # type: ignore[arg-type]
    return load_torch_runner(config)


def test_the_torch_kernel_serves_where_it_is_asked_for(tiny_model: MakeModel) -> None:
    folder = tiny_model("llama")
    asked = load(folder, attention_backend="torch")
    assert isinstance(asked.kernel, ReferenceAttention)
    usual = load(folder)
    tokens = []
    for runner in (asked, usual):
        driver = BatchDriver(runner)
        sequences = [
            driver.start(prompt, Sampling(1, 8, temperature=0.0, ignore_eos=True)) for prompt in ([5, 9, 11], [2] * 20)
        ]
        driver.run_to_end()
        tokens.append([sequence.tokens for sequence in sequences])
    assert tokens[0] == tokens[1]


@pytest.mark.parametrize("backend", ["flash", "triton"])
def test_a_kernel_that_cannot_serve_stops_the_start_with_its_reason(backend: str, tiny_model: MakeModel) -> None:
    with pytest.raises(StartupError, match=rf"^attention-backend {backend}: it runs on a GPU$"):
        load(tiny_model("llama"), attention_backend=backend)


def test_batch_invariance_is_accepted_on_a_cpu_and_told(
    tiny_model: MakeModel, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    runner = load(tiny_model("llama"), batch_invariant=True)
    assert f"attention by {runner.kernel.name}: batch-invariant, as it always is on a CPU" in caplog.messages


def test_batch_invariance_that_the_machine_does_not_keep_is_an_error(
    tiny_model: MakeModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("worker.torch_runner.rows_keep_their_bits", lambda *_: False)
    load(tiny_model("llama"))
    with pytest.raises(StartupError, match=r"^batch-invariant: on this machine a row's bits depend"):
        load(tiny_model("llama"), batch_invariant=True)
