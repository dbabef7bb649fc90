"""Acceptance cases of kinds K and D, scheduling, KV memory and determinism: B14 to B20.

``tests/mesh/test_memory_parity.py`` has most of B14 to B16, B18, B19 and B21; here is what it leaves out.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch
from mesh_stack import BusClient, until
from oracles import open_stream, refused, streamed, transport_parity
from tiny_models import make_tokenizer
from transformers import AutoModelForCausalLM, PreTrainedModel
from whole_mesh import BYTES_PER_BLOCK, FLOAT32, SIMULATED, Mesh, at_once, eventually, running_mesh

from shared.messages import StepPlan, Submit

pytestmark = pytest.mark.mesh

HF = make_tokenizer()
BLOCKS = 20  # one of which is the scratch page
POOL_TOKENS = 16 * (BLOCKS - 1)
CHUNK = 32


@pytest.fixture(scope="module")
def cramped(tiny: Path) -> Iterator[Mesh]:
    """The tiny model with a pool smaller than its context and 32 tokens an iteration; no foresight, no cache."""
    scheduler = ("--max-num-batched-tokens", str(CHUNK), "--max-num-seqs", "8",
                 "--no-growth-aware-admission", "--no-enable-prefix-caching")  # fmt: skip
    worker = (*FLOAT32, "--kv-cache-memory", str(BLOCKS * BYTES_PER_BLOCK))
    with running_mesh(tiny, scheduler=scheduler, worker=worker) as mesh:
        yield mesh


@lru_cache
def reference(folder: Path) -> PreTrainedModel:
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return model


def generated(folder: Path, prompt: list[int], max_tokens: int, **options: Any) -> str:
    """What ``transformers`` generates greedily, without EOS."""
    ids = torch.tensor([prompt])
    with torch.inference_mode():
        out = reference(folder).generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=max_tokens, min_new_tokens=max_tokens,
            do_sample=False, **options,
        )  # fmt: skip
    text: str = HF.decode(out[0, len(prompt) :], skip_special_tokens=True)
    return text


def preemptions(mesh: Mesh) -> float:
    return mesh.metrics(mesh.scheduler)["vllm:num_preemptions_total"]


# --- B14 --------------------------------------------------------------------------------------------------------------


def check_never_fits(mesh: Mesh, pool_tokens: int) -> None:
    small = [lambda index=index: mesh.texts(prompt=f"small {index}", max_tokens=4) for index in range(3)]

    def never_fits() -> dict[str, Any]:
        began = time.monotonic()
        error = refused(mesh.post(prompt=[5] * (pool_tokens + 1), max_tokens=1))
        assert mesh.post(prompt=[5] * pool_tokens, max_tokens=1).status_code in (200, 400)
        assert time.monotonic() - began < 1
        return error

    error, *_ = at_once([never_fits, *small])
    assert str(pool_tokens) in error["message"], "the limit is named"
    assert mesh.answer(prompt=[5] * (pool_tokens - 1), max_tokens=1)["usage"]["prompt_tokens"] == pool_tokens - 1
    mesh.quiescence()


def test_b14_a_context_over_the_pool(cramped: Mesh) -> None:
    check_never_fits(cramped, POOL_TOKENS)


# --- B15 --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [15, 16, 17, 32, 33])
def test_b15_a_cached_prompt_has_the_same_logprobs(mesh: Mesh, length: int) -> None:
    body = {"prompt": [200 + length] * length, "max_tokens": 6, "temperature": 0, "ignore_eos": True, "logprobs": 1}
    answers = [mesh.answer(**body) for _ in range(3)] + at_once([lambda: mesh.answer(**body)] * 4)
    first = answers[0]["choices"][0]
    for answer in answers:
        choice, details = answer["choices"][0], answer["usage"].get("prompt_tokens_details") or {}
        assert choice["text"] == first["text"]
        assert choice["logprobs"]["token_logprobs"] == pytest.approx(first["logprobs"]["token_logprobs"], abs=1e-4)
        assert details.get("cached_tokens", 0) <= length - 1
    assert answers[2]["usage"]["prompt_tokens_details"]["cached_tokens"] == (length - 1) // 16 * 16


# --- B16 --------------------------------------------------------------------------------------------------------------


def growing(**sampling: Any) -> list[dict[str, Any]]:
    return [{"prompt": f"growing {index} " * 2, "max_tokens": 90, "ignore_eos": True, **sampling} for index in range(4)]


VARIANTS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "seeded": {"temperature": 1, "seed": 21},
    "stop": {"temperature": 1, "seed": 22, "stop": ["qz", "\ufffdk"]},
    "presence": {"temperature": 0, "presence_penalty": 1.5},
    "frequency": {"temperature": 0, "frequency_penalty": 0.7},
    "repetition": {"temperature": 0, "repetition_penalty": 1.3},
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_b16_preemption_changes_neither_tokens_nor_usage(mesh: Mesh, cramped: Mesh, variant: str) -> None:
    bodies = growing(**VARIANTS[variant])
    before = preemptions(cramped)
    tight = at_once([
        lambda body=body: streamed(cramped, **body, stream_options={"include_usage": True}) for body in bodies
    ])  # fmt: skip
    ample = at_once([lambda body=body: mesh.answer(**body) for body in bodies])
    for stream, whole in zip(tight, ample, strict=True):
        choice = whole["choices"][0]
        assert (stream.text(), stream.finish()) == (choice["text"], choice["finish_reason"])
        assert stream.usage["completion_tokens"] == whole["usage"]["completion_tokens"]
        assert stream.usage["prompt_tokens"] == whole["usage"]["prompt_tokens"]
    cramped.quiescence()
    assert preemptions(cramped) > before


def test_b16_the_repetition_penalty_is_that_of_transformers(mesh: Mesh) -> None:
    prompt = "over and over and over again"
    text = mesh.text(prompt=prompt, max_tokens=40, temperature=0, repetition_penalty=1.3, ignore_eos=True)
    assert text != mesh.text(prompt=prompt, max_tokens=40, temperature=0, ignore_eos=True)
    # As in the mesh, no EOS is drawn: its ids are penalised with all others, and suppressed behind that.
    assert text == generated(mesh.folder, HF.encode(prompt), 40, repetition_penalty=1.3)


# --- B17 --------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def crowded(tiny: Path) -> Iterator[Mesh]:
    """A simulated worker of 40 blocks, 2 ms a step, and a tight bound on how many may pass a blocked head."""
    scheduler = ("--max-num-seqs", "16", "--max-bypasses", "8", "--max-bypass-wait-s", "1")
    worker = (*SIMULATED, "--simulate-base-us", "2000", "--simulate-blocks", "40")
    with running_mesh(tiny, scheduler=scheduler, worker=worker) as mesh:
        yield mesh


def test_b14_a_prompt_that_a_simulated_pool_never_holds(crowded: Mesh) -> None:
    check_never_fits(crowded, 16 * 40)


def test_b17_small_requests_do_not_starve_a_big_one(crowded: Mesh) -> None:
    over = threading.Event()
    served = [0] * 16

    def small(client: int) -> None:
        while not over.is_set():
            crowded.answer(prompt=[client + 3] * 24, max_tokens=24, ignore_eos=True, seed=served[client])
            served[client] += 1

    def big() -> float:
        eventually(lambda: min(served) >= 2, "small requests under way")
        began = time.monotonic()
        try:
            answer = crowded.answer(prompt=[9] * 500, max_tokens=12, ignore_eos=True)
            assert answer["usage"]["completion_tokens"] == 12
        finally:
            over.set()
        return time.monotonic() - began

    *_, waited_s = at_once([*[lambda client=client: small(client) for client in range(16)], big])
    assert waited_s < 20
    crowded.quiescence()


def test_b17_with_ample_memory_the_order_is_that_of_arrival(simulated: Mesh) -> None:
    all_queued = threading.Event()

    def fill_the_batch() -> None:
        with open_stream(simulated, prompt="all slots", n=64, max_tokens=1900, ignore_eos=True):
            assert all_queued.wait(60)

    def ask(index: int) -> Any:
        return simulated.answer(prompt=[index + 3] * (1 + index % 5 * 40), max_tokens=4, ignore_eos=True)

    async def scenario(client: BusClient) -> None:
        await client.spy()

        def seen(kind: type) -> list[Any]:
            return [message for message in client.seen if isinstance(message, kind)]

        try:
            tasks = [asyncio.create_task(asyncio.to_thread(fill_the_batch))]
            await until(lambda: client.beat and client.beat.running == 64, "a full batch")
            for index in range(12):
                tasks.append(asyncio.create_task(asyncio.to_thread(ask, index)))
                await until(lambda count=index + 2: len(seen(Submit)) == count, "its arrival")
        finally:
            all_queued.set()
        await asyncio.gather(*tasks)
        order = dict.fromkeys(start.request_id for plan in seen(StepPlan) for start in plan.starts)
        assert list(order) == [submit.request_id for submit in seen(Submit)]

    simulated.on_the_bus(scenario)


# --- B18 --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [31, 32, 33, 64, 65, 100])
def test_b18_prompts_around_a_chunk_are_those_of_transformers(cramped: Mesh, length: int) -> None:
    prompt = list(range(5, 5 + length))
    want = generated(cramped.folder, prompt, 9)
    body = {"prompt": prompt, "max_tokens": 9, "temperature": 0, "ignore_eos": True}
    stream = transport_parity(cramped, **body)
    assert stream.text() == want and stream.usage is not None and stream.usage["completion_tokens"] == 9
    choices = [choice for event in stream.events for choice in event["choices"]]
    assert all(choice["text"] or choice["finish_reason"] for choice in choices), "an empty chunk"
    beside = {"prompt": "a stream beside it", "max_tokens": 20, "temperature": 0, "ignore_eos": True}
    assert cramped.together([beside, body])[1] == [want]


def test_b18_a_stream_advances_during_a_long_prefill(cramped: Mesh) -> None:
    def both() -> None:
        with open_stream(cramped, prompt="beside", max_tokens=60, ignore_eos=True) as lines:
            assert next(lines).startswith("data: {")
            cramped.answer(prompt=[7] * 100, max_tokens=1)
            assert list(lines)[-2] == "data: [DONE]"

    async def scenario(client: BusClient) -> None:
        await client.spy()
        await asyncio.to_thread(both)
        plans = [message for message in client.seen if isinstance(message, StepPlan)]
        prefills = [plan for plan in plans if plan.chunks and plan.decodes]
        assert sum(tokens for plan in prefills for _, tokens in plan.chunks) >= 100 and len(prefills) >= 4

    cramped.on_the_bus(scenario)


# --- B19 --------------------------------------------------------------------------------------------------------------


def test_b19_choices_of_different_length(mesh: Mesh) -> None:
    body = {"prompt": list(range(30, 47)), "n": 4, "temperature": 1, "seed": 7, "max_tokens": 60, "stop": ["e", "a"]}
    stream = transport_parity(mesh, **body)
    assert stream.usage is not None and stream.usage["prompt_tokens"] == 17
    assert {index: len(reasons) for index, reasons in stream.finishes.items()} == dict.fromkeys(range(4), 1)
    choices = [choice for event in stream.events for choice in event["choices"]]
    first_end = next(place for place, choice in enumerate(choices) if choice["finish_reason"])
    assert len({choice["index"] for choice in choices[first_end + 1 :] if choice["text"]}) >= 2, "later choices go on"
    assert len(set(stream.texts())) > 1
    mesh.quiescence()


# --- B20 --------------------------------------------------------------------------------------------------------------


def test_b20_a_seed_holds_beside_requests_without_one(mesh: Mesh) -> None:
    seeded = {"prompt": "a seed", "seed": 42, "temperature": 0.8, "max_tokens": 40, "ignore_eos": True}
    alone = [mesh.text(**seeded) for _ in range(3)]

    def in_company(wait_for: int) -> str:
        with open_stream(mesh, prompt="company", max_tokens=200, ignore_eos=True) as lines:
            for _ in range(2 * wait_for):  # staggered: it joins after so many tokens of the others
                next(lines)
            text = mesh.text(**seeded)
            list(lines)
            return text

    assert alone + at_once([lambda wait=wait: in_company(wait) for wait in (1, 5, 12)]) == alone[:1] * 6


def test_b20_greedy_alone_and_among_eight_of_mixed_lengths(mesh: Mesh) -> None:
    bodies = [
        {"prompt": [20 + index] * (1 + 37 * index), "max_tokens": 10 + 5 * index, "temperature": 0, "ignore_eos": True}
        for index in range(8)
    ]
    assert mesh.together(bodies) == [mesh.texts(**body) for body in bodies]
