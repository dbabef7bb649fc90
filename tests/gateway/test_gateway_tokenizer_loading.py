"""What is named as the gateway's model and has no tokenizer that can be used is refused in one line."""

from __future__ import annotations

from pathlib import Path

import pytest

from gateway.tokenizer import PromptTokenizer
from shared.lifecycle import StartupError


def test_a_file_is_refused_and_what_makes_a_folder_of_it_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "x.gguf").write_bytes(b"GGUF")
    monkeypatch.chdir(tmp_path)
    for model in ("x.gguf", str(tmp_path / "x.gguf")):
        with pytest.raises(StartupError, match=r"is a file; 'headrace fetch-model \S*x.gguf'"):
            PromptTokenizer.load(model)


def test_a_missing_folder_is_named() -> None:
    with pytest.raises(StartupError, match=r"model folder \./nowhere does not exist"):
        PromptTokenizer.load("./nowhere")
