"""Where the time of a decode step goes: the host's work, the launch, the device; and how long the device has nothing to
do between two steps, alone, with the scheduler's core in the same process, and with the whole mesh around it."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import torch

from headrace.bench.observer import Observer
from headrace.bench.report import percentile
from headrace.bench.workload import Shot
from headrace.gpu_check.mesh import MeshUnavailable, measure_mesh
from headrace.gpu_check.one_process import OneProcess
from headrace.gpu_check.rig import CannotRun, Rig
from headrace.gpu_check.runners import Made, made
from headrace.gpu_check.shapes import LLAMA_1B, LLAMA_8B, TINY, largest
from headrace.gpu_check.stepping import Stepping, prompt
from headrace.nats_server import NatsServerError, find_nats_server
from scheduler.core.limits import Limits

BATCHES = (1, 32, 64)
CONTEXT = 512
STEPS, WARM_UP, PROFILED = 64, 8, 16
OUTPUT = 200
MESH_S = 25.0
"""Less than that is not worth starting a mesh."""


def run(rig: Rig) -> None:
    shape = TINY if rig.rehearsal else largest((LLAMA_8B, LLAMA_1B), rig.served_dtype, rig.free_bytes())
    if shape is None:
        raise CannotRun("too little memory is free for a model of 1B")
    batches = (2,) if rig.rehearsal else BATCHES
    rig.progress(f"making weights of the {shape.name}")
    with made(rig, shape, max_model_len=64 if rig.rehearsal else 2048) as model:
        for batch in batches:
            if rig.more(f"batch {batch} alone"):
                _alone(rig, model, batch)
        for batch in batches[-1:]:
            if rig.more(f"batch {batch} with the scheduler's core"):
                _one_process(rig, model, batch)
    if _wants_mesh(rig) and rig.more("the mesh", needs_s=0.0 if rig.rehearsal else MESH_S):
        _mesh(rig, shape.name, batches[-1])


def _alone(rig: Rig, model: Made, batch: int) -> None:
    warm_up, steps, context = (1, 2, 8) if rig.rehearsal else (WARM_UP, STEPS, CONTEXT)
    stepping = Stepping(model.runner, batch, context, warm_up + steps + PROFILED)
    stepping.run(warm_up)
    done = stepping.run(steps)
    row: dict[str, Any] = {"around": "nothing", "batch": batch, "steps": steps, "step_us": done.step_s * 1e6}
    for name in ("host", "launch"):
        row[f"{name}_us"] = (done.median(f"{name}_s") or 0.0) * 1e6
    busy = _kernels_s(rig, stepping) or done.median("busy_s")
    if busy is not None:
        row |= {"device_us": busy * 1e6, "device_idle_us": max(0.0, done.step_s - busy) * 1e6}
    rig.row(**row, note=f"{model.shape.name}, context {context}, {model.path}")


def _kernels_s(rig: Rig, stepping: Stepping) -> float | None:
    """What the kernels of a step take together, as CUPTI has it: the runner's own events also count what the device
    waits for within a step. None where that can't be had."""
    if rig.rehearsal:
        return None
    activities = [torch.profiler.ProfilerActivity.CUDA]
    try:
        with torch.profiler.profile(activities=activities) as profile:
            stepping.run(PROFILED)
            rig.timer.sync()
        total_us = sum(float(getattr(event, "self_device_time_total", 0.0)) for event in profile.key_averages())
    except RuntimeError:
        return None
    return total_us / 1e6 / PROFILED or None


def shots(rig: Rig, vocabulary: int) -> Iterator[Shot]:
    """Without end: prompts and outputs all alike, so that nearly every step is a decode of the whole batch."""
    length, output = (4, 6) if rig.rehearsal else (64, OUTPUT)
    return (Shot(0.0, prompt(number, length, vocabulary), output) for number in itertools.count())


def _one_process(rig: Rig, model: Made, batch: int) -> None:
    limits = Limits(max_num_seqs=batch, max_num_batched_tokens=max(1024, batch))
    load = shots(rig, model.shape.sizes.vocab_size)
    with closing(OneProcess(model.runner, limits)) as serving:
        serving.serve(itertools.islice(load, batch), batch)
        serving.forget()
        _, seconds = serving.serve(itertools.islice(load, 3 * batch), batch, lasting_s=min(8.0, rig.left_s / 2))
        note = f"{model.shape.name}, {model.path}, messages encoded"
        rig.row(around="one process", batch=batch, note=note, **gaps(serving.seen, seconds))


def gaps(seen: Observer, seconds: float) -> dict[str, Any]:
    """Of a row: steps, the device's time for one, and how long its loop was blocked for want of a plan."""
    found: dict[str, Any] = {"steps": len(seen.forward_us)}
    if seen.forward_us:
        found["step_us"] = seconds * 1e6 / len(seen.forward_us)
        found["device_us"] = percentile(seen.forward_us, 0.5)
    if seen.gap_us:
        found |= {"gap_p50_us": float(percentile(seen.gap_us, 0.5)), "gap_p99_us": float(percentile(seen.gap_us, 0.99))}
    return found


def _wants_mesh(rig: Rig) -> bool:
    if rig.nats or rig.rehearsal:
        return rig.nats
    try:
        find_nats_server()
    except NatsServerError:
        return False
    return True


def _mesh(rig: Rig, shape: str, batch: int) -> None:
    rig.progress("a mesh: NATS, scheduler, worker, gateway")
    try:
        seen, seconds = asyncio.run(measure_mesh(rig, shape, batch, shots))
    except MeshUnavailable as reason:
        rig.row(around="mesh", batch=batch, note=str(reason))
        return
    rig.row(around="mesh", batch=batch, note=f"{shape}, streams by HTTP", **gaps(seen, seconds))
