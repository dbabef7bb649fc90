"""The ``headrace`` command: subcommands, exit codes, one-line errors."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from headrace import __main__ as cli
from headrace import __version__
from headrace.models.default import DEFAULT_MODEL_ID, DEFAULT_VOCAB_SIZE
from headrace.services import SERVICES
from shared.config import parse_service
from worker.__main__ import load_runner
from worker.config import WorkerConfig


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["version"]) == 0
    assert capsys.readouterr().out == f"headrace {__version__}\n"


@pytest.mark.parametrize(
    ("argv", "complaint"),
    [
        (["fly"], "headrace: argument COMMAND: invalid choice: 'fly'"),
        (["version", "--loud"], "headrace version: unrecognized arguments: --loud"),
        (["worker", "--block-size", "x"], "headrace worker: --block-size: 'x' is no int"),
        (["gateway", "--config", "/no/such/file"], "headrace gateway: /no/such/file: No such file"),
        (["fetch-model", "/no/such/model"], "headrace fetch-model: /no/such/model: no such folder"),
    ],
)
def test_a_bad_command_line_is_one_line_and_exit_2(
    argv: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(argv)
    assert ended.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith(complaint)
    assert error.count("\n") == 1


@pytest.mark.parametrize("argv", [["version"], ["capacity", "--json"], ["config-docs"]])
def test_a_reader_that_leaves_ends_it_quietly(argv: list[str]) -> None:
    read, write = os.pipe()
    os.close(read)
    try:
        ended = subprocess.run([sys.executable, "-m", "headrace", *argv], stdout=write, stderr=subprocess.PIPE)
    finally:
        os.close(write)
    assert (ended.returncode, ended.stderr) == (cli.CLOSED_PIPE, b"")


def test_an_interrupted_command_says_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(argv: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr("headrace.capacity.main", interrupted)
    assert cli.main(["capacity"]) == cli.INTERRUPTED
    assert capsys.readouterr() == ("", "")


def test_help_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main([])
    assert ended.value.code == 0
    text = capsys.readouterr().out
    assert all(f"  {name} " in text for name in cli.COMMANDS)


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The command lines that services would have been started with."""
    calls: list[list[str]] = []

    def main(argv: list[str]) -> int:
        calls.append(argv)
        return 7

    monkeypatch.setattr("headrace.services.Service.main", lambda service: main)
    return calls


def test_a_service_gets_its_own_command_line(started: list[list[str]]) -> None:
    argv = ["--nats", "nats://10.0.0.1:4222", "--max-num-seqs", "3"]
    assert cli.main(["scheduler", *argv]) == 7
    assert started == [argv]


@pytest.mark.parametrize("service", ["gateway", "worker"])
def test_the_default_model_is_made_a_folder_for_a_service(
    service: str, started: list[list[str]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def resolve(spec: str, *_: Any) -> tuple[str, str]:
        assert spec == "default"
        return str(tmp_path), "name"

    monkeypatch.setattr("headrace.models.resolve_model", resolve)
    cli.main([service, "--model", "default", "--log-level", "error"])
    cli.main([service, "--model", "org/other"])
    assert started == [
        ["--model", "default", "--log-level", "error", "--model", str(tmp_path)],
        ["--model", "org/other"],
    ]


def test_a_simulated_worker_fetches_nothing_and_is_met_by_gateways_of_the_same_model(
    started: list[list[str]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def resolve(spec: str, *_: Any) -> tuple[str, str]:
        raise AssertionError("it needs no weights")

    monkeypatch.setattr("headrace.models.resolve_model", resolve)
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "config.json").write_text('{"vocab_size": 77}')
    for argv, name, vocab_size in (
        ([], DEFAULT_MODEL_ID, DEFAULT_VOCAB_SIZE),
        (["--model", "default"], DEFAULT_MODEL_ID, DEFAULT_VOCAB_SIZE),
        (["--served-model-name", "x", "--simulate-vocab-size", "9"], "x", 9),
        (["--model", str(folder)], "mine", 77),
        (["--model", "org/name"], "org/name", 32000),
    ):
        cli.main(["worker", "--simulate", *argv])
        worker = parse_service(WorkerConfig, "worker", "worker", started.pop())
        capacity = load_runner(worker).capacity
        assert (capacity.model, capacity.vocab_size) == (name, vocab_size), argv


def test_a_missing_dependency_names_the_extra(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def main(service: object) -> None:
        raise ModuleNotFoundError("No module named 'uvicorn'", name="uvicorn")

    monkeypatch.setattr("headrace.services.Service.main", main)
    with pytest.raises(SystemExit) as ended:
        cli.main(["gateway", "--model", "org/some"])
    assert ended.value.code == 2
    assert capsys.readouterr().err == "headrace: uvicorn is not installed; pip install 'headrace[gateway]'\n"


@pytest.mark.parametrize("service", SERVICES)
def test_the_declarations_bring_no_torch(service: str) -> None:
    program = f"import sys, {service}.config, headrace.__main__; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program]).returncode == 0
