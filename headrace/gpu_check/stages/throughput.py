"""Decoding over batch sizes and contexts, beside the time that reading the weights and the keys and values takes."""

from __future__ import annotations

from headrace.gpu_check.rig import CannotRun, Rig
from headrace.gpu_check.runners import Made, made
from headrace.gpu_check.shapes import LLAMA_1B, LLAMA_8B, TINY, Shape, fits
from headrace.gpu_check.stepping import Stepping, cells_that_fit

BATCHES, CONTEXTS = (1, 8, 16, 32, 64, 128), (1024, 4096, 16384)
BESIDE = (1, 64)
"""Batches of other ways to run the model."""

WARM_UP, STEPS = 4, 32


def run(rig: Rig) -> None:
    shapes = [TINY] if rig.rehearsal else [shape for shape in (LLAMA_8B, LLAMA_1B) if _fits(rig, shape)]
    if not shapes:
        raise CannotRun("too little memory is free for a model of 1B")
    for number, shape in enumerate(shapes):
        if rig.more(f"{shape.name} was measured", needs_s=0.0 if not number else 10.0):
            _shape(rig, shape, number > 0)


def _fits(rig: Rig, shape: Shape) -> bool:
    return fits(shape, rig.served_dtype, rig.free_bytes())


def _shape(rig: Rig, shape: Shape, few: bool) -> None:
    rig.progress(f"making weights of the {shape.name}")
    most = WARM_UP + STEPS
    contexts = (16,) if rig.rehearsal else CONTEXTS[:2] if few else CONTEXTS
    batches = (3,) if rig.rehearsal else (1, 32, 128) if few else BATCHES
    beside = (2,) if rig.rehearsal else BESIDE
    with made(rig, shape, max_model_len=max(contexts) + most + 64) as model:
        capacity = model.runner.capacity
        cells = cells_that_fit(
            batches, contexts, most, capacity.num_blocks, capacity.block_size, capacity.max_model_len
        )
        for batch, context in cells:
            if not rig.more(f"batch {batch} at context {context} of the {shape.name}"):
                return
            measure(rig, model, batch, context, served=not few)
    if few or not rig.more(f"the {shape.name} without graphs"):
        return
    with made(rig, shape, max_model_len=contexts[0] + most + 64, graphs=False) as model:
        for batch in beside:
            if rig.more(f"batch {batch} of the {shape.name} without graphs"):
                measure(rig, model, batch, contexts[0])
    if not rig.more(f"the {shape.name}, batch-invariant"):
        return
    with made(rig, shape, max_model_len=contexts[0] + most + 64, batch_invariant=True) as model:
        for batch in beside:
            if rig.more(f"batch {batch} of the {shape.name}, batch-invariant"):
                measure(rig, model, batch, contexts[0])


def measure(rig: Rig, model: Made, batch: int, context: int, *, served: bool = False) -> None:
    """One row; ``served``: of the larger model, run as it would be. The first steps of a batch size capture its graph:
    they are not counted."""
    stepping = Stepping(model.runner, batch, context, WARM_UP + STEPS)
    stepping.run(3 if rig.rehearsal else WARM_UP)
    done = stepping.run(2 if rig.rehearsal else STEPS)
    read = model.shape.read_bytes(rig.served_dtype, batch, context)
    row = {
        "model": model.shape.name, "path": model.path, "served": served, "batch": batch, "context": context,
        "step_ms": done.step_s * 1e3, "tokens_s": batch / done.step_s,
    }  # fmt: skip
    if rig.copy_bytes_s:
        row |= {"read_ms": read / rig.copy_bytes_s * 1e3, "roofline_share": read / rig.copy_bytes_s / done.step_s}
    nominal = float(rig.known.get("environment", {}).get("nominal_bytes_s", 0))
    if nominal:
        row["nominal_share"] = read / nominal / done.step_s
    rig.row(**row)
