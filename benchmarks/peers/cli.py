"""Command line of ``benchmarks/peers.py``."""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from benchmarks.peers.engines import ENGINES, Engine, Setup
from benchmarks.peers.figures import Figures, figures
from benchmarks.peers.install import INSTALLERS, InstallFailed, install
from benchmarks.peers.models import Models
from benchmarks.peers.processes import spent, usage
from benchmarks.peers.report import report
from benchmarks.peers.running import EngineFailed, Running
from benchmarks.peers.workloads import LOADS, Load, shots_of, warm_up_of
from headrace.models import ModelError
from headrace.models.cache import cache_root
from headrace.output_file import check_writable

MOST_REQUESTS_PER_S = 60
"""More than any engine answers here: so many requests are made for each second of --seconds."""
NOT_INSTALLED = "not installed"
INTERRUPTED = "interrupted"
FAILURE_CHARS = 60
BUSY_LOAD = 0.5
"""A load average above this is told before the run: somebody else is at work."""


@dataclass(frozen=True)
class Plan:
    engines: Sequence[Engine]
    loads: Sequence[Load]
    requests: int | None
    seconds: float | None
    seed: int
    repeat: int


def say(line: str) -> None:
    print(f"peers: {line}", file=sys.stderr, flush=True)


def measure_parser(description: str | None) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="peers.py", description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--engines", default=",".join(ENGINES), metavar="NAME,...", help="which, in this order (default: %(default)s)"
    )
    parser.add_argument(
        "--workloads", default=",".join(LOADS), metavar="NAME,...", help="which, in this order (default: %(default)s)"
    )
    length = parser.add_mutually_exclusive_group()
    length.add_argument("--requests", type=int, default=None, help="of each run (default: enough, by workload)")
    length.add_argument("--seconds", type=float, default=None, help="send requests for so long instead")
    parser.add_argument("--seed", type=int, default=1, help="of lengths and prompts (default: %(default)s)")
    parser.add_argument(
        "--repeat", type=int, default=1,
        help="rounds in which engines take turns; the median by tok/s is shown (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument("--json", type=Path, default=None, help="also write all figures to this file")
    parser.add_argument(
        "--logs", type=Path, default=None, help="keep what engines print in this folder (default: a temporary one)"
    )
    add_venvs(parser)
    parser.add_argument("headrace_flags", nargs="*", metavar="-- FLAG", help="flags of headrace up")
    return parser


def add_venvs(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--venvs", type=Path, default=cache_root() / "peers",
        help="folder of the peers' environments and models (default: %(default)s)",
    )  # fmt: skip


def main(argv: Sequence[str], description: str | None = None) -> int:
    """Exit 0: measured, or installed. 1: an engine or a request failed. 2: a bad command line. 130: interrupted."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # engines are stopped on the way out
    try:
        if argv[:1] == ["install"]:
            return install_command(argv[1:])
        return measure_command(measure_parser(description), argv)
    except (ModelError, InstallFailed) as error:
        say(str(error))
        return 1
    except KeyboardInterrupt:
        return 130


def install_command(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="peers.py install", description="Make the environments of peers.")
    parser.add_argument("peers", nargs="+", choices=[*INSTALLERS, "all"], metavar="PEER",
                        help=f"{', '.join(INSTALLERS)}, or all")  # fmt: skip
    add_venvs(parser)
    args = parser.parse_args(argv)
    for peer in INSTALLERS if "all" in args.peers else args.peers:
        install(peer, args.venvs.absolute(), say)
    return 0


Thing = TypeVar("Thing")


def chosen(named: str, known: dict[str, Thing], option: str) -> list[Thing]:
    """The things of a comma-separated list. Raises ValueError for one that is not known, or for none."""
    names = [name.strip() for name in named.split(",") if name.strip()]
    for name in names:
        if name not in known:
            raise ValueError(f"{option}: {name!r} is not one of {', '.join(known)}")
    if not names:
        raise ValueError(f"{option} names nothing")
    return [known[name] for name in dict.fromkeys(names)]


def measure_command(parser: argparse.ArgumentParser, argv: Sequence[str]) -> int:
    args = parser.parse_args(argv)
    try:
        if args.json is not None:
            check_writable(args.json, "--json")
        if any(given is not None and given <= 0 for given in (args.repeat, args.requests, args.seconds)):
            raise ValueError("--repeat, --requests and --seconds must be positive")
        plan = Plan(
            chosen(args.engines, ENGINES, "--engines"), chosen(args.workloads, LOADS, "--workloads"), args.requests,
            args.seconds, args.seed, args.repeat,
        )  # fmt: skip
    except ValueError as error:
        parser.error(str(error))
    venvs = args.venvs.absolute()
    if os.getloadavg()[0] > BUSY_LOAD:
        say(f"the load average is {os.getloadavg()[0]:.1f}: something else is at work, and all figures will suffer")
    with tempfile.TemporaryDirectory(prefix="peers-") as folder:
        logs = args.logs.absolute() if args.logs is not None else Path(folder)
        logs.mkdir(parents=True, exist_ok=True)
        setup = Setup(venvs, Models(venvs / "models", say), logs, args.headrace_flags)
        runs, absent = measure(plan, setup)
    shown = medians(runs)
    engines, loads = [engine.name for engine in plan.engines], [load.name for load in plan.loads]
    print(f"{machine()}; seed {plan.seed}; bfloat16, greedy, exact output lengths")
    print(report(engines, loads, shown, absent))
    if args.json is not None:
        found = {
            "machine": machine(), "seed": plan.seed, "requests": plan.requests, "seconds": plan.seconds,
            "headrace_flags": list(args.headrace_flags), "absent": absent,
            "runs": [run.as_dict() for rounds in runs.values() for run in rounds],
        }  # fmt: skip
        args.json.write_text(json.dumps(found, indent=1) + "\n")
    if INTERRUPTED in absent.values():
        return 130
    failed = any(why != NOT_INSTALLED for why in absent.values()) or any(run.failed for run in shown.values())
    return 1 if failed else 0


Rounds = dict[tuple[str, str], list[Figures]]
"""(engine, load) -> its runs, one a round."""


def measure(plan: Plan, setup: Setup) -> tuple[Rounds, dict[str, str]]:
    """All runs, and why an engine has none or not all: it is not installed, or it failed."""
    runs: Rounds = defaultdict(list)
    absent = {engine.name: NOT_INSTALLED for engine in plan.engines if not engine.installed(setup.venvs)}
    for name in absent:
        say(f"{name}: {NOT_INSTALLED}")
    if len(absent) == len(plan.engines):
        return runs, absent
    vocab_size = setup.models.vocab_size()
    for number in range(plan.repeat):
        for engine in plan.engines:
            loads = [load for load in plan.loads if load.name in engine.loads]
            if engine.name in absent or not loads:
                continue
            say(f"{engine.name} ({engine.text}): starting, round {number + 1} of {plan.repeat}")
            try:
                with engine.start(setup) as running:
                    for load in loads:
                        run = measured(engine.name, running, load, plan, vocab_size)
                        runs[engine.name, load.name].append(run)
            except EngineFailed as error:
                say(f"{engine.name}: {error}")
                absent[engine.name] = "FAILED: " + (str(error).splitlines() or [""])[0][:FAILURE_CHARS]
            except KeyboardInterrupt:  # what was measured so far is shown
                say(f"interrupted at {engine.name}, round {number + 1}")
                absent[engine.name] = INTERRUPTED
                return runs, absent
    return runs, absent


def measured(engine: str, running: Running, load: Load, plan: Plan, vocab_size: int) -> Figures:
    """One run, after a warm-up of the same shape. Raises EngineFailed."""
    count = plan.requests or load.requests
    if plan.seconds is not None:
        count = round(plan.seconds * MOST_REQUESTS_PER_S) + load.concurrency
    shots = shots_of(load, plan.seed, vocab_size, count)
    running.run(warm_up_of(load, plan.seed, vocab_size), load.concurrency, None, lambda _: None)
    progress = Progress(f"{engine} {load.name}", count if plan.seconds is None else None)
    before = usage(running.pid)
    taken = running.run(shots, load.concurrency, plan.seconds, progress.done)
    after = usage(running.pid)
    found = figures(engine, load.name, taken, spent(before, after))
    progress.end(f"{found.tokens_per_s:.0f} tok/s" + (f", {found.failed} requests FAILED" if found.failed else ""))
    return found


class Progress:
    """One line on a terminal that is written again and again; elsewhere a line every ten seconds."""

    def __init__(self, what: str, count: int | None) -> None:
        self._what = what
        self._of = f" of {count}" if count is not None else ""
        self._every_s = 0.2 if sys.stderr.isatty() else 10.0
        self._said_s = time.monotonic()
        self._count = 0

    def done(self, count: int) -> None:
        self._count = count
        if (now := time.monotonic()) - self._said_s >= self._every_s:
            self._said_s = now
            self._write(f"{count}{self._of} requests", last=False)

    def end(self, result: str) -> None:
        self._write(f"{result}", last=True)

    def _write(self, text: str, last: bool) -> None:
        if sys.stderr.isatty():
            print(f"\rpeers: {self._what}: {text:<50}", end="\n" if last else "", file=sys.stderr, flush=True)
        else:
            say(f"{self._what}: {text}")


def medians(runs: Rounds) -> dict[tuple[str, str], Figures]:
    """Of each engine and load the run with the median tok/s; a run with failures, if there is one."""
    shown = {}
    for key, rounds in runs.items():
        failed = [run for run in rounds if run.failed]
        ordered = sorted(failed or rounds, key=lambda run: run.tokens_per_s)
        shown[key] = ordered[(len(ordered) - 1) // 2]
    return shown


def machine() -> str:
    """``2 CPUs (their name), Linux``: which machine the figures are of."""
    name = next(
        (line.partition(":")[2].strip() for line in Path("/proc/cpuinfo").read_text().splitlines()
         if line.startswith("model name")),
        platform.machine(),
    )  # fmt: skip
    return f"{len(os.sched_getaffinity(0))} CPUs ({name})"
