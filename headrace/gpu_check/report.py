"""The readable table, for a terminal and as Markdown."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from headrace.gpu_check.document import Document, Row, StageReport
from headrace.text_table import table

Column = tuple[str, str, str]
"""(heading, key in a row, format). A row without the key has a dash; a column that no row fills is left out."""

COLUMNS: dict[str, tuple[Column, ...]] = {
    "limits": (
        ("what", "what", "{}"),
        ("measured", "value", "{:,.4g}"),
        ("unit", "unit", "{}"),
        ("of nominal", "nominal_share", "{:.0%}"),
    ),
    "contract": (
        ("kernel", "kernel", "{}"),
        ("dtype", "dtype", "{}"),
        ("cases", "cases", "{}"),
        ("largest error", "error", "{:.2g}"),
        ("allowed", "allowed", "{:.2g}"),
        ("calls", "calls", "{}"),
        ("note", "note", "{}"),
    ),
    "parity": (
        ("path", "path", "{}"),
        ("sequences", "sequences", "{}"),
        ("tokens", "tokens", "{}"),
        ("equal", "equal", "{}"),
        ("near ties", "ties", "{}"),
        ("smallest gap", "gap", "{:.2g}"),
        ("note", "note", "{}"),
    ),
    "kernels": (
        ("kernel", "kernel", "{}"),
        ("backend", "backend", "{}"),
        ("batch", "batch", "{}"),
        ("context", "context", "{}"),
        ("µs", "us", "{:,.1f}"),
        ("floor µs", "floor_us", "{:,.1f}"),
        ("bound", "bound", "{}"),
        ("of floor", "floor_share", "{:.0%}"),
        ("GB/s", "gb_s", "{:,.0f}"),
        ("of copy", "copy_share", "{:.0%}"),
        ("note", "note", "{}"),
    ),
    "throughput": (
        ("model", "model", "{}"),
        ("path", "path", "{}"),
        ("batch", "batch", "{}"),
        ("context", "context", "{}"),
        ("ms/step", "step_ms", "{:,.3f}"),
        ("tok/s", "tokens_s", "{:,.0f}"),
        ("read ms", "read_ms", "{:,.3f}"),
        ("of roofline", "roofline_share", "{:.0%}"),
        ("of nominal", "nominal_share", "{:.0%}"),
        ("note", "note", "{}"),
    ),
    "steps": (
        ("around", "around", "{}"),
        ("batch", "batch", "{}"),
        ("steps", "steps", "{}"),
        ("step µs", "step_us", "{:,.0f}"),
        ("host µs", "host_us", "{:,.0f}"),
        ("launch µs", "launch_us", "{:,.0f}"),
        ("device µs", "device_us", "{:,.0f}"),
        ("device idle µs", "device_idle_us", "{:,.0f}"),
        ("gap p50 µs", "gap_p50_us", "{:,.0f}"),
        ("gap p99 µs", "gap_p99_us", "{:,.0f}"),
        ("note", "note", "{}"),
    ),
    "serving": (
        ("policy", "policy", "{}"),
        ("requests", "requests", "{}"),
        ("tok/s", "tokens_s", "{:,.0f}"),
        ("TTFT p50 ms", "ttft_p50_ms", "{:,.1f}"),
        ("TTFT p99 ms", "ttft_p99_ms", "{:,.1f}"),
        ("ITL p50 ms", "itl_p50_ms", "{:,.2f}"),
        ("ITL p99 ms", "itl_p99_ms", "{:,.2f}"),
        ("busy", "busy_share", "{:.0%}"),
        ("note", "note", "{}"),
    ),
}
COLUMNS["vllm"] = (("engine", "policy", "{}"), *COLUMNS["serving"][1:])

REHEARSAL = "A rehearsal with tiny shapes on the CPU: its figures mean nothing."


def text(document: Document) -> str:
    """Everything, for a terminal."""
    parts = [_headline(document)]
    for stage in document.stages:
        lines = [f"{stage.title} [{_state(stage)}]"]
        lines += [f"  {name}: {value}" for name, value in _facts(stage)]
        lines += [f"  {line}" for line in _check_lines(stage)]
        if stage.rows:
            lines += [f"  {line}" for line in table(_cells(stage.name, stage.rows)).splitlines()]
        parts.append("\n".join(lines))
    if document.goals:
        parts.append("\n".join(["goals", *(f"  {line}" for line in table(_goal_cells(document)).splitlines())]))
    return "\n\n".join(parts)


def markdown(document: Document) -> str:
    """A section for docs/gpu.md, under the card's name and the date."""
    card = document.card or "no card"
    parts = [f"## {card}, {document.began:%Y-%m-%d}", _headline(document)]
    if document.goals:
        parts.append(_markdown_table(_goal_cells(document)))
    for stage in document.stages:
        parts.append(f"### {stage.title}\n\n{_state(stage).capitalize()}.")
        lines = [f"- {name}: {value}" for name, value in _facts(stage)]
        lines += [f"- {line}" for line in _check_lines(stage)]
        if lines:
            parts.append("\n".join(lines))
        if stage.rows:
            parts.append(_markdown_table(_cells(stage.name, stage.rows)))
    return "\n\n".join(parts) + "\n"


def _headline(document: Document) -> str:
    line = f"{document.card or 'no card'}, {document.began:%Y-%m-%d %H:%M}: {document.seconds:.0f} s " \
           f"of {document.budget_s:.0f} s"  # fmt: skip
    return f"{line}. {REHEARSAL}" if document.rehearsal else line


def _state(stage: StageReport) -> str:
    note = f": {stage.note}" if stage.note else ""
    return f"{stage.state}{note}; {stage.seconds:.1f} s"


def _facts(stage: StageReport) -> list[tuple[str, Any]]:
    """Only of the environment: those of the other stages are in their rows."""
    if stage.name != "environment":
        return []
    found = []
    for name, value in stage.facts.items():
        if isinstance(value, dict):
            value = ", ".join(f"{key} {one}" for key, one in value.items())
        elif name.endswith("_bytes") and isinstance(value, int):
            value = f"{value / 2**30:,.1f} GiB" if value > 2**30 else f"{value / 2**20:,.1f} MiB"
        elif isinstance(value, float):
            value = f"{value:.4g}"
        found.append((name.removesuffix("_bytes").replace("_", " "), value))
    return found


def _check_lines(stage: StageReport) -> list[str]:
    if not stage.checks:
        return []
    failed = stage.failed_checks
    passed = len(stage.checks) - len(failed)
    return [f"{passed} of {len(stage.checks)} checks passed", *(f"FAILED {c.name}: {c.detail}" for c in failed)]


def _cells(stage: str, rows: Sequence[Row]) -> list[list[str]]:
    """Headings first. Rows of a stage that has no columns show whatever they have."""
    columns = COLUMNS.get(stage) or tuple((key, key, "{}") for key in rows[0])
    used = [column for column in columns if any(column[1] in row for row in rows)]
    return [
        [heading for heading, _, _ in used],
        *([form.format(row[key]) if row.get(key) is not None else "-" for _, key, form in used] for row in rows),
    ]


def _goal_cells(document: Document) -> list[list[str]]:
    marks = {True: "met", False: "missed", None: "-"}
    return [
        ["goal", "target", "measured", ""],
        *([goal.name, goal.target, goal.measured, marks[goal.met]] for goal in document.goals),
    ]


def _markdown_table(cells: list[list[str]]) -> str:
    lines = [f"| {' | '.join(row)} |" for row in cells]
    return "\n".join([lines[0], f"|{'---|' * len(cells[0])}", *lines[1:]])
