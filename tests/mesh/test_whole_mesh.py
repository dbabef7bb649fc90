"""NATS, scheduler, worker and gateway as processes: clients as users have them."""

from __future__ import annotations

import asyncio
import json
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import httpx
import openai
import pytest
from loopback_http import HTTP
from mesh_stack import DEADLINE_S, Stack, stack
from otlp_receiver import attributes, otlp_receiver

from headrace.models import ensure_default_model

if TYPE_CHECKING:
    from whole_mesh import Mesh

pytestmark = [pytest.mark.mesh, pytest.mark.timeout(600)]

HERE = Path(__file__).parent
TRACE_ID = "0af7651916cd43dd8448eb211c80319c"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def serve(mesh: Stack, model: Path, *, scheduler: tuple[str, ...] = (), worker: tuple[str, ...] = (),
          every: tuple[str, ...] = ()) -> str:  # fmt: skip
    """Start the three services and return the gateway's URL once a completion can succeed."""
    port = free_port()
    mesh.start("scheduler", *every, *scheduler)
    mesh.start("worker", "--model", str(model), "--served-model-name", "m", *every, *worker)
    mesh.start("gateway", "--model", str(model), "--served-model-name", "m", "--port", str(port), *every)
    url = f"http://127.0.0.1:{port}"
    wait_ready(url)
    return url


def wait_ready(url: str, status: int = 200) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while True:
        try:
            if HTTP.get(url + "/ready").status_code == status:
                return
        except httpx.TransportError:
            pass  # not listening yet
        assert time.monotonic() < deadline, f"{url}/ready is not {status}"
        time.sleep(0.05)  # a start takes seconds of CPU, and so would asking for its end all the time


@pytest.fixture(scope="module")
def tiny_url(torch_mesh: Mesh) -> str:
    """A mesh with the tiny model, torch worker, float32."""
    return torch_mesh.url


@pytest.fixture(scope="module")
def real_url() -> Iterator[str]:
    """A mesh with the real model."""
    with stack() as mesh:
        yield serve(mesh, ensure_default_model(lambda _: None), worker=("--dtype", "float32"))


def test_official_client_streamed_equals_whole(tiny_url: str) -> None:
    client = openai.OpenAI(base_url=tiny_url + "/v1", api_key="unused")
    assert [model.id for model in client.models.list().data] == ["m"]
    for temperature in (0.0, 1.0):
        request = {"model": "m", "messages": [{"role": "user", "content": "hello"}], "seed": 3, "max_tokens": 24}
        whole = client.chat.completions.create(**request, temperature=temperature)  # type: ignore[call-overload]
        chunks = list(
            client.chat.completions.create(  # type: ignore[call-overload]
                **request, temperature=temperature, stream=True, stream_options={"include_usage": True}
            )
        )
        joined = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
        assert joined == whole.choices[0].message.content
        # But for prompt_tokens_details: the second has more of its prompt in the cache.
        assert chunks[-1].usage.total_tokens == whole.usage.total_tokens
        assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
        ends = [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices and chunk.choices[0].finish_reason]
        assert ends == [whole.choices[0].finish_reason]


def test_official_async_client_many_at_once(tiny_url: str) -> None:
    async def body() -> None:
        async with openai.AsyncOpenAI(base_url=tiny_url + "/v1", api_key="unused") as client:

            async def ask(index: int) -> str:
                reply = await client.completions.create(
                    model="m", prompt=f"number {index}", max_tokens=20, temperature=0, extra_body={"ignore_eos": True}
                )
                assert reply.usage is not None and reply.usage.completion_tokens == 20
                return reply.choices[0].text

            together = await asyncio.gather(*(ask(index) for index in range(24)))
            for index in (0, 11, 23):
                assert await ask(index) == together[index], "alone as in company"

    asyncio.run(body())


def test_n_choices_differ_and_repeat(tiny_url: str) -> None:
    body = {"prompt": "a prompt of about seventeen bytes", "n": 4, "temperature": 1.0, "seed": 7, "max_tokens": 12}
    first = HTTP.post(tiny_url + "/generate", json=body, timeout=60).json()["text"]
    second = HTTP.post(tiny_url + "/generate", json=body, timeout=60).json()["text"]
    assert first == second and len(first) == 4 and len(set(first)) > 1
    greedy = HTTP.post(tiny_url + "/generate", json=body | {"temperature": 0}, timeout=60).json()["text"]
    assert len(set(greedy)) == 1


def test_a_client_that_leaves_frees_the_memory(tiny_url: str, tiny: Path) -> None:
    with stack() as mesh:
        url = serve(mesh, tiny, worker=("--simulate", "--simulate-vocab-size", "320", "--simulate-base-us", "2000"))
        before = running(mesh)
        assert before == 0
        for _ in range(5):
            with HTTP.stream(
                "POST", url + "/v1/completions",
                json={"prompt": "x", "max_tokens": 2000, "ignore_eos": True, "stream": True}, timeout=60,
            ) as response:  # fmt: skip
                for number, _line in enumerate(response.iter_lines()):
                    if number == 5:
                        break
        deadline = time.monotonic() + DEADLINE_S
        while running(mesh):
            assert time.monotonic() < deadline, "the sequences of clients that left still run"
            time.sleep(0.02)


def running(mesh: Stack) -> int:
    """Sequences running or waiting, as the scheduler's beats say."""
    from mesh_stack import BusClient

    async def body() -> int:
        client = await BusClient.connect(mesh.nats)
        try:
            beat = await client.ready()
            client.beat = None
            await asyncio.wait_for(_next_beat(client), 30)
            beat = client.beat or beat
            assert beat.running or beat.free_blocks == beat.total_blocks
            return beat.running + beat.waiting
        finally:
            await client.close()

    return asyncio.run(body())


async def _next_beat(client: object) -> None:
    from mesh_stack import until

    await until(lambda: client.beat is not None, "a beat")  # type: ignore[attr-defined]


def test_one_trace_through_gateway_queue_prefill_and_decode(tiny: Path) -> None:
    with otlp_receiver() as receiver, stack() as mesh:
        url = serve(
            mesh, tiny, every=("--otlp-endpoint", receiver.url),
            worker=("--dtype", "float32", "--kv-cache-memory", "4MiB", "--threads", "1"),
        )  # fmt: skip
        caller = "b7ad6b7169203331"
        reply = HTTP.post(
            url + "/v1/completions",
            json={"model": "m", "prompt": "hello", "max_tokens": 9, "ignore_eos": True, "temperature": 0},
            headers={"traceparent": f"00-{TRACE_ID}-{caller}-01"}, timeout=60,
        )  # fmt: skip
        assert reply.status_code == 200
        for process in reversed(mesh.processes):
            assert process.stop() == 0  # a service exports what it still has before it ends
    spans = [span for span in receiver.spans if span.trace_id.hex() == TRACE_ID]
    by_name = {span.name: span for span in spans}
    services = {span.name: receiver.services[span.span_id] for span in spans}
    server = next(span for span in spans if span.parent_span_id.hex() == caller)
    assert receiver.services[server.span_id] == "headrace-gateway"
    assert services["queue"] == "headrace-scheduler"
    assert services["prefill"] == services["decode"] == "headrace-worker"
    for name in ("queue", "prefill", "decode"):
        span = by_name[name]
        assert span.parent_span_id == server.span_id
        assert server.start_time_unix_nano <= span.start_time_unix_nano <= span.end_time_unix_nano
        assert span.end_time_unix_nano <= server.end_time_unix_nano + 5_000_000  # its own process takes the end
    assert by_name["queue"].end_time_unix_nano <= by_name["prefill"].end_time_unix_nano
    assert attributes(by_name["decode"])["gen_ai.usage.output_tokens"] == 9


def test_a_stream_waits_for_a_worker_in_the_place_of_the_killed_one(tiny: Path) -> None:
    simulated = ("--simulate", "--simulate-vocab-size", "320", "--simulate-base-us", "5000")
    body = {"prompt": "x", "max_tokens": 400, "ignore_eos": True, "seed": 5}
    with stack() as mesh:
        url = serve(mesh, tiny, worker=simulated)
        whole = HTTP.post(url + "/v1/completions", json=body, timeout=60).json()["choices"][0]["text"]
        streamed = body | {"stream": True}
        with HTTP.stream("POST", url + "/v1/completions", json=streamed, timeout=120) as response:
            lines = response.iter_lines()
            first = next(lines)
            mesh.processes[1].kill()
            wait_ready(url, 503)
            refused = HTTP.post(url + "/v1/completions", json={"prompt": "x"}, timeout=60)
            assert refused.status_code == 503 and int(refused.headers["retry-after"]) >= 1
            mesh.start("worker", "--model", "x", "--served-model-name", "m", *simulated)
            events = [line.removeprefix("data: ") for line in (first, *lines) if line]
        assert events.pop() == "[DONE]"
        assert "".join(json.loads(event)["choices"][0]["text"] for event in events) == whole


@pytest.mark.model
def test_the_capital_of_france(real_url: str) -> None:
    client = openai.OpenAI(base_url=real_url + "/v1", api_key="unused")
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    stream = client.chat.completions.create(model="m", messages=messages, temperature=0, stream=True)  # type: ignore[call-overload]
    assert "Paris" in "".join(chunk.choices[0].delta.content or "" for chunk in stream)


@pytest.mark.model
def test_the_tutorials_client_runs_as_it_stands(real_url: str) -> None:
    script = (HERE / "tutorial_client.py").read_text("utf-8").replace("http://localhost:8000", real_url)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=300, check=True)
    assert re.fullmatch(r"总处理时间（并发模拟）: \d+\.\d\d 秒\n", done.stdout)


@pytest.mark.model
def test_short_requests_do_not_wait_for_a_long_one(real_url: str) -> None:
    prompts = {
        30: "介绍一下什么是大语言模型",
        150: "详细描述Continuous Batching的工作机制和优势",
        50: "什么是HoL Blocking",
    }
    order: list[int] = []
    lock = threading.Lock()

    def ask(max_tokens: int) -> str:
        body = {"prompt": prompts[max_tokens], "max_tokens": max_tokens, "temperature": 0.0, "ignore_eos": True}
        reply = HTTP.post(real_url + "/generate", content=json.dumps(body), timeout=300)
        with lock:
            order.append(max_tokens)
        return str(reply.json()["text"][0])

    with ThreadPoolExecutor(3) as pool:
        texts = dict(zip((150, 50, 30), pool.map(ask, (150, 50, 30)), strict=True))
    assert order == [30, 50, 150]
    assert all(texts[length].startswith(prompts[length]) for length in prompts)
