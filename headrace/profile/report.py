"""The profile as tables for the terminal, and as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from headrace.profile.phases import GEMM, KINDS, UNDIVIDED
from headrace.profile.roofline import Machine, Weights, bound_s, gemm_flops
from headrace.profile.steps import HOST, MESSAGES, Profiled
from headrace.text_table import table

PARTS = (MESSAGES, HOST, *KINDS)


def as_text(
    model: str, dtype: str, quantize: str, machine: Machine, weights: Weights, kv_bytes: int, runs: Sequence[Profiled]
) -> str:
    """Milliseconds by part, what the machine's limits would allow, and the limits themselves."""
    kept = dtype if quantize == "none" else f"{dtype}, {quantize} weights"
    heading = [f"{model}, {kept}, {machine.threads} threads; ms", *(run.load.name for run in runs)]
    parts = [part for part in PARTS if part != UNDIVIDED or any(run.parts[part] for run in runs)]
    rows = [heading, *([part, *(f"{run.parts[part] * 1e3:.2f}" for run in runs)] for part in parts)]
    bounds = [bound_s(run.load, weights, machine, dtype, kv_bytes) for run in runs]
    rows += [
        ["whole step", *(f"{run.total * 1e3:.2f}" for run in runs)],
        ["bound by the roofline", *(f"{bound * 1e3:.2f}" for bound in bounds)],
        ["share of the bound", *(f"{bound / run.total:.0%}" for bound, run in zip(bounds, runs, strict=True))],
        ["GEMM, GFLOP/s", *(_rate(run, weights) for run in runs)],
        ["tokens/s", *(f"{run.load.tokens / run.total:,.0f}" for run in runs)],
    ]
    counts = list(next(iter(machine.gemm.values())))
    limits = [["this machine, GFLOP/s", *(f"{count} rows" for count in counts)]]
    limits += [
        [f"{name} products, packed", *(f"{rates[count] / 1e9:,.0f}" for count in counts)]
        for name, rates in machine.gemm.items()
    ]
    return f"{table(rows)}\n\n{table(limits)}\n\nmemory read: {machine.bandwidth / 1e9:.1f} GB/s"


def as_json(
    model: str, dtype: str, quantize: str, machine: Machine, weights: Weights, kv_bytes: int, runs: Sequence[Profiled]
) -> dict[str, Any]:
    """Seconds, FLOP/s and bytes/s, unrounded."""
    return {
        "model": model,
        "dtype": dtype,
        "quantize": quantize,
        "threads": machine.threads,
        "machine": {"gemm_flop_per_s": machine.gemm, "memory_bytes_per_s": machine.bandwidth},
        "steps": [
            {
                "load": run.load.name,
                "rows": run.load.rows,
                "context": run.load.context,
                "chunk": run.load.chunk,
                "seconds": run.total,
                "parts": run.parts,
                "bound_seconds": bound_s(run.load, weights, machine, dtype, kv_bytes),
            }
            for run in runs
        ],
    }


def _rate(run: Profiled, weights: Weights) -> str:
    seconds = run.parts[GEMM]
    return f"{gemm_flops(run.load, weights) / seconds / 1e9:,.0f}" if seconds else "-"
