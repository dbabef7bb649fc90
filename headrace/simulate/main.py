"""Command line of ``headrace simulate``."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from headrace.simulate.baselines import BASELINES
from headrace.simulate.engine import Stalled
from headrace.simulate.hardware import GPUS, MODELS, UnknownHardware
from headrace.simulate.limits_flags import add_limit_flags, changed, fields
from headrace.simulate.report import Slo, table
from headrace.simulate.scenario import SIMULATED_LIMITS, Run, Scenario, run
from headrace.simulate.workload import ARRIVALS, LENGTHS, Lengths, Request, prefixed, stream, uniform
from scheduler.policies.batching import BATCHING_POLICIES
from shared.config import ConfigError, Parser


def parser() -> Parser:
    made = Parser(
        prog="headrace simulate",
        description="Run the scheduler in virtual time on modelled hardware. `headrace simulate figures` checks the "
        "claims that the field makes about batching and memory.",
    )
    made.add_argument("--model", default="llama-3.1-8b", help=f"{', '.join(MODELS)}, or a config.json")
    made.add_argument("--gpu", default="a100-80", help=", ".join(GPUS))
    made.add_argument("--tp", type=int, default=1, help="GPUs that share the model (tensor parallelism)")
    made.add_argument("--workers", type=int, default=1, help="workers, each a whole model")
    made.add_argument("--block-size", type=int, default=16, help="tokens in a KV block")
    made.add_argument("--max-model-len", type=int, default=8192, help="longest prompt and output together")
    made.add_argument("--kv-tokens", type=int, default=0, help="size of the KV pool (default: what the card has left)")
    made.add_argument("--host-tokens", type=int, default=0, help="KV entries in host memory, for swapping (default: 0)")
    made.add_argument("--t0-ms", type=float, default=2.0, help="fixed part of a step: launches, Python")
    made.add_argument("--bus-us", type=float, default=125.0, help="one way over the bus")
    made.add_argument("--policy", default="continuous", choices=sorted(BATCHING_POLICIES))
    made.add_argument("--baseline", default="", choices=sorted(BASELINES), help="a naive scheduler to compare with")
    made.add_argument("--workload", default="chat", choices=sorted(LENGTHS), help="lengths of prompts and outputs")
    made.add_argument("--prompt-len", type=int, default=256, help="workload uniform")
    made.add_argument("--output-len", type=int, default=256, help="workload uniform")
    made.add_argument("--prefixes", type=int, default=8, help="workload prefix: how many different ones")
    made.add_argument("--prefix-len", type=int, default=2000, help="workload prefix")
    made.add_argument("--requests", type=int, default=2000)
    made.add_argument("--n", type=int, default=1, help="choices of each request")
    made.add_argument("--rate", type=float, default=0.0, help="arrivals a second (default: a closed loop)")
    made.add_argument("--arrivals", default="poisson", choices=sorted(ARRIVALS), help="with --rate")
    made.add_argument("--concurrency", type=int, default=512, help="requests open at once, without --rate")
    made.add_argument("--seed", type=int, default=1, help="of lengths and arrivals")
    made.add_argument("--slo-ttft-ms", type=float, default=2000.0, help="a good request's longest time to first token")
    made.add_argument("--slo-tpot-ms", type=float, default=100.0, help="and its longest mean time per further token")
    made.add_argument(
        "--compare", default="", metavar="A,B",
        help="variants, each OPTION=VALUE joined by +: policy=static,policy=continuous+max-num-seqs=64",
    )  # fmt: skip
    made.add_argument("--json", nargs="?", const="-", default=None, metavar="FILE", help="figures as JSON")
    made.add_argument(
        "--picture", type=Path, default=None, metavar="FILE", help="batch, pages, queue over time (svg, png)"
    )
    add_limit_flags(made, SIMULATED_LIMITS)
    return made


def main(argv: Sequence[str] | None = None) -> int:
    argv = list(sys.argv[1:] if argv is None else argv)
    if argv[:1] == ["figures"]:
        from headrace.simulate.figures import main as claims

        code: int = claims(argv[1:])
        return code
    made = parser()
    args = made.parse_args(argv)
    try:
        variants = _variants(args.compare, vars(args))
        requests = _requests(args)
        runs: list[Run] = []
        for name, scenario in variants:
            report = progress(name)
            runs.append(
                run(scenario, requests, name, concurrency=0 if args.rate else args.concurrency, progress=report)
            )
    except (ConfigError, UnknownHardware) as error:
        made.error(str(error))
    except Stalled as error:
        print(f"headrace simulate: stalled: {error}", file=sys.stderr)
        return 1
    figures = [one.figures for one in runs]
    text = json.dumps([one.as_dict() for one in figures], indent=2)
    if args.json == "-":
        print(text)
    else:
        print(table(figures))
        if args.json is not None:
            Path(args.json).write_text(text + "\n", "utf-8")
    if args.picture is not None:
        from headrace.simulate.picture import draw_runs

        draw_runs([(one.figures.variant, one.measured) for one in runs], args.picture)
    return 0


def _requests(args: Any) -> list[Request]:
    if args.requests < 1 or args.n < 1 or args.concurrency < 1 or args.rate < 0:
        raise ConfigError("--requests, --n and --concurrency are at least 1, --rate at least 0")
    lengths: Lengths = LENGTHS[args.workload]
    if args.workload == "uniform":
        lengths = uniform(args.prompt_len, args.output_len)
    elif args.workload == "prefix":
        lengths = prefixed(args.prefixes, args.prefix_len, 100, 100)
    return stream(
        lengths, args.requests, args.seed, args.rate, args.arrivals, n=args.n, longest=args.max_model_len
    )  # fmt: skip


_OPTIONS: dict[str, type] = {
    "model": str, "gpu": str, "tp": int, "workers": int, "block_size": int, "max_model_len": int, "kv_tokens": int,
    "host_tokens": int, "t0_ms": float, "bus_us": float, "policy": str, "baseline": str,
}  # fmt: skip
"""Options that make the scenario and may differ between variants, beside the limits."""


def _variants(compare: str, values: dict[str, Any]) -> list[tuple[str, Scenario]]:
    slo = Slo(values["slo_ttft_ms"], values["slo_tpot_ms"])
    made = []
    for variant in compare.split(",") if compare else [values["baseline"] or values["policy"]]:
        own = dict(values)
        for setting in variant.split("+") if compare else []:
            name, equals, value = setting.partition("=")
            name = name.strip().replace("-", "_")
            if not equals or (name not in _OPTIONS and name not in fields()):
                raise ConfigError(f"--compare: {setting!r} is no OPTION=VALUE of the scenario or the limits")
            own[name] = _parsed(name, value)
        if own["policy"] not in BATCHING_POLICIES or own["baseline"] not in BASELINES:
            raise ConfigError(f"--compare {variant}: unknown policy or baseline")
        scenario = Scenario(**{name: own[name] for name in _OPTIONS}, slo=slo)
        made.append((variant, replace(scenario, limits=changed(SIMULATED_LIMITS, own))))
    return made


def _parsed(name: str, value: str) -> Any:
    try:
        return _OPTIONS[name](value) if name in _OPTIONS else value
    except ValueError:
        raise ConfigError(f"--compare: {name}={value}: no {_OPTIONS[name].__name__}") from None


def progress(name: str) -> Callable[[int, int], None] | None:
    """Says on a terminal's stderr how far a run is, twice a second."""
    if not sys.stderr.isatty():
        return None
    last = 0.0

    def report(done: int, total: int) -> None:
        nonlocal last
        now = time.monotonic()
        if now - last > 0.5 or done == total:
            last = now
            print(f"\r{name}: {done}/{total} requests", end="\n" if done == total else "", file=sys.stderr, flush=True)

    return report


if __name__ == "__main__":
    sys.exit(main())
