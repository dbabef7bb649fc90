"""A model divided over two processes, behind the whole mesh."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from loopback_http import HTTP
from tiny_models import make_tiny_model
from whole_mesh import FLOAT32, Mesh, eventually, running_mesh

from shared.messages import StepPlan

pytestmark = [pytest.mark.mesh, pytest.mark.timeout(600)]

BLOCKS = 24
BYTES_PER_BLOCK = 2 * 2 * 2 * 16 * 4 * 16  # key and value, layers, KV heads, head size, float32, tokens
MEMORY = ("--kv-cache-memory", str((BLOCKS + 2) * BYTES_PER_BLOCK), "--max-model-len", "256")
ONE, TWO = (*FLOAT32, *MEMORY), (*FLOAT32, *MEMORY, "--tensor-parallel", "2")

REQUESTS: list[dict[str, Any]] = [
    {"prompt": "once upon a time " * (1 + index), "max_tokens": 60, "ignore_eos": True, "seed": index,
     "temperature": index % 2, "n": 1 + index // 4}
    for index in range(6)
]  # fmt: skip
START_S = 180.0
"""Two processes that load, perhaps on two busy cores."""

STREAM = {"prompt": "a long one", "max_tokens": 200, "ignore_eos": True, "seed": 3, "stream": True}


def followers_of(pid: int) -> list[int]:
    tasks = Path(f"/proc/{pid}/task")
    return [int(child) for task in tasks.iterdir() for child in (task / "children").read_text().split()]


def streamed(mesh: Mesh, begun: list[int]) -> str:
    body = {"model": mesh.model, **STREAM}
    with HTTP.stream("POST", mesh.url + "/v1/completions", json=body, timeout=START_S) as reply:
        text = ""
        for line in reply.iter_lines():
            event = line.removeprefix("data: ")
            if line and event != "[DONE]":
                text += json.loads(event)["choices"][0]["text"]
                begun.append(1)
        return text


def replace_worker(mesh: Mesh, flags: tuple[str, ...]) -> None:
    """Stop the worker; another takes its place."""
    mesh.workers.pop().stop()
    eventually(lambda: not mesh.ready(), "that nothing serves")
    mesh._worker_flags = flags
    mesh.workers.append(mesh.start_worker())
    eventually(mesh.ready, "that the two serve", START_S)


def test_two_ranks_serve_as_one_does_and_the_death_of_one_is_survived(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path / "model", seed=9)
    scheduler = ("--no-growth-aware-admission", "--no-enable-prefix-caching", "--max-num-batched-tokens", "64")
    patient = ("--resume-timeout-s", str(START_S))
    with (
        running_mesh(folder, scheduler=scheduler, worker=ONE, gateway=patient) as mesh,
        ThreadPoolExecutor(1) as pool,
    ):
        alone = mesh.together(REQUESTS)
        whole = streamed(mesh, [])

        replace_worker(mesh, TWO)
        (worker,) = mesh.workers
        assert len(followers_of(worker.popen.pid)) == 1

        async def watched(client: Any) -> int:
            await client.spy()
            divided = await asyncio.to_thread(mesh.together, REQUESTS)
            assert divided == alone
            return sum(len(one.starts) for one in client.seen if isinstance(one, StepPlan))

        starts = mesh.on_the_bus(watched)
        assert starts > sum(request["n"] for request in REQUESTS), "nothing was preempted: the pool is too large"

        begun: list[int] = []
        stream = pool.submit(streamed, mesh, begun)
        eventually(lambda: len(begun) > 3, "tokens of the stream")
        (follower,) = followers_of(worker.popen.pid)
        os.kill(follower, signal.SIGKILL)
        assert worker.popen.wait(60) == 1
        assert "rank 1 was killed by SIGKILL" in worker.output()
        mesh.workers = [mesh.start_worker()]
        assert stream.result(START_S) == whole

        (follower,) = followers_of(mesh.workers[0].popen.pid)
        mesh.workers[0].popen.kill()
        eventually(lambda: not Path(f"/proc/{follower}").exists() or _is_zombie(follower), "that it ends with rank 0")


def test_what_cannot_be_divided_is_told_once_and_ends_the_worker(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path / "model", hidden_size=48, num_attention_heads=3, num_key_value_heads=3)
    with running_mesh(folder) as mesh:
        mesh._worker_flags = TWO
        refused = mesh.start_worker()
        assert refused.popen.wait(START_S) == 2
        lines = [line for line in refused.output().splitlines() if "divided" in line]
        assert len(lines) == 1 and lines[0].startswith("headrace: model "), refused.output()
        assert "its 3 attention heads can't be divided evenly" in lines[0]
        assert "Traceback" not in refused.output()


def _is_zombie(pid: int) -> bool:
    return ") Z " in Path(f"/proc/{pid}/stat").read_text()
