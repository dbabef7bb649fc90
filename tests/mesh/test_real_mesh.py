"""The real model on the real mesh: tokens against ``transformers``, under memory pressure."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import pytest
import torch
from mesh_stack import BusClient, stack, until
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from headrace.models import ensure_default_model
from shared.messages import Outcome, StepPlan, StepResult

pytestmark = [pytest.mark.mesh, pytest.mark.model, pytest.mark.timeout(900)]

NEAR_TIE = 1e-3
QUESTIONS = (
    "What is the capital of France?",
    "Name three primary colours.",
    "Write a haiku about the sea.",
    "Explain in one sentence why the sky is blue.",
    "List the first ten prime numbers.",
    "Who wrote Romeo and Juliet?",
    "Translate 'good morning' into Spanish.",
    "Give me a recipe for pancakes, step by step, with the amounts of flour, milk, eggs, sugar and butter.",
)


@dataclass(frozen=True)
class Asked:
    prompt: list[int]
    max_tokens: int


def asked(tokenizer: object) -> list[Asked]:
    """32 prompts of mixed lengths, some of them continuing a long text, outputs of 4 to 72 tokens."""
    made = []
    for index in range(32):
        text = QUESTIONS[index % len(QUESTIONS)] + " Please." * (index // len(QUESTIONS))
        if index % 5 == 4:
            text = "Here is a list of facts. " * (4 + index // 2) + text
        ids = tokenizer.apply_chat_template(  # type: ignore[attr-defined]
            [{"role": "user", "content": text}], add_generation_prompt=True, return_dict=False
        )
        made.append(Asked(list(ids), 4 + (index * 29) % 69))
    return made


def shortfalls(model: PreTrainedModel, prompt: list[int], tokens: list[int]) -> list[float]:
    """For each token, by how much its logit is less than the best one, all before it as they are: 0 for a greedy one.

    One pass over all of them. A greedy search that agrees with each of its own steps is the reference's.
    """
    with torch.inference_mode():
        logits = model(torch.tensor([prompt + tokens[:-1]]), logits_to_keep=len(tokens)).logits[0].double()
    chosen = logits.gather(1, torch.tensor(tokens)[:, None])[:, 0]
    return list((logits.amax(dim=1) - chosen).tolist())


def test_32_greedy_requests_under_memory_pressure_match_transformers() -> None:
    folder = ensure_default_model(lambda _: None)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    requests = asked(tokenizer)
    eos = {tokenizer.eos_token_id}

    async def scenario(client: BusClient) -> tuple[int, list[list[int]]]:
        await client.spy()
        await client.ready()
        replies = await asyncio.gather(
            *(
                client.submit(f"r{i}", one.prompt, one.max_tokens, temperature=0.0, ignore_eos=False)
                for i, one in enumerate(requests)
            )
        )
        assert all(reply.outcome is Outcome.ACCEPTED for reply in replies)
        await until(lambda: len(client.ends) == len(requests), "every request's end", 240)
        plans = [message for message in client.seen if isinstance(message, StepPlan)]
        assert max(len(plan.decodes) + len(plan.chunks) for plan in plans) <= 8
        results = [message for message in client.seen if isinstance(message, StepResult)]
        assert all(result.kv_bytes_copied == 0 for result in results), "joining and leaving copy no KV"
        restarts = sum(len(plan.starts) for plan in plans) - len(requests)
        return restarts, [client.tokens[f"r{i}", 0] for i in range(len(requests))]

    async def body() -> tuple[int, list[list[int]]]:
        client = await BusClient.connect(mesh.nats)
        try:
            return await scenario(client)
        finally:
            await client.close()

    with stack() as mesh:
        foresight = ("--no-growth-aware-admission", "--no-enable-prefix-caching")  # so that much is preempted
        mesh.start("scheduler", "--max-num-seqs", "8", "--max-num-batched-tokens", "128", *foresight)
        mesh.start("worker", "--model", str(folder), "--dtype", "float32", "--kv-cache-memory", "16MiB")
        preemptions, got = asyncio.run(body())
    assert preemptions > 0, "the pool is too large for the test"

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    near_ties = 0
    for one, tokens in zip(requests, got, strict=True):
        short = shortfalls(model, one.prompt, tokens)
        assert max(short) < NEAR_TIE, f"a token's logit is {max(short):.5f} under the reference's best"
        assert len(tokens) == one.max_tokens or tokens[-1] in eos, "it ended too early"
        assert not eos & set(tokens[:-1]), "it ended too late"
        near_ties += sum(gap > 0 for gap in short)
    print(f"\n32 requests, {preemptions} preemptions, {sum(map(len, got))} tokens, {near_ties} near-tie differences")


def test_a_third_of_the_memory_gives_the_same_tokens_greedy_and_seeded() -> None:
    folder = ensure_default_model(lambda _: None)
    requests = [Asked(one.prompt, 30) for one in asked(AutoTokenizer.from_pretrained(folder))[:12]]
    blocks = sum(-(-(len(one.prompt) + one.max_tokens) // 16) for one in requests)  # what the load wants at once

    def run(memory_blocks: int) -> tuple[int, dict[tuple[str, int], list[int]]]:
        async def body() -> tuple[int, dict[tuple[str, int], list[int]]]:
            client = await BusClient.connect(mesh.nats)
            try:
                await client.spy()
                await client.ready()
                for i, one in enumerate(requests):
                    await client.submit(f"r{i}", one.prompt, one.max_tokens, temperature=float(i % 2), seed=i)
                await until(lambda: len(client.ends) == len(requests), "every request's end", 240)
                starts = sum(len(message.starts) for message in client.seen if isinstance(message, StepPlan))
                return starts, client.tokens
            finally:
                await client.close()

        with stack() as mesh:
            mesh.start("scheduler", "--max-num-seqs", "12", "--no-growth-aware-admission")
            memory = str((memory_blocks + 2) * 2 * 30 * 3 * 64 * 4 * 16)  # key and value, layers, heads, size, float32
            mesh.start("worker", "--model", str(folder), "--dtype", "float32", "--kv-cache-memory", memory)
            return asyncio.run(body())

    ample_starts, ample = run(2 * blocks)
    tight_starts, tight = run(blocks // 3)
    assert ample_starts == len(requests) < tight_starts, "nothing was preempted in the tight pool"
    assert tight == ample
