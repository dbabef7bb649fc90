"""Penalties, log-probabilities and grammars on a real mesh: a tight pool changes nothing (CASES B16, O3).

On the bus, not through a gateway: what a worker says is compared message by message.
"""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from loopback_http import HTTP
from mesh_stack import BusClient, Stack, stack, until
from tiny_models import make_tiny_model, make_tokenizer

from shared.grammar import Grammar, encode_grammar
from shared.messages import (
    Outcome,
    Sampling,
    Submit,
    SubmitReply,
    TokenBatch,
    TokenLogprob,
    decode,
    encode,
    pack_tokens,
)

pytestmark = [pytest.mark.mesh, pytest.mark.timeout(600)]

TIGHT_BLOCKS = 20
BYTES_PER_BLOCK = 2 * 2 * 2 * 16 * 4 * 16  # key and value, layers, KV heads, head size, float32, tokens

SCHEMA = {"type": "array", "items": {"enum": [1, 22, 333]}, "minItems": 25, "maxItems": 30}

KINDS: dict[str, dict[str, Any]] = {
    "presence and frequency": {"presence_penalty": 1.0, "frequency_penalty": 0.4, "temperature": 0.9},
    "repetition": {"repetition_penalty": 1.3, "temperature": 0.0},
    "bias": {"logit_bias": [(40, 4.0), (41, -100.0)], "min_tokens": 20},
    "log-probabilities": {"logprobs": 3, "prompt_logprobs": 2},
    "schema": {"grammar": encode_grammar(Grammar("json_schema", SCHEMA)), "logprobs": 0},
    "regex, greedy": {"grammar": encode_grammar(Grammar("regex", "([a-f]{2}-)*z")), "temperature": 0.0},
    "all": {"grammar": encode_grammar(Grammar("regex", "[a-p ]{50,}")), "repetition_penalty": 1.2, "logprobs": 1,
            "presence_penalty": 0.5, "top_p": 0.9},
    "no grammar": {"grammar": encode_grammar(Grammar("regex", "a("))},
}  # fmt: skip


class Listener(BusClient):
    """Keeps log-probabilities too: of choices in order, of prompts by their index."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.logprobs: dict[tuple[str, int], list[TokenLogprob]] = {}
        self.prompts: dict[str, dict[int, TokenLogprob]] = {}

    def _on_tokens(self, payload: bytes, subject: str) -> None:
        message = decode(payload)
        assert isinstance(message, TokenBatch)
        for entry in message.entries:
            assert not entry.prompt_logprobs or (entry.choice == 0 and not entry.tokens)
            for index, one in enumerate(entry.prompt_logprobs, entry.prompt_offset):
                known = self.prompts.setdefault(entry.request_id, {})
                assert index in known or not self.tokens.get((entry.request_id, 0)), "before the output's first"
                assert known.setdefault(index, one) == one, "what comes again is the same"
            self.logprobs.setdefault((entry.request_id, entry.choice), []).extend(entry.logprobs)
        rest = [entry for entry in message.entries if not entry.prompt_logprobs]
        super()._on_tokens(encode(msgspec.structs.replace(message, entries=rest)), subject)

    async def ask(self, name: str, prompt: list[int], sampling: Sampling, n: int) -> None:
        assert self.beat is not None
        self.live[name] = 1
        salt = name if sampling.prompt_logprobs >= 0 else ""
        submit = Submit(name, 1, self.name, self.beat.models[0].name, pack_tokens(prompt), sampling, time.time_ns(), n,
                        cache_salt=salt)  # fmt: skip
        subject = self.subjects.submit(submit.model, self.beat.epoch)
        reply = decode(await self.bus.request(subject, encode(submit), timeout_s=10))
        assert isinstance(reply, SubmitReply) and reply.outcome is Outcome.ACCEPTED, reply


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tiny") / "model", seed=9)


def mesh(folder: Path, memory: str, *worker: str, scheduler: tuple[str, ...] = ()) -> Iterator[Stack]:
    with stack() as running:
        running.start("scheduler", *scheduler)
        running.start("worker", "--model", str(folder), "--dtype", "float32", "--threads", "1", "--max-model-len",
                      "256", "--kv-cache-memory", memory, *worker)  # fmt: skip
        yield running


@pytest.fixture(scope="module")
def ample(folder: Path) -> Iterator[Stack]:
    yield from mesh(folder, "16MiB")


@pytest.fixture(scope="module", params=["recompute", "swap"])
def tight(folder: Path, request: pytest.FixtureRequest) -> Iterator[Stack]:
    swap = ("--swap-space", "8MiB") if request.param == "swap" else ()
    naive = ("--no-growth-aware-admission",) + (("--no-enable-prefix-caching",) if request.param == "swap" else ())
    yield from mesh(folder, str(TIGHT_BLOCKS * BYTES_PER_BLOCK), *swap, scheduler=naive)


Outcomes = dict[str, Any]


def run(on: Stack) -> Outcomes:
    """Everything at once, with two choices each, and what came of it."""

    async def scenario() -> Outcomes:
        client = await Listener.connect(on.nats)
        assert isinstance(client, Listener)
        try:
            await client.ready()
            names = {}
            for number, (kind, how) in enumerate(KINDS.items()):
                prompt = [3 + (number * 31 + place * 7) % 280 for place in range(10 + 9 * number)]
                names[kind] = prompt
                await client.ask(kind, prompt, Sampling(number, 60, **how), 2)
            await until(lambda: len(client.ends) == 2 * len(names), "every choice's end")
            for kind, prompt in names.items():
                wanted = range(1, len(prompt)) if KINDS[kind].get("prompt_logprobs", -1) >= 0 else ()
                assert sorted(client.prompts.get(kind, {})) == list(wanted)
            return {
                f"{kind} {choice}": (
                    client.tokens[kind, choice], client.ends[kind, choice], client.logprobs[kind, choice],
                    client.prompts.get(kind),
                )
                for kind in names for choice in (0, 1)
            }  # fmt: skip
        finally:
            await client.close()

    return asyncio.run(scenario())


@pytest.fixture(scope="module")
def wanted(ample: Stack) -> Outcomes:
    return run(ample)


def test_b16_a_tight_pool_changes_no_token_and_no_log_probability(wanted: Outcomes, tight: Stack) -> None:
    got = run(tight)
    assert {name: one[:2] for name, one in got.items()} == {name: one[:2] for name, one in wanted.items()}
    assert got == wanted
    assert preemptions(tight) > 0


def test_what_came_out_is_what_was_asked_for(wanted: Outcomes) -> None:
    tokenizer = make_tokenizer()
    for name, (tokens, end, logprobs, prompts) in wanted.items():
        kind = name.rsplit(" ", 1)[0]
        text = tokenizer.decode(tokens, skip_special_tokens=True)
        assert len(logprobs) == (len(tokens) if "logprobs" in KINDS[kind] else 0)
        assert end == "failed" if kind == "no grammar" else end in ("stop", "length")
        if kind == "bias":
            assert 41 not in tokens
        if kind == "log-probabilities":
            assert prompts and {len(one.top_ids) for one in prompts.values()} == {2}
        if kind == "schema" and end == "stop":
            assert set(json.loads(text)) <= {1, 22, 333}
        if kind == "regex, greedy":
            assert re.fullmatch("([a-f]{2}-)*(z|[a-f]{0,2})", text)
        if kind == "all":
            assert re.fullmatch("[a-p ]+", text)
    assert wanted["no grammar 0"][0] == []


def preemptions(on: Stack) -> float:
    port = re.search(r"metrics on http://[^:]+:(\d+)/", on.processes[0].output())
    assert port is not None
    text = HTTP.get(f"http://127.0.0.1:{port.group(1)}/metrics").text
    [line] = [line for line in text.splitlines() if line.startswith("vllm:num_preemptions_total")]
    return float(line.rsplit(" ", 1)[1])
