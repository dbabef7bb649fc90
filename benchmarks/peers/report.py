"""The tables that are printed: figures, ratios, CPU."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from benchmarks.peers.figures import Figures
from headrace.text_table import table

OURS = "headrace"
CORE = "headrace-core"
"""Our scheduler core and runner in one process: no peer, but what the mesh is held against."""

NONE = "-"
DISTURBED_SHARE = 0.1
"""Foreign CPU above this share of one CPU is named below the tables."""

Runs = Mapping[tuple[str, str], Figures]
"""(engine, load) -> what was measured."""


def report(engines: Sequence[str], loads: Sequence[str], runs: Runs, absent: Mapping[str, str]) -> str:
    """All tables as text. ``absent``: engine -> why it was not measured."""
    parts = [
        "tok/s; TTFT p50/p99; ITL p50/p99 in ms\n" + figures_table(engines, loads, runs, absent),
        "tok/s of Headrace over that of each\n" + ratio_table(engines, loads, runs),
        "CPU-seconds of all processes of an engine for 1,000 output tokens\n" + cpu_table(engines, loads, runs),
    ]
    return "\n\n".join([part for part in parts if part.count("\n") > 1] + notes(runs))


def cell(run: Figures | None) -> str:
    if run is None:
        return NONE
    if run.failed:
        return f"{run.failed} of {run.requests} FAILED"
    itl = f"{run.itl_p50:.0f}/{run.itl_p99:.0f}"
    return f"{run.tokens_per_s:.0f}; {run.ttft_p50:.0f}/{run.ttft_p99:.0f}; {itl}"


def figures_table(engines: Sequence[str], loads: Sequence[str], runs: Runs, absent: Mapping[str, str]) -> str:
    rows = [["", *loads]]
    for engine in engines:
        named = f"{engine}: {absent[engine]}" if engine in absent else engine
        rows.append([named, *[cell(runs.get((engine, load))) for load in loads]])
    return table(rows)


def rate(runs: Runs, engine: str, load: str) -> float:
    """Tokens a second; 0 where nothing was measured, or a request failed."""
    run = runs.get((engine, load))
    return 0.0 if run is None or run.failed else run.tokens_per_s


def best_peer(engines: Sequence[str], load: str, runs: Runs) -> str:
    """The quickest engine that is not Headrace under this load; empty if none was measured."""
    peers = [engine for engine in engines if engine not in (OURS, CORE) and rate(runs, engine, load)]
    return max(peers, key=lambda engine: rate(runs, engine, load), default="")


def ratio(runs: Runs, engine: str, load: str) -> str:
    ours, theirs = rate(runs, OURS, load), rate(runs, engine, load)
    return f"{ours / theirs:.2f}" if ours and theirs else NONE


def ratio_table(engines: Sequence[str], loads: Sequence[str], runs: Runs) -> str:
    """Empty but for its headings where there is nothing to compare."""
    rows = [["", *loads]]
    for engine in engines:
        ratios = [ratio(runs, engine, load) for load in loads]
        if engine != OURS and any(one != NONE for one in ratios):
            rows.append([engine, *ratios])
    if len(rows) > 1:
        best = [best_peer(engines, load, runs) for load in loads]
        rows.append(["the best of them", *[f"{ratio(runs, name, load)} ({name})" if name else NONE
                                           for name, load in zip(best, loads, strict=True)]])  # fmt: skip
    return table(rows)


def cpu_table(engines: Sequence[str], loads: Sequence[str], runs: Runs) -> str:
    """One row an engine; below ours one for each kind of its processes, the gateway's, NATS's and scheduler's cost."""
    rows = [["", *loads]]
    for engine in engines:
        measured = [runs.get((engine, load)) for load in loads]
        if not any(measured):
            continue
        rows.append([engine, *[f"{run.cpu_s_per_1000:.2f}" if run else NONE for run in measured]])
        kinds = list(dict.fromkeys(kind for run in measured if run for kind in run.cpu_s_per_1000_by_process))
        if engine == OURS:
            rows += [[f"  {kind}", *[_by_kind(run, kind) for run in measured]] for kind in kinds]
    return table(rows)


def _by_kind(run: Figures | None, kind: str) -> str:
    return NONE if run is None else f"{run.cpu_s_per_1000_by_process.get(kind, 0.0):.3f}"


def notes(runs: Runs) -> list[str]:
    """What makes a figure less than it seems: failures, a disturbed machine, answers in lumps."""
    lines = []
    for (engine, load), run in runs.items():
        where = f"{engine}, {load}"
        lines += [f"{where}: FAILED: {error}" for error in run.errors]
        if run.others_share > DISTURBED_SHARE or run.steal_share > DISTURBED_SHARE:
            lines.append(
                f"{where}: other processes took {run.others_share:.0%} of one CPU, the hypervisor {run.steal_share:.0%}"
            )
        if run.pieces_per_token < 0.9:
            lines.append(f"{where}: {run.pieces_per_token:.2f} pieces of text for a token; ITL is between pieces")
    return ["\n".join(lines)] if lines else []
