"""``headrace capacity``: the arithmetic people do by hand."""

from __future__ import annotations

import json

import pytest

from headrace import __main__ as cli
from headrace.capacity import capacity
from headrace.simulate.hardware import Deployment, gpu_named, model_named


def test_three_answers_for_13b_on_an_a100() -> None:
    found = capacity(Deployment(model_named("llama-2-13b"), gpu_named("a100-40")), 16, [2048])
    assert found.kv_bytes_per_token == 819_200
    assert found.weight_bytes == pytest.approx(26.0e9, rel=0.002)
    assert [round(row.kv_bytes / 1e9, 1) for row in found.assumptions] == [14.0, 12.0, 11.1]
    assert [round(row.sequences[2048], 1) for row in found.assumptions] == [8.3, 7.2, 6.6]


def test_lengths_take_whole_blocks() -> None:
    deployment = Deployment(model_named("llama-3.1-8b"), gpu_named("h100"))
    one = capacity(deployment, 16, [17]).assumptions[0]
    assert one.sequences[17] == pytest.approx(one.kv_bytes / (32 * 131_072))


def test_a_pool_one_knows(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["capacity", "--model", "llama-3.1-8b", "--gpu", "h200", "--kv-gb", "20", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["assumptions"]
    assert rows[-1]["text"] == "20 GB, as given"
    assert rows[-1]["kv_tokens"] == 152_587


def test_the_text_names_its_assumptions(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["capacity"]) == 0
    text = capsys.readouterr().out
    for words in ("llama-2-13b on a100-40", "800 KiB", "less weights", "the vLLM paper", "activations", "8.3", "7.2"):
        assert words in text


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        (["--model", "nope"], "unknown model"), (["--gpu", "nope"], "unknown GPU"), (["--length", "0"], "at least 1"),
        (["--memory-share", "1.5"], "--memory-share"), (["--kv-gb", "-1"], "--kv-gb is above 0"),
        (["--activations-gb", "-1"], "--activations-gb is at least 0"),
        (["--tp", "3"], "--tp 3: the 40 attention heads of llama-2-13b cannot be shared evenly"),
        (["--model", "llama-3.1-70b", "--gpu", "h100"], "llama-3.1-70b (141.1 GB of weights) does not fit 1 x h100"),
        (["--model", __file__], "test_headrace_capacity.py is no config.json: "),
    ],
)  # fmt: skip
def test_bad_settings_are_one_line_and_exit_2(
    flags: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["capacity", *flags])
    assert ended.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith("headrace capacity: ") and complaint in error and error.count("\n") == 1


def test_help_says_the_defaults(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["capacity", "--help"])
    text = capsys.readouterr().out
    assert "(default: llama-2-13b)" in text and "(default: a100-40)" in text
