"""What clients see of faults: a mesh of real processes, 24 streams, a fault amid them, every token compared.

    python benchmarks/faults.py [--dtype float32,bfloat16] [--seconds 10] [--only worker] [--quick] [--model FOLDER]
    python benchmarks/faults.py --soak 30 [--every 20] [--clients 32] [--seed 1]
    python benchmarks/faults.py --rolling 2 [--clients 8]

Each fault has a mesh of its own: NATS, scheduler, worker and gateway as separate processes, each of which reaches NATS
through a proxy. What is killed is started again at once, as by a supervisor; a partition is a proxy that passes nothing
while connections stay open. The requests (greedy and seeded, n = 2, penalties, stop strings, structured output,
log-probabilities, chats and completions, and four that are not streamed) are answered once while nothing happens; the
same ones are asked again, and once every stream has had 15 pieces the fault comes. When a gateway is killed, clients
come again to another one with their ``Idempotency-Key`` and ``Last-Event-ID``.

A stream's pause is its longest gap between two pieces less its usual one. *wrong* has another text, *missing* lacks a
part, *doubled* has a part twice, *failed* ended with an error behind a right beginning. The model is a tiny random one
unless ``--model`` names another. Exits with 1 if any answer is not exactly the undisturbed one.

``--soak`` keeps two processes of each kind saturated for so many minutes with a random fault each ``--every`` seconds,
compares every answer, watches every process's memory, and at the end looks whether all blocks are free. ``--rolling``
restarts every process of a ``headrace up`` by ``headrace restart``, so many times, under load: no answer may fail or
differ, and the gaps between pieces are compared with those while nothing happens.
"""

from __future__ import annotations

import argparse
import re
import signal
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import NoReturn

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "tests" / "mesh")]

from fault_matrix import FAULTS, Fault, Known, Outcome, tried, undisturbed  # noqa: E402
from fault_mesh import FaultMesh, fault_mesh  # noqa: E402
from fault_rolling import rolled, running_up  # noqa: E402
from fault_soak import Pressure, Soaked, many, soak  # noqa: E402
from tiny_models import make_tiny_model  # noqa: E402

from headrace.text_table import table  # noqa: E402

QUICK_KINDS = ("nothing", "kill")
QUICK_S = 3.0
RESUME_TIMEOUT = ("--resume-timeout-s", "120")  # a slow machine starts slowly: no stream is given up for that
BEFORE_S = 20.0
MIB = 1 << 20


def main() -> int:
    args = arguments()
    signal.signal(signal.SIGTERM, _end)  # so that every process is ended with this one
    with tempfile.TemporaryDirectory() as folder:
        model = Path(args.model) if args.model else make_tiny_model(Path(folder) / "tiny", seed=9)
        if args.soak:
            return soaked(model, args)
        if args.rolling:
            return rolling(model, args)
        return max(matrix(model, dtype, args) for dtype in args.dtype.split(","))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--dtype", default="float32,bfloat16", help="of the worker, comma-separated")
    parser.add_argument("--seconds", type=float, default=10.0, help="of a stop or a partition")
    parser.add_argument("--length", type=int, default=400, help="tokens of an answer")
    parser.add_argument("--only", default="", metavar="REGEX", help="faults whose name has this in it")
    parser.add_argument("--quick", action="store_true", help="kills only")
    parser.add_argument("--model", default="", help="folder of a model, instead of a tiny random one")
    parser.add_argument("--threads", type=int, default=1, help="compute threads of a worker")
    parser.add_argument("--kv-cache-memory", default="64MiB", help="of a worker")
    parser.add_argument("--soak", type=float, default=0.0, metavar="MINUTES", help="saturation and random faults")
    parser.add_argument("--rolling", type=int, default=0, metavar="TIMES", help="`headrace restart` under load")
    parser.add_argument("--every", type=float, default=20.0, help="seconds from fault to fault of a soak")
    parser.add_argument("--clients", type=int, default=32, help="requests that a soak or --rolling keeps open")
    parser.add_argument("--seed", type=int, default=1, help="of a soak's faults and requests")
    parser.add_argument("--logs", action="store_true", help="the logs of every process behind a fault that showed")
    return parser.parse_args()


def worker_flags(dtype: str, args: argparse.Namespace) -> tuple[str, ...]:
    return ("--dtype", dtype, "--threads", str(args.threads), "--kv-cache-memory", args.kv_cache_memory)


def matrix(model: Path, dtype: str, args: argparse.Namespace) -> int:
    """Every fault once; the exit code."""
    faults = [fault for fault in FAULTS if re.search(args.only, fault.name)]
    if args.quick:
        faults = [fault for fault in faults if fault.kind in QUICK_KINDS]
    seconds = min(args.seconds, QUICK_S) if args.quick else args.seconds
    known: dict[bool, Known] = {}
    outcomes = []
    for fault in faults:
        note(f"{dtype}: {fault.name}")
        with fault_mesh(model, **fault.counts(), worker=worker_flags(dtype, args), gateway=RESUME_TIMEOUT) as mesh:
            outcomes.append(one(mesh, fault, known, args.length, seconds))
            for name, what in outcomes[-1].wrong.items():
                note(f"  {name}: {what}")
            for error in outcomes[-1].errors:
                note(f"  {error}")
            if outcomes[-1].wrong and args.logs:
                note(mesh.logs())
    print(f"\n{dtype}, {args.model or 'a tiny random model'}, stops and partitions of {seconds:g} s\n")
    print(table([HEAD, *(row(outcome) for outcome in outcomes)]), flush=True)
    return int(any(outcome.wrong for outcome in outcomes))


def one(mesh: FaultMesh, fault: Fault, known: dict[bool, Known], length: int, seconds: float) -> Outcome:
    resume = fault.victim == "gateway" and fault.kind == "kill"
    if resume not in known:
        known[resume] = undisturbed(mesh.urls, length, resume=resume)
    outcome = tried(mesh, known[resume], fault, seconds)
    mesh.wait_ready()
    mesh.quiescence()
    return outcome


HEAD = ["fault", "streams", "met", "wrong", "missing", "doubled", "failed", "pause p50 s", "max s", "aim s"]


def row(outcome: Outcome) -> list[str]:
    kinds = ("wrong", "missing", "doubled", "failed")
    aim = "-" if outcome.aim_s is None else f"{outcome.aim_s:g}"
    return [
        outcome.fault, str(outcome.streams), str(outcome.cut), *(str(outcome.count(kind)) for kind in kinds),
        f"{outcome.pause_p50_s:.2f}", f"{outcome.pause_max_s:.2f}", aim,
    ]  # fmt: skip


def soaked(model: Path, args: argparse.Namespace) -> int:
    dtype = args.dtype.split(",")[0]
    flags = {
        "worker": worker_flags(dtype, args),
        "scheduler": ("--max-num-seqs", str(max(1, args.clients // 2))),  # of each of two workers: some always wait
        "gateway": RESUME_TIMEOUT,
    }
    with fault_mesh(model, schedulers=2, workers=2, gateways=2, **flags) as mesh:
        note(f"{dtype}: the answers while nothing happens")
        known = many({length: undisturbed(mesh.urls, length) for length in (args.length // 4, args.length // 2)})
        note(f"{len(known.wanted)} requests, {args.clients} at a time, for {args.soak:g} minutes")
        result = soak(mesh, known, args.soak, clients=args.clients, every_s=args.every, seed=args.seed, show=note)
        mesh.wait_ready()
        mesh.quiescence()
        used = mesh.load()["vllm:kv_cache_usage_perc"]
    report(result, used)
    return int(bool(result.verdicts) or used > 0)


def report(result: Soaked, used: float) -> None:
    wrong = ", ".join(f"{count} {what}" for what, count in result.verdicts.items()) or "none wrong, lost or doubled"
    print(
        f"\n{result.answers} answers, {sum(result.faults.values())} faults: {wrong}; blocks in use at the end: {used:g}"
    )
    for error, count in result.errors.most_common(10):
        print(f"  {count} x {error}")
    print(table([["fault", "times"], *([name, str(count)] for name, count in result.faults.most_common())]))
    growth = result.growth().items()
    rows = [[name, f"{most / MIB:.0f}", f"{per_minute / MIB:+.2f}"] for name, (most, per_minute) in growth]
    print(table([["process", "most MiB", "MiB a minute"], *rows]), flush=True)


def rolling(model: Path, args: argparse.Namespace) -> int:
    flags = (*worker_flags(args.dtype.split(",")[0], args), *RESUME_TIMEOUT)
    with running_up(model, *flags) as up:
        known = undisturbed([up.url], args.length)
        pressure = [Pressure([up.url], known, args.clients, seed, note) for seed in (args.seed, args.seed + 1)]
        result = rolled(up, (pressure[0], pressure[1]), args.rolling, BEFORE_S)
    for line in result.said:
        note(line)
    rows = []
    for name, booked in (("nothing", result.before), (f"{args.rolling} rolling restarts", result.during)):
        percents = statistics.quantiles(booked.gaps_s, n=1000)
        wrong = sum(booked.verdicts.values())
        gaps = (percents[499], percents[989], percents[998], max(booked.gaps_s))
        rows.append([name, str(booked.answers), str(wrong), *(f"{1e3 * gap:.1f}" for gap in gaps)])
    print(f"\n{args.clients} clients, {result.took_s:.0f} s of restarts; gaps between two pieces in ms\n")
    print(table([["meanwhile", "answers", "failed or wrong", "p50", "p99", "p99.9", "max"], *rows]), flush=True)
    return int(bool(result.during.verdicts or result.before.verdicts))


def note(line: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {line}", file=sys.stderr, flush=True)


def _end(*_: object) -> NoReturn:
    raise SystemExit(143)


if __name__ == "__main__":
    sys.exit(main())
