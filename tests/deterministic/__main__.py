"""``python tests/deterministic``: random schedules of faults, for as long as asked, or one again with its log."""

from __future__ import annotations

import argparse
import gc
import multiprocessing
import sys
import time
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent.parent), str(HERE.parent)]

from schedules import random_mesh, random_meshes, random_moves  # noqa: E402
from simulated_mesh import Violation  # noqa: E402

KINDS = {"": random_mesh, "moves": random_moves, "meshes": random_meshes}


def run_one(seed: int, kind: str) -> str:
    """Empty, or what went wrong."""
    mesh = KINDS[kind](seed)
    try:
        mesh.run()
    except Violation as violation:
        return str(violation)
    except Exception as error:  # noqa: BLE001  the other schedules go on
        return f"seed {seed}: the simulation itself fell over: {error!r}"
    return ""


def replay(seed: int, verbose: bool, kind: str) -> int:
    mesh = KINDS[kind](seed, verbose)
    failure = ""
    try:
        mesh.run()
    except Violation as violation:
        failure = str(violation)
    print("\n".join(mesh.log))
    for client in mesh.clients:
        print(f"{client.ask.name}: {client.outcome} {client.error}")
    print(failure or f"seed {seed}: every promise was kept")
    return int(bool(failure))


def work(first: int, stride: int, count: int, seconds: float, kind: str, results: multiprocessing.Queue) -> None:
    gc.disable()
    began = time.monotonic()
    cpu = time.process_time()
    seed, done, failures = first, 0, 0
    while (not count or done < count) and (not seconds or time.monotonic() - began < seconds):
        failure = run_one(seed, kind)
        done += 1
        seed += stride
        if failure:
            failures += 1
            results.put(("failure", failure))
        if done % 50 == 0:
            gc.collect()
            results.put(("progress", 50))
    results.put(("end", (done, failures, time.process_time() - cpu)))


def main() -> int:
    parser = argparse.ArgumentParser(prog="tests/deterministic", description=__doc__)
    parser.add_argument("--seed", type=int, help="run this schedule alone, and say what happened")
    parser.add_argument("-v", "--verbose", action="store_true", help="with --seed: every message and fault")
    kinds = parser.add_mutually_exclusive_group()
    for name, text in (("moves", "in which sequences move between workers"), ("meshes", "with two meshes")):
        kinds.add_argument(
            f"--{name}", dest="kind", action="store_const", const=name, default="", help=f"schedules {text}"
        )
    parser.add_argument("--first", type=int, default=0, help="first seed of many")
    parser.add_argument("--count", type=int, default=0, help="how many schedules each process runs; 0: until the time")
    parser.add_argument("--seconds", type=float, default=0.0, help="how long; 0: until the count")
    parser.add_argument("--processes", type=int, default=multiprocessing.cpu_count())
    options = parser.parse_args()
    if options.seed is not None:
        return replay(options.seed, options.verbose, options.kind)
    if not options.count and not options.seconds:
        options.seconds = 60.0
    results: multiprocessing.Queue = multiprocessing.Queue()
    processes = [
        multiprocessing.Process(
            target=work,
            args=(
                options.first + index,
                options.processes,
                options.count,
                options.seconds,
                options.kind,
                results,
            ),
        )
        for index in range(options.processes)
    ]
    began = time.monotonic()
    for process in processes:
        process.start()
    running, done, failures, cpu_s, shown = len(processes), 0, 0, 0.0, 0
    seen = 0
    while running:
        kind, what = results.get()
        if kind == "failure":
            print(what, flush=True)
        elif kind == "progress":
            seen += what
            if seen - shown >= 5000:
                shown = seen
                print(f"{seen} schedules in {time.monotonic() - began:.0f} s", flush=True)
        else:
            running -= 1
            done, failures, cpu_s = done + what[0], failures + what[1], cpu_s + what[2]
    for process in processes:
        process.join()
    print(
        f"{done} schedules, {failures} with a broken promise; {time.monotonic() - began:.0f} s, "
        f"{1000 * cpu_s / max(1, done):.1f} ms of CPU each"
    )
    return int(failures > 0)


if __name__ == "__main__":
    sys.exit(main())
