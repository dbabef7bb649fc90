"""Command line of ``headrace bench``."""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import sys
from collections.abc import Coroutine, Sequence
from pathlib import Path
from typing import Any

from headrace.bench.client import fire
from headrace.bench.goodput import load_table, of_the_peak
from headrace.bench.mesh import MeshFailed, running_mesh
from headrace.bench.observer import Observer
from headrace.bench.offered_load import FILLING_SHARE, Plan, measure
from headrace.bench.report import Figures, figures, table
from headrace.bench.workload import WORKLOADS, Workload, shots
from headrace.output_file import check_writable
from headrace.settings import read_settings
from scheduler.policies.batching import BATCHING_POLICIES
from shared.bus import NatsBus
from shared.config import Parser

COMPARE_ONLY = ("compare", "requests", "concurrency", "rate", "repeat")
LOADS_ONLY = ("seconds", "capacity")
SHORTEST_S = 2.0


def parser() -> Parser:
    made = Parser(
        prog="headrace bench",
        description="Run one workload on a real mesh: under several settings, to compare them, or with --loads at "
        "multiples of what one setting can do. Flags of `headrace up` that follow a lone -- go to every mesh.",
    )
    shown = "(default: %(default)s)"
    made.add_argument(
        "--workload", default="chat", choices=sorted(WORKLOADS), help=f"lengths of prompts and outputs {shown}"
    )
    made.add_argument("--seed", type=int, default=1, help=f"of lengths, prompts and arrivals {shown}")
    made.add_argument("--max-num-seqs", type=int, default=16, help=f"most sequences in the batch {shown}")
    made.add_argument("--json", type=Path, default=None, help="also write the figures to this file")
    made.add_argument("up_flags", nargs="*", metavar="-- FLAG", help="flags of headrace up")
    compare = made.add_argument_group("comparing settings")
    compare.add_argument(
        "--compare", default="static,dynamic,continuous",
        help="comma-separated variants: policies, or option=value of any service, e.g. run-ahead=1,run-ahead=2 "
        "(default: %(default)s)",
    )  # fmt: skip
    compare.add_argument("--requests", type=int, default=48, help=f"requests per run {shown}")
    compare.add_argument("--concurrency", type=int, default=16, help=f"most requests open at once {shown}")
    compare.add_argument(
        "--rate", type=float, default=0.0, help="arrivals per second, Poisson (default: 0, closed loop)"
    )
    compare.add_argument("--repeat", type=int, default=1, help=f"rounds; variants take turns inside a round {shown}")
    loads = made.add_argument_group("offered load")
    loads.add_argument(
        "--loads", default=None, metavar="X,X,...",
        help="Poisson arrivals at these multiples of the capacity, one after the other on one mesh, e.g. 0.5,1,2,3",
    )  # fmt: skip
    loads.add_argument("--seconds", type=float, default=60.0, help=f"of arrivals, at each multiple {shown}")
    loads.add_argument(
        "--capacity", type=float, default=0.0, metavar="R",
        help="requests per second that 1x stands for (default: 0, measured first in a closed loop)",
    )  # fmt: skip
    return made


def multiples(text: str) -> list[float]:
    """``0.5,1,2`` -> [0.5, 1.0, 2.0]. Raises ValueError unless all are positive numbers."""
    found = []
    for part in text.split(","):
        try:
            value = float(part)
        except ValueError:
            value = math.nan
        if not 0 < value < math.inf:
            raise ValueError(f"--loads: {part.strip()!r} is no positive number")
        found.append(value)
    return found


def variant_flags(variant: str) -> list[str]:
    """``static`` -> --policy static; ``run-ahead=1`` -> --run-ahead 1. Raises ValueError for anything else."""
    if variant in BATCHING_POLICIES:
        return ["--policy", variant]
    name, equals, value = variant.partition("=")
    if not equals or not name or not value:
        raise ValueError(f"{variant!r} is neither a policy ({', '.join(BATCHING_POLICIES)}) nor option=value")
    return [f"--{name}", value]


def mesh_flags(max_num_seqs: int, up_flags: Sequence[str], variant: str = "") -> list[str]:
    """What a mesh is started with, beside its address."""
    return ["--max-num-seqs", str(max_num_seqs), *up_flags, *(variant_flags(variant) if variant else [])]


def check_mesh_flags(flags: Sequence[str]) -> None:
    """What `headrace up` would refuse is refused before any mesh starts: its line on stderr, and exit 2.

    Raises ValueError if the limits contradict each other.
    """
    scheduler: Any = read_settings(flags).services["scheduler"]
    scheduler.limits()


async def _measure(
    variant: str, workload: Workload, flags: list[str], count: int, concurrency: int, rate: float, seed: int
) -> Figures:
    async with running_mesh(flags) as mesh:
        bus = await NatsBus.connect(mesh.nats.url, "bench", mesh.nats.token)
        seen = Observer()
        await seen.attach(bus, "default")
        model = await mesh.model()
        load = shots(workload, count, seed, model.vocab_size, rate, model.max_model_len)
        few = shots(workload, 4, seed + 1, model.vocab_size, 0, min(64, model.max_model_len))
        await fire(mesh.url, model.name, few, 4, lambda _: None)  # warm-up
        seen.recording = True
        taken, seconds = await fire(
            mesh.url, model.name, load, concurrency, lambda done: _progress(variant, done, count)
        )
        seen.recording = False
        await bus.close()
    for error in sorted({one.error for one in taken if one.error})[:3]:
        print(f"\n{variant}: {error}", file=sys.stderr)
    return figures(variant, taken, seconds, seen)


def _progress(variant: str, done: int, count: int) -> None:
    if not sys.stderr.isatty():
        if done % max(1, count // 4) == 0:
            print(f"headrace: {variant}: {done} of {count} requests", file=sys.stderr, flush=True)
    else:
        end = "\n" if done == count else ""
        print(f"\r{variant}: {done}/{count} requests", end=end, file=sys.stderr, flush=True)


async def _run(
    variants: list[str], workload: Workload, repeat: int, up_flags: list[str], max_num_seqs: int, count: int,
    concurrency: int, rate: float, seed: int,
) -> list[Figures]:  # fmt: skip
    runs: list[Figures] = []
    for round_number in range(repeat):
        for variant in variants:
            print(f"headrace: {variant}, round {round_number + 1} of {repeat}", file=sys.stderr, flush=True)
            flags = mesh_flags(max_num_seqs, up_flags, variant)
            runs.append(await _measure(variant, workload, flags, count, concurrency, rate, seed))
    return sorted(runs, key=lambda run: variants.index(run.variant))


def main(argv: Sequence[str]) -> int:
    """Exit 0: measured. 1: the mesh or a request failed. 2: a bad command line."""
    made = parser()
    args = made.parse_args(argv)
    foreign = LOADS_ONLY if args.loads is None else COMPARE_ONLY
    for name in foreign:
        if getattr(args, name) != made.get_default(name):
            made.error(f"--{name} does not go {'without' if args.loads is None else 'with'} --loads")
    try:
        if args.json is not None:
            check_writable(args.json, "--json")
        work = _compare(args) if args.loads is None else _offer(args)
    except ValueError as error:
        made.error(str(error))
    try:
        return asyncio.run(work)
    except MeshFailed as error:
        print(f"headrace bench: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def _compare(args: argparse.Namespace) -> Coroutine[Any, Any, int]:
    """The work of --compare, whose result is the exit code. Raises ValueError on a bad option."""
    variants = [part.strip() for part in args.compare.split(",") if part.strip()]
    for variant in variants:
        variant_flags(variant)
    if not variants or min(args.requests, args.concurrency, args.repeat, args.max_num_seqs) < 1 or args.rate < 0:
        raise ValueError("--compare, --requests, --concurrency, --repeat and --max-num-seqs must be positive")
    for variant in variants:
        check_mesh_flags(mesh_flags(args.max_num_seqs, args.up_flags, variant))
    workload = WORKLOADS[args.workload]

    async def work() -> int:
        runs = await _run(
            variants, workload, args.repeat, args.up_flags, args.max_num_seqs, args.requests, args.concurrency,
            args.rate, args.seed,
        )  # fmt: skip
        pace = f"{args.rate:g} requests/s, Poisson" if args.rate else f"closed loop of {args.concurrency}"
        print(f"workload {workload.name} ({workload.text}); {args.requests} requests, {pace}, seed {args.seed}, "
              f"max_num_seqs {args.max_num_seqs}; times in ms")  # fmt: skip
        print(table(runs))
        if args.json is not None:
            args.json.write_text(json.dumps([run.as_dict() for run in runs], indent=1) + "\n")
        return 1 if any(run.failed for run in runs) else 0

    return work()


def _offer(args: argparse.Namespace) -> Coroutine[Any, Any, int]:
    """The work of --loads, whose result is the exit code. Raises ValueError on a bad option."""
    loads = multiples(args.loads)
    if args.max_num_seqs < 1 or not SHORTEST_S <= args.seconds < math.inf or not 0 <= args.capacity < math.inf:
        raise ValueError(
            f"--max-num-seqs must be positive, --seconds {SHORTEST_S:g} or more, and --capacity not negative"
        )
    # Twice the batch: whenever a sequence ends, another waits.
    plan = Plan(WORKLOADS[args.workload], loads, args.seconds, args.capacity, 2 * args.max_num_seqs, args.seed)
    flags = mesh_flags(args.max_num_seqs, args.up_flags)
    check_mesh_flags(flags)

    async def work() -> int:
        closed, capacity, runs = await measure(plan, flags)
        print(f"workload {plan.workload.name} ({plan.workload.text}); Poisson arrivals for {plan.seconds:g} s at each "
              f"multiple on one mesh, drained between, measured after the first {FILLING_SHARE:.0%}; "
              f"seed {plan.seed}, max_num_seqs {args.max_num_seqs}; times in ms")  # fmt: skip
        measured = (
            "" if closed is None else f", from {closed.tokens_per_s:.1f} tok/s in a closed loop of {plan.concurrency}"
        )
        print(f"capacity (1x): {capacity:.3g} requests/s{measured}")
        print(load_table(runs))
        for error in sorted({error for run in runs for error in run.errors})[:3]:
            print(f"headrace bench: {error}", file=sys.stderr)
        if args.json is not None:
            found = {
                "capacity_per_s": capacity,
                "closed_loop": None if closed is None else closed.as_dict(),
                "loads": [run.as_dict() for run in runs],
            }
            args.json.write_text(json.dumps(found, indent=1) + "\n")
        print(of_the_peak(runs))
        return 1 if any(run.failed for run in runs) else 0

    return work()
