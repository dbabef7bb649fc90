"""Command line of ``headrace simulate``."""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from headrace.output_file import check_writable
from headrace.simulate.baselines import BASELINES
from headrace.simulate.engine import Stalled
from headrace.simulate.hardware import GPUS, MODELS, UnknownHardware
from headrace.simulate.limits_flags import add_limit_flags, canonical, changed, fields, parsed
from headrace.simulate.report import Slo, table
from headrace.simulate.roles import roles_of, workers_of
from headrace.simulate.scenario import SIMULATED_LIMITS, Run, Scenario, run
from headrace.simulate.worker_pools import parsed_pools, pools_of
from headrace.simulate.workload import ARRIVALS, LENGTHS, Lengths, Request, prefixed, stream, uniform
from scheduler.policies.batching import BATCHING_POLICIES
from shared.config import ConfigError, Parser

UNIFORM_TOKENS = 256
PREFIXES, PREFIX_LEN, SUFFIX, PREFIX_OUTPUT = 8, 2000, 100, 100
CONCURRENCY = 512
PICTURES = (".svg", ".png", ".pdf")


def parser() -> Parser:
    made = Parser(
        prog="headrace simulate",
        description="Run the scheduler in virtual time on modelled hardware. `headrace simulate figures` checks the "
        "claims that the field makes about batching and memory.",
    )
    add = made.add_argument
    shown = "(default: %(default)s)"
    add("--model", default="llama-3.1-8b", help=f"{', '.join(MODELS)}, or a config.json {shown}")
    add("--gpu", default="a100-80", help=f"{', '.join(GPUS)} {shown}")
    add("--tp", type=int, default=1, help=f"GPUs that share the model, tensor parallelism {shown}")
    named = "as many as --roles or --worker-pools name, or 1"
    add("--workers", type=int, help=f"workers, each a whole model (default: {named})")
    add("--worker-pools", default="", metavar="NAME=COUNT,...", help="pools that they are in (default: all in one)")
    add("--roles", default="", metavar="ROLE=COUNT,...", help="prefill=4,decode=12; others are mixed (default: all)")
    add("--plan-roles", action="store_true", help="move workers between prefill and decode as the load asks")
    gbit = f"of a worker's link, in Gbit/s, for KV blocks, with --roles (default: {Scenario.link_gbit})"
    add("--link-gbit", type=float, help=gbit)
    add("--link-us", type=float, help=f"until a transfer's first byte, with --roles (default: {Scenario.link_us})")
    add("--block-size", type=int, default=16, help=f"tokens in a KV block {shown}")
    add("--max-model-len", type=int, default=8192, help=f"longest prompt and output together, in tokens {shown}")
    add("--kv-tokens", type=int, default=0, help="size of the KV pool (default: 0, what the card has left)")
    add("--host-tokens", type=int, default=0, help=f"KV entries in host memory, for swapping {shown}")
    add("--t0-ms", type=float, default=2.0, help=f"fixed part of a step: launches, Python {shown}")
    add("--bus-us", type=float, default=125.0, help=f"one way over the bus {shown}")
    add("--policy", default="continuous", choices=sorted(BATCHING_POLICIES), help=f"how batches are made {shown}")
    add("--baseline", default="", choices=sorted(BASELINES), help="a naive scheduler instead (default: none)")
    add("--workload", default="chat", choices=sorted(LENGTHS), help=f"lengths of prompts and outputs {shown}")
    # The defaults of those that go with some other flag are filled in where that one is given (see _requests).
    add("--prompt-len", type=int, help=f"tokens, of workload uniform (default: {UNIFORM_TOKENS})")
    add("--output-len", type=int, help=f"tokens, of workload uniform (default: {UNIFORM_TOKENS})")
    add("--prefixes", type=int, help=f"how many different ones workload prefix has (default: {PREFIXES})")
    add("--prefix-len", type=int, help=f"tokens, of workload prefix (default: {PREFIX_LEN})")
    add("--requests", type=int, default=2000, help=f"how many are sent {shown}")
    add("--n", type=int, default=1, help=f"choices of each request {shown}")
    add("--rate", type=float, default=0.0, help="arrivals a second (default: 0, a closed loop)")
    add("--arrivals", choices=sorted(ARRIVALS), help="how they are spread, with --rate (default: poisson)")
    add("--concurrency", type=int, help=f"requests open at once, without --rate (default: {CONCURRENCY})")
    add("--seed", type=int, default=1, help=f"of lengths and arrivals {shown}")
    add("--slo-ttft-ms", type=float, default=2000.0, help=f"a good request's longest time to first token {shown}")
    add("--slo-tpot-ms", type=float, default=100.0, help=f"and its longest mean time per further token {shown}")
    add(
        "--compare", metavar="A,B",
        help="variants, each OPTION=VALUE joined by +: policy=static,policy=continuous+max-num-seqs=64",
    )  # fmt: skip
    add("--json", nargs="?", const="-", metavar="FILE", help="figures as JSON, on stdout or in FILE")
    add("--picture", type=Path, metavar="FILE", help=f"batch, pages, queue over time ({', '.join(PICTURES)})")
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
        requests, about = _requests(args)
        _check_files(args)
        if args.picture is not None:
            from headrace.simulate.picture import draw_runs  # what it needs may not be installed: known before the run
        runs: list[Run] = []
        for name, scenario in variants:
            report = progress(name)
            runs.append(run(scenario, requests, name, concurrency=_concurrency(args), progress=report))
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
        print(_headline(args, about))
        print(table(figures))
        if args.json is not None:
            Path(args.json).write_text(text + "\n", "utf-8")
    if args.picture is not None:
        draw_runs([(one.figures.variant, one.measured) for one in runs], args.picture)
    return 0


def _check_files(args: Any) -> None:
    """Files that cannot be written are said before the run."""
    if args.json not in (None, "-"):
        check_writable(Path(args.json), "--json")
    if args.picture is not None:
        if args.picture.suffix not in PICTURES:
            raise ConfigError(f"--picture {args.picture}: a name that ends in none of {', '.join(PICTURES)}")
        check_writable(args.picture, "--picture")


def _headline(args: Any, about: str) -> str:
    """What was run, and what the SLO is, on one line. Variants say themselves in what they differ."""
    cards = f"{args.tp} x {args.gpu}" if args.tp > 1 else args.gpu
    pace = f"{args.rate:g}/s {args.arrivals or 'poisson'}" if args.rate else f"closed loop of {_concurrency(args)}"
    return (
        f"{args.model} on {cards}; workload {args.workload} ({about}); {args.requests} requests, {pace}, seed "
        f"{args.seed}; SLO: first token in {args.slo_ttft_ms:g} ms, then {args.slo_tpot_ms:g} ms per token on average; "
        "times in ms"
    )


def _concurrency(args: Any) -> int:
    """Requests open at once; 0: they arrive by themselves."""
    return 0 if args.rate else int(_given(args.concurrency, CONCURRENCY))


def _given(value: int | None, default: int) -> int:
    return default if value is None else value


def _requests(args: Any) -> tuple[list[Request], str]:
    """The load, and what it is in words. Raises ConfigError, also for flags that it would have to ignore."""
    _check_numbers(vars(args))
    if args.rate and args.concurrency is not None:
        raise ConfigError("--concurrency does not go with --rate: requests arrive, however many are open")
    if not args.rate and args.arrivals is not None:
        raise ConfigError("--arrivals goes with --rate only")
    for workload, names in _OF_WORKLOAD.items():
        for name in names:
            if getattr(args, name) is not None and args.workload != workload:
                raise ConfigError(f"--{name.replace('_', '-')} goes with --workload {workload} only")
    lengths: Lengths = LENGTHS[args.workload]
    needed = 0
    if args.workload == "uniform":
        prompt, output = _given(args.prompt_len, UNIFORM_TOKENS), _given(args.output_len, UNIFORM_TOKENS)
        lengths, needed = uniform(prompt, output), prompt + output
    elif args.workload == "prefix":
        prefix = _given(args.prefix_len, PREFIX_LEN)
        lengths = prefixed(_given(args.prefixes, PREFIXES), prefix, SUFFIX, PREFIX_OUTPUT)
        needed = prefix + (SUFFIX + PREFIX_OUTPUT) * 3 // 2  # they vary by half
    if needed > args.max_model_len:
        raise ConfigError(
            f"--workload {args.workload}: prompt and output of up to {needed} tokens are longer than --max-model-len "
            f"{args.max_model_len}"
        )
    settings = (lengths, args.requests, args.seed, args.rate, args.arrivals or "poisson")
    requests = stream(*settings, n=args.n, longest=args.max_model_len)
    cut = sum(one != other for one, other in zip(requests, stream(*settings, n=args.n), strict=True))
    about = lengths.text + (f"; {cut} of them cut to {args.max_model_len} tokens" if cut else "")
    return requests, about


_LEAST = {
    "requests": 1, "n": 1, "concurrency": 1, "rate": 0, "prompt_len": 1, "output_len": 1, "prefixes": 1,
    "prefix_len": 1, "slo_ttft_ms": 0, "slo_tpot_ms": 0, "tp": 1, "workers": 1, "block_size": 1, "max_model_len": 2,
    "kv_tokens": 0, "host_tokens": 0, "t0_ms": 0, "bus_us": 0, "link_gbit": 0.001, "link_us": 0,
}  # fmt: skip
"""Smallest value of each number."""

_OF_WORKLOAD = {"uniform": ("prompt_len", "output_len"), "prefix": ("prefixes", "prefix_len")}

_OPTIONS: dict[str, type] = {
    "model": str, "gpu": str, "tp": int, "workers": int, "worker_pools": str, "block_size": int, "max_model_len": int,
    "kv_tokens": int, "host_tokens": int, "t0_ms": float, "bus_us": float, "policy": str, "baseline": str,
    "roles": str, "plan_roles": bool, "link_gbit": float, "link_us": float,
}  # fmt: skip
"""Options that make the scenario and may differ between variants, beside the limits."""


def _variants(compare: str | None, values: dict[str, Any]) -> list[tuple[str, Scenario]]:
    slo = Slo(values["slo_ttft_ms"], values["slo_tpot_ms"])
    made = []
    link = ""
    alone = values["baseline"] or values["policy"]
    for variant in [alone] if compare is None else compare.split(","):
        own = dict(values)
        for setting in [] if compare is None else variant.split("+"):
            name, equals, value = setting.partition("=")
            name, value = canonical(name.strip().replace("-", "_"), value)
            if not equals or (name not in _OPTIONS and name not in fields()):
                raise ConfigError(f"--compare: {setting!r} is no OPTION=VALUE of the scenario or the limits")
            own[name] = _parsed(name, value)
        if own["policy"] not in BATCHING_POLICIES or own["baseline"] not in BASELINES:
            raise ConfigError(f"--compare {variant}: unknown policy or baseline")
        own["workers"] = workers_of(own["workers"], own["roles"], sum(parsed_pools(own["worker_pools"]).values()))
        _check_scenario(own)
        link = link or next((name for name in ("link_gbit", "link_us") if own[name] is not None), "")
        scenario = Scenario(**{name: own[name] for name in _OPTIONS if own[name] is not None}, slo=slo)
        deployment = scenario.deployment
        if not scenario.kv_tokens:
            _ = deployment.kv_tokens  # a model that does not fit is said before any variant runs
        made.append((variant, replace(scenario, limits=changed(SIMULATED_LIMITS, own))))
    if link and not any(scenario.roles for _, scenario in made):
        raise ConfigError(f"--{link.replace('_', '-')} goes with --roles only: without them nothing moves")
    return made


def _check_numbers(values: dict[str, Any]) -> None:
    for name, least in _LEAST.items():
        value = values[name]
        if value is not None and not least <= value < math.inf:
            raise ConfigError(f"--{name.replace('_', '-')}: {value} is not at least {least}")


def _check_scenario(own: dict[str, Any]) -> None:
    _check_numbers(own)
    pools_of(own["workers"], own["worker_pools"])
    roles_of(own["workers"], own["roles"])
    if own["plan_roles"] and not own["roles"]:
        raise ConfigError("--plan-roles goes with --roles: those are what it begins with")
    if own["roles"] and (own["baseline"] or own["policy"] != "continuous"):
        raise ConfigError("--roles goes with --policy continuous only: with the others nothing moves between workers")
    if 0 < own["kv_tokens"] < own["block_size"]:
        raise ConfigError(f"--kv-tokens: {own['kv_tokens']} is less than one block of {own['block_size']} tokens")


def _parsed(name: str, value: str) -> Any:
    if name not in _OPTIONS:
        return value
    if _OPTIONS[name] is bool:
        return parsed(name, bool, value)
    try:
        return _OPTIONS[name](value)
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
