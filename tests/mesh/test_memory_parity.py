"""Memory pressure changes nothing but time: CASES B14 to B19 and B21, on a torch worker, through the gateway."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import whole_mesh
from loopback_http import HTTP
from mesh_stack import BusClient, Stack, stack, until
from test_whole_mesh import serve

from headrace.bench.probe import read_metrics

pytestmark = [pytest.mark.mesh, pytest.mark.timeout(600)]

TIGHT_BLOCKS = 20
BYTES_PER_BLOCK = 2 * 2 * 2 * 16 * 4 * 16  # key and value, layers, KV heads, head size, float32, tokens


class Mesh:
    def __init__(self, running: Stack, url: str) -> None:
        self.stack = running
        self.url = url

    def post(self, **body: Any) -> httpx.Response:
        return HTTP.post(self.url + "/v1/completions", json={"model": "m", **body}, timeout=120)

    def together(self, bodies: list[dict[str, Any]]) -> list[list[str]]:
        def ask(body: dict[str, Any]) -> list[str]:
            reply = self.post(**body)
            assert reply.status_code == 200, reply.text
            return [choice["text"] for choice in reply.json()["choices"]]

        with ThreadPoolExecutor(len(bodies)) as pool:
            return list(pool.map(ask, bodies))

    def idle(self) -> int:
        """Wait until nothing runs and every block is free (O5); returns the pool's size."""

        async def body() -> int:
            client = await BusClient.connect(self.stack.nats)
            try:
                await until(
                    lambda: (
                        client.beat
                        and client.beat.models
                        and client.beat.running == client.beat.waiting == 0
                        and client.beat.free_blocks == client.beat.total_blocks
                    ),
                    "quiescence",
                )
                assert client.beat is not None
                return client.beat.total_blocks
            finally:
                await client.close()

        return asyncio.run(body())


def mesh(folder: Path, memory: str, *worker: str, scheduler: tuple[str, ...] = ()) -> Iterator[Mesh]:
    flags = ("--dtype", "float32", "--kv-cache-memory", memory, "--threads", "1", "--max-model-len", "256", *worker)
    with stack() as running:
        yield Mesh(running, serve(running, folder, worker=flags, scheduler=scheduler))


@pytest.fixture(scope="module")
def ample(torch_mesh: whole_mesh.Mesh) -> Mesh:
    """The same model with memory for everything."""
    return Mesh(torch_mesh.stack, torch_mesh.url)


@pytest.fixture(scope="module", params=["recompute", "swap", "naive"])
def tight(tiny: Path, request: pytest.FixtureRequest) -> Iterator[Mesh]:
    """A pool that the load of these tests does not fit in. ``naive``: without foresight, so that much is preempted."""
    swap = ("--swap-space", "8MiB") if request.param == "swap" else ()
    scheduler = () if request.param == "recompute" else ("--no-growth-aware-admission", "--no-enable-prefix-caching")
    yield from mesh(tiny, str(TIGHT_BLOCKS * BYTES_PER_BLOCK), *swap, scheduler=scheduler)


@pytest.fixture(scope="module")
def wanted() -> dict[str, list[list[str]]]:
    """The ample pool's texts, by sampling."""
    return {}


def load(**more: Any) -> list[dict[str, Any]]:
    return [
        {"prompt": f"request number {index} " + "of many " * (index % 3), "max_tokens": 60, "ignore_eos": True, **more}
        for index in range(8)
    ]


@pytest.mark.parametrize(
    "sampling",
    [
        {"temperature": 0},
        {"temperature": 1.0, "seed": 5},
        {"temperature": 0.8, "top_p": 0.9, "top_k": 50, "seed": 6},
        {"temperature": 1.0, "seed": 7, "n": 3},
        {"temperature": 0, "stop": ["e"]},
        {"use_beam_search": True, "n": 2, "best_of": 2},
    ],
    ids=["greedy", "sampled", "filtered", "choices", "stop", "beams"],
)
def test_b16_a_tight_pool_gives_the_texts_of_an_ample_one(
    ample: Mesh, tight: Mesh, sampling: dict[str, Any], wanted: dict[str, list[list[str]]]
) -> None:
    bodies = load(**sampling)
    key = str(sampling)
    if key not in wanted:  # once for all kinds of tight pools
        wanted[key] = ample.together(bodies)
    assert tight.together(bodies) == wanted[key]
    assert tight.idle() == TIGHT_BLOCKS - 1  # one is the scratch page


def test_the_naive_pool_did_preempt(tight: Mesh, request: pytest.FixtureRequest) -> None:
    kind = request.node.callspec.params["tight"]
    if kind == "recompute":
        return  # foresight may avoid every preemption; that the texts agree is tested above
    log = metrics(tight)
    assert log["vllm:num_preemptions_total"] > 0
    if kind == "swap":
        # A sequence whose last token was in flight, or that was cancelled, ends in host memory and never comes back.
        assert log["headrace_kv_blocks_swapped_out_total"] >= log["headrace_kv_blocks_swapped_in_total"] > 0


def metrics(of: Mesh) -> dict[str, float]:
    """The scheduler's metrics, from the port that it says it listens on."""
    port = re.search(r"metrics on http://[^:]+:(\d+)/", of.stack.processes[0].output())
    assert port is not None
    return read_metrics([HTTP.get(f"http://127.0.0.1:{port.group(1)}/metrics").text])


def test_b14_what_can_never_fit_is_refused_at_once_and_the_small_ones_run(tight: Mesh) -> None:
    ids = list(range(3, 3 + 255))
    small = [{"prompt": f"small {index}", "max_tokens": 4} for index in range(3)]
    with ThreadPoolExecutor(4) as pool:
        refused = pool.submit(lambda: tight.post(prompt=ids, max_tokens=2))
        texts = list(pool.map(lambda body: tight.post(**body).status_code, small))
    assert refused.result().status_code == 400 and "256" in refused.result().json()["error"]["message"]
    assert texts == [200, 200, 200]
    assert tight.post(prompt=ids, max_tokens=1).status_code == 200


@pytest.mark.parametrize("length", [15, 16, 17, 32, 33])
def test_b15_a_prompt_wholly_in_the_cache(ample: Mesh, length: int) -> None:
    body = {"prompt": list(range(20, 20 + length)), "max_tokens": 8, "temperature": 0, "ignore_eos": True}
    texts = [ample.together([body])[0] for _ in range(3)] + ample.together([body] * 4)
    assert len({text[0] for text in texts}) == 1


def test_b18_chunk_boundaries(tiny: Path, ample: Mesh) -> None:
    for chunked in mesh(tiny, "16MiB", scheduler=("--max-num-batched-tokens", "32", "--max-num-seqs", "8")):
        for length in (31, 32, 33, 64, 65, 100):
            body = {"prompt": list(range(5, 5 + length)), "max_tokens": 9, "temperature": 0, "ignore_eos": True}
            beside = {"prompt": "a stream beside it", "max_tokens": 20, "temperature": 0, "ignore_eos": True}
            want = ample.together([body])[0]
            assert chunked.together([body])[0] == want
            assert chunked.together([beside, body])[1] == want


def test_b19_choices(ample: Mesh) -> None:
    body = {"prompt": list(range(30, 47)), "n": 4, "temperature": 1.0, "seed": 7, "max_tokens": 12}
    first, second = ample.together([body])[0], ample.together([body])[0]
    assert first == second and len(set(first)) > 1
    greedy = ample.together([body | {"temperature": 0}])[0]
    assert len(set(greedy)) == 1 and greedy[0] == ample.together([body | {"temperature": 0, "n": 1}])[0][0]
    usage = ample.post(**body).json()["usage"]
    assert usage["prompt_tokens"] == 17
    ample.idle()


def test_b21_extreme_but_legal_sampling_values_in_one_batch(ample: Mesh) -> None:
    base = {"prompt": "extreme", "max_tokens": 10, "ignore_eos": True, "seed": 1}
    greedy = ample.together([base | {"temperature": 0}])[0]
    like_greedy = [
        {"temperature": 1e-4}, {"temperature": 1e-6}, {"temperature": 1e-8}, {"top_p": 1e-9},
        {"temperature": 0, "top_p": 0.5}, {"top_k": 1},
    ]  # fmt: skip
    unfiltered = [{"top_k": 10**6}, {"top_k": 0}, {"top_k": -1}, {}]
    texts = ample.together([base | more for more in like_greedy + unfiltered])
    assert texts[: len(like_greedy)] == [greedy] * len(like_greedy)
    assert len({text[0] for text in texts[len(like_greedy) :]}) == 1
    assert ample.post(**base, top_p=0).status_code == 400
