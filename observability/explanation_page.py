"""An explanation as a page and as JSON."""

from __future__ import annotations

import html
from collections.abc import Sequence
from typing import Any
from urllib.parse import quote

from observability.explanation import Interval, by_cause
from observability.explanation_text import USUAL, details, duration, unusual
from observability.page_style import STAGES, page
from observability.phases import Gap, Phase, contents, phases, slow_gaps, usual_gap_ms
from shared.flight_record import Report, RequestTrace

MOST_ROWS = 2000
"""Intervals of one phase that the page shows; the JSON has them all."""


def as_json(report: Report, pieces: Sequence[Interval], intervals: Sequence[Interval]) -> dict[str, Any]:
    """Everything that the page says, for programs. Times in ms from the beginning."""
    request = report.request
    assert request is not None
    begin = intervals[0].begin_ns if intervals else 0
    return {
        **summary(request),
        "siblings": report.siblings,
        "begin_unix_ns": begin,
        "total_ms": round(sum(one.ms for one in intervals), 3),
        "usual_gap_ms": round(usual_gap_ms(pieces), 3),
        "intervals": [
            {
                "at_ms": round((one.begin_ns - begin) / 1e6, 3), "ms": round(one.ms, 3), "stage": one.stage,
                "cause": one.cause, "by": one.by, "note": one.note, "steps": one.steps, "tokens": one.tokens,
                "others": one.others,
            }
            for one in intervals
        ],
        "slow_gaps": [_gap_json(gap, begin) for gap in slow_gaps(pieces)],
        "by_cause": [
            {"stage": stage, "cause": cause, "ms": round(ms, 3)} for stage, cause, ms in by_cause(intervals)
        ],
        "steps": len(report.steps),
        "steps_left_out": report.left_out,
    }  # fmt: skip


def _gap_json(gap: Gap, begin_ns: int) -> dict[str, Any]:
    return {
        "at_ms": round((gap.begin_ns - begin_ns) / 1e6, 3), "ms": round(gap.ms, 3), "cause": gap.cause, "by": gap.by,
        "contents": contents(gap.step) if gap.step is not None else "",
    }  # fmt: skip


def summary(request: RequestTrace) -> dict[str, Any]:
    """One request in a list of them."""
    firsts = [choice.first_token_ns for choice in request.choices.values() if choice.first_token_ns]
    interruptions = max((choice.interruptions for choice in request.choices.values()), key=len, default=[])
    return {
        "request_id": request.request_id,
        "answer_id": request.answer_id,
        "client_id": request.client_id,
        "tenant": request.tenant,
        "priority": request.priority,
        "pool": request.pool,
        "adapter": request.adapter,
        "prompt_tokens": request.prompt_len,
        "generated_tokens": sum(choice.generated for choice in request.choices.values()),
        "choices": len(request.choices),
        "preemptions": sum(stay.preempted for choice in request.choices.values() for stay in choice.stays[:-1]),
        "interruptions": len(interruptions),
        "interrupted": [f"{one.why}; resumed as attempt {one.attempt}" for one in interruptions],
        "live": request.live,
        "answered": request.answer is not None,  # its gateway has told its part
        "end": "; ".join(sorted({choice.end for choice in request.choices.values() if choice.end})),
        "first_token_ms": round((min(firsts) - request.submitted_ns) / 1e6, 3) if firsts else None,
        "took_ms": round(request.took_ns / 1e6, 3) if not request.live else None,
    }


def as_page(report: Report, pieces: Sequence[Interval], intervals: Sequence[Interval]) -> bytes:
    """The waterfall of one request."""
    request = report.request
    assert request is not None
    about = summary(request)
    total = sum(one.ms for one in intervals) or 1.0
    begin = intervals[0].begin_ns if intervals else 0
    body = (
        _nav('<a href="?format=json">JSON</a>')
        + f"<header><h1><code>{_text(request.request_id)}</code> {_took(intervals, request.live)}</h1>"
        f"<p class=soft>{_ending(about)}{_family(about, report)}</p></header>"
        + _facts(about, pieces)
        + _strip(intervals, total)
        + _sums(intervals, total)
        + _gaps(slow_gaps(pieces), begin, usual_gap_ms(pieces))
        + _waterfall(intervals, total)
        + (f"<p class=soft>{report.left_out:,} uneventful steps are not shown.</p>" if report.left_out else "")
    )
    return page(f"{request.request_id} {_took(intervals, request.live)}", body)


def list_page(requests: Sequence[RequestTrace]) -> bytes:
    """The slowest requests, each with the way to its own page."""
    rows = "".join(
        f'<tr><td class="num">{duration(one["took_ms"] or 0.0)}</td><td>{_link(one["request_id"])}</td>'
        f"<td>{_text(one['tenant'])}</td>"
        f'<td class="num">{_first(one["first_token_ms"])}</td>'
        f'<td class="num">{one["prompt_tokens"]:,}</td><td class="num">{one["generated_tokens"]:,}</td>'
        f'<td class="num">{one["preemptions"] or ""}</td><td>{_text(one["end"])}</td></tr>'
        for one in map(summary, requests)
    )
    body = (
        _nav()
        + "<header><h1>The slowest requests</h1><p class=soft>Of those remembered, from a request's head to the last "
        "byte of its answer.</p></header><table><tr><th class=num>took</th><th>request</th><th>tenant</th>"
        "<th class=num>first token</th><th class=num>prompt</th><th class=num>generated</th>"
        f"<th class=num>preempted</th><th>end</th></tr>{rows}</table>"
    )
    return page("The slowest requests", body)


def missing_page(request_id: str, why: str) -> bytes:
    """No such request is remembered."""
    return page(
        "Not remembered", f"{_nav()}<header><h1>{_text(request_id)}</h1><p class=soft>{_text(why)}</p></header>"
    )


# --- parts of the page ----------------------------------------------------------------------------------------------


def _nav(more: str = "") -> str:
    return (
        f'<nav><a href="/dashboard">Dashboard</a><a href="/debug/requests?slowest=20">Slowest requests</a>{more}</nav>'
    )


def _took(intervals: Sequence[Interval], live: bool) -> str:
    ms = duration(sum(one.ms for one in intervals))
    return f"has taken {ms} so far" if live else f"took {ms}"


def _ending(about: dict[str, Any]) -> str:
    said = "still running" if about["live"] else f"ended: {_text(about['end'])}"
    return said + "".join(f" · interrupted: {_text(why)}" for why in about["interrupted"])


def _family(about: dict[str, Any], report: Report) -> str:
    said = ""
    if report.request is not None and report.request.names:
        names = " and ".join(f"<code>{_text(name)}</code>" for name in report.request.names)
        said += f" · known to its client as {names}"
    if about["choices"] > 1:
        said += f" · the last of its {about['choices']} choices to end is shown"
    if report.siblings:
        links = ", ".join(map(_link, report.siblings[:8]))
        more = f" and {len(report.siblings) - 8} more" if len(report.siblings) > 8 else ""
        said += f" · one of {len(report.siblings) + 1} prompts in one call, the others: {links}{more}"
    return said


def _facts(about: dict[str, Any], pieces: Sequence[Interval]) -> str:
    gaps = slow_gaps(pieces, 1)
    usual = usual_gap_ms(pieces)
    facts = [
        ("first token", _first(about["first_token_ms"]), "from its arrival at the scheduler"),
        ("prompt", f"{about['prompt_tokens']:,}", "tokens"),
        ("generated", f"{about['generated_tokens']:,}", "tokens"),
        ("usual gap", duration(usual) if usual else "-", "median between its tokens"),
        ("longest gap", duration(gaps[0].ms) if gaps else "-", "where it stands out"),
        ("preempted", str(about["preemptions"]), "times"),
        ("class", str(about["priority"]), f"tenant {about['tenant']}" if about["tenant"] else "no tenant"),
        *(
            (name, value, {"pool": "of workers", "adapter": "its LoRA weights"}[name])
            for name, value in unusual(about).items()
        ),
    ]
    return "<section class=facts>" + "".join(
        f"<div><span class=soft>{name}</span><b>{_text(value)}</b><span class=soft>{_text(what)}</span></div>"
        for name, value, what in facts
    ) + "</section>"  # fmt: skip


def _strip(intervals: Sequence[Interval], total: float) -> str:
    spans = "".join(
        f'<span class="s-{one.stage}" style="flex:{one.ms / total:.6f}" '
        f'title="{_text(one.stage)}: {duration(one.ms)}{_text(": " + one.summary if one.summary else "")}"></span>'
        for one in phases(intervals)
    )
    stages = [stage for stage in STAGES if any(one.stage == stage for one in intervals)]
    legend = "".join(f"<span>{_dot(stage)}{stage}</span>" for stage in stages)
    ticks = "".join(f"<span>{duration(total * part / 4)}</span>" for part in range(5))
    return f"<div class=strip>{spans}</div><div class='ticks soft'>{ticks}</div><div class='legend soft'>{legend}</div>"


def _sums(intervals: Sequence[Interval], total: float) -> str:
    rows = "".join(
        f'<tr><td class="num">{duration(ms)}</td><td class="num">{ms / total:.0%}</td>'
        f'<td class=share><i class="s-{stage}" style="width:{100 * ms / total:.2f}%"></i></td>'
        f"<td>{_dot(stage)}{stage}</td><td>{_text(cause) or _usual(stage)}</td></tr>"
        for stage, cause, ms in by_cause(intervals)[:12]
    )
    return (
        "<h2>Where the time went</h2><table><tr><th class=num>time</th><th class=num>share</th><th></th>"
        f"<th>stage</th><th>cause</th></tr>{rows}</table>"
    )


def _usual(stage: str) -> str:
    return f"<span class=soft>{USUAL.get(stage, '')}</span>"


def _gaps(gaps: Sequence[Gap], begin_ns: int, usual_ms: float) -> str:
    if not gaps:
        return ""
    rows = "".join(
        f'<tr><td class="num">{duration(gap.ms)}</td><td class="num">{duration((gap.begin_ns - begin_ns) / 1e6)}</td>'
        f"<td>{_text(gap.cause or 'a slow step')} {_link(gap.by) if gap.by else ''}"
        + (f"<div class=soft>{_text(contents(gap.step))}</div>" if gap.step is not None else "")
        + "</td></tr>"
        for gap in gaps
    )
    return (
        f"<h2>Slowest gaps between tokens <span class=soft>usually {duration(usual_ms)}</span></h2><table>"
        f"<tr><th class=num>gap</th><th class=num>at</th><th>what was in it</th></tr>{rows}</table>"
    )


def _waterfall(intervals: Sequence[Interval], total: float) -> str:
    made, at = [], 0.0
    for phase in phases(intervals):
        if phase.folds:
            inner, inside = [], at
            for one in phase.intervals[:MOST_ROWS]:
                inner.append(f"<div class=row>{_row(one, inside, total)}</div>")
                inside += one.ms
            hidden = len(phase.intervals) - MOST_ROWS
            if hidden > 0:
                inner.append(f"<div class='row soft'>{hidden:,} more are in the JSON</div>")
            made.append(f"<details><summary class=row>{_phase(phase, at, total)}</summary>{''.join(inner)}</details>")
            at += phase.ms
            continue
        for one in phase.intervals:
            made.append(f"<div class=row>{_row(one, at, total)}</div>")
            at += one.ms
    return (
        "<h2>From beginning to end <span class=soft>without a gap; click a folded row for its steps</span></h2>"
        f"<section class=waterfall>{''.join(made)}</section>"
    )


def _phase(phase: Phase, at: float, total: float) -> str:
    text = f"{_text(phase.summary)} <span class=count>{len(phase.intervals):,} intervals</span>"
    return _cells(phase.stage, at, phase.ms, total, text)


def _row(one: Interval, at: float, total: float) -> str:
    return _cells(
        one.stage,
        at,
        one.ms,
        total,
        (_text(details(one)) or _usual(one.stage)) + (f" {_link(one.by)}" if one.by else ""),
    )


def _cells(stage: str, at: float, ms: float, total: float, text: str) -> str:
    return (
        f'<span class="num">{duration(at)}</span><span class="num strong">{duration(ms)}</span>'
        f'<span class=lane><i class="s-{stage}" style="left:{100 * at / total:.3f}%;width:{100 * ms / total:.3f}%">'
        f"</i></span><span>{_dot(stage)}{stage}</span><span>{text}</span>"
    )


def _link(request_id: str) -> str:
    return f'<a href="/debug/requests/{quote(request_id, safe="")}"><code>{_text(request_id)}</code></a>'


def _dot(stage: str) -> str:
    return f'<i class="dot s-{stage}"></i>'


def _first(ms: float | None) -> str:
    return duration(ms) if ms is not None else "-"


def _text(text: str) -> str:
    return html.escape(text)
