"""What every attention kernel must do on the device that it will serve on: cases of :mod:`kernels.contract`, small
enough to compare with float64, of fresh random numbers each time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from headrace.gpu_check.paged import Part, Pool, leave_nan
from headrace.gpu_check.paged import Sequence as Paged
from kernels.contract import DeviceBatch, DeviceKernel, Geometry, LayerAttention
from kernels.device_batch import on_device

ALLOWED = {torch.float32: 2e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}
"""The largest error of outputs of a size of about 1, against float64 of what the pages hold: roundings of the type."""

WRITTEN = {torch.float8_e4m3fn: 2.0**-4, torch.int8: 0.5 / 127}
"""The largest error of a number in pages with scales: in fp8 of the number itself, in int8 of its head's largest."""

SLACK = 1.01
SCALING = 0.3


@dataclass
class Found:
    """Of one kernel in one type."""

    cases: int = 0
    error: float = 0.0
    failures: list[tuple[str, str]] = field(default_factory=list)  # (case, what is wrong)

    def saw(self, case: str, error: float, allowed: float) -> None:
        self.error = max(self.error, error)
        if not error <= allowed:  # NaN is not
            self.failures.append((case, f"off by {error:.3g}, {allowed:.3g} allowed"))

    def require(self, case: str, holds: bool, otherwise: str) -> None:
        if not holds:
            self.failures.append((case, otherwise))


@dataclass(frozen=True)
class Bench:
    """A kernel for each geometry, in one type, and where it runs."""

    make: Callable[[Geometry], DeviceKernel]
    dtype: torch.dtype
    device: torch.device
    seed: int
    size: int = 1  # divides lengths: a rehearsal's are short

    def pool(self, geometry: Geometry, tokens: int) -> Pool:
        """With room for sequences of so many tokens in all, each with a page to spare."""
        pages = -(-tokens // geometry.block_size) + 24
        return Pool(self.make(geometry), geometry, self.dtype, self.device, pages, self.seed)

    def tokens(self, count: int) -> int:
        return max(3, count // self.size)


PLAIN = Geometry(8, 2, 64, 16)
SHAPES = (
    Geometry(9, 3, 64, 16),
    Geometry(32, 8, 128, 16),
    Geometry(14, 2, 128, 48),
    Geometry(6, 2, 80, 32),
    Geometry(2, 1, 256, 16),
    Geometry(8, 8, 64, 256),
    Geometry(48, 1, 64, 16),
)
"""Groups of 1, 3, 4, 7 and 48; heads of 64 to 256; small, odd and large pages."""


def sinks(device: torch.device) -> torch.Tensor:
    return torch.linspace(-1, 3, PLAIN.num_heads, device=device)


def layers(device: torch.device) -> dict[str, LayerAttention]:
    return {
        "full": LayerAttention(SCALING),
        "window": LayerAttention(SCALING, window=37),
        "softcap": LayerAttention(SCALING, softcap=4.0),
        "window and softcap": LayerAttention(SCALING, window=130, softcap=4.0),
        "sinks": LayerAttention(SCALING, sinks=sinks(device)),
        "sinks and window": LayerAttention(SCALING, window=20, sinks=sinks(device)),
    }


def ragged(bench: Bench, found: Found, name: str, layer: LayerAttention) -> None:
    """Prompts in chunks and decodes, mixed, in pages that others have left full."""
    n = bench.tokens
    pool = bench.pool(PLAIN, n(603) + n(140) + 3)
    long, middle, short = pool.sequence(n(603)), pool.sequence(n(140)), pool.sequence(3)
    a, b, c = n(603) // 3, n(603) - 2, n(140) - 1
    schedule: list[list[Part]] = [
        [(long, 0, a), (short, 0, 3)],
        [(middle, 0, 1), (long, a, a + 1)],
        [(long, a + 1, b), (middle, 1, c)],
        [(middle, c, c + 1), (long, b, b + 1)],
    ]
    for parts in schedule:
        compare(pool, found, f"ragged, {name}", parts, layer)
    for sequence in (long, middle, short):
        check_written(pool, found, f"pages, {name}", sequence, b + 1 if sequence is long else sequence.length)


def shape(bench: Bench, found: Found, geometry: Geometry) -> None:
    n = bench.tokens(300)
    pool = bench.pool(geometry, n)
    sequence = pool.sequence(n)
    layer = LayerAttention(geometry.head_dim**-0.5)
    g = geometry
    name = f"{g.num_heads}/{g.num_kv_heads} heads of {g.head_dim}, pages of {g.block_size}"
    for start, stop in ((0, n - 2), (n - 2, n - 1), (n - 1, n)):
        compare(pool, found, name, [(sequence, start, stop)], layer)


def long_contexts(bench: Bench, found: Found) -> None:
    """Decodes far apart in length: whatever shares a context among programs and merges what they have."""
    lengths = [bench.tokens(count) for count in (9001, 17, 4096, 2100, 1)]
    pool = bench.pool(PLAIN, sum(lengths))
    sequences = [pool.sequence(length) for length in lengths]
    layer = LayerAttention(SCALING)
    for sequence in sequences:
        if sequence.length > 1:
            pool.attend([(sequence, 0, sequence.length - 1)], layer)
    compare(pool, found, "long contexts", [(s, s.length - 1, s.length) for s in sequences], layer)
    compare(pool, found, "one long context", [(sequences[0], lengths[0] - 1, lengths[0])], layer)


def bits(bench: Bench, found: Found, name: str, layer: LayerAttention) -> None:
    """Of a kernel that says so: a query's bits are the same alone, in company, in one piece and in chunks."""
    n = bench.tokens(1100)
    pool = bench.pool(PLAIN, 2 * n)
    if not pool.kernel.batch_invariant:
        return
    sequence, other = pool.sequence(n), pool.sequence(n)
    whole = pool.attend([(sequence, 0, n)], layer)[0]
    stops = sorted({1, 8, n // 8, n // 8 + 1, n // 2, n // 2 + 1, n - 3, n - 2, n})
    case = f"bits, {name}"
    found.require(case, torch.equal(pool.attend_in_pieces(sequence, stops, layer), whole), "other bits in chunks")
    half = n // 2
    pool.attend([(other, 0, half)], layer)
    mixed = []
    for number, (a, b) in enumerate(zip([0, *stops[:-1]], stops, strict=True)):
        company: Part = (other, half, half + 1 + 3 * (number % 2))
        parts = [company, (sequence, a, b)] if number % 2 else [(sequence, a, b), company]
        mixed.append(pool.attend(parts, layer)[number % 2])
    found.require(case, torch.equal(torch.cat(mixed), whole), "other bits in company")


def not_finite(bench: Bench, found: Found) -> None:
    """A sequence of NaN and infinities harms none beside it, nor one that gets its pages."""
    n = bench.tokens(96)
    pool = bench.pool(PLAIN, 3 * n)
    layer = LayerAttention(SCALING)
    healthy, broken = pool.sequence(n - 2), pool.sequence(n)
    alone = pool.attend([(healthy, 0, n - 2)], layer)[0]
    for part in (broken.query, broken.key, broken.value):
        part[:] = float("nan")
        part[1::3] = float("inf")
    beside = pool.attend([(broken, 0, n), (healthy, 0, n - 2)], layer)[1]
    found.require("not finite beside", bool(beside.isfinite().all()), "NaN came over from a sequence beside it")
    found.saw("not finite beside", gap(beside, alone), ALLOWED[bench.dtype])
    healthy.pages = broken.pages
    after = pool.attend([(healthy, 0, n - 2)], layer)[0]
    found.saw("not finite before", gap(after, alone), ALLOWED[bench.dtype])


def captured(bench: Bench, found: Found) -> None:
    """One graph for decodes of a padded size, replayed with other sequences, lengths and pages."""
    if bench.device.type != "cuda":
        return
    lengths = [bench.tokens(count) for count in (700, 90, 333)]
    pool = bench.pool(PLAIN, 2 * sum(lengths))
    layer = LayerAttention(SCALING)
    batches = []
    for _ in range(2):
        sequences = [pool.sequence(length) for length in lengths]
        for sequence in sequences:
            pool.attend([(sequence, 0, sequence.length - 1)], layer)
        batches.append([(s, s.length - 1, s.length) for s in sequences])
    first, second = batches
    static = padded(pool, first)
    graph = torch.cuda.CUDAGraph()
    inputs = step_inputs(pool, first, static.num_tokens)

    def step() -> torch.Tensor:
        plan = pool.kernel.plan_device(static)
        pool.kernel.write(plan, pool.cache, inputs[1], inputs[2])
        return pool.kernel.read(plan, pool.cache, inputs[0], layer)

    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    with torch.cuda.graph(graph):
        out = step()
    for parts in (second[:2], second, first):
        fresh = padded(pool, parts)
        for name in ("query_start", "visible", "block_tables", "write_slots"):
            getattr(static, name).copy_(getattr(fresh, name))
        for place, tensor in zip(inputs, step_inputs(pool, parts, static.num_tokens), strict=True):
            place.copy_(tensor)
        out.fill_(float("nan"))
        graph.replay()
        for row, (sequence, start, stop) in enumerate(parts):
            wanted = pool.dense(sequence, start, stop, layer)
            found.saw("captured graph", gap(out[row : row + 1], wanted), ALLOWED[bench.dtype])


def padded(pool: Pool, parts: Sequence[Part], rows: int = 4, pages: int = 64) -> DeviceBatch:
    """Decodes in tensors of a fixed size, as a graph has them: what is over has no queries."""
    batch = on_device(pool.batch(parts), pool.device)
    count = len(parts)
    start = torch.full((rows + 1,), count, dtype=torch.int32, device=pool.device)
    start[: count + 1] = batch.query_start
    visible = torch.ones(rows, dtype=torch.int32, device=pool.device)
    visible[:count] = batch.visible
    tables = torch.zeros((rows, pages), dtype=torch.int32, device=pool.device)
    tables[:count, : batch.block_tables.shape[1]] = batch.block_tables
    slots = torch.zeros(rows, dtype=torch.int64, device=pool.device)
    slots[:count] = batch.write_slots
    return DeviceBatch(start, visible, tables, slots, 1, pages * pool.geometry.block_size)


def step_inputs(pool: Pool, parts: Sequence[Part], rows: int) -> list[torch.Tensor]:
    """Queries, keys and values of decodes, padded to ``rows``."""
    found = []
    for name in ("query", "key", "value"):
        given = torch.cat([getattr(s, name)[a:b] for s, a, b in parts])
        whole = torch.zeros((rows, *given.shape[1:]), dtype=given.dtype, device=given.device)
        whole[: len(given)] = given
        found.append(whole)
    return found


def compare(pool: Pool, found: Found, case: str, parts: Sequence[Part], layer: LayerAttention) -> None:
    outputs = pool.attend(parts, layer)
    for (sequence, start, stop), out in zip(parts, outputs, strict=True):
        found.saw(case, gap(out, pool.dense(sequence, start, stop, layer)), ALLOWED[pool.dtype])
    leave_nan(outputs[0])


def check_written(pool: Pool, found: Found, case: str, sequence: Paged, length: int) -> None:
    """Pages hold what was written: exactly, or as near as their type can."""
    for held, given in zip(pool.stored(sequence, length), (sequence.key, sequence.value), strict=True):
        wanted = given[:length].double()
        if pool.cache.key_scale is None:
            found.require(case, torch.equal(held, wanted), "pages hold other numbers than were written")
            continue
        storage = pool.cache.key.dtype
        largest = wanted.abs().amax(dim=-1, keepdim=True)
        size = largest if storage == torch.int8 else torch.maximum(wanted.abs(), largest * 2.0**-14)
        error = float(((held - wanted).abs() / size).max())
        found.require(case, error <= WRITTEN[storage] * SLACK, f"pages are off by {error:.3g} of a number's size")


def gap(out: torch.Tensor, wanted: torch.Tensor) -> float:
    """The largest difference; NaN where either has one."""
    return float((out.double() - wanted.double()).abs().max())
