"""Structured output and forced tool calls through a whole mesh: valid for every seed, streamed or not, and the same
under preemption."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tiny_models import make_tiny_model
from tool_templates import save_tokenizer
from whole_mesh import BYTES_PER_BLOCK, FLOAT32, Mesh, at_once, running_mesh

pytestmark = [pytest.mark.mesh, pytest.mark.timeout(600)]

TIGHT_BLOCKS = 56  # two or three of ten answers at once
SEEDS = range(10)
CHAT = "/v1/chat/completions"
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "tags": {"type": "array", "items": {"enum": ["a", "bb", "ccc"]}, "minItems": 8, "maxItems": 12},
        "count": {"type": "integer", "minimum": 0, "maximum": 999},
    },
    "required": ["name", "tags", "count"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "store", "parameters": SCHEMA}}
CLOCK = {"type": "function", "function": {"name": "clock"}}
ASK: dict[str, Any] = {
    "messages": [{"role": "user", "content": "Store it."}], "max_tokens": 500, "temperature": 1.0, "logprobs": True,
}  # fmt: skip
FORMAT = {"type": "json_schema", "json_schema": {"name": "thing", "strict": True, "schema": SCHEMA}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = make_tiny_model(tmp_path_factory.mktemp("tools") / "model", seed=9, initializer_range=0.1)
    return save_tokenizer("hermes", made)


@pytest.fixture(scope="module")
def ample(folder: Path) -> Iterator[Mesh]:
    with running_mesh(folder, worker=(*FLOAT32, "--kv-cache-memory", "32MiB")) as mesh:
        yield mesh


@pytest.fixture(scope="module")
def tight(folder: Path) -> Iterator[Mesh]:
    memory = str(TIGHT_BLOCKS * BYTES_PER_BLOCK)
    with running_mesh(
        folder, worker=(*FLOAT32, "--kv-cache-memory", memory), scheduler=("--no-growth-aware-admission",)
    ) as mesh:
        yield mesh


def check(text: str) -> None:
    thing = json.loads(text)
    assert list(thing) == ["name", "tags", "count"]
    assert len(thing["name"]) <= 12
    assert 8 <= len(thing["tags"]) <= 12
    assert set(thing["tags"]) <= {"a", "bb", "ccc"}
    assert thing["count"] in range(1000)


def chunks(mesh: Mesh, **body: Any) -> list[dict[str, Any]]:
    """The choices of a stream's events."""
    with mesh.http.stream("POST", CHAT, json={"model": mesh.model, "stream": True, **body}) as reply:
        assert reply.status_code == 200
        lines = [line.removeprefix("data: ") for line in reply.iter_lines() if line.startswith("data: {")]
    return [json.loads(line)["choices"][0] for line in lines]


def formatted(mesh: Mesh, seed: int) -> dict[str, Any]:
    (choice,) = mesh.answer(CHAT, **ASK, seed=seed, response_format=FORMAT)["choices"]
    return choice  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def texts(ample: Mesh) -> list[str]:
    choices = at_once([lambda seed=seed: formatted(ample, seed) for seed in SEEDS])
    assert {choice["finish_reason"] for choice in choices} == {"stop"}
    return [choice["message"]["content"] for choice in choices]


def test_a_schema_is_kept_for_every_seed(texts: list[str]) -> None:
    for text in texts:
        check(text)
    assert len(set(texts)) == len(texts)


def test_streamed_it_is_the_same(ample: Mesh, texts: list[str]) -> None:
    def streamed(seed: int) -> str:
        deltas = chunks(ample, **ASK, seed=seed, response_format=FORMAT)
        return "".join(delta["delta"].get("content", "") for delta in deltas)

    assert at_once([lambda seed=seed: streamed(seed) for seed in SEEDS]) == texts
    assert [streamed(seed) for seed in SEEDS[:2]] == texts[:2], "alone in the batch, too"


def test_preemption_changes_nothing(tight: Mesh, texts: list[str]) -> None:
    choices = at_once([lambda seed=seed: formatted(tight, seed) for seed in SEEDS])
    assert [choice["message"]["content"] for choice in choices] == texts
    assert tight.metrics(tight.scheduler)["vllm:num_preemptions_total"] > 0
    tight.quiescence()


def test_choices_of_one_prompt(ample: Mesh) -> None:
    choices = ample.answer(CHAT, **ASK, n=4, seed=3, response_format=FORMAT)["choices"]
    for choice in choices:
        check(choice["message"]["content"])
    assert len({choice["message"]["content"] for choice in choices}) > 1


def test_long_grammars_of_many_choices_are_no_message_too_long(ample: Mesh) -> None:
    schema = {"type": "boolean", "description": "x" * 60_000}  # with every start of a choice: 1.4 MB for all
    answer = ample.answer(prompt="x", max_tokens=9, n=24, structured_outputs={"json": schema})
    assert {choice["text"] for choice in answer["choices"]} <= {"true", "false"}


@pytest.mark.parametrize(
    ("constraint", "texts"),
    [
        ({"choice": ["yes", "no", "maybe so"]}, {"yes", "no", "maybe so"}),
        ({"grammar": 'start: "a" ("b" | "c")'}, {"ab", "ac"}),
        ({"grammar": 'root ::= "a" [xy]'}, {"ax", "ay"}),
        ({"regex": "[0-9]{3}/z"}, {f"{number:03}/z" for number in range(1000)}),
    ],
)
def test_the_other_constraints(ample: Mesh, constraint: dict[str, Any], texts: set[str]) -> None:
    def choice(seed: int) -> dict[str, Any]:
        body = {"prompt": "x", "max_tokens": 40, "seed": seed, "structured_outputs": constraint}
        return ample.answer(**body)["choices"][0]  # type: ignore[no-any-return]

    for made in at_once([lambda seed=seed: choice(seed) for seed in SEEDS]):
        assert made["text"] in texts
        assert made["finish_reason"] == "stop"


def calls_of(choice: dict[str, Any]) -> list[tuple[str, str]]:
    called = [call["function"] for call in choice["message"]["tool_calls"]]
    return [(function["name"], function["arguments"]) for function in called]


def streamed_calls(choices: list[dict[str, Any]]) -> list[tuple[str, str]]:
    calls: list[tuple[str, str]] = []
    for delta in (delta for choice in choices for delta in choice["delta"].get("tool_calls", [])):
        if delta["index"] == len(calls):
            calls.append((delta["function"]["name"], ""))
        name, arguments = calls[delta["index"]]
        calls[delta["index"]] = (name, arguments + delta["function"]["arguments"])
    return calls


def test_a_call_is_required(ample: Mesh) -> None:
    every = {**ASK, "tools": [TOOL, CLOCK], "tool_choice": "required", "parallel_tool_calls": False}
    bodies = [every | {"seed": seed} for seed in range(4)]
    whole = at_once([lambda body=body: ample.answer(CHAT, **body)["choices"] for body in bodies])
    streams = at_once([lambda body=body: streamed_calls(chunks(ample, **body)) for body in bodies])
    for (choice,), stream in zip(whole, streams, strict=True):
        (call,) = calls_of(choice)
        assert choice["finish_reason"] == "tool_calls"
        if call[0] == "store":
            check(call[1])
        else:
            assert (call[0], json.loads(call[1])) == ("clock", {})
        assert stream == [call]


def test_one_function_is_forced(ample: Mesh) -> None:
    named = {"type": "function", "function": {"name": "store"}}
    (choice,) = ample.answer(CHAT, **ASK, tools=[CLOCK, TOOL], tool_choice=named, seed=5)["choices"]
    ((name, arguments),) = calls_of(choice)
    assert name == "store"
    check(arguments)


def test_a_model_that_may_call_but_does_not(ample: Mesh) -> None:
    body = {**ASK, "max_tokens": 30, "seed": 1, "ignore_eos": True, "tools": [TOOL]}
    (choice,) = ample.answer(CHAT, **body)["choices"]
    text = "".join(delta["delta"].get("content", "") for delta in chunks(ample, **body))
    assert choice["message"]["content"] == text
    assert choice["finish_reason"] == "length"
