"""Beam search and best_of end to end: gateway, scheduler, torch worker in float64, against ``transformers``."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from loopback_http import HTTP
from mesh_stack import stack
from test_whole_mesh import serve
from tiny_models import make_tiny_model
from transformers import AutoModelForCausalLM, AutoTokenizer

pytestmark = [pytest.mark.mesh, pytest.mark.timeout(600)]

PROMPTS = ("hello", "a prompt of sixteen", "beam search keeps several of them", "x")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tiny") / "model", seed=5)


@pytest.fixture(scope="module")
def url(folder: Path) -> Iterator[str]:
    with stack() as mesh:
        yield serve(mesh, folder, worker=("--dtype", "float64", "--kv-cache-memory", "4MiB", "--threads", "1"))


@pytest.fixture(scope="module")
def reference(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)


def complete(url: str, **body: Any) -> dict[str, Any]:
    reply = HTTP.post(url + "/v1/completions", json={"model": "m", **body}, timeout=120)
    assert reply.status_code == 200, reply.text
    answer: dict[str, Any] = reply.json()
    return answer


@pytest.mark.parametrize("penalty", [1.0, 0.0, 2.0])
@pytest.mark.parametrize("width", [2, 4])
def test_beam_search_finds_what_transformers_finds(
    url: str, folder: Path, reference: Any, width: int, penalty: float
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    for prompt in PROMPTS:
        ids = tokenizer(prompt, return_tensors="pt").input_ids
        out = reference.generate(
            ids, attention_mask=torch.ones_like(ids), num_beams=width, num_return_sequences=width, do_sample=False,
            length_penalty=penalty, max_new_tokens=14,
        )  # fmt: skip
        want = [tokenizer.decode(row[ids.shape[1] :], skip_special_tokens=True) for row in out]
        answer = complete(
            url, prompt=prompt, use_beam_search=True, n=width, length_penalty=penalty, max_tokens=14, temperature=0
        )
        assert [choice["text"] for choice in answer["choices"]] == want
        assert [choice["index"] for choice in answer["choices"]] == list(range(width))


def test_one_beam_is_greedy_and_best_of_widens_the_beam(url: str) -> None:
    for prompt in PROMPTS:
        greedy = complete(url, prompt=prompt, temperature=0, max_tokens=12)["choices"][0]["text"]
        assert complete(url, prompt=prompt, use_beam_search=True, max_tokens=12)["choices"][0]["text"] == greedy
        wide = complete(url, prompt=prompt, use_beam_search=True, n=4, max_tokens=12)["choices"]
        best = complete(url, prompt=prompt, use_beam_search=True, n=1, best_of=4, max_tokens=12)["choices"]
        assert [choice["text"] for choice in best] == [wide[0]["text"]]


def test_best_of_gives_the_likeliest_choices_and_counts_all(url: str, folder: Path, reference: Any) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = tokenizer(PROMPTS[1]).input_ids
    body = {"prompt": ids, "temperature": 1.0, "seed": 11, "max_tokens": 10, "ignore_eos": True}
    every = complete(url, **body, n=6)
    best = complete(url, **body, n=2, best_of=6)
    texts = [choice["text"] for choice in every["choices"]]
    chosen = [choice["text"] for choice in best["choices"]]
    assert len(chosen) == 2 and set(chosen) <= set(texts)
    assert best["usage"]["completion_tokens"] == every["usage"]["completion_tokens"] == 60
    assert [choice["index"] for choice in best["choices"]] == [0, 1]


def test_ranked_choices_cannot_be_streamed(url: str) -> None:
    for body in ({"use_beam_search": True}, {"n": 1, "best_of": 2}, {"n": 3, "best_of": 2}):
        reply = HTTP.post(url + "/v1/completions", json={"model": "m", "prompt": "x", "stream": True, **body})
        assert reply.status_code == 400 and reply.json()["error"]["param"] in ("stream", "best_of")


def test_choices_and_beams_share_the_prompts_blocks(url: str) -> None:
    answer = complete(url, prompt=PROMPTS[2], n=8, temperature=1.0, seed=3, max_tokens=6, ignore_eos=True)
    assert len({choice["text"] for choice in answer["choices"]}) > 1
    again = complete(url, prompt=PROMPTS[2], n=8, temperature=1.0, seed=3, max_tokens=6, ignore_eos=True)
    assert [c["text"] for c in again["choices"]] == [c["text"] for c in answer["choices"]]
