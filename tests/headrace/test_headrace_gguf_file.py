"""``--model file.gguf``: converted once, again when it changes, and refused in one line where it can't be read."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_gguf import write_gguf

from headrace.__main__ import main
from headrace.models import ModelError, resolve_model
from headrace.models.cache import cache_root
from shared.model_name import model_name


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def gguf(tmp_path: Path) -> Path:
    write_gguf(tmp_path / "Tiny.Q4_1.gguf")
    return tmp_path / "Tiny.Q4_1.gguf"


def test_is_converted_once_and_served_under_its_name(gguf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    folder, name = resolve_model(str(gguf), said.append)
    assert name == "Tiny.Q4_1" == Path(folder).name == model_name(folder, "") == model_name(str(gguf), "")
    assert Path(folder).is_relative_to(cache_root())
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= set(os.listdir(folder))
    assert said[0] == "converting Tiny.Q4_1.gguf to safetensors (float32, once)"
    before = len(said)
    monkeypatch.chdir(gguf.parent)
    assert resolve_model(gguf.name, said.append) == (folder, name)
    assert len(said) == before


def test_is_converted_again_once_it_has_changed(gguf: Path) -> None:
    folder, _ = resolve_model(str(gguf), lambda line: None)
    weights = Path(folder, "model.safetensors").read_bytes()
    write_gguf(gguf, seed=1)
    assert resolve_model(str(gguf), lambda line: None)[0] == folder
    assert Path(folder, "model.safetensors").read_bytes() != weights


@pytest.mark.parametrize(
    ("asked", "complaint"),
    [
        ({"architecture": "wavtokenizer-dec"}, "can't be read: GGUF model with architecture wavtokenizer-dec"),
        ({"without": "blk.0.ffn_up"}, "lacks weights that its model needs, e.g. model.layers.0.mlp.up_proj"),
        ({"parts": 3}, "is one of 3 parts"),
        ({"rope_scaling": "yarn"}, "rope scaling 'yarn' can't be read from a GGUF"),
        ({"more_tensors": {"rope_factors_long.weight": np.ones(16, np.float32)}}, "rope_factors_long.weight can't be"),
        ({"pre": "deepseek-coder"}, "splitting 'deepseek-coder' is not known"),
    ],
)
def test_a_model_that_cannot_be_read_right_is_refused(
    asked: dict[str, Any], complaint: str, tmp_path: Path, cache: Path
) -> None:
    write_gguf(tmp_path / "x.gguf", **asked)
    with pytest.raises(ModelError) as refused:
        resolve_model(str(tmp_path / "x.gguf"), lambda line: None)
    assert complaint in str(refused.value)
    assert "\n" not in str(refused.value)
    assert not [path for path in cache.rglob("*") if path.is_dir() and (path / "config.json").exists()]


@pytest.mark.parametrize("kept", [3, 20, 200, -1])
def test_a_truncated_file_is_refused(kept: int, gguf: Path) -> None:
    whole = gguf.read_bytes()
    gguf.write_bytes(whole[: kept if kept >= 0 else len(whole) - 5000])
    with pytest.raises(ModelError, match="is not a GGUF file" if kept == 3 else "is truncated or damaged: ") as refused:
        resolve_model(str(gguf), lambda line: None)
    assert "\n" not in str(refused.value)
    if kept != 3:
        assert f"its {gguf.stat().st_size:,} bytes are not what its header tells of" in str(refused.value)


def test_a_version_that_cannot_be_read_is_named(gguf: Path) -> None:
    whole = gguf.read_bytes()
    gguf.write_bytes(whole[:4] + (1).to_bytes(4, "little") + whole[8:])
    with pytest.raises(ModelError, match="is of GGUF version 1, which can't be read"):
        resolve_model(str(gguf))


def test_what_is_no_gguf_is_refused_whatever_its_name(tmp_path: Path) -> None:
    (tmp_path / "x.gguf").write_bytes(b"PK\3\4" * 100)
    with pytest.raises(ModelError, match="is not a GGUF file"):
        resolve_model(str(tmp_path / "x.gguf"))


def test_a_disk_without_room_is_named(gguf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(gguf.parent)._replace(free=1000)
    monkeypatch.setattr("headrace.models.gguf_file.shutil.disk_usage", lambda folder: usage)
    with pytest.raises(ModelError, match="are needed in"):
        resolve_model(str(gguf), lambda line: None)


@pytest.mark.parametrize("service", ["worker", "gateway"])
def test_a_service_alone_names_a_missing_file(service: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([service, "--model", "no-such.gguf"])
    assert ended.value.code == 2
    assert capsys.readouterr().err == f"headrace {service}: no-such.gguf: no such file\n"
