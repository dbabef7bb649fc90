"""Acceptance cases of kind A, API validation: B01 to B07. Hostile input gets a 4xx in OpenAI's shape."""

from __future__ import annotations

import time
from typing import Any

import httpx
import pytest
from oracles import CANARY, refused, streamed, survival
from whole_mesh import SIMULATED, VOCAB_SIZE, Mesh, at_once, eventually, memory_bytes, running_mesh

pytestmark = pytest.mark.mesh

COMPLETIONS, CHAT, GENERATE = "/v1/completions", "/v1/chat/completions", "/generate"
HELLO = [{"role": "user", "content": "hello"}]
CONTEXT = 2048


def raw(mesh: Mesh, body: bytes, path: str = COMPLETIONS) -> httpx.Response:
    return mesh.http.post(path, content=body, headers={"content-type": "application/json"})


# --- B01 --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "prompt",
    ["", [""], [], [[]], [VOCAB_SIZE], [-1], [2**63], [2**64], [1.5], [True], [[5], [VOCAB_SIZE]], [[5], []], ["a", 5]],
    ids=str,
)
def test_b01_prompts_that_are_none_are_refused(mesh: Mesh, prompt: Any) -> None:
    with survival(mesh):
        refused(mesh.post(prompt=prompt, max_tokens=2))


def test_b01_the_bound_is_the_embedding_not_the_tokenizer(mesh: Mesh) -> None:
    with survival(mesh):
        assert mesh.answer(prompt=[VOCAB_SIZE - 1], max_tokens=2)["usage"]["prompt_tokens"] == 1


# --- B02 --------------------------------------------------------------------------------------------------------------

NUMBERS = ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty",
           "length_penalty")  # fmt: skip
NO_NUMBERS = ("NaN", "Infinity", "-Infinity", "1e999", "-1e999", '"NaN"', "[]", "true")
OUT_OF_RANGE = (
    ("temperature", "-1"), ("temperature", "2.1"), ("top_p", "-0.1"), ("top_p", "1.1"), ("top_p", "0"),
    ("presence_penalty", "10"), ("presence_penalty", "-2.1"), ("frequency_penalty", "2.1"),
    ("repetition_penalty", "0"), ("repetition_penalty", "-1"), ("min_p", "1.1"), ("top_k", "-2"), ("top_k", "1.5"),
)  # fmt: skip


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT, GENERATE])
def test_b02_numbers_that_are_none_or_out_of_range_are_refused(mesh: Mesh, path: str) -> None:
    prompt = '"messages": [{"role": "user", "content": "x"}]' if path == CHAT else '"prompt": "x"'
    with survival(mesh):
        for field, value in (*((field, value) for field in NUMBERS for value in NO_NUMBERS), *OUT_OF_RANGE):
            refused(raw(mesh, f'{{{prompt}, "max_tokens": 2, "{field}": {value}}}'.encode(), path), 400, 422)


# --- B03 --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize("value", [0, -1, 1.5, "5", True, 10**9, 2**64, [5]], ids=str)
def test_b03_max_tokens_at_the_edges(mesh: Mesh, path: str, value: Any) -> None:
    prompt = {"messages": HELLO} if path == CHAT else {"prompt": "hello"}
    error = refused(mesh.post(path, **prompt, max_tokens=value))
    assert error["param"] == "max_tokens"
    if value == 10**9:
        assert str(CONTEXT) in error["message"]


def test_b03_an_absent_limit_is_bounded(mesh: Mesh) -> None:
    assert mesh.answer(prompt="hello", ignore_eos=True)["usage"]["completion_tokens"] == 16
    chat = mesh.answer(CHAT, messages=[{"role": "user", "content": "a" * 1900}], ignore_eos=True)
    assert chat["usage"]["total_tokens"] == CONTEXT, "the room that the prompt leaves"


def test_b03_a_prompt_over_the_context_is_refused_at_once(mesh: Mesh) -> None:
    with survival(mesh):
        began = time.monotonic()
        for tokens in (CONTEXT, CONTEXT + 1):
            assert str(CONTEXT) in refused(mesh.post(prompt=[5] * tokens, max_tokens=1))["message"]
        assert time.monotonic() - began < 2


# --- B04 --------------------------------------------------------------------------------------------------------------


def test_b04_huge_n_is_refused_before_it_costs_anything(mesh: Mesh) -> None:
    with survival(mesh):
        before = memory_bytes(mesh.gateway)
        for body in ({"prompt": "x", "n": 10**6}, {"prompt": ["x"] * 64, "n": 64}, {"prompt": "x", "best_of": 10**6}):
            began = time.monotonic()
            refused(mesh.post(**body))
            assert time.monotonic() - began < 1
        assert memory_bytes(mesh.gateway) - before < 32 << 20


QUEUE, SLOTS = 8, 4


def test_b04_a_full_queue_refuses_early_and_admits_all_choices_or_none(tiny: Any) -> None:
    flags = ("--max-num-queued-reqs", str(QUEUE), "--max-num-seqs", str(SLOTS))
    slow = (*SIMULATED, "--simulate-base-us", "10000")
    with running_mesh(tiny, scheduler=flags, worker=slow) as mesh:
        long = {"prompt": "long", "max_tokens": 50, "ignore_eos": True}
        waiting: list[float] = []

        def one() -> tuple[httpx.Response, float]:
            began = time.monotonic()
            reply = mesh.post(**long)
            return reply, time.monotonic() - began

        def watch() -> None:
            while not waiting or mesh.metrics(mesh.gateway)["headrace_gateway_requests_in_flight"]:
                waiting.append(mesh.metrics(mesh.scheduler)["vllm:num_requests_waiting"])

        *answers, _ = at_once([*[one] * 50, watch])
        served = [reply for reply, _ in answers if reply.status_code == 200]
        assert SLOTS + QUEUE <= len(served) < 50
        assert all(reply.json()["usage"]["completion_tokens"] == 50 for reply in served)
        for reply, seconds in answers:
            if reply.status_code != 200:
                refused(reply, 429, 503)
                assert seconds < 1
        assert 0 < max(waiting) <= QUEUE

        def load() -> tuple[float, float]:
            metrics = mesh.metrics(mesh.scheduler)
            return metrics["vllm:num_requests_running"], metrics["vllm:num_requests_waiting"]

        def eight() -> httpx.Response:
            eventually(lambda: load() == (SLOTS, QUEUE // 2), "a queue with four free places")
            return mesh.post(prompt="eight", n=8, max_tokens=2)

        *answered, last = at_once([*[lambda: mesh.post(**long | {"max_tokens": 60})] * (SLOTS + QUEUE // 2), eight])
        assert [reply.status_code for reply in answered] == [200] * (SLOTS + QUEUE // 2)
        if last.status_code == 200:
            assert len(last.json()["choices"]) == 8
        else:
            refused(last, 429, 503)
        mesh.quiescence()


# --- B05 --------------------------------------------------------------------------------------------------------------

NO_TEXT = (
    (COMPLETIONS, rb'{"prompt": "\ud83d", "max_tokens": 2}'),
    (COMPLETIONS, rb'{"prompt": ["\ude00\ud83d"], "max_tokens": 2}'),
    (COMPLETIONS, rb'{"prompt": "x", "stop": "\ud83d", "max_tokens": 2}'),
    (COMPLETIONS, rb'{"prompt": "x", "\ud83d": 1}'),
    (CHAT, rb'{"messages": [{"role": "user", "content": "\ud83d"}], "max_tokens": 2}'),
    (CHAT, rb'{"messages": [{"role": "\ud83d", "content": "x"}]}'),
    (COMPLETIONS, b'{"prompt": "\xff", "max_tokens": 2}'),
    (COMPLETIONS, b'{"prompt": "x", "max_tokens"'),
    (COMPLETIONS, b"[]"),
    (COMPLETIONS, b"null"),
    (COMPLETIONS, b""),
    (COMPLETIONS, b'"text"'),
    (COMPLETIONS, b"[" * 100_000),
    (CHAT, b'{"messages": ' + b"[" * 50_000 + b"]" * 50_000 + b"}"),
)


def test_b05_bytes_that_are_no_text(mesh: Mesh) -> None:
    with survival(mesh):
        for path, body in NO_TEXT:
            refused(raw(mesh, body, path))
        for path, body in NO_TEXT:
            refused(raw(mesh, body, GENERATE if path == COMPLETIONS else path))


def test_b05_text_that_only_looks_odd(mesh: Mesh) -> None:
    with survival(mesh):
        assert raw(mesh, rb'{"prompt": "\ud83d\ude00", "max_tokens": 2}').status_code == 200
        nul = raw(mesh, rb'{"prompt": "a\u0000b", "max_tokens": 2}')
        assert nul.status_code in (200, 400)


# --- B06 --------------------------------------------------------------------------------------------------------------


def user(content: Any, **more: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": content, **more}]


def parts(*texts: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text} for text in texts]


def test_b06_text_parts_are_text(mesh: Mesh) -> None:
    def ask(content: Any) -> dict[str, Any]:
        return mesh.answer(CHAT, messages=user(content), temperature=0, max_tokens=8)

    plain, one_part = ask("a b"), ask(parts("a b"))
    assert one_part["usage"]["prompt_tokens"] == plain["usage"]["prompt_tokens"]
    assert one_part["choices"][0]["message"] == plain["choices"][0]["message"]
    assert ask(parts("a", "b"))["choices"]


@pytest.mark.parametrize(
    "content", [None, [], [{"type": "image_url", "image_url": {"url": "data:,"}}], [{"type": "text"}], 5], ids=str
)
def test_b06_content_that_is_no_text_is_refused_by_name(mesh: Mesh, content: Any) -> None:
    error = refused(mesh.post(CHAT, messages=user(content)))
    assert "content" in f"{error['param']} {error['message']}"


def test_b06_harmless_fields_and_the_newer_cap(mesh: Mesh) -> None:
    body = {"messages": user("hi", name="someone"), "user": "u", "metadata": {"a": "b"}, "ignore_eos": True}
    assert mesh.answer(CHAT, **body, max_completion_tokens=3)["usage"]["completion_tokens"] == 3
    both = mesh.answer(CHAT, **body, max_completion_tokens=3, max_tokens=9)
    assert both["usage"]["completion_tokens"] == 3


UNSUPPORTED = (
    {"response_format": {"type": "xml"}},
    {"response_format": {"type": "json_schema"}},
    {"tools": [{"type": "web_search"}]},
    {"tools": "all"},
    {"guided_regex": "("},
    {"structured_outputs": {"regex": "("}},
    {"modalities": ["audio"]},
    {"audio": {"voice": "alloy"}},
    {"a_field_that_nobody_knows": 1},
)


@pytest.mark.parametrize("fields", UNSUPPORTED, ids=str)
def test_b06_what_would_change_the_answer_and_cannot_be_had_is_refused(mesh: Mesh, fields: dict[str, Any]) -> None:
    began = time.monotonic()
    refused(mesh.post(CHAT, messages=HELLO, max_tokens=2, **fields))
    assert time.monotonic() - began < 1


SLOW = (
    {"structured_outputs": {"regex": "((a{1,500}){1,500}){1,500}"}},
    {"structured_outputs": {"regex": "(x+x+)+y" * 400}},
    {"response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": {"enum": ["x" * 50] * 5000}}}},
    {"response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": {
        "type": "object", "properties": {f"p{i}": {"type": "string", "pattern": "(a|b){1,5000}c"} for i in range(500)},
    }}}},
)  # fmt: skip


@pytest.mark.parametrize("fields", SLOW, ids=["repeats", "backtracking", "enum", "patterns"])
def test_b06_a_constraint_that_is_slow_to_compile_costs_nobody_else(mesh: Mesh, fields: dict[str, Any]) -> None:
    def hostile() -> float:
        began = time.monotonic()
        reply = mesh.post(CHAT, messages=HELLO, max_tokens=2, **fields)
        if reply.status_code != 200:
            refused(reply, 400, 503)
        return time.monotonic() - began

    with survival(mesh):
        *texts, seconds = at_once([*[lambda: mesh.text(**CANARY)] * 4, hostile])
        assert len(set(texts)) == 1 and seconds < 5


# --- B07 --------------------------------------------------------------------------------------------------------------

BATCH = ("a long prompt, " * 40, "short", "a medium prompt, " * 8)


@pytest.mark.parametrize("as_ids", [False, True])
def test_b07_a_batch_of_prompts_keeps_its_order(mesh: Mesh, as_ids: bool) -> None:
    prompts: list[Any] = [list(text.encode()) for text in BATCH] if as_ids else list(BATCH)
    body = {"n": 2, "max_tokens": 6, "ignore_eos": True}
    alone = [mesh.answer(prompt=prompt, temperature=0, max_tokens=6, ignore_eos=True) for prompt in prompts]
    counts = [answer["usage"]["prompt_tokens"] for answer in alone]
    for more in ({"temperature": 0}, {"temperature": 1, "seed": 11}):
        whole = mesh.answer(prompt=prompts, **body, **more)
        assert [choice["index"] for choice in whole["choices"]] == list(range(6))
        texts = [choice["text"] for choice in whole["choices"]]
        if more["temperature"] == 0:
            assert texts == [answer["choices"][0]["text"] for answer in alone for _ in range(2)]
        assert whole["usage"]["prompt_tokens"] == sum(counts)
        assert whole["usage"]["completion_tokens"] == 6 * 6
        stream = streamed(mesh, prompt=prompts, **body, **more)
        assert stream.texts() == texts
        assert {index: len(reasons) for index, reasons in stream.finishes.items()} == dict.fromkeys(range(6), 1)


@pytest.mark.parametrize("bad", [[VOCAB_SIZE], [5] * (CONTEXT + 1)], ids=["id", "length"])
def test_b07_one_bad_prompt_refuses_the_whole_batch(mesh: Mesh, bad: list[int]) -> None:
    refused(mesh.post(prompt=[[5, 6], bad, [7, 8]], max_tokens=200, ignore_eos=True))
    mesh.quiescence()
