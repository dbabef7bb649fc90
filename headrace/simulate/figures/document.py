"""The claims as text: a table for the terminal and the page in docs/."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from pathlib import Path

from headrace.simulate.figures.claim import Row, Section

_WIDTH = 100


def as_text(sections: Sequence[Section]) -> str:
    """Each claim with ours, workload, baseline and verdict, for a terminal."""
    lines = []
    for row in (row for section in sections for row in section.rows):
        lines.append("\n".join(textwrap.wrap(row.claim, _WIDTH)))
        for label, value in (
            ("ours", row.ours), ("workload", row.workload), ("baseline", row.baseline), ("holds", row.holds.value),
            ("because", row.why),
        ):  # fmt: skip
            if value:
                lines += textwrap.wrap(
                    f"{value}", _WIDTH - 14, initial_indent=f"  {label:<10}  ", subsequent_indent=" " * 14
                )
        lines.append("")
    return "\n".join(lines)


def as_markdown(sections: Sequence[Section], pictures: str) -> str:
    """The page; ``pictures`` is the folder of the SVGs, relative to it."""
    rows = [row for section in sections for row in section.rows]
    lines = [
        "# Claims about batching and memory, and ours beside them",
        "",
        "Made by `headrace simulate figures --write docs`; the same command and version give the same figures. The",
        "production scheduler core runs in virtual time; a step takes what a roofline of weights and attention says",
        "(`headrace/simulate/step_time.py`: 2 ms fixed, 60 % of peak FLOP/s, 75 % of peak bandwidth, 0.125 ms "
        "one way over",
        "the bus, run-ahead of 2). One cost model serves both sides of every ratio: it shows the scheduler against its",
        "baseline, not one engine against another.",
        "",
        "| claim | ours | holds |",
        "|---|---|---|",
    ]
    lines += [f"| {_cell(row.claim)} | {_cell(row.ours)} | {row.holds.value} |" for row in rows]
    for section in sections:
        lines += ["", f"## {section.title}", ""]
        for row in section.rows:
            lines += _paragraph(row)
        if section.table:
            head, *body = section.table
            lines += ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
            lines += ["| " + " | ".join(_cell(cell) for cell in cells) + " |" for cells in body]
            lines.append("")
        if section.note:
            lines += [section.note, ""]
        if section.picture:
            lines += [f"![{section.title}]({pictures}/{section.picture}.svg)", ""]
    return "\n".join(lines).rstrip() + "\n"


def _paragraph(row: Row) -> list[str]:
    lines = [f"**{row.claim}.** Holds: {row.holds.value}.", "", f"- ours: {row.ours}", f"- workload: {row.workload}"]
    lines.append(f"- baseline: {row.baseline}")
    if row.why:
        lines.append(f"- {row.why}")
    return [*lines, ""]


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def write(sections: Sequence[Section], folder: Path) -> None:
    """``folder``/figures.md and its pictures in ``folder``/figures/."""
    pictures = folder / "figures"
    pictures.mkdir(parents=True, exist_ok=True)
    for section in sections:
        if section.draw is not None:
            section.draw(pictures / f"{section.picture}.svg")
    (folder / "figures.md").write_text(as_markdown(sections, "figures"), "utf-8")
