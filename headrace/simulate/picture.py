"""Pictures of a run over time. matplotlib without a display."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import itertools

import matplotlib.pyplot as plt
from matplotlib.axes import Axes

from headrace.simulate.measure import Measurements, Sample

matplotlib.rcParams["svg.hashsalt"] = "headrace"  # the same data give the same file
_DECODE, _PREFILL, _PADDING, _BAD = "#2a6f97", "#f4a259", "#bbbbbb", "#c1121f"


def draw_runs(runs: Sequence[tuple[str, Measurements]], path: Path) -> None:
    """One column for each run; batch make-up, pages, queue and preemptions as rows."""
    figure, axes = plt.subplots(4, len(runs), figsize=(6.5 * len(runs), 10), sharex="col", squeeze=False)
    for column, (name, measured) in enumerate(runs):
        _column([row[column] for row in axes], name, _thinned(measured.samples))
    save(figure, path)


def save(figure: matplotlib.figure.Figure, path: Path) -> None:
    figure.tight_layout()
    metadata = {"Date": None} if path.suffix == ".svg" else None
    figure.savefig(path, metadata=metadata, dpi=110)
    plt.close(figure)


def _thinned(samples: list[Sample], most: int = 128) -> list[Sample]:
    return samples[:: max(1, len(samples) // most)]


def _column(axes: list[Axes], name: str, samples: list[Sample]) -> None:
    at = [sample.at_s for sample in samples]
    batch, pages, queue, lost = axes
    batch.set_title(name)
    batch.stackplot(
        at,
        _rate(samples, "decode_rows"),
        _rate(samples, "prefill_rows"),
        _rate(samples, "padding_rows"),
        labels=("decode", "prompt", "padding"),
        colors=(_DECODE, _PREFILL, _PADDING),
    )
    batch.set_ylabel("rows / s")
    batch.legend(loc="upper right", fontsize=8)
    total = max((sample.pages_total for sample in samples), default=1) or 1
    pages.stackplot(
        at,
        [sample.pages_used / total * 100 for sample in samples],
        [sample.pages_cached / total * 100 for sample in samples],
        labels=("in use", "cached"),
        colors=(_DECODE, "#cfe3ef"),
    )
    pages.set_ylim(0, 100)
    pages.set_ylabel("pages, %")
    pages.legend(loc="lower right", fontsize=8)
    queue.plot(at, [sample.waiting for sample in samples], color=_PREFILL, label="waiting")
    queue.plot(at, [sample.running for sample in samples], color=_DECODE, label="running")
    queue.plot(at, [sample.preempted for sample in samples], color=_BAD, label="preempted")
    queue.set_ylabel("sequences")
    queue.legend(loc="upper right", fontsize=8)
    lost.plot(at, [sample.preemptions for sample in samples], color=_BAD, label="preemptions")
    lost.set_ylabel("preemptions so far")
    lost.set_ylim(0, max(1, *(sample.preemptions for sample in samples)))
    lost.set_xlabel("virtual seconds")


def _rate(samples: list[Sample], name: str) -> list[float]:
    """Per second, between each sample and the one before it."""
    rates = [0.0]
    for before, after in itertools.pairwise(samples):
        rates.append((getattr(after, name) - getattr(before, name)) / max(1e-9, after.at_s - before.at_s))
    return rates[: len(samples)]


Curve = tuple[Sequence[float], Sequence[float]]


def curves(path: Path, across: str, panels: Mapping[str, Mapping[str, Curve]], log: bool = False) -> None:
    """Panels side by side over one quantity: panel title -> line name -> (xs, ys)."""
    figure, axes = plt.subplots(1, len(panels), figsize=(5 * len(panels), 3.6), squeeze=False)
    colours = (_DECODE, _PREFILL, _BAD, "#6a994e")
    for place, (title, lines) in zip(axes[0], panels.items(), strict=True):
        for colour, (name, (xs, ys)) in zip(colours, lines.items(), strict=False):
            place.plot(xs, ys, marker="o", markersize=4, color=colour, label=name)
        place.set_title(title)
        place.set_xlabel(across)
        place.set_ylim(bottom=0)
        if log:
            place.set_xscale("log", base=2)
        if len(lines) > 1:
            place.legend(fontsize=8)
    save(figure, path)
