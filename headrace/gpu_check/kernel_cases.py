"""The kernels around attention, against float64 or plain torch: norms, activations, rotation, products, sampling."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from headrace.gpu_check.attention_cases import Found, gap
from headrace.gpu_check.ports import port_of
from headrace.gpu_check.rig import Rig
from kernels import device_pages
from kernels.contract import DeviceBatch, Geometry, LayerCache
from shared.messages import Sampling
from worker.device.pages import DevicePages
from worker.device.port import Uploads
from worker.device.sampling import DeviceSampler, SamplingParams, host_params, what_is_asked
from worker.sampling import SampleRow, choose_in_torch

ROUNDINGS = {torch.float32: 1e-5, torch.bfloat16: 3 * 2.0**-8, torch.float16: 3 * 2.0**-11}
"""Of a number's size: a few roundings of the type."""

Check = Callable[[Rig, Found, torch.Generator], float]
"""Fills in what it found, and returns the error that it allows."""


def checks(rig: Rig) -> dict[str, Check]:
    return {
        "norm, with the residual's sum": norm,
        "gated activation": activation,
        "rotary and write": rotary,
        "products that keep a row's bits": products,
        "page copies and swaps": page_moves,
        "pages of all layers in one launch": launched_moves,
        "sampling": sampling,
    }


def types(rig: Rig) -> list[torch.dtype]:
    return [torch.float32] if rig.rehearsal else [torch.bfloat16, torch.float16, torch.float32]


def random(generator: torch.Generator, dtype: torch.dtype, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=generator, device=generator.device).to(dtype)


def relative(out: torch.Tensor, wanted: torch.Tensor) -> float:
    """The largest difference in proportion to the size of the result."""
    return gap(out, wanted) / max(1.0, float(wanted.abs().max()))


def norm(rig: Rig, found: Found, generator: torch.Generator) -> float:
    from kernels.triton.norm import add_rms_norm

    eps = 1e-5
    for dtype in types(rig):
        for rows, width in ((1, 64), (3, 576)) if rig.rehearsal else ((1, 4096), (33, 576), (257, 4096), (5, 16384)):
            x, residual = random(generator, dtype, rows, width), random(generator, dtype, rows, width)
            weight = random(generator, dtype, width)
            out, total = add_rms_norm(x, residual, weight, eps)
            case = f"norm of {rows} x {width} in {dtype}"
            found.require(case, torch.equal(total, x + residual), "the sum is another than torch's")
            exact = total.double()
            wanted = exact * torch.rsqrt(exact.pow(2).mean(-1, keepdim=True) + eps) * weight.double()
            found.saw(case, relative(out, wanted), ROUNDINGS[dtype])
            alone = add_rms_norm(x[-1:], residual[-1:], weight, eps)[0]
            found.require(case, torch.equal(alone, out[-1:]), "other bits alone")
            found.cases += 1
    return ROUNDINGS[types(rig)[0]]


def activation(rig: Rig, found: Found, generator: torch.Generator) -> float:
    from kernels.triton.activation import gated

    exact: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "silu": lambda x: x * torch.sigmoid(x),
        "gelu_tanh": lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
    }
    for dtype in types(rig):
        for name, function in exact.items():
            for rows, inner in ((3, 100),) if rig.rehearsal else ((1, 14336), (65, 1000)):
                merged = random(generator, dtype, rows, 2 * inner)
                gate, up = torch.split(merged.double(), inner, dim=-1)
                case = f"{name} of {rows} x {inner} in {dtype}"
                found.saw(case, relative(gated(merged, name), function(gate) * up), ROUNDINGS[dtype])
                found.cases += 1
    return ROUNDINGS[types(rig)[0]]


def rotary(rig: Rig, found: Found, generator: torch.Generator) -> float:
    """Rotated queries come back, rotated keys and values lie in the pages that the slots name."""
    from kernels.triton.rotary import Rotation, rotate_and_write

    for dtype in types(rig):
        g = Geometry(4, 2, 32, 16) if rig.rehearsal else Geometry(32, 8, 128, 16)
        tokens, pages, longest = (7, 4, 64) if rig.rehearsal else (301, 64, 4096)
        half = g.head_dim // 2
        angle = torch.rand((longest, half), generator=generator, device=rig.device) * 6.28
        cos, sin = angle.cos().to(dtype), angle.sin().to(dtype)
        positions = torch.randint(0, longest, (tokens,), generator=generator, device=rig.device)
        order = torch.randperm(pages * g.block_size, generator=generator, device=rig.device)
        slots = order[:tokens].contiguous()
        qkv = random(generator, dtype, tokens, (g.num_heads + 2 * g.num_kv_heads) * g.head_dim)
        cache = device_pages.allocate(g, dtype, pages, rig.device)
        query = rotate_and_write(qkv, positions, flat_batch(slots, rig.device), cache, g, Rotation(cos, sin))
        heads = qkv.double().view(tokens, -1, g.head_dim)
        turned = rotated(heads, cos.double()[positions], sin.double()[positions])
        case = f"rotary in {dtype}"
        found.saw(case, relative(query, turned[:, : g.num_heads]), ROUNDINGS[dtype])
        held = cache.key.flatten(0, 1)[slots]
        found.saw(case, relative(held, turned[:, g.num_heads : g.num_heads + g.num_kv_heads]), ROUNDINGS[dtype])
        values = cache.value.flatten(0, 1)[slots].double()
        found.require(case, torch.equal(values, heads[:, -g.num_kv_heads :]), "values are others than were given")
        untouched = cache.key.flatten(0, 1)[order[tokens:]]
        found.require(case, not bool(untouched.any()), "something was written to slots that nobody named")
        found.cases += 1
    return ROUNDINGS[types(rig)[0]]


def rotated(heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """``[T, heads, dim]`` turned in Llama's half layout by tables ``[T, dim / 2]``."""
    first, second = heads.chunk(2, dim=-1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def flat_batch(slots: torch.Tensor, device: torch.device) -> DeviceBatch:
    """One sequence that writes to ``slots``; whoever only writes looks at nothing else."""
    count = len(slots)
    start = torch.tensor([0, count], dtype=torch.int32, device=device)
    visible = torch.arange(1, count + 1, dtype=torch.int32, device=device)
    return DeviceBatch(start, visible, torch.zeros((1, 1), dtype=torch.int32, device=device), slots, count, count)


def page_moves(rig: Rig, found: Found, generator: torch.Generator) -> float:
    """Copies happen as if one after the other, chains and swaps of two pages among them; pages that leave come back."""
    g = Geometry(4, 2, 16, 16) if rig.rehearsal else Geometry(32, 8, 128, 16)
    count = 12 if rig.rehearsal else 400
    for storage in (rig.dtype, torch.int8):
        caches = [device_pages.allocate(g, storage, count, rig.device) for _ in range(2)]
        for tensor in (tensor for cache in caches for tensor in cache.tensors()):
            noise = torch.randint(-100, 100, tensor.shape, generator=generator, device=rig.device)
            tensor.copy_(noise.to(tensor.dtype))
        port = port_of(rig)
        pages = DevicePages(caches, 4, port, Uploads(port))
        wanted = [tensor.cpu().clone() for cache in caches for tensor in cache.tensors()]
        moves = [(1, 2), (2, 3), (1, 4), (5, 1), (3, 5), *((page, page + count // 2) for page in range(6, count // 2))]
        pages.copy(moves)
        for tensor in wanted:
            for source, target in moves:
                tensor[target] = tensor[source]
        port.synchronize()
        case = f"page copies in {storage}"
        same = [torch.equal(a.cpu(), b) for a, b in zip(tensors_of(caches), wanted, strict=True)]
        found.require(case, all(same), "pages hold something else than copies one by one would leave")
        pages.swap_out([(1, 3), (7, 0), (5, 1)])
        port.run(partial(overwrite, caches))
        pages.swap_in([(0, 2), (1, 9), (3, 8)])
        port.synchronize()
        for tensor, before in zip(tensors_of(caches), wanted, strict=True):
            for was, now in ((7, 2), (5, 9), (1, 8)):
                back = torch.equal(tensor[now].cpu(), before[was])
                found.require(f"swaps in {storage}", back, f"page {was} came back otherwise as {now}")
        found.cases += 2
    return 0.0


def launched_moves(rig: Rig, found: Found, generator: torch.Generator) -> float:
    """The kernel that moves pages: among themselves, to a buffer and back."""
    from kernels.triton.moves import PageMoves

    g = Geometry(4, 2, 16, 16) if rig.rehearsal else Geometry(32, 8, 128, 16)
    count, moved = (12, 4) if rig.rehearsal else (400, 90)
    for storage in (rig.dtype, torch.int8):
        pools = tensors_of([device_pages.allocate(g, storage, count, rig.device) for _ in range(2)])
        for pool in pools:
            noise = torch.randint(-100, 100, pool.shape, generator=generator, device=rig.device)
            pool.copy_(noise.to(pool.dtype))
        order = torch.randperm(count, generator=generator, device=rig.device)
        sources, targets, others = order[:moved], order[moved : 2 * moved], order[-moved:]
        wanted = [pool.clone() for pool in pools]
        for pool in wanted:
            pool[targets] = pool[sources]
            pool[others] = pool[targets]
        moves = PageMoves(pools)
        moves.copy(sources, targets)
        buffer = torch.empty((moved, moves.page_bytes), dtype=torch.uint8, device=rig.device)
        moves.gather(targets, buffer)
        moves.scatter(buffer, others)
        same = all(torch.equal(pool, other) for pool, other in zip(pools, wanted, strict=True))
        found.require(f"moves of pages in {storage}", same, "pages hold something else than was moved there")
        found.cases += 1
    return 0.0


def overwrite(caches: list[LayerCache]) -> None:
    for tensor in tensors_of(caches):
        tensor[1:8].zero_()


def tensors_of(caches: list[LayerCache]) -> list[torch.Tensor]:
    return [tensor for cache in caches for tensor in cache.tensors()]


def products(rig: Rig, found: Found, generator: torch.Generator) -> float:
    """A row has the same bits alone and among others."""
    from kernels.triton.matmul import linear

    for dtype in types(rig):
        inner, columns, most = (48, 70, 5) if rig.rehearsal else (4096, 6144, 300)
        x, weight = random(generator, dtype, most, inner), random(generator, dtype, columns, inner) * inner**-0.5
        whole = linear(x, weight)
        case = f"product in {dtype}"
        found.saw(case, relative(whole, x.double() @ weight.double().T), ROUNDINGS[dtype])
        for first, last in ((0, 1), (most - 1, most), (1, most // 2)):
            same = torch.equal(linear(x[first:last], weight), whole[first:last])
            found.require(case, same or rig.rehearsal, "other bits in company")  # the interpreter's depend on it
        found.cases += 1
    return ROUNDINGS[types(rig)[0]]


ASKED: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 0.7, "top_p": 0.9},
    {"temperature": 1.3, "top_k": 40},
    {"temperature": 0.9, "top_k": 50, "top_p": 0.95},
    {"temperature": 1.0, "min_p": 0.05},
    {"temperature": 2.5, "top_p": 0.999},
    {"temperature": 1.0, "top_k": 5000, "top_p": 0.8, "min_p": 0.001},
)


def sampling(rig: Rig, found: Found, generator: torch.Generator) -> float:
    """The tokens that the CPU's sampler chooses of the same logits."""
    sampler = DeviceSampler(rig.device, lambda array: torch.from_numpy(array).to(rig.device), triton=True)
    vocabulary, count = (200, 3) if rig.rehearsal else (128256, 64)
    for dtype in types(rig):
        logits = random(generator, dtype, count, vocabulary) * 3
        logits[1, ::7] = float("-inf")
        logits[2, 5] = float("nan")
        rows = [
            SampleRow(Sampling(seed=1000 + row, max_tokens=1, **ASKED[row % len(ASKED)]), 0, row % 3, 10 + row)
            for row in range(count)
        ]
        wanted = choose_in_torch(logits.cpu(), rows)
        packed = host_params(rows)
        there = torch.from_numpy(packed).to(rig.device)
        got = sampler.sample(logits, SamplingParams.of(there, *what_is_asked(packed))).tolist()
        different = [row for row in range(count) if got[row] != wanted[row]]
        case = f"sampling in {dtype}"
        shown = ", ".join(
            f"row {row} ({ASKED[row % len(ASKED)]}): {got[row]} for {wanted[row]}" for row in different[:3]
        )
        found.require(case, not different, f"{len(different)} of {count} tokens differ from the CPU's: {shown}")
        found.cases += 1
    return 0.0
