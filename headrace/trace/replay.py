"""``headrace replay TRACE``: recorded traffic under the recorded configuration, or under another one.

Without other settings every recorded input goes to a core configured as it was, at its time, and each plan is compared
byte for byte. With other settings the recorded requests, with their arrival times and output lengths, go through the
simulator, whose step times are fitted to the recorded ones, under both configurations.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from headrace.simulate.baselines import BASELINES
from headrace.simulate.engine import Stalled
from headrace.simulate.limits_flags import add_limit_flags, changed, fields
from headrace.simulate.report import Figures, Slo, table
from headrace.simulate.scenario import Scenario, run
from headrace.trace.measured import Recorded, measure
from headrace.trace.recorded import Header, header
from headrace.trace.stream import BadTrace
from scheduler.core.limits import Limits
from scheduler.policies.batching import BATCHING_POLICIES
from shared.config import ConfigError, Parser


def parser() -> Parser:
    made = Parser(
        prog="headrace replay",
        description="Replay what a scheduler recorded (headrace scheduler --record FILE). With no other settings: are "
        "the decisions the same, byte for byte? With some: how would that traffic have gone under them?",
    )
    made.add_argument("trace", type=Path, metavar="TRACE")
    made.add_argument("--policy", default=None, choices=sorted(BATCHING_POLICIES))
    made.add_argument("--baseline", default=None, choices=sorted(BASELINES), help="a naive scheduler to compare with")
    made.add_argument(
        "--slo-ttft-ms",
        type=float,
        default=2000.0,
        help="a good request's longest time to first token (default: %(default)s)",
    )
    made.add_argument(
        "--slo-tpot-ms",
        type=float,
        default=100.0,
        help="and its longest mean time per further token (default: %(default)s)",
    )
    made.add_argument("--json", action="store_true", help="print JSON")
    add_limit_flags(made, Limits())
    return made


def main(argv: Sequence[str] | None = None) -> int:
    """0: the same plans, or a comparison; 1: the plans differ; 2: no trace, or bad settings."""
    made = parser()
    args = made.parse_args(argv)
    slo = Slo(args.slo_ttft_ms, args.slo_tpot_ms)
    try:
        recorded = header(args.trace)
        limits = changed(recorded.limits, vars(args))
        found = measure(args.trace, recorded, slo)
        policy = args.policy or recorded.policy
        if limits == recorded.limits and policy == recorded.policy and not args.baseline:
            return _report(recorded, found, args.json)
        runs = [found.figures]
        for name, scenario in (
            ("recorded configuration, simulated", _scenario(recorded.limits, recorded.policy, "", found, slo)),
            (_named(args), _scenario(limits, policy, args.baseline or "", found, slo)),
        ):
            runs.append(run(scenario, found.requests, name, step_time=found.step_time).figures)
    except (BadTrace, ConfigError) as error:
        made.error(str(error))
    except Stalled as error:
        print(f"headrace replay: stalled: {error}", file=sys.stderr)
        return 1
    print(_as_json(found, runs) if args.json else table(runs))
    if not args.json:
        fit = found.step_time
        print(f"\nstep time fitted to the trace: {fit.base_ns / 1e6:.2f} ms + {fit.row_ns / 1e3:.1f} us per row")
    return 0


def _scenario(limits: Limits, policy: str, baseline: str, found: Recorded, slo: Slo) -> Scenario:
    capacity = found.capacities[0]
    return Scenario(
        workers=len(found.capacities),
        block_size=capacity.block_size,
        max_model_len=capacity.max_model_len,
        kv_tokens=capacity.num_blocks * capacity.block_size,
        limits=limits,
        policy=policy,
        baseline=baseline,
        slo=slo,
    )


def _named(args: Any) -> str:
    given = [name for name in ("policy", "baseline", *fields()) if getattr(args, name) is not None]
    return "+".join(f"{name.replace('_', '-')}={getattr(args, name)}" for name in given)


def _report(recorded: Header, found: Recorded, as_json: bool) -> int:
    outcome = found.outcome
    if as_json:
        print(_as_json(found, [found.figures]))
    else:
        seconds = (outcome.last_ns - outcome.first_ns) / 1e9
        print(f"{outcome.inputs} inputs and {outcome.plans} plans over {seconds:.1f} s, policy {recorded.policy}")
        print(outcome.difference or "every plan is the recorded one, byte for byte")
        print(table([found.figures]))
    if recorded.unknown:
        print(f"limits that this version lacks: {', '.join(sorted(recorded.unknown))}", file=sys.stderr)
    return 1 if outcome.difference else 0


def _as_json(found: Recorded, runs: list[Figures]) -> str:
    outcome = found.outcome
    return json.dumps(
        {
            "inputs": outcome.inputs,
            "plans": outcome.plans,
            "difference": outcome.difference,
            "runs": [one.as_dict() for one in runs],
        },
        indent=2,
    )


if __name__ == "__main__":
    sys.exit(main())
