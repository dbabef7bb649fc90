"""How the pages of the internal listeners look: one style, light and dark, without anything from elsewhere."""

from __future__ import annotations

import html

STAGES = ("receive", "tokenise", "submit", "queue", "preempted", "interrupted", "prefill", "move", "decode",
          "stream", "bus")  # fmt: skip
"""In the order of a request's life; each has a colour (``--queue``) and a class (``s-queue``)."""

STYLE = """
:root { color-scheme: light dark;
  --ink: #1a1f2b; --soft: #667085; --page: #f5f6f8; --card: #fff; --line: #e3e6eb; --well: #eef0f4; --accent: #2f6fed;
  --receive: #98a2b3; --tokenise: #b58b5a; --submit: #98a2b3; --bus: #98a2b3; --queue: #f0a020; --preempted: #d92d3a;
  --interrupted: #8e2a8b; --move: #c2681f;
  --prefill: #3b7ded; --decode: #23a26d; --recompute: #e5484d; --padding: #b6bdc9; --stream: #4fb8d8; --swap: #9b6ef3 }
@media (prefers-color-scheme: dark) { :root {
  --ink: #e8ebf1; --soft: #8d97a9; --page: #0d1017; --card: #151a23; --line: #242b38; --well: #1d2430;
  --accent: #6ea0ff;
  --receive: #667085; --submit: #667085; --bus: #667085; --queue: #f5b344; --preempted: #ff5d64; --prefill: #5b96ff;
  --interrupted: #d06bcd; --move: #e08a44; --decode: #35c98a; --recompute: #ff6369; --padding: #4b5565;
  --stream: #62cbe8 } }
* { box-sizing: border-box }
body { margin: 0 auto; max-width: 80rem; padding: 1.2rem 1.5rem 3rem; background: var(--page); color: var(--ink);
  font: 14px/1.5 "Inter", system-ui, sans-serif }
h1 { font-size: 1.35rem; font-weight: 650; margin: 0 0 .2rem; letter-spacing: -.01em }
h2 { font-size: .95rem; font-weight: 650; margin: 1.8rem 0 .6rem } h2 .soft { font-weight: 400; margin-left: .5rem }
header { margin: .8rem 0 1rem } header p { margin: 0 } nav { display: flex; gap: 1.2rem }
a { color: var(--accent); text-decoration: none } a:hover { text-decoration: underline }
code { font: .92em ui-monospace, "DejaVu Sans Mono", monospace }
.soft { color: var(--soft) } .strong { font-weight: 600 }
.num { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap }
table { border-collapse: separate; border-spacing: 0; width: 100%; background: var(--card);
  border: 1px solid var(--line); border-radius: 8px; overflow: hidden }
th, td { padding: .38rem .75rem; text-align: left; vertical-align: top }
tr + tr td { border-top: 1px solid var(--line) }
th { font-weight: 500; color: var(--soft); font-size: .85em; background: var(--well) } th.num { text-align: right }
.dot { display: inline-block; width: .65em; height: .65em; border-radius: 2px; margin-right: .45em }
""" + "".join(f".s-{stage} {{ background: var(--{stage}) }}\n" for stage in STAGES) + """
.facts { display: grid; grid-template-columns: repeat(auto-fit, minmax(9rem, 1fr)); gap: .6rem; margin: 0 0 1rem }
.facts div { background: var(--card); border: 1px solid var(--line); border-radius: 8px; padding: .55rem .8rem }
.facts span { display: block; font-size: .85em } .facts b { font-size: 1.25rem; font-weight: 650;
  font-variant-numeric: tabular-nums }
.strip { display: flex; height: 2.4rem; border-radius: 8px; overflow: hidden; background: var(--well) }
.strip span { min-width: 1px } .ticks, .legend { display: flex; font-size: .85em; margin-top: .25rem }
.ticks { justify-content: space-between } .legend { gap: 1rem }
td.num, th.num { width: 1% } .share { width: 30%; vertical-align: middle }
.share i { display: block; height: .55rem; min-width: 2px; border-radius: 3px }
.waterfall { background: var(--card); border: 1px solid var(--line); border-radius: 8px; overflow: hidden }
.row { display: grid; grid-template-columns: 5.2rem 5.2rem minmax(9rem, 26%) 7rem 1fr; gap: .8rem; align-items: center;
  padding: .32rem .75rem; border-top: 1px solid var(--line); list-style: none } .waterfall > :first-child,
.waterfall > :first-child > summary { border-top: 0 }
summary.row { cursor: pointer } summary.row:hover { background: var(--well) } details .row:not(summary) {
  background: color-mix(in srgb, var(--well) 55%, transparent); font-size: .93em }
.count { color: var(--soft); border: 1px solid var(--line); border-radius: 99px; padding: 0 .5em; font-size: .85em;
  white-space: nowrap } summary .count::after { content: " ▸" } details[open] > summary .count::after { content: " ▾" }
.lane { position: relative; height: .7rem; background: var(--well); border-radius: 3px; overflow: hidden }
.lane i { position: absolute; height: 100%; min-width: 2px; border-radius: 2px }
@media (max-width: 50rem) { .row { grid-template-columns: 5rem 5rem 1fr } .row .lane { display: none } }
"""  # fmt: skip


def page(title: str, body: str) -> bytes:
    """A whole HTML document."""
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><meta name="viewport" '
        f'content="width=device-width"><link rel="icon" href="data:,"><title>{html.escape(title)}</title>'
        f"<style>{STYLE}</style></head>"
        f"<body>{body}</body></html>"
    ).encode()
