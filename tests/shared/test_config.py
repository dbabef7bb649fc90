"""One loader: defaults, file, environment, flags, in that order; what is unknown or wrong is an error."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from shared.config import (
    MAX_FILE_BYTES,
    ConfigError,
    MeshConfig,
    at_least,
    check_keys,
    option,
    parse_service,
    resolve,
    size_bytes,
)


@dataclass(frozen=True)
class ToyConfig(MeshConfig):
    """A toy."""

    max_num_seqs: int = option(64, "sequences", check=at_least(1))
    share: float = option(0.5, "share")
    enable_it: bool = option(True, "switch")
    longest: int | None = option(None, "longest")
    kind: str = option("a", "kind", choices=("a", "b"))


def toml(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "headrace.toml"
    path.write_text(text)
    return path


def test_later_sources_win(tmp_path: Path) -> None:
    file = toml(tmp_path, '[mesh]\nmesh = "m"\nother-service-key = 1\n[toy]\nmax-num-seqs = 1\nshare = 1\nkind = "b"\n')
    environ = {"HEADRACE_MAX_NUM_SEQS": "2", "HEADRACE_SHARE": "0.25"}
    config = resolve(ToyConfig, "toy", {"max_num_seqs": "3", "share": None}, file=file, environ=environ)
    assert (config.mesh, config.max_num_seqs, config.share, config.kind, config.enable_it) == ("m", 3, 0.25, "b", True)


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("[toy]\nmax_seqs = 1\n", "max_seqs"),
        ("[toy]\nmax_num_seqs = 0\n", "at least 1"),
        ("[toy]\nmax_num_seqs = true\n", "max_num_seqs"),
        ("[toy]\nmax_num_seqs = 1.5\n", "max_num_seqs"),
        ("[toy]\nshare = nan\n", "not a number"),
        ("[toy]\nenable_it = 3\n", "enable_it"),
        ("[toy]\nkind = 'c'\n", "none of a, b"),
        ("[toy]\nkind = 7\n", "kind"),
        ("[toy]\nkind = ['a']\n", "kind"),
        ("stray = 1\n", "outside a table"),
        ("[toy", "headrace.toml"),
    ],
)
def test_what_is_wrong_in_a_file_is_named(tmp_path: Path, text: str, names: str) -> None:
    with pytest.raises(ConfigError, match=names):
        resolve(ToyConfig, "toy", {}, file=toml(tmp_path, text), environ={})


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nowhere"):
        resolve(ToyConfig, "toy", {}, file=tmp_path / "nowhere.toml", environ={})


def test_unknown_keys_anywhere_are_errors(tmp_path: Path) -> None:
    declared = {"toy": ToyConfig}
    check_keys(declared, file=toml(tmp_path, "[mesh]\nshare = 1\n"), environ={"HEADRACE_SHARE": "1", "OTHER": "x"})
    with pytest.raises(ConfigError, match="HEADRACE_SHRAE"):
        check_keys(declared, file=None, environ={"HEADRACE_SHRAE": "1"})
    with pytest.raises(ConfigError, match=r"\[toys\]"):
        check_keys(declared, file=toml(tmp_path, "[toys]\n"), environ={})
    with pytest.raises(ConfigError, match="shrae"):
        check_keys(declared, file=toml(tmp_path, "[mesh]\nshrae = 1\n"), environ={})


def test_flags_and_their_negation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.environ", {})
    assert parse_service(ToyConfig, "toy", "toy", ["--no-enable-it", "--longest", "7"]).longest == 7
    assert parse_service(ToyConfig, "toy", "toy", ["--no-enable-it"]).enable_it is False


@pytest.mark.parametrize("argv", [["--max-num-seqs", "x"], ["--nonsense"], ["--kind", "c"], ["--config", "/nowhere"]])
def test_a_bad_command_line_is_one_line_and_exit_2(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        parse_service(ToyConfig, "toy", "toy", argv)
    assert caught.value.code == 2
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize(
    "content", [b"a=" + b"[" * 500, b"a=" + b"9" * 5000, b"\xff\xfe", b"\0", b"#" * (MAX_FILE_BYTES + 1)],
    ids=["deep", "long number", "no UTF-8", "NUL", "large"],
)  # fmt: skip
def test_a_file_of_any_content_is_one_line_and_exit_2(
    tmp_path: Path, content: bytes, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "headrace.toml").write_bytes(content)
    with pytest.raises(SystemExit) as caught:
        parse_service(ToyConfig, "toy", "toy", ["--config", str(tmp_path / "headrace.toml")])
    assert caught.value.code == 2
    told = capsys.readouterr().err
    assert told.count("\n") == 1 and "headrace.toml: " in told


@pytest.mark.parametrize(
    ("text", "want"), [("1GiB", 1 << 30), ("512MiB", 1 << 29), ("2g", 2 << 30), ("1.5k", 1536), ("7", 7)]
)
def test_sizes(text: str, want: int) -> None:
    assert size_bytes(text) == want


@pytest.mark.parametrize("text", ["", "GiB", "-1", "1e400", "nan", "many"])
def test_sizes_that_are_none(text: str) -> None:
    with pytest.raises(ConfigError):
        size_bytes(text)
