"""Every kernel at the sizes of an 8B Llama, against the bytes that it must move and the products that it must make, and
beside what PyTorch has."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch

from headrace.gpu_check import measured_attention as attention
from headrace.gpu_check.backends import Kind, attention_kinds
from headrace.gpu_check.measured_attention import Cell, Pages
from headrace.gpu_check.measured_kernels import measurements
from headrace.gpu_check.rig import Rig
from kernels.contract import Geometry

BATCHES, CONTEXTS = (1, 8, 32, 64, 128), (1024, 4096, 16384)
CHUNKS = (Cell(1, 512, 4096), Cell(4, 512, 512), Cell(1, 2048, 2048), Cell(1, 8192, 8192))
FEW = (Cell(8, 1, 1024), Cell(32, 1, 4096), Cell(128, 1, 1024))
"""For kernels and types that do not serve by default."""

Measurement = tuple[str, Callable[[], None]]


def run(rig: Rig) -> None:
    if not rig.copy_bytes_s:
        rig.facts(note="no limits were measured and the card is not in the table: no shares")
    for name, measure in _measurements(rig):
        if not rig.more(f"{name} was measured"):
            return
        try:
            measure()
        except torch.cuda.OutOfMemoryError:
            rig.row(kernel=name, backend="-", note="out of memory")


def _measurements(rig: Rig) -> Iterator[Measurement]:
    """What serves by default first, what is slow to compile last."""
    geometry = Geometry(4, 2, 16, 16) if rig.rehearsal else Geometry(32, 8, 128, 16)
    decodes, chunks, few = _cells(rig)
    kinds = attention_kinds(rig)
    served = [kind for kind in kinds if kind.dtype == rig.dtype]
    plain = [kind for kind in served if kind.storage == rig.dtype and kind.name != "triton, batch-invariant"]
    pages = Pages(rig, plain[0].make(geometry), geometry, max(cell.batch * cell.context for cell in decodes))
    fitting = [cell for cell in (*decodes, *chunks) if cell.batch * cell.context <= pages.num_tokens]
    for kind in plain:
        rig.progress(f"attention by {kind}")
        yield from _of_kind(rig, kind, pages, fitting)
    rig.progress("the kernels around attention")
    yield from measurements(rig, pages)
    rig.progress("SDPA")
    dense = [cell for cell in fitting if cell.decode or cell.queries == cell.context]
    yield from ((f"SDPA, {cell}", partial(attention.measure_sdpa, rig, pages, cell)) for cell in dense)
    rig.progress("the batch-invariant kernel, and pages of other types")
    for kind in served:
        if kind in plain:
            continue
        own = pages
        if kind.storage != rig.dtype:
            own = Pages(rig, kind.make(geometry), geometry, max(cell.batch * cell.context for cell in few))
        yield from _of_kind(rig, kind, own, [cell for cell in few if cell.batch * cell.context <= own.num_tokens])
    rig.progress("FlexAttention, which takes a while to compile")
    for cell in (*few[1:2], *[cell for cell in chunks if cell.queries == cell.context][1:2]):
        yield f"FlexAttention, {cell}", partial(attention.measure_flex, rig, pages, cell)


def _of_kind(rig: Rig, kind: Kind, pages: Pages, cells: list[Cell]) -> Iterator[Measurement]:
    return ((f"{kind}, {cell}", partial(attention.measure, rig, kind, pages, cell)) for cell in cells)


def _cells(rig: Rig) -> tuple[list[Cell], list[Cell], list[Cell]]:
    """(decodes, chunks, a few of them)."""
    if rig.rehearsal:
        return [Cell(2, 1, 32)], [Cell(1, 8, 24), Cell(1, 8, 8), Cell(1, 16, 16)], [Cell(2, 1, 32), Cell(3, 1, 16)]
    decodes = [Cell(batch, 1, context) for context in CONTEXTS for batch in BATCHES]
    return decodes, list(CHUNKS), list(FEW)
