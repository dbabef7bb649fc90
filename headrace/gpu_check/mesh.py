"""A whole mesh around a runner with random weights: NATS, scheduler, gateway and worker as processes of their own.

The worker loads nothing (:mod:`headrace.gpu_check.mesh_worker`); the gateway has a tokenizer that is made here, with a
word for each token id.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

from headrace.bench.mesh import MeshFailed, RunningMesh
from headrace.bench.observer import Observer
from headrace.bench.workload import Shot
from headrace.gpu_check.rig import Rig
from headrace.gpu_check.serving_load import SHAPES
from headrace.gpu_check.shapes import Shape
from headrace.launch import free_port
from headrace.nats_server import NatsServer, NatsServerError, embedded_nats
from headrace.parent_death import die_with_parent
from shared.bus import NatsBus

HOST = "127.0.0.1"
NAME = "check"
"""Of the model, as clients call it."""

POLL_S = 0.25
END_S = 5.0
"""Of the stage's time, kept for stopping the mesh."""

LONGEST_S = 10.0
"""Of the measurement itself."""


class MeshUnavailable(Exception):
    """Why there is no mesh to measure; one line."""


Shots = Callable[[Rig, int], Iterator[Shot]]


async def measure_mesh(rig: Rig, shape_name: str, batch: int, shots: Shots) -> tuple[Observer, float]:
    """What was seen on the bus while ``batch`` clients kept streaming, and for how many seconds.

    Raises MeshUnavailable.
    """
    try:
        from headrace.bench.client import fire
    except ImportError as error:
        raise MeshUnavailable(f"{error}; the mesh needs headrace[all]") from None
    shape = SHAPES[shape_name]
    try:
        async with running(rig, shape, batch) as mesh:
            bus = await NatsBus.connect(mesh.nats.url, "check", mesh.nats.token)
            seen = Observer()
            await seen.attach(bus, "default")
            load = shots(rig, shape.sizes.vocab_size)
            await fire(mesh.url, NAME, list(itertools.islice(load, batch)), batch, lambda _: None)
            seen.recording = True
            began = time.perf_counter()
            firing = asyncio.create_task(
                fire(mesh.url, NAME, list(itertools.islice(load, 50 * batch)), batch, lambda _: None)
            )
            await asyncio.wait([firing], timeout=max(0.5, min(LONGEST_S, rig.left_s - END_S)))
            seen.recording = False
            seconds = time.perf_counter() - began
            firing.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await firing
            await bus.close()
    except (MeshFailed, NatsServerError, OSError) as error:
        raise MeshUnavailable(" ".join(str(error).split())[:200]) from None
    if not seen.forward_us:
        raise MeshUnavailable("nothing was seen on the bus")
    return seen, seconds


@contextlib.asynccontextmanager
async def running(rig: Rig, shape: Shape, batch: int) -> AsyncIterator[RunningMesh]:
    """Yields the mesh once the scheduler tells of the worker's model and the gateway answers. Raises MeshFailed."""
    with tempfile.TemporaryDirectory() as name, embedded_nats() as nats:
        folder = Path(name)
        await asyncio.to_thread(make_tokenizer, folder / "model", shape)
        port = free_port(HOST)
        common = [f"--nats={nats.url}", "--metrics-port=0"]
        model = [f"--model={folder / 'model'}", f"--served-model-name={NAME}"]
        commands = {
            "scheduler": ["-m", "scheduler", *common, f"--max-num-seqs={batch}"],
            "worker": ["-m", "headrace.gpu_check.mesh_worker", _worker_request(rig, shape), *common, *model],
            "gateway": ["-m", "gateway", *common, *model, f"--host={HOST}", f"--port={port}"],
        }
        processes: dict[str, asyncio.subprocess.Process] = {}
        try:
            for service, arguments in commands.items():
                processes[service] = await _start(arguments, nats, folder / f"{service}.log")
            mesh = RunningMesh(f"http://{HOST}:{port}", nats, os.getpid())
            await _served(rig, mesh, processes, folder)
            yield mesh
        finally:
            await _stop(processes)


def _worker_request(rig: Rig, shape: Shape) -> str:
    return json.dumps({"shape": shape.name, "rehearsal": rig.rehearsal})


async def _start(arguments: list[str], nats: NatsServer, log: Path) -> asyncio.subprocess.Process:
    env = {**os.environ, "HEADRACE_NATS_TOKEN": nats.token}
    with log.open("wb") as output:
        return await asyncio.create_subprocess_exec(
            sys.executable, *arguments, env=env, stdin=asyncio.subprocess.DEVNULL, stdout=output, stderr=output,
            preexec_fn=die_with_parent(),
        )  # fmt: skip


async def _served(rig: Rig, mesh: RunningMesh, processes: dict[str, Any], folder: Path) -> None:
    """Wait until a model is served and the gateway's port is open."""
    while True:
        for service, process in processes.items():
            if process.returncode is not None:
                raise MeshFailed(f"the {service} ended: {_last_line(folder / f'{service}.log')}")
        if rig.left_s < END_S:
            raise MeshFailed("it was not up in time")
        with contextlib.suppress(MeshFailed, OSError):
            async with asyncio.timeout(2):
                _, writer = await asyncio.open_connection(HOST, int(mesh.url.rsplit(":", 1)[1]))
                writer.close()
                await mesh.model()
                return
        await asyncio.sleep(POLL_S)


async def _stop(processes: dict[str, asyncio.subprocess.Process]) -> None:
    running = [process for process in processes.values() if process.returncode is None]
    for process in running:
        process.kill()
    for process in running:
        await process.wait()


def _last_line(log: Path) -> str:
    lines = [line for line in log.read_text("utf-8", "replace").splitlines() if line.strip()]
    return lines[-1] if lines else "without a word"


def make_tokenizer(folder: Path, shape: Shape) -> None:
    """A model's folder without weights: its config, and a tokenizer in which every id is a word of its own."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(shape.sizes.vocab_size)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    words.decoder = decoders.Fuse()
    PreTrainedTokenizerFast(tokenizer_object=words, clean_up_tokenization_spaces=False).save_pretrained(folder)
    shape.config().save_pretrained(folder)
