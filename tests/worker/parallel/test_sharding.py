"""A divided model says what the whole one says, whatever its plan asks for; and which models can't be divided."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from rank_process import greedy
from tiny_models import make_config_folder
from transformers import AutoConfig

from shared.lifecycle import StartupError
from worker.parallel.sharding import divide

HERE = Path(__file__).parent


def over_ranks(size: int, folders: list[Path]) -> list[list[object]]:
    """What each rank says of each model."""
    paths = [HERE.parents[2], HERE.parent, HERE.parents[1]]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths))}

    def start(rank: int, port: str) -> subprocess.Popen[str]:
        command = [sys.executable, str(HERE / "rank_process.py"), str(rank), str(size), port, *map(str, folders)]
        return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True)

    first = start(0, "0")
    assert first.stdout is not None
    port = first.stdout.readline().strip()
    processes = [first, *(start(rank, port) for rank in range(1, size))]
    try:
        return [json.loads(process.communicate(timeout=240)[0]) for process in processes]
    finally:
        for process in processes:
            process.kill()


def test_two_ranks_say_what_one_says(tiny_model: Callable[..., Path]) -> None:
    kinds: dict[str, Path] = {
        "plain": tiny_model("llama"),
        "tied, of an odd vocabulary": tiny_model("llama", vocab_size=321, tie_word_embeddings=True),
        "untied, of an odd vocabulary": tiny_model("llama", vocab_size=321),
        "one key/value head for both ranks": tiny_model("llama", num_key_value_heads=1),
        "biases": tiny_model("llama", attention_bias=True, mlp_bias=True),
        "packed projections": tiny_model("phi3"),
        "norms over all heads, of gathered projections": tiny_model("olmo2"),
        "capped logits and windows": tiny_model("gemma2"),
        "experts": tiny_model("qwen3_moe"),
    }
    said = over_ranks(2, list(kinds.values()))
    for number, (kind, folder) in enumerate(kinds.items()):
        assert said[0][number] == said[1][number], f"{kind}: the ranks differ"
        assert said[0][number] == greedy(str(folder)), kind


@pytest.mark.parametrize(
    ("family", "config", "size", "reason"),
    [
        ("llama", {"num_attention_heads": 9, "num_key_value_heads": 3}, 2, "its 9 attention heads can't be divided"),
        ("llama", {"num_attention_heads": 12, "num_key_value_heads": 3}, 2, "its 3 key/value heads can be neither"),
        ("llama", {"intermediate_size": 110}, 4, "the 110 features of model.layers.0.mlp.gate_proj can't be divided"),
        ("gpt2", {}, 2, "transformers has no tensor-parallel plan for it"),
        ("gpt_oss", {}, 2, "transformers has no tensor-parallel plan for it"),
    ],
)
def test_what_cannot_be_divided_is_one_line(
    tmp_path: Path, family: str, config: dict[str, int], size: int, reason: str
) -> None:
    shape = {"num_hidden_layers": 2, "vocab_size": 320, "hidden_size": 216, "intermediate_size": 112}
    folder = make_config_folder(tmp_path, family, **({"num_attention_heads": 4} | shape | config))
    with pytest.raises(StartupError, match=rf"^model 'm' \({family}\) can't be divided over {size} ranks: {reason}"):
        divide("m", AutoConfig.from_pretrained(folder), size)
