"""``headrace simulate`` from the outside."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from headrace import __main__ as cli
from headrace.simulate.limits_flags import changed
from headrace.simulate.main import parser
from scheduler.core.limits import Limits
from shared.config import ConfigError

SMALL = ["simulate", "--requests", "20", "--concurrency", "8", "--workload", "uniform", "--output-len", "8"]


def test_a_table_a_file_and_a_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    figures, picture = tmp_path / "figures.json", tmp_path / "run.svg"
    compare = ["--compare", "policy=static,policy=continuous+max-num-seqs=4"]
    assert cli.main([*SMALL, *compare, "--json", str(figures), "--picture", str(picture)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["variant", "policy=static", "policy=continuous+max-num-seqs=4"]
    runs = json.loads(figures.read_text())
    assert [one["served"] for one in runs] == [20, 20]
    assert picture.read_text().startswith("<?xml")


def test_json_on_stdout_and_the_same_twice(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([*SMALL, "--json"]) == 0
    first = capsys.readouterr().out
    assert cli.main([*SMALL, "--json"]) == 0
    assert first == capsys.readouterr().out
    assert json.loads(first)[0]["tokens_per_s"] > 0


@pytest.mark.parametrize("field", [one.name for one in dataclasses.fields(Limits)])
def test_every_limit_has_its_flag(field: str) -> None:
    flags = {option for action in parser()._actions for option in action.option_strings}
    assert "--" + field.replace("_", "-") in flags


def test_limits_are_read_as_what_they_are() -> None:
    read = changed(Limits(), {"max_num_seqs": "8", "admission_watermark": "0.05", "enable_prefix_caching": "off"})
    assert (read.max_num_seqs, read.admission_watermark, read.enable_prefix_caching) == (8, 0.05, False)
    with pytest.raises(ConfigError, match="--max-num-seqs: 'x' is no int"):
        changed(Limits(), {"max_num_seqs": "x"})


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        (["--model", "nope"], "unknown model 'nope'"),
        (["--gpu", "nope"], "unknown GPU 'nope'"),
        (["--model", "llama-3.1-70b"], "does not fit"),
        (["--compare", "colour=red"], "'colour=red' is no OPTION=VALUE"),
        (["--compare", "policy=nope"], "unknown policy or baseline"),
        (["--max-num-seqs", "x"], "--max-num-seqs: 'x' is no int"),
        (["--max-num-batched-tokens", "1"], "max_num_batched_tokens (1) is less than"),
        (["--requests", "0"], "at least 1"),
    ],
)
def test_bad_settings_are_one_line_and_exit_2(
    flags: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main([*SMALL, *flags])
    assert ended.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith("headrace simulate: ") and complaint in error and error.count("\n") == 1
