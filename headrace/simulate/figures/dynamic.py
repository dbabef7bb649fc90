"""Roles that follow the load against fixed ratios, on a workload that shifts from reading to writing and back."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from headrace.simulate.figures.claim import Bench, Holds, Row, Section, cells
from headrace.simulate.figures.split import WORKERS, varied
from headrace.simulate.report import Slo, within
from headrace.simulate.scenario import Run, Scenario
from headrace.simulate.workload import Request, merged, stream
from scheduler.policies.roles import RolePolicy
from shared.messages import Role

_SLO = Slo(2000, 30)
_PHASES = ((4000, 50, 28.0), (200, 350, 170.0), (4000, 50, 28.0))
"""Mean prompt, mean output, requests a second; one after the other, each as long."""

_PHASE_S = 14.0
_PREFILL = (4, 8, 12)  # workers for prompts, of the fixed ratios
_POLICY = RolePolicy(average_s=3.0, hold_s=0.0, every_s=2.0)
"""Quicker than the default, as the phases are shorter than any day's."""

_WHY = (
    "what finds no room among decode workers decodes where its prompt was computed, so that a fixed ratio with many "
    "prefill workers holds up in every phase"
)
_COLUMNS = (
    ("ttft_p50", "{:.0f}"), ("ttft_p99", "{:.0f}"),
    ("itl_p50", "{:.1f}"), ("itl_p99", "{:.1f}"),
)  # fmt: skip


def shifting(phase_s: float) -> list[Request]:
    return merged(*(
        stream(varied(prompt, output), int(rate * phase_s), 16 + index, rate, start_ns=int(index * phase_s * 1e9))
        for index, (prompt, output, rate) in enumerate(_PHASES)
    ))  # fmt: skip


def following(bench: Bench) -> list[Section]:
    phase_s = bench.seconds(_PHASE_S, 4)
    requests = shifting(phase_s)
    mesh = Scenario(workers=WORKERS, slo=_SLO, role_policy=_POLICY).with_limits(target_itl_ns=int(_SLO.tpot_ms * 1e6))
    variants = {f"{count} + {WORKERS - count}": replace(mesh, roles=_roles(count)) for count in _PREFILL}
    variants["planned"] = replace(mesh, roles=_roles(WORKERS // 2), plan_roles=True)
    runs = {name: bench.run(scenario, requests, f"shifting load, {name}") for name, scenario in variants.items()}
    kept = {name: _kept(run, phase_s) for name, run in runs.items()}
    mean = {name: sum(shares) / len(shares) for name, shares in kept.items()}
    table = [["prefill + decode", "within the SLO, by phase", "mean of the phases", "TTFT p50 ms", "TTFT p99 ms",
              "ITL p50 ms", "ITL p99 ms"]]  # fmt: skip
    table += [
        [name, ", ".join(f"{share:.0%}" for share in kept[name]), f"{mean[name]:.0%}", *cells(run.figures, _COLUMNS)]
        for name, run in runs.items()
    ]
    planned = runs["planned"]
    best, worst = (pick(list(mean)[:-1], key=mean.__getitem__) for pick in (max, min))

    def draw(path: Path) -> None:
        from headrace.simulate.picture import curves

        curves(path, "virtual seconds", {"workers for prompts": {"planned": _prefill_over_time(planned, phase_s)}})

    ours, fixed = planned.figures, runs[best].figures
    wins = mean["planned"] > mean[best]
    row = Row(
        "roles that follow the load beat every fixed ratio on a workload that shifts",
        f"{mean['planned']:.0%} of a phase's requests within the SLO, the best fixed ratio ({best}) {mean[best]:.0%}, "
        f"the worst ({worst}) {mean[worst]:.0%}; TTFT p99 {ours.ttft_p99:.0f} ms against the best's "
        f"{fixed.ttft_p99:.0f}, ITL p99 {ours.itl_p99:.1f} ms against {fixed.itl_p99:.1f}; "
        f"{len(planned.measured.roles)} changes of a worker's role",
        "; then ".join(f"{varied(*kind[:2]).text} at {kind[2]:.0f}/s" for kind in _PHASES)
        + f"; {phase_s:g} s each, Poisson; SLO {_SLO.ttft_ms:g} ms to the first token, {_SLO.tpot_ms:g} ms a token; "
        f"{WORKERS} workers of Llama-3.1-8B on one A100-80 each, links of 100 Gbit/s",
        f"fixed ratios with {', '.join(map(str, _PREFILL))} of {WORKERS} workers for prompts",
        Holds.YES if wins else Holds.NO,
        ("" if wins else f"{_WHY}; ")
        + f"it begins with {WORKERS // 2} + {WORKERS // 2} and looks every second, with averages over "
        f"{_POLICY.average_s:g} s: what comes in the seconds between a shift and the change that follows pays for it",
    )
    return [Section("Roles that follow the load", [row], table, picture="dynamic", draw=draw)]


def _kept(run: Run, phase_s: float) -> list[float]:
    """Of each phase's requests, the share within the SLO."""
    phase = (run.measured.arrived_ns / (phase_s * 1e9)).astype(int)
    good = within(run.measured, _SLO)
    return [float(good[phase == index].mean()) for index in range(len(_PHASES))]


def _roles(prefill: int) -> str:
    return f"prefill={prefill},decode={WORKERS - prefill}"


def _prefill_over_time(run: Run, phase_s: float) -> tuple[list[float], list[float]]:
    """(virtual seconds, workers for prompts), a point for each change and one at either end."""
    count, now = WORKERS // 2, {f"w{index}": Role.PREFILL for index in range(WORKERS // 2)}
    seconds, counts = [0.0], [float(count)]
    for at, worker, role in run.measured.roles:
        now[worker] = role
        count = sum(one is Role.PREFILL for one in now.values())
        if at > seconds[-1]:
            seconds += [at, at]
            counts += [counts[-1], float(count)]
        counts[-1] = float(count)
    return [*seconds, len(_PHASES) * phase_s], [*counts, float(count)]
