"""Configuration of ``headrace up``: every service's options, from flags, file and environment; errors are one line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from headrace.settings import UpSettings, read_settings


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder without a headrace.toml."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def service(settings: UpSettings, name: str) -> Any:
    return settings.services[name]


def test_defaults() -> None:
    settings = read_settings([], {})
    assert (settings.schedulers, read_settings(["--schedulers", "3"], {}).schedulers) == (1, 3)
    assert (settings.workers, settings.model, settings.served_model_name) == (1, "default", "")
    assert settings.own_nats
    assert service(settings, "gateway").port == 8000


def test_a_flag_reaches_every_service_that_has_the_option() -> None:
    settings = read_settings(["--mesh", "m", "--max-num-seqs", "7", "--block-size", "32", "--port", "81"], {})
    assert {config.mesh for config in settings.services.values()} == {"m"}
    assert service(settings, "scheduler").max_num_seqs == 7
    assert service(settings, "worker").block_size == 32
    assert service(settings, "gateway").port == 81


def test_flags_win_over_environment_over_file(elsewhere: Path) -> None:
    file = elsewhere / "my.toml"
    file.write_text('[mesh]\nlog-level = "error"\n[scheduler]\nmax-num-seqs = 1\nrun_ahead = 1\n')
    environ = {"HEADRACE_MAX_NUM_SEQS": "2", "HEADRACE_BLOCK_SIZE": "8"}
    settings = read_settings(["--config", str(file), "--block-size", "4"], environ)
    assert service(settings, "scheduler").max_num_seqs == 2
    assert service(settings, "scheduler").run_ahead == 1
    assert service(settings, "worker").block_size == 4
    assert {config.log_level for config in settings.services.values()} == {"error"}


def test_headrace_toml_of_the_current_folder_is_read_unless_one_is_named(elsewhere: Path) -> None:
    (elsewhere / "headrace.toml").write_text("[gateway]\nport = 9001\n")
    (elsewhere / "other.toml").write_text("[gateway]\nport = 9002\n")
    assert service(read_settings([], {}), "gateway").port == 9001
    assert service(read_settings([], {"HEADRACE_CONFIG": "other.toml"}), "gateway").port == 9002
    assert service(read_settings(["--config", "other.toml"], {}), "gateway").port == 9002


@pytest.mark.parametrize(
    ("argv", "environ", "toml", "complaint"),
    [
        (["--no-such-flag"], {}, "", "--no-such-flag"),
        (["--max-num-seqs", "many"], {}, "", "--max-num-seqs: 'many' is no int"),
        (["--max-num-seqs", "0"], {}, "", "must be at least 1"),
        (["--kv-cache-memory", "5XB"], {}, "", "--kv-cache-memory: '5XB' is no size; write e.g. 1GiB"),
        (["--swap-space", "-1"], {}, "", "--swap-space: '-1' is no usable size"),
        (["--port", "65536"], {}, "", "must be between 0 and 65535"),
        (["--policy", "lifo"], {}, "", "none of continuous"),
        (["--workers", "0"], {}, "", "--workers: '0' must be a number from 1"),
        (["--schedulers", "0"], {}, "", "--schedulers: '0' must be a number from 1 to 8"),
        (["--schedulers", "9"], {}, "", "--schedulers: '9' must be a number from 1 to 8"),
        (["--workers", "two"], {}, "", "--workers: 'two' must be a number from 1"),
        (["--config", "absent.toml"], {}, "", "absent.toml: No such file"),
        ([], {"HEADRACE_MAX_NUM_SEQ": "3"}, "", "unknown environment variable HEADRACE_MAX_NUM_SEQ"),
        ([], {"HEADRACE_BLOCK_SIZE": "x"}, "", "HEADRACE_BLOCK_SIZE: 'x' is no int"),
        ([], {}, "[scheduler]\nmax-num-seq = 3\n", "unknown key 'max-num-seq' in [scheduler]"),
        ([], {}, "[schedular]\n", "unknown table [schedular]"),
        ([], {}, "[mesh]\nmeshh = 'x'\n", "unknown key 'meshh' in [mesh]"),
        ([], {}, "port = 3\n", "outside a table"),
        ([], {}, "[gateway\n", "headrace.toml"),
        ([], {}, "[gateway]\nmodel = 'a'\n[worker]\nmodel = 'b'\n", "model differs between services: a, b"),
    ],
)
def test_a_bad_setting_is_one_line_and_exit_2(
    argv: list[str], environ: dict[str, str], toml: str, complaint: str,
    elsewhere: Path, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    if toml:
        (elsewhere / "headrace.toml").write_text(toml)
    with pytest.raises(SystemExit) as ended:
        read_settings(argv, environ)
    assert ended.value.code == 2
    error = capsys.readouterr().err
    assert complaint in error
    assert error.startswith("headrace up: ")
    assert error.count("\n") == 1


def test_the_model_cache_variable_is_no_unknown_setting() -> None:
    read_settings([], {"HEADRACE_CACHE": "/somewhere", "PATH": "/bin"})


@pytest.mark.parametrize("where", ["flag", "environment", "file"])
def test_naming_a_nats_server_means_not_running_one(where: str, elsewhere: Path) -> None:
    url = "nats://127.0.0.1:4222"  # the default address, but asked for
    argv = ["--nats", url] if where == "flag" else []
    environ = {"HEADRACE_NATS": url} if where == "environment" else {}
    if where == "file":
        (elsewhere / "headrace.toml").write_text(f'[mesh]\nnats = "{url}"\n')
    assert not read_settings(argv, environ).own_nats


def test_a_model_given_to_one_service_is_everyones(elsewhere: Path) -> None:
    (elsewhere / "headrace.toml").write_text("[worker]\nmodel = '/models/a'\n[gateway]\nserved-model-name = 'a'\n")
    settings = read_settings([], {})
    assert (settings.model, settings.served_model_name) == ("/models/a", "a")
