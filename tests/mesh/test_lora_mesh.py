"""LoRA adapters on the real mesh: two workers, three adapters, each request with its own."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import pytest
import torch
from mesh_stack import BusClient, stack, until
from tiny_adapters import make_adapter, merged_model
from tiny_models import make_tiny_model

from shared.messages import Outcome, StepPlan

pytestmark = [pytest.mark.mesh]

TOKENS = 10


def reference(model: object, prompt: list[int]) -> list[int]:
    out = model.generate(  # type: ignore[attr-defined]
        torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt), dtype=torch.int64), max_new_tokens=TOKENS,
        do_sample=False, eos_token_id=None,
    )  # fmt: skip
    return out[0, len(prompt) :].tolist()  # type: ignore[no-any-return]


def test_each_request_has_the_tokens_of_its_adapter_on_whichever_worker_has_it(tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path / "model")
    folders = {
        name: make_adapter(tmp_path / name, model, seed=seed) for seed, name in enumerate(("sql", "chat", "law"))
    }
    rng = random.Random(2)
    shared = [rng.randrange(3, 296) for _ in range(40)]  # all begin alike: what the cache holds of one is not another's
    asked = {
        f"{adapter or 'plain'}-{index}": (adapter, shared + [rng.randrange(3, 296) for _ in range(3 + index)])
        for index in range(3)
        for adapter in ("", "sql", "chat", "law")
    }

    async def body() -> tuple[dict[str, list[int]], dict[str, set[str]], Outcome]:
        client = await BusClient.connect(mesh.nats)
        try:
            await client.spy()
            await client.ready(2)
            for name, (adapter, prompt) in asked.items():
                reply = await client.submit(name, prompt, TOKENS, temperature=0.0, adapter=adapter)
                assert reply.outcome is Outcome.ACCEPTED, (name, reply)
            unknown = await client.submit("unknown", shared, TOKENS, adapter="poetry")
            await until(lambda: len(client.ends) == len(asked), "every request's end")
            ran: dict[str, set[str]] = {}
            for plan in client.seen:
                if isinstance(plan, StepPlan):
                    for start in plan.starts:
                        ran.setdefault(start.adapter, set()).add(plan.worker)
            return {name: client.tokens[name, 0] for name in asked}, ran, unknown.outcome
        finally:
            await client.close()

    with stack() as mesh:
        mesh.start("scheduler", "--max-num-seqs", "8", "--max-num-batched-tokens", "64")
        for worker, names in (("w0", ("sql", "chat")), ("w1", ("sql", "law"))):
            lora = ",".join(f"{name}={folders[name]}" for name in names)
            mesh.start(
                "worker", "--model", str(model), "--dtype", "float64", "--kv-cache-memory", "16MiB", "--worker-id",
                worker, "--lora", lora,
            )  # fmt: skip
        got, ran, unknown = asyncio.run(body())
    assert unknown is Outcome.UNKNOWN_MODEL
    assert ran["chat"] == {"w0"} and ran["law"] == {"w1"}
    models = {name: merged_model(model, folders.get(name)) for name in ("", *folders)}
    for name, (adapter, prompt) in asked.items():
        assert got[name] == reference(models[adapter], prompt), name
    assert len({tuple(tokens) for tokens in got.values()}) > 4, "the adapters change nothing"
