"""An explanation as lines for a terminal."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from observability.explanation import Interval, by_cause
from observability.phases import Phase, phases
from shared.pool_name import DEFAULT_POOL

USUAL = {
    "queue": "for the next plan",
    "prefill": "its own prompt",
    "decode": "at the usual pace",
    "stream": "to the client",
}
"""Said where there is no cause to name."""


def duration(ms: float) -> str:
    """With the digits that matter."""
    if ms >= 1000:
        return f"{ms / 1000:,.2f} s"
    return f"{ms:.1f} ms"


def words(one: Interval) -> str:
    """One interval on one line."""
    return one.stage + (f": {details(one)}" if details(one) else "") + (f" ({one.by})" if one.by else "")


def details(one: Interval) -> str:
    """What is known of an interval beside its stage and who was in the way."""
    said = [one.cause] if one.cause else []
    if one.steps > 1:
        said.append(f"{one.steps:,} steps")
    if one.tokens:
        said.append(f"{one.tokens:,} token{'s' if one.tokens > 1 else ''}")
    if one.others:
        said.append(f"{one.others:,} of others")
    return "; ".join([*said, one.note] if one.note else said)


def unusual(about: dict[str, Any]) -> dict[str, str]:
    """Of a request's summary, where it runs, if that is not as with most: in a named pool, with a LoRA adapter."""
    pool, adapter = about.get("pool", ""), about.get("adapter", "")
    return ({"pool": pool} if pool not in ("", DEFAULT_POOL) else {}) | ({"adapter": adapter} if adapter else {})


def lines(
    about: dict[str, Any], intervals: Sequence[Interval], gaps: Sequence[dict[str, Any]] = (), width: int = 110,
    full: bool = False,
) -> list[str]:  # fmt: skip
    """The waterfall for a terminal of so many columns. ``about`` is the summary of the request (explanation_page) and
    ``gaps`` are those of its JSON. Phases of many intervals are one line each unless ``full``."""
    total = sum(one.ms for one in intervals) or 1.0
    made = [
        f"{about['request_id']}: {duration(total)}, {about['prompt_tokens']:,} prompt tokens, "
        f"{about['generated_tokens']:,} generated, {about['preemptions']} preemptions, "
        + "".join(f"{name} {value}, " for name, value in unusual(about).items())
        + ("still running" if about["live"] else about["end"]),
        *(f"interrupted: {why}" for why in about.get("interrupted", ())),
        "",
        "where the time went:",
    ]
    for stage, cause, ms in by_cause(intervals)[:8]:
        made.append(f"{duration(ms):>10} {ms / total:>5.0%}  {stage}{_colon(cause or USUAL.get(stage, ''))}")
    if gaps:
        made += ["", f"slowest gaps between tokens (usually {duration(about['usual_gap_ms'])}):"]
        for gap in gaps[: None if full else 5]:
            made.append(f"{duration(gap['ms']):>10}  at {duration(gap['at_ms'])}: {gap['cause'] or 'a slow step'}"
                        + (f" ({gap['by']})" if gap["by"] else ""))  # fmt: skip
            if gap["contents"]:
                made.append(f"{'':>12}{gap['contents']}")
    made += ["", f"{'at':>10} {'for':>10}"]
    at, bar, folded = 0.0, max(10, min(40, width - 70)), False
    for phase in phases(intervals):
        folded |= phase.folds and not full
        if phase.folds and not full:
            made.append(_line(at, phase.ms, total, bar, f"{phase.stage}: {phase.summary}"))
            at += phase.ms
            continue
        for one in phase.intervals:
            made.append(_line(at, one.ms, total, bar, words(one)))
            at += one.ms
    if folded:
        made += ["", f"{_hidden(phases(intervals)):,} intervals are folded; --full shows each"]
    return made


def _colon(text: str) -> str:
    return f": {text}" if text else ""


def _hidden(found: Sequence[Phase]) -> int:
    return sum(len(phase.intervals) for phase in found if phase.folds)


def _line(at: float, ms: float, total: float, bar: int, text: str) -> str:
    begin = min(bar - 1, int(at / total * bar))
    end = max(begin + 1, min(bar, math.ceil((at + ms) / total * bar)))
    lane = "·" * begin + "█" * (end - begin) + "·" * (bar - end)
    return f"{duration(at):>10} {duration(ms):>10}  {lane}  {text}"
