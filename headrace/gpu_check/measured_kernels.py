"""The kernels around attention, timed: each against the bytes that it must read and write."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from headrace.gpu_check.kernel_cases import flat_batch, random
from headrace.gpu_check.measured_attention import Call, Pages, against_floor
from headrace.gpu_check.ports import port_of
from headrace.gpu_check.rig import Rig
from headrace.gpu_check.timing import sets_for
from shared.messages import Sampling
from worker.device.pages import DevicePages
from worker.device.port import Port, Uploads
from worker.device.sampling import DeviceSampler, SamplingParams, choose, host_params, what_is_asked
from worker.sampling import SampleRow

Measurement = tuple[str, Callable[[], None]]

WIDTH, INNER, VOCABULARY = 4096, 14336, 128256
TOKENS = (64, 2048)
"""A batch that decodes, and a prompt's chunks."""

SAMPLED: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "temperature": {"temperature": 0.8},
    "top-k, top-p": {"temperature": 0.8, "top_k": 50, "top_p": 0.95},
    "top-p 0.99, flat": {"temperature": 1.5, "top_p": 0.99},
}
"""Of random logits, which are flatter than a model's: filters have more candidates than usual."""


def measurements(rig: Rig, pages: Pages) -> Iterator[Measurement]:
    sizes = (3,) if rig.rehearsal else TOKENS
    for name, measure in (
        ("norm, with the residual's sum", _norm),
        ("gated activation", _activation),
        ("cache write", _write),
        ("rotary and write", _rotary),
    ):
        for tokens in sizes:
            yield name, partial(measure, rig, pages, name, tokens)
    for tokens in (2,) if rig.rehearsal else (1, 64, 256):
        yield "product", partial(_product, rig, tokens)
    for count in (2,) if rig.rehearsal else (8, 64):
        yield "page copies", partial(_page_copies, rig, pages, count)
        yield "pages in one launch", partial(_moves, rig, pages, count)
        yield "swaps", partial(_swaps, rig, pages, count)
    for rows in (2,) if rig.rehearsal else (1, 64, 128):
        for name, asked in SAMPLED.items():
            if name == "top-k, top-p" or not rig.rehearsal:
                yield "sampling", partial(_sampling, rig, rows, name, asked)


def timed(
    rig: Rig, name: str, backend: str, tokens: int, make: Callable[[int], Call], data_bytes: int, moved: float,
    flops: float = 0.0, *, ours: bool = True, **more: Any,
) -> None:  # fmt: skip
    """One row. ``make(n)``: a call on inputs of its own, which take ``data_bytes``."""
    count = sets_for(data_bytes, rig.timer.l2_bytes, rig.free_bytes() // 4)
    seconds = rig.timer.seconds([make(number) for number in range(count)], data_bytes)
    rig.row(kernel=name, backend=backend, ours=ours, batch=tokens, **against_floor(rig, seconds, moved, flops), **more)


def _sizes(rig: Rig) -> tuple[int, int]:
    return (64, 96) if rig.rehearsal else (WIDTH, INNER)


def _norm(rig: Rig, pages: Pages, name: str, tokens: int) -> None:
    from kernels.triton.norm import add_rms_norm

    width, _ = _sizes(rig)
    weight = torch.ones(width, dtype=rig.dtype, device=rig.device)

    def make(number: int) -> Call:
        x, residual = (random(rig.generator(10 * number + place), rig.dtype, tokens, width) for place in range(2))
        return lambda: add_rms_norm(x, residual, weight, 1e-5)

    one = tokens * width * rig.dtype.itemsize
    timed(rig, name, "triton", tokens, make, 4 * one, 4 * one)


def _activation(rig: Rig, pages: Pages, name: str, tokens: int) -> None:
    from kernels.triton.activation import gated

    _, inner = _sizes(rig)

    def make(number: int) -> Call:
        merged = random(rig.generator(number), rig.dtype, tokens, 2 * inner)
        return lambda: gated(merged, "silu")

    one = tokens * inner * rig.dtype.itemsize
    timed(rig, name, "triton", tokens, make, 3 * one, 3 * one)


def _write(rig: Rig, pages: Pages, name: str, tokens: int) -> None:
    from kernels.triton.cache import write_pages

    g = pages.geometry

    def make(number: int) -> Call:
        generator = rig.generator(number)
        key, value = (random(generator, rig.dtype, tokens, g.num_kv_heads, g.head_dim) for _ in range(2))
        batch = flat_batch(some_slots(pages, tokens, number).to(rig.device), rig.device)
        return lambda: write_pages(pages.cache, key, value, batch)

    moved = 2 * tokens * pages.token_bytes
    timed(rig, name, "triton", tokens, make, moved, moved)


def _rotary(rig: Rig, pages: Pages, name: str, tokens: int) -> None:
    from kernels.triton.rotary import Rotation, rotate_and_write

    g = pages.geometry
    angle = torch.rand((4096, g.head_dim // 2), device=rig.device) * 6.28
    rotation = Rotation(angle.cos().to(rig.dtype), angle.sin().to(rig.dtype))
    heads = g.num_heads + 2 * g.num_kv_heads

    def make(number: int) -> Call:
        qkv = random(rig.generator(number), rig.dtype, tokens, heads * g.head_dim)
        positions = torch.randint(0, 4096, (tokens,), generator=rig.generator(number), device=rig.device)
        batch = flat_batch(some_slots(pages, tokens, number).to(rig.device), rig.device)
        return lambda: rotate_and_write(qkv, positions, batch, pages.cache, g, rotation)

    moved = 2 * tokens * heads * g.head_dim * rig.dtype.itemsize
    timed(rig, name, "triton", tokens, make, moved, moved)


def some_slots(pages: Pages, tokens: int, seed: int) -> torch.Tensor:
    """Distinct slots in random order."""
    order = torch.randperm(min(pages.num_tokens, 1 << 20), generator=torch.Generator().manual_seed(seed))
    return order[:tokens].contiguous()


def _product(rig: Rig, tokens: int) -> None:
    """The batch-invariant product beside the library's, whose bits may depend on the batch."""
    from kernels.triton.matmul import linear

    width, inner = _sizes(rig)
    shape = f"{width} to {2 * inner}"
    size = 2 * inner * width * rig.dtype.itemsize
    x = random(rig.generator(1), rig.dtype, tokens, width)

    def weights(number: int) -> torch.Tensor:
        return random(rig.generator(number), rig.dtype, 2 * inner, width)

    def ours(number: int) -> Call:
        weight = weights(number)
        return lambda: linear(x, weight)

    def library(number: int) -> Call:
        weight = weights(number)
        return lambda: torch.nn.functional.linear(x, weight)

    moved = size + tokens * (width + 2 * inner) * rig.dtype.itemsize
    flops = 2.0 * tokens * width * 2 * inner
    timed(rig, "product", "triton, batch-invariant", tokens, ours, size, moved, flops, note=shape)
    timed(rig, "product", "torch", tokens, library, size, moved, flops, ours=False, note=shape)


def _page_copies(rig: Rig, pages: Pages, count: int) -> None:
    """Copy-on-write of ``count`` pages in one layer."""
    port = port_of(rig)
    moving = DevicePages([pages.cache], 0, port, Uploads(port))
    moves = [(page, pages.num_pages // 2 + page) for page in range(min(count, pages.num_pages // 2))]
    seconds = _until_done(rig, port, lambda: moving.copy(moves))
    moved = 2 * len(moves) * pages.geometry.block_size * pages.token_bytes
    row = against_floor(rig, seconds, moved)
    rig.row(
        kernel="page copies",
        backend="the runner's",
        ours=True,
        batch=len(moves),
        **row,
        note="with the upload of the pairs",
    )


def _moves(rig: Rig, pages: Pages, count: int) -> None:
    from kernels.triton.moves import PageMoves

    moves = PageMoves(pages.cache.tensors())
    count = min(count, pages.num_pages // 2)

    def make(number: int) -> Call:
        order = torch.randperm(pages.num_pages, generator=torch.Generator().manual_seed(number)).to(rig.device)
        sources, targets = order[:count].contiguous(), order[count : 2 * count].contiguous()
        return lambda: moves.copy(sources, targets)

    moved = 2 * count * pages.geometry.block_size * pages.token_bytes
    timed(rig, "pages in one launch", "triton", count, make, moved, moved)


def _swaps(rig: Rig, pages: Pages, count: int) -> None:
    """To pinned memory and back, one layer; a page's bytes count once each way."""
    port = port_of(rig)
    count = min(count, pages.num_pages - 1)
    moving = DevicePages([pages.cache], count, port, Uploads(port))
    size = count * pages.geometry.block_size * pages.token_bytes
    out = [(page, page) for page in range(count)]
    for name, work in (("out", lambda: moving.swap_out(out)), ("in", lambda: moving.swap_in(out))):
        seconds = _until_done(rig, port, work)
        link = float(rig.known.get("limits", {}).get("d2h_bytes_s" if name == "out" else "h2d_bytes_s", 0.0))
        row: dict[str, Any] = {"us": seconds * 1e6, "gb_s": size / seconds / 1e9}
        if link:
            row |= {"floor_us": size / link * 1e6, "floor_share": size / link / seconds, "bound": "link"}
        rig.row(kernel=f"swap {name}", backend="the runner's", ours=True, batch=count, **row, note="until it is there")


def _until_done(rig: Rig, port: Port, work: Call) -> float:
    """Of what runs on both streams: it can't be captured. Median seconds until the host sees both done."""
    work()
    taken = []
    for _ in range(2 if rig.rehearsal else 7):
        port.synchronize()
        began = time.perf_counter()
        work()
        port.synchronize()
        taken.append(time.perf_counter() - began)
    return statistics.median(taken)


def _sampling(rig: Rig, rows: int, name: str, asked: dict[str, Any]) -> None:
    vocabulary = 500 if rig.rehearsal else VOCABULARY
    sampler = DeviceSampler(rig.device, lambda array: torch.from_numpy(array).to(rig.device), triton=True)
    how = [SampleRow(Sampling(seed=row, max_tokens=1, **asked), 0, 0, row) for row in range(rows)]
    packed = host_params(how)
    params = SamplingParams.of(torch.from_numpy(packed).to(rig.device), *what_is_asked(packed))

    def logits(number: int) -> torch.Tensor:
        return random(rig.generator(number), rig.dtype, rows, vocabulary) * 3

    def ours(number: int) -> Call:
        given = logits(number)
        return lambda: sampler.sample(given, params)

    def sorting(number: int) -> Call:
        given = logits(number)
        return lambda: choose(given, params)

    size = rows * vocabulary * rig.dtype.itemsize
    timed(rig, "sampling", "triton", rows, ours, size, size, note=name)
    if name == "top-k, top-p":
        timed(rig, "sampling", "torch, with a sort", rows, sorting, size, size, ours=False, note=name)
