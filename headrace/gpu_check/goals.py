"""Figures that were aimed at, beside what was measured. They are for an H200 and the shape of an 8B Llama in bf16; on
another card they are shown all the same. A goal that is missed fails nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from headrace.gpu_check.document import Goal, Row, StageReport

ATTENTION_SHARE = 0.8
ATTENTION_CONTEXT, ATTENTION_BATCH = 1024, 32
DECODE_SHARE = 0.7
DECODE_BATCHES = (1, 64)
GAP_US = 100.0
NOT_MEASURED = "not measured"


def goals(stages: Iterable[StageReport]) -> list[Goal]:
    """The goals of the stages that were asked for."""
    rows = {stage.name: stage.rows for stage in stages}
    makers: dict[str, Callable[[list[Row]], Goal]] = {
        "kernels": _attention, "throughput": _decode, "steps": _gap,
    }  # fmt: skip
    return [make(rows[name]) for name, make in makers.items() if name in rows]


def _attention(rows: list[Row]) -> Goal:
    """The worst cell of the batches and contexts that the goal speaks of; in each, the best of our kernels."""
    best: dict[tuple[int, int], float] = {}
    for row in rows:
        if row.get("kernel") == "attention, decode" and row.get("ours") and "copy_share" in row:
            cell = int(row["batch"]), int(row["context"])
            if cell[0] >= ATTENTION_BATCH and cell[1] >= ATTENTION_CONTEXT:
                best[cell] = max(best.get(cell, 0.0), float(row["copy_share"]))
    name = "attention in decode"
    target = f"≥ {ATTENTION_SHARE:.0%} of copy bandwidth, context ≥ 1k, batch ≥ {ATTENTION_BATCH}"
    if not best:
        return Goal(name, target, NOT_MEASURED, None)
    cell, share = min(best.items(), key=lambda item: item[1])
    return Goal(name, target, f"{share:.0%} at worst (batch {cell[0]}, context {cell[1]})", share >= ATTENTION_SHARE)


def _decode(rows: list[Row]) -> Goal:
    """Of the larger model, as it is served."""
    name = "decode step"
    target = f"≥ {DECODE_SHARE:.0%} of the time to read weights and KV, batch {DECODE_BATCHES[0]}-{DECODE_BATCHES[1]}"
    shares = [
        (float(row["roofline_share"]), row)
        for row in rows
        if row.get("served") and "roofline_share" in row and DECODE_BATCHES[0] <= int(row["batch"]) <= DECODE_BATCHES[1]
    ]
    if not shares:
        return Goal(name, target, NOT_MEASURED, None)
    share, row = min(shares, key=lambda item: item[0])
    where = f"{row['model']}, batch {row['batch']}, context {row['context']}"
    return Goal(name, target, f"{share:.0%} at worst ({where})", share >= DECODE_SHARE)


def _gap(rows: list[Row]) -> Goal:
    """With the mesh around it where that was measured, else in one process, which says less."""
    name, target = "idle gap between steps", f"≤ {GAP_US:.0f} µs with the mesh around it"
    found = {str(row["around"]): float(row["gap_p50_us"]) for row in rows if "gap_p50_us" in row}
    if "mesh" in found:
        return Goal(name, target, f"{found['mesh']:.0f} µs (median)", found["mesh"] <= GAP_US)
    if "one process" in found:
        return Goal(name, target, f"{found['one process']:.0f} µs (median) in one process; no mesh was measured", None)
    return Goal(name, target, NOT_MEASURED, None)
