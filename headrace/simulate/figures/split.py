"""Prompts and decodes on workers of their own, or both on each: the rate that keeps an SLO, by prompts to outputs."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from headrace.simulate.figures.claim import Bench, Holds, Row, Section
from headrace.simulate.report import Figures, Slo
from headrace.simulate.scenario import Scenario
from headrace.simulate.step_time import Roofline, StepWork
from headrace.simulate.workload import OWN, Lengths, Segment, stream
from scheduler.policies.roles import best_split

WORKERS = 16
_ATTAINED = 0.9  # share of the requests that keep both parts of the SLO
_RATES = tuple(0.3 + 0.1 * level for level in range(8))  # of the ceiling; the highest good one is found by bisection
_KINDS = ((4000, 100), (1000, 100), (250, 125))
_SLOS = (Slo(2000, 40), Slo(1000, 18))
_SECONDS = 6.0


def varied(prompt: int, output: int) -> Lengths:
    """Both vary by half, evenly."""

    def draw(rng: random.Random) -> tuple[tuple[Segment, ...], int, int]:
        own, length = (max(1, round(rng.uniform(0.5, 1.5) * mean)) for mean in (prompt, output))
        return ((OWN, own),), round(1.5 * output), length

    return Lengths(f"{prompt}/{output}", f"prompts around {prompt} tokens, outputs around {output}", draw)


def needs(scenario: Scenario, prompt: int, output: int) -> tuple[float, float]:
    """Worker-seconds that the prompt of a request takes, and its decodes in batches that just keep the SLO."""
    time, most = Roofline(scenario.deployment, scenario.t0_ms), scenario.slo.tpot_ms * 1e6
    chunk = StepWork()
    chunk.add_rows(0, prompt)
    context = prompt + output // 2

    def step_ns(rows: int) -> int:
        return time.ns(StepWork(rows, rows * context, rows * context))

    fits = min(scenario.limits.max_num_seqs, scenario.deployment.kv_tokens // context)
    rows = next((rows for rows in range(fits, 0, -1) if step_ns(rows) <= most), 1)
    return time.ns(chunk) / 1e9, output * step_ns(rows) / rows / 1e9


def by_arithmetic(scenario: Scenario, prompt: int, output: int) -> str:
    """Roles in the ratio of what prompts and decodes need."""
    prefill = best_split(*needs(scenario, prompt, output), scenario.workers, scenario.workers // 2)
    return f"prefill={prefill},decode={scenario.workers - prefill}"


def _ceiling(scenario: Scenario, prompt: int, output: int) -> float:
    """Requests a second that take all the arithmetic of all workers."""
    time = Roofline(scenario.deployment, t0_ms=0.0)
    tokens = 100_000  # so many that weights are read beside their arithmetic
    return scenario.workers / (time.ns(StepWork(rows=tokens)) / tokens * (prompt + output) / 1e9)


def _goodput(bench: Bench, scenario: Scenario, prompt: int, output: int, name: str) -> tuple[float, Figures | None]:
    """The highest of ``_RATES`` at which the SLO is kept, in requests a second, and its run; 0 if none is."""
    lengths, ceiling = varied(prompt, output), _ceiling(scenario, prompt, output)
    low, high = -1, len(_RATES)
    kept: tuple[float, Figures | None] = 0.0, None
    while low + 1 < high:
        middle = (low + high) // 2
        rate = ceiling * _RATES[middle]
        requests = stream(lengths, max(30, int(rate * bench.seconds(_SECONDS, 1))), 15, rate)
        one = bench.run(scenario, requests, f"{name}, {lengths.name} at {rate:.1f}/s").figures
        if one.slo_share >= _ATTAINED:
            low, kept = middle, (rate, one)
        else:
            high = middle
    return kept


def apart(bench: Bench) -> list[Section]:
    table = [["SLO: TTFT, then per token", "prompt / output", "mixed /s", "split /s", "prefill + decode",
              "split / mixed", "TTFT p99 ms: mixed, split", "ITL p99 ms: mixed, split", "a pause, ms"]]  # fmt: skip
    best: dict[tuple[Slo, str], list[float]] = {}
    for slo in _SLOS:
        mesh = Scenario(workers=WORKERS, slo=slo).with_limits(target_itl_ns=int(slo.tpot_ms * 1e6))
        for prompt, output in _KINDS:
            roles = by_arithmetic(mesh, prompt, output)
            mixed, one = _goodput(bench, mesh, prompt, output, "mixed")
            split, other = _goodput(bench, replace(mesh, roles=roles), prompt, output, roles)
            best.setdefault((slo, "mixed"), []).append(mixed)
            best.setdefault((slo, "split"), []).append(split)
            table.append([
                _named(slo), f"{prompt} / {output}", f"{mixed:.1f}", f"{split:.1f}",
                " + ".join(part.partition("=")[2] for part in roles.split(",")),
                f"{split / mixed:.2f}" if mixed else "-",
                " / ".join(f"{run.ttft_p99:.0f}" if run else "-" for run in (one, other)),
                " / ".join(f"{run.itl_p99:.0f}" if run else "-" for run in (one, other)),
                f"{other.pause_p50:.1f}" if other else "-",
            ])  # fmt: skip

    def draw(path: Path) -> None:
        from headrace.simulate.picture import curves

        ratios = [prompt / output for prompt, output in _KINDS]
        panels = {
            f"requests/s in {_named(slo)}": {name: (ratios, best[slo, name]) for name in ("mixed", "split")}
            for slo in _SLOS
        }
        curves(path, "prompt tokens for each output token", panels, log=True)

    rows = [_row(slo, best[slo, "mixed"], best[slo, "split"]) for slo in _SLOS]
    return [Section("Prefill and decode apart", rows, table, _NOTE, picture="split", draw=draw)]


_NOTE = (
    f"A rate is kept for {_SECONDS:g} s, not for ever: what queues up within the time to the first token counts as "
    "kept, and at the highest rate prompts and outputs take all the arithmetic of all workers. "
    "The roofline takes reading weights and arithmetic as perfectly parallel: some hundred prompt tokens beside "
    "decodes cost a mixed worker next to nothing, which is the most that chunked prefill can gain. Where kernels "
    "overlap the two less well, mixed workers gain less; nothing here measures how much."
)


def _named(slo: Slo) -> str:
    return f"{slo.ttft_ms:g} ms, {slo.tpot_ms:g} ms"


def _row(slo: Slo, mixed: Sequence[float], split: Sequence[float]) -> Row:
    wins = [apart > both for both, apart in zip(mixed, split, strict=True)]
    told = "; ".join(
        f"{prompt}/{output} tokens {apart:.1f}/s split, {both:.1f}/s mixed"
        for (prompt, output), both, apart in zip(_KINDS, mixed, split, strict=True)
    )
    return Row(
        f"with workers for prompts and workers for decodes more requests keep an SLO of {_named(slo)} a token than "
        "with as many that do both",
        told,
        f"prompts and outputs that vary by half, Poisson for {_SECONDS:g} s; the highest of eight rates at which "
        f"{_ATTAINED:.0%} of the requests keep both parts of the SLO; {WORKERS} workers of Llama-3.1-8B on one A100-80 "
        "each, links of 100 Gbit/s; roles by what prompts and decodes need by the roofline",
        "the same workers, all mixed, chunked prefill with the SLO's time per token as target ITL",
        Holds.YES if all(wins) else Holds.PARTLY if any(wins) else Holds.NO,
        ""
        if all(wins)
        else "where it does not, mixed workers make up for it: they compute prompt tokens beside decodes that have to "
        "read all weights anyway, and no kind of them is idle while the other is full",
    )
