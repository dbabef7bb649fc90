"""``headrace simulate`` from the outside."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from headrace import __main__ as cli
from headrace.bench import goodput
from headrace.bench import report as bench_report
from headrace.output_file import check_writable
from headrace.simulate import report
from headrace.simulate.limits_flags import changed
from headrace.simulate.main import parser
from headrace.text_table import Column
from scheduler.core.limits import Limits
from shared.config import ConfigError

SMALL = ["simulate", "--requests", "20", "--concurrency", "8", "--workload", "uniform", "--output-len", "8"]


def test_a_table_a_file_and_a_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    figures, picture = tmp_path / "figures.json", tmp_path / "run.svg"
    compare = ["--compare", "policy=static,policy=continuous+max-num-seqs=4"]
    assert cli.main([*SMALL, *compare, "--json", str(figures), "--picture", str(picture)]) == 0
    about, *lines = capsys.readouterr().out.splitlines()
    for said in ("llama-3.1-8b on a100-80", "workload uniform", "20 requests, closed loop of 8", "2000 ms", "100 ms"):
        assert said in about
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
        (["--requests", "0"], "--requests: 0 is not at least 1"),
        (["--workers", "0"], "--workers: 0 is not at least 1"),
        (["--tp", "0"], "--tp: 0 is not at least 1"),
        (["--roles", "writer=1"], "'writer=1' is no ROLE=COUNT"),
        (["--workers", "2", "--roles", "prefill=1,decode=2"], "names 3 workers, of 2"),
        (["--compare", "roles=prefill=1/decode=1+workers=1"], "names 2 workers, of 1"),
        (["--plan-roles"], "--plan-roles goes with --roles"),
        (["--compare", "plan-roles=maybe"], "--plan-roles: 'maybe' is no bool"),
        (["--roles", "prefill=1,decode=1", "--policy", "static"], "--roles goes with --policy continuous only"),
        (["--link-us", "9"], "--link-us goes with --roles only"),
        (["--compare", "link-gbit=4,link-gbit=100"], "--link-gbit goes with --roles only"),
        (["--link-gbit", "0"], "--link-gbit: 0.0 is not at least 0.001"),
        (["--tp", "3"], "cannot be shared evenly"),
        (["--block-size", "0"], "--block-size: 0 is not at least 1"),
        (["--kv-tokens", "-5"], "--kv-tokens: -5 is not at least 0"),
        (["--kv-tokens", "10"], "--kv-tokens: 10 is less than one block"),
        (["--compare", "kv-tokens=10"], "--kv-tokens: 10 is less than one block"),
        (["--compare", "model=llama-3.1-8b,model=llama-3.1-70b"], "does not fit"),
        (["--compare", "target-itl-ms=x"], "--target-itl-ms: 'x' is no finite number"),
        (["--compare", ""], "'' is no OPTION=VALUE"),
        (["--prompt-len", "0"], "--prompt-len: 0 is not at least 1"),
        (["--t0-ms", "-5"], "--t0-ms: -5.0 is not at least 0"),
        (["--rate", "inf"], "--rate: inf is not at least 0"),
        (["--max-num-seqs", "0"], "max_num_seqs (0) is at least 1"),
        (["--length-quantile", "7"], "length_quantile (7.0) is above 0 and below 1"),
        (["--target-itl-ms", "nan"], "--target-itl-ms: 'nan' is no finite number"),
        (["--rate", "5"], "--concurrency does not go with --rate"),
        (["--arrivals", "steady"], "--arrivals goes with --rate only"),
        (["--workload", "chat"], "--output-len goes with --workload uniform only"),
        (["--prefixes", "3"], "--prefixes goes with --workload prefix only"),
        (["--prompt-len", "100000"], "100008 tokens are longer than --max-model-len 8192"),
        (["--picture", "/no/such/folder/x.svg"], "--picture /no/such/folder/x.svg: No such file or directory"),
        (["--picture", "x.doc"], "--picture x.doc: a name that ends in none of .svg"),
        (["--json", "/no/such/folder/o.json"], "--json /no/such/folder/o.json: No such file or directory"),
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


def test_limits_in_the_units_of_the_service(capsys: pytest.CaptureFixture[str]) -> None:
    read = parser().parse_args(["--target-itl-ms", "30", "--max-bypass-wait-s=0.5"])
    limits = changed(Limits(), vars(read))
    assert (limits.target_itl_ns, limits.max_bypass_wait_ns) == (30_000_000, 500_000_000)
    assert cli.main([*SMALL, "--compare", "target-itl-ms=30,target-itl-ns=30000000"]) == 0
    in_ms, in_ns = (line.split()[1:] for line in capsys.readouterr().out.splitlines()[2:])
    assert in_ms == in_ns


def test_roles_make_the_workers_and_show_their_moves(capsys: pytest.CaptureFixture[str]) -> None:
    compare = ["--compare", "workers=2,roles=prefill=1/decode=1,roles=prefill=1/decode=1+plan-roles=true"]
    assert cli.main([*SMALL, *compare, "--json"]) == 0
    mixed, split, planned = json.loads(capsys.readouterr().out)
    assert mixed["moves"] == 0 and split["moves"] == planned["moves"] > 10
    assert cli.main([*SMALL, "--roles", "prefill=1,decode=1"]) == 0
    head = capsys.readouterr().out.splitlines()[1]
    assert "moved GB" in head
    assert cli.main(SMALL) == 0
    assert "moved GB" not in capsys.readouterr().out


def test_requests_that_are_cut_are_told(capsys: pytest.CaptureFixture[str]) -> None:
    few = ["simulate", "--requests", "5", "--concurrency", "5", "--workload", "document"]
    assert cli.main(few) == 0
    assert "of them cut to 8192 tokens" in capsys.readouterr().out.splitlines()[0]
    assert cli.main([*few, "--max-model-len", "32768"]) == 0
    assert "cut" not in capsys.readouterr().out.splitlines()[0]


def test_help_says_the_defaults(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["simulate", "--help"])
    text = " ".join(capsys.readouterr().out.split())
    for default in ("llama-3.1-8b", "a100-80", "chat", "2000", "512", "2000.0", "100.0", "continuous"):
        assert f"(default: {default})" in text


def test_a_file_that_can_be_made_is_not_left_behind_and_one_that_is_there_is_kept(tmp_path: Path) -> None:
    new, old = tmp_path / "new", tmp_path / "old"
    old.write_text("kept")
    check_writable(new, "--json")
    check_writable(old, "--json")
    assert not new.exists() and old.read_text() == "kept"
    with pytest.raises(ConfigError, match="Is a directory"):
        check_writable(tmp_path, "--json")


def test_figures_that_cannot_be_written_are_not_computed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["simulate", "figures", "--write", __file__])
    assert ended.value.code == 2
    assert capsys.readouterr().err == f"headrace simulate figures: --write {__file__}: File exists\n"


@pytest.mark.parametrize("columns", [report._COLUMNS, bench_report._COLUMNS, goodput._COLUMNS])
def test_no_two_columns_of_a_table_have_the_same_heading(columns: Sequence[Column]) -> None:
    headings = [heading for heading, _, _ in columns]
    assert len(set(headings)) == len(headings)
