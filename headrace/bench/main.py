"""Command line of ``headrace bench``."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Sequence
from pathlib import Path

import httpx

from headrace.bench.client import fire
from headrace.bench.mesh import MeshFailed, running_mesh
from headrace.bench.observer import Observer
from headrace.bench.report import Figures, figures, table
from headrace.bench.workload import WORKLOADS, Workload, shots
from scheduler.policies.batching import BATCHING_POLICIES
from shared.bus import NatsBus
from shared.config import Parser


def parser() -> Parser:
    made = Parser(
        prog="headrace bench",
        description="Run one workload on a real mesh under several settings and compare. Flags of `headrace up` that "
        "follow a lone -- go to every mesh.",
    )
    made.add_argument("--workload", default="chat", choices=sorted(WORKLOADS), help="lengths of prompts and outputs")
    made.add_argument(
        "--compare", default="static,dynamic,continuous",
        help="comma-separated variants: policies, or option=value of any service, e.g. run-ahead=1,run-ahead=2",
    )  # fmt: skip
    made.add_argument("--requests", type=int, default=48, help="requests per run (default: 48)")
    made.add_argument("--concurrency", type=int, default=16, help="most requests open at once (default: 16)")
    made.add_argument("--rate", type=float, default=0.0, help="arrivals per second, Poisson (default: 0, closed loop)")
    made.add_argument("--seed", type=int, default=1, help="of lengths, prompts and arrivals")
    made.add_argument("--repeat", type=int, default=1, help="rounds; variants take turns inside a round")
    made.add_argument("--max-num-seqs", type=int, default=16, help="most sequences in the batch (default: 16)")
    made.add_argument("--json", type=Path, default=None, help="also write the figures to this file")
    made.add_argument("up_flags", nargs="*", metavar="-- FLAG", help="flags of headrace up")
    return made


def variant_flags(variant: str) -> list[str]:
    """``static`` -> --policy static; ``run-ahead=1`` -> --run-ahead 1. Raises ValueError for anything else."""
    if variant in BATCHING_POLICIES:
        return ["--policy", variant]
    name, equals, value = variant.partition("=")
    if not equals or not name or not value:
        raise ValueError(f"{variant!r} is neither a policy ({', '.join(BATCHING_POLICIES)}) nor option=value")
    return [f"--{name}", value]


async def _measure(
    variant: str, workload: Workload, flags: list[str], count: int, concurrency: int, rate: float, seed: int
) -> Figures:
    async with running_mesh(flags) as (url, nats):
        bus = await NatsBus.connect(nats.url, "bench", nats.token)
        seen = Observer()
        await seen.attach(bus, "default")
        async with httpx.AsyncClient(base_url=url) as http:
            model = (await http.get("/v1/models")).json()["data"][0]
        longest = int(model.get("max_model_len", 2048))
        load = shots(workload, count, seed, int(model.get("vocab_size", 32000)), rate, longest)
        await fire(url, model["id"], shots(workload, 4, seed + 1, 2000, 0, 64), 4, lambda _: None)  # warm-up
        seen.recording = True
        taken, seconds = await fire(url, model["id"], load, concurrency, lambda done: _progress(variant, done, count))
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
            flags = ["--max-num-seqs", str(max_num_seqs), *up_flags, *variant_flags(variant)]
            runs.append(await _measure(variant, workload, flags, count, concurrency, rate, seed))
    return sorted(runs, key=lambda run: variants.index(run.variant))


def main(argv: Sequence[str]) -> int:
    made = parser()
    args = made.parse_args(argv)
    variants = [part.strip() for part in args.compare.split(",") if part.strip()]
    try:
        for variant in variants:
            variant_flags(variant)
    except ValueError as error:
        made.error(str(error))
    if not variants or min(args.requests, args.concurrency, args.repeat, args.max_num_seqs) < 1 or args.rate < 0:
        made.error("--compare, --requests, --concurrency, --repeat and --max-num-seqs must be positive")
    workload = WORKLOADS[args.workload]
    try:
        runs = asyncio.run(
            _run(
                variants, workload, args.repeat, args.up_flags, args.max_num_seqs, args.requests, args.concurrency,
                args.rate, args.seed,
            )
        )  # fmt: skip
    except MeshFailed as error:
        print(f"headrace bench: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    pace = f"{args.rate:g} requests/s, Poisson" if args.rate else f"closed loop of {args.concurrency}"
    print(f"workload {workload.name} ({workload.text}); {args.requests} requests, {pace}, seed {args.seed}, "
          f"max_num_seqs {args.max_num_seqs}")  # fmt: skip
    print(table(runs))
    if args.json is not None:
        args.json.write_text(json.dumps([run.as_dict() for run in runs], indent=1) + "\n")
    return 1 if any(run.failed for run in runs) else 0
