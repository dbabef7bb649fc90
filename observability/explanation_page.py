"""An explanation as a page, as JSON, and as lines for a terminal."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from typing import Any

from observability.explanation import Interval, by_cause
from shared.flight_record import Report, RequestTrace

STAGES = {
    "receive": "#8e8e93", "tokenise": "#a2845e", "submit": "#8e8e93", "queue": "#ff9f0a", "preempted": "#ff453a",
    "prefill": "#0a84ff", "decode": "#30d158", "stream": "#64d2ff", "bus": "#8e8e93",
}  # fmt: skip
"""Colour of each stage, in pages and pictures."""

STYLE = """
:root { color-scheme: light dark; --ink: #1d1d1f; --soft: #6e6e73; --page: #fbfbfd; --card: #fff; --line: #d2d2d7 }
@media (prefers-color-scheme: dark) {
  :root { --ink: #f5f5f7; --soft: #a1a1a6; --page: #000; --card: #1c1c1e; --line: #3a3a3c } }
* { box-sizing: border-box }
body { margin: 0 auto; max-width: 72rem; padding: 1.5rem; background: var(--page); color: var(--ink);
  font: 15px/1.45 system-ui, sans-serif }
h1 { font-size: 1.3rem; margin: 0 0 .2rem } h2 { font-size: 1rem; margin: 1.6rem 0 .5rem }
a { color: inherit } code { font: 13px ui-monospace, monospace }
.soft { color: var(--soft) } .num { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap }
table { border-collapse: collapse; width: 100%; background: var(--card); border: 1px solid var(--line) }
th, td { padding: .3rem .6rem; text-align: left; border-bottom: 1px solid var(--line); vertical-align: top }
th { font-weight: 600 }
.dot { display: inline-block; width: .7em; height: .7em; border-radius: 2px; margin-right: .4em }
.strip { display: flex; height: 2.2rem; border-radius: 4px; overflow: hidden; border: 1px solid var(--line) }
.strip span { min-width: 1px } .lane { position: relative; height: .9rem; min-width: 16rem }
.lane span { position: absolute; height: 100%; min-width: 2px; border-radius: 2px }
"""


def page(title: str, body: str, script: str = "") -> bytes:
    """A whole HTML document."""
    tail = f"<script>{script}</script>" if script else ""
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><meta name="viewport" '
        f'content="width=device-width"><title>{html.escape(title)}</title><style>{STYLE}</style></head>'
        f"<body>{body}{tail}</body></html>"
    ).encode()


def as_json(report: Report, intervals: Sequence[Interval]) -> dict[str, Any]:
    """Everything that the page says, for programs. Times in ms from the beginning."""
    request = report.request
    assert request is not None
    begin = intervals[0].begin_ns if intervals else 0
    return {
        **summary(request),
        "begin_unix_ns": begin,
        "total_ms": round(sum(one.ms for one in intervals), 3),
        "intervals": [
            {
                "at_ms": round((one.begin_ns - begin) / 1e6, 3), "ms": round(one.ms, 3), "stage": one.stage,
                "cause": one.cause, "by": one.by,
            }
            for one in intervals
        ],
        "by_cause": [
            {"stage": stage, "cause": cause, "ms": round(ms, 3)} for stage, cause, ms in by_cause(intervals)
        ],
        "steps": len(report.steps),
        "steps_left_out": report.left_out,
    }  # fmt: skip


def summary(request: RequestTrace) -> dict[str, Any]:
    """One request in a list of them."""
    answer = request.answer
    return {
        "request_id": request.request_id,
        "answer_id": answer.answer_id if answer is not None else "",
        "client_id": answer.client_id if answer is not None else "",
        "tenant": request.tenant,
        "priority": request.priority,
        "prompt_tokens": request.prompt_len,
        "generated_tokens": sum(choice.generated for choice in request.choices.values()),
        "choices": len(request.choices),
        "preemptions": sum(max(0, len(choice.stays) - 1) for choice in request.choices.values()),
        "live": request.live,
        "end": "; ".join(sorted({choice.end for choice in request.choices.values() if choice.end})),
        "took_ms": round(request.took_ns / 1e6, 3) if not request.live else None,
    }


def as_page(report: Report, intervals: Sequence[Interval]) -> bytes:
    """The waterfall of one request."""
    request = report.request
    assert request is not None
    about = summary(request)
    total = sum(one.ms for one in intervals) or 1.0
    strip = "".join(
        f'<span style="flex:{one.ms / total:.6f};background:{STAGES.get(one.stage, "#888")}" '
        f'title="{html.escape(_words(one))}: {_ms(one.ms)}"></span>'
        for one in intervals
    )
    rows, at = [], 0.0
    for one in intervals:
        rows.append(
            f'<tr><td class="num">{_ms(at)}</td><td class="num">{_ms(one.ms)}</td>'
            f"<td>{_dot(one.stage)}{one.stage}</td>"
            f'<td>{_cause(one)}</td><td><div class=lane><span style="left:{100 * at / total:.3f}%;'
            f'width:{100 * one.ms / total:.3f}%;background:{STAGES.get(one.stage, "#888")}"></span></div></td></tr>'
        )
        at += one.ms
    sums = "".join(
        f'<tr><td class="num">{_ms(ms)}</td><td class="num">{ms / total:.0%}</td><td>{_dot(stage)}{stage}</td>'
        f"<td>{html.escape(cause)}</td></tr>"
        for stage, cause, ms in by_cause(intervals)[:12]
    )
    ended = "still running" if request.live else f"ended: {html.escape(str(about['end']))}"
    left_out = f" {report.left_out:,} uneventful steps are not shown." if report.left_out else ""
    body = (
        f"<h1>Why <code>{html.escape(request.request_id)}</code> took {_ms(total)}</h1>"
        f"<p class=soft>{about['prompt_tokens']:,} prompt tokens, {about['generated_tokens']:,} generated, "
        f"{about['preemptions']} preemptions, {ended}. Beginning to end without a gap; hover for causes.{left_out} "
        f'<a href="/dashboard">dashboard</a> · <a href="/debug/requests?slowest=20">slowest</a> · '
        f'<a href="?format=json">JSON</a></p>'
        f"<div class=strip>{strip}</div><h2>Where the time went</h2><table><tr><th class=num>time</th><th class=num>"
        f"share</th><th>stage</th><th>cause</th></tr>{sums}</table><h2>Step by step</h2><table>"
        f"<tr><th class=num>at</th><th class=num>for</th><th>stage</th><th>cause</th><th></th></tr>"
        f"{''.join(rows)}</table>"
    )
    return page(f"{request.request_id}: {_ms(total)}", body)


def list_page(requests: Sequence[RequestTrace]) -> bytes:
    """The slowest requests, each with the way to its own page."""
    rows = "".join(
        f'<tr><td class="num">{_ms(one["took_ms"] or 0.0)}</td>'
        f'<td><a href="/debug/requests/{one["request_id"]}"><code>{one["request_id"]}</code></a></td>'
        f'<td class="num">{one["prompt_tokens"]:,}</td><td class="num">{one["generated_tokens"]:,}</td>'
        f'<td class="num">{one["preemptions"]}</td>'
        f"<td>{html.escape(one['end'])}</td></tr>"
        for one in map(summary, requests)
    )
    body = (
        '<h1>The slowest requests</h1><p class=soft>Of those remembered. <a href="/dashboard">dashboard</a></p><table>'
        "<tr><th class=num>took</th><th>request</th><th class=num>prompt</th><th class=num>generated</th>"
        f"<th class=num>preempted</th><th>end</th></tr>{rows}</table>"
    )
    return page("The slowest requests", body)


def lines(about: dict[str, Any], intervals: Sequence[Interval], width: int = 110) -> list[str]:
    """The waterfall for a terminal of so many columns; ``about`` is a :func:`summary` of the request."""
    total = sum(one.ms for one in intervals) or 1.0
    bar = max(10, min(40, width - 70))
    made = [
        f"{about['request_id']}: {_ms(total)}, {about['prompt_tokens']:,} prompt tokens, "
        f"{about['generated_tokens']:,} generated, {about['preemptions']} preemptions, "
        f"{'still running' if about['live'] else about['end']}",
        "",
    ]
    at = 0.0
    for one in intervals:
        begin = min(bar - 1, int(at / total * bar))
        end = max(begin + 1, min(bar, math.ceil((at + one.ms) / total * bar)))
        lane = "·" * begin + "█" * (end - begin) + "·" * (bar - end)
        made.append(f"{_ms(at):>10} {_ms(one.ms):>10}  {lane}  {_words(one)}")
        at += one.ms
    made += ["", "where the time went:"]
    for stage, cause, ms in by_cause(intervals)[:8]:
        made.append(f"{_ms(ms):>10} {ms / total:>5.0%}  {stage}{': ' + cause if cause else ''}")
    return made


def _words(one: Interval) -> str:
    return one.stage + (f": {one.cause}" if one.cause else "") + (f" ({one.by})" if one.by else "")


def _cause(one: Interval) -> str:
    by = f' <a href="/debug/requests/{html.escape(one.by)}"><code>{html.escape(one.by)}</code></a>' if one.by else ""
    return html.escape(one.cause) + by


def _dot(stage: str) -> str:
    return f'<span class=dot style="background:{STAGES.get(stage, "#888")}"></span>'


def _ms(ms: float) -> str:
    if ms >= 1000:
        return f"{ms / 1000:.2f} s"
    return f"{ms:.1f} ms"
