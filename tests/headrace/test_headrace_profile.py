"""``headrace profile``: the parts of a step add up to it, whoever tells them, and bad flags are one line."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tiny_models import make_tiny_model

from headrace.__main__ import main
from headrace.profile import phases, roofline, steps
from headrace.profile.roofline import Machine, Weights
from headrace.profile.steps import Load
from kernels.cpu import library
from worker.torch_runner import TorchRunner


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("profiled") / "tiny")


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(roofline, "MATRICES", 1)
    monkeypatch.setattr(roofline, "SHAPE", (32, 32))
    monkeypatch.setattr(roofline, "READ_BYTES", 1 << 16)


def profile(folder: Path, capsys: pytest.CaptureFixture[str], *flags: str) -> str:
    assert main(["profile", "--model", str(folder), "--threads", "1", "--steps", "2", "--context", "20", *flags]) == 0
    return capsys.readouterr().out


FLOAT32 = ("--dtype", "float32", "--batch", "1,5", "--chunk", "33")


@pytest.fixture
def without_library(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As on a machine without a compiler; the environment is looked at once in a process, and others came first."""
    with monkeypatch.context() as patch:
        patch.setenv("HEADRACE_CPU_ISA", "none")
        library.find.cache_clear()
        yield
    library.find.cache_clear()


@pytest.mark.usefixtures("without_library")
def test_an_op_by_op_model_is_divided_by_the_torch_profiler(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = json.loads(profile(folder, capsys, *FLOAT32, "--json", "--temperature", "1"))
    assert [step["load"] for step in found["steps"]] == ["batch 1", "batch 5", "chunk 33"]
    assert (found["dtype"], found["threads"]) == ("float32", 1)
    for step in found["steps"]:
        parts = step["parts"]
        assert sum(parts.values()) == pytest.approx(step["seconds"])
        for part in (steps.MESSAGES, phases.GEMM, phases.ATTENTION, phases.ELEMENTWISE, phases.LOGITS, phases.SAMPLING):
            assert parts[part] > 0, part
        assert parts[phases.UNDIVIDED] == 0
        assert step["bound_seconds"] > 0


def test_the_table_has_a_column_for_each_load_and_the_machines_limits(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = profile(folder, capsys, *FLOAT32)
    heading = text.splitlines()[0]
    assert heading.startswith("tiny, float32, 1 threads; ms")
    assert heading.split()[-6:] == ["batch", "1", "batch", "5", "chunk", "33"]
    for row in ("messages", "GEMM", "whole step", "bound by the roofline", "bfloat16 products", "memory read: "):
        assert row in text


def test_a_runner_that_tells_its_phases_is_believed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = TorchRunner.load(folder, dtype="float32", num_blocks=16, num_threads=1, self_check=False)
    told = {"embed": 1e-6, "norm": 2e-6, "qkv": 3e-6, "down": 4e-6, "attention": 5e-6, "logits": 6e-6, "sample": 7e-6}
    asked: list[int] = []

    def phase_times() -> dict[str, float]:
        asked.append(1)
        return told

    monkeypatch.setattr(runner, "phase_times", phase_times, raising=False)
    monkeypatch.setattr(steps, "traced", None)  # nothing is traced
    found = steps.profile_load(runner, Load(2, 20), 0.0, 3)
    assert len(asked) == 4  # once to begin, then after each step
    wanted = {phases.ELEMENTWISE: 3e-6, phases.GEMM: 7e-6, phases.ATTENTION: 5e-6, phases.LOGITS: 6e-6,
              phases.SAMPLING: 7e-6}  # fmt: skip
    assert {kind: found.parts[kind] for kind in wanted} == pytest.approx(wanted)
    assert sum(found.parts.values()) == pytest.approx(found.total)


def test_a_phase_that_nobody_knows_is_no_silent_zero() -> None:
    with pytest.raises(KeyError, match="fused"):
        phases.by_kind({"fused": 1.0})


@pytest.mark.skipif(library.load() is None, reason="rounded weights are the C++ library's")
def test_rounded_weights_are_profiled_and_their_bytes_are_the_bound(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ("--dtype", "float32", "--batch", "1", "--chunk", "")
    plain, rounded = (
        json.loads(profile(folder, capsys, *flags, "--quantize", scheme, "--json")) for scheme in ("none", "int8")
    )
    assert (plain["quantize"], rounded["quantize"]) == ("none", "int8")
    assert profile(folder, capsys, *flags, "--quantize", "int8").startswith("tiny, float32, int8 weights, 1 threads")


@pytest.mark.usefixtures("without_library")
def test_rounded_weights_without_the_library_are_refused_in_one_line(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["profile", "--model", str(folder), "--quantize", "int8"])
    assert ended.value.code == 2 and capsys.readouterr().err.count("\n") == 1


@pytest.mark.usefixtures("without_library")
def test_tracing_leaves_the_runner_as_it_was(folder: Path) -> None:
    runner = TorchRunner.load(folder, dtype="float32", num_blocks=16, num_threads=1, self_check=False)
    before = (dict(vars(runner.kernel)), phases.torch_runner.sample, dict(vars(runner.model.module.lm_head)))
    phases.traced(runner, lambda: None)
    assert (vars(runner.kernel), phases.torch_runner.sample, vars(runner.model.module.lm_head)) == before


def test_weights_are_counted_in_the_models_files(folder: Path, tmp_path: Path) -> None:
    per_layer = 64 * 64 * 2 + 64 * 32 * 2 + 3 * 64 * 112
    assert roofline.weights_of(folder) == Weights(2 * per_layer, 320 * 64)
    tied = make_tiny_model(tmp_path, tie_word_embeddings=True)
    assert roofline.weights_of(tied) == Weights(2 * per_layer, 320 * 64)  # the embedding is the head


def test_the_bound_is_memory_for_one_row_and_arithmetic_for_many() -> None:
    machine = Machine(1, {"float32": {1: 1e9, 512: 4e9}}, bandwidth=1e9)
    weights = Weights(layers=1000, head=500)
    assert roofline.bound_s(Load(1, 10), weights, machine, "float32", 8) == (1500 * 4 + 80) / 1e9
    assert roofline.bound_s(Load(64, 0), weights, machine, "float32", 8) == 2 * 64 * 1500 / 4e9
    assert roofline.bound_s(Load(1, 0, 64), weights, machine, "float32", 8) == 2 * (64 * 1000 + 500) / 4e9
    rounded = Weights(layers=1000, head=500, item_bytes=1)
    assert roofline.bound_s(Load(1, 10), rounded, machine, "float32", 8) == (1500 + 80) / 1e9


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        (["--batch", "1,x"], "--batch: 'x' is no number from 1 to 4096"),
        (["--chunk", "0"], "--chunk: '0' is no number from 1 to 4096"),
        (["--batch", "", "--chunk", ""], "neither --batch nor --chunk asks for a step"),
        (["--context", "0"], "--context: 0 is less than 1"),
        (["--steps", "0"], "--steps: 0 is less than 1"),
        (["--threads", "-1"], "--threads and --temperature must not be negative"),
        (["--model", "/no/such/folder"], "/no/such/folder: no such folder"),
        (["--dtype", "int4"], "argument --dtype: invalid choice: 'int4'"),
    ],
)
def test_what_cannot_be_run_is_one_line(flags: list[str], complaint: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["profile", *flags])
    errors = capsys.readouterr().err
    assert ended.value.code == 2
    assert errors.startswith(f"headrace profile: {complaint}")
    assert errors.count("\n") == 1


def test_a_context_that_the_model_has_not_is_one_line(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["profile", "--model", str(folder), "--context", "4000", "--batch", "1", "--threads", "1"])
    assert ended.value.code == 2
    assert "the model has 2048" in capsys.readouterr().err


def test_threads_are_the_whole_processs() -> None:
    machine = roofline.measure([4], (torch.float32,))
    assert machine.threads == torch.get_num_threads()
    assert machine.gemm["float32"][4] > 0 < machine.bandwidth
