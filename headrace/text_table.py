"""Tables of figures for the terminal: one row for each run, the first column left-aligned."""

from __future__ import annotations

from collections.abc import Sequence

Column = tuple[str, str, str]
"""(heading, attribute of a run, format of its value)."""


def figures_table(columns: Sequence[Column], runs: Sequence[object]) -> str:
    """One line of headings and one line a run; the widest cell of a column decides its width."""
    rows = [[heading for heading, _, _ in columns]]
    rows += [[form.format(getattr(run, name)) for _, name, form in columns] for run in runs]
    return table(rows)


def table(rows: Sequence[Sequence[str]]) -> str:
    """Rows of cells, the headings first, as aligned lines."""
    widths = [max(len(row[index]) for row in rows) for index in range(len(rows[0]))]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if index == 0 else cell.rjust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    )
