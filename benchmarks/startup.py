"""From ``headrace up`` to the first streamed token of a chat, with a cached model: where the time goes, and the memory.

Starts meshes one after the other on free ports. *Served*: ``up`` has had its own first completion; *first token*: the
first piece of text of a chat that was sent then. Stages are what each process says of itself (``ready after ...``);
processes run beside one another, so theirs don't add up. CPU seconds, up to the first token, are what a machine with
other work leaves comparable. Memory is read after it: RSS, and PSS, which counts shared pages once; of
``--kv-cache-memory`` only pages that have been written are in it.

    python benchmarks/startup.py --starts 5 -- --dtype bfloat16
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from headrace.text_table import table

DEADLINE_S = 300.0
STAGES = re.compile(r"^(\S+) *\| .*ready after (\S+) s: (.*)$")
SERVED = re.compile(r"^(\S+) is served at (\S+)$")
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]


@dataclass
class Start:
    """What one start took: seconds by stage; by process, seconds of CPU until the first token, and MiB."""

    seconds: dict[str, float] = field(default_factory=dict)
    cpu: dict[str, float] = field(default_factory=dict)
    rss: dict[str, float] = field(default_factory=dict)
    pss: dict[str, float] = field(default_factory=dict)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--starts", type=int, default=5, help="meshes to start (default: 5)")
    parser.add_argument("--json", action="store_true", help="print every start as JSON")
    parser.add_argument("flags", nargs="*", metavar="-- FLAGS", help="flags for headrace up")
    args = parser.parse_args()
    if args.starts < 1:
        parser.error("--starts must be at least 1")
    starts = [measure(args.flags) for _ in range(args.starts)]
    if args.json:
        print(json.dumps([vars(start) for start in starts], indent=2))
        return 0
    print(f"{args.starts} starts, medians (fastest to slowest); load average {os.getloadavg()[0]:.1f}\n")
    print(table([["stage", "s", "range"], *_stages(starts)]))
    print()
    print(table([["process", "CPU, s", "RSS, MiB", "PSS, MiB"], *_processes(starts)]))
    return 0


def measure(flags: list[str]) -> Start:
    """Start a mesh, have one answer, look at its memory, stop it."""
    start = Start()
    command = [sys.executable, "-m", "headrace", "up", "--port", "0", "--metrics-port", "0", *flags]
    began = time.monotonic()
    # One pipe, in the order in which lines come; unbuffered, or "is served" would wait for its block to fill.
    up = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=os.environ | {"PYTHONUNBUFFERED": "1"}
    )
    lines: list[str] = []
    try:
        assert up.stdout is not None
        for line in up.stdout:
            lines.append(line.rstrip("\n"))
            now = time.monotonic() - began
            if line.startswith("headrace: starting "):
                start.seconds["up: NATS is ready"] = now
            if found := STAGES.match(lines[-1]):
                name, whole, stages = found.groups()
                start.seconds[f"{name}: ready, own clock"] = float(whole)
                for stage in stages.split(", "):
                    what, _, took = stage.rpartition(" ")
                    start.seconds[f"{name}:   {what}"] = float(took)
            if found := SERVED.match(lines[-1]):
                start.seconds["served"] = now
                asked = time.monotonic()
                first_token(found[2], found[1])
                start.seconds["first token, from the request"] = time.monotonic() - asked
                start.seconds["first token, from headrace up"] = time.monotonic() - began
                look(up.pid, start)
                return start
        raise SystemExit("\n".join(["headrace up ended before it served:", *lines]))
    finally:
        up.send_signal(signal.SIGINT)
        try:
            up.communicate(timeout=60)
        except subprocess.TimeoutExpired:
            up.kill()


def first_token(url: str, model: str) -> None:
    """Return once the first text of a streamed chat has come."""
    body = {"model": model, "messages": QUESTION, "temperature": 0, "stream": True}
    with httpx.stream("POST", f"{url}/v1/chat/completions", json=body, timeout=DEADLINE_S, trust_env=False) as answer:
        for line in answer.iter_lines():
            choices = json.loads(line[6:]).get("choices") if line.startswith("data: {") else None
            if choices and choices[0]["delta"].get("content"):
                return
    raise SystemExit(f"no token came: {answer.status_code}")


def look(pid: int, start: Start) -> None:
    """CPU seconds so far and memory of ``up`` and its children, by what they run."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    for one in [str(pid), *children]:
        words = Path(f"/proc/{one}/cmdline").read_bytes().split(b"\0")
        name = "up" if one == str(pid) else "nats" if b"nats" in words[0] else words[3].decode()
        usage = Path(f"/proc/{one}/stat").read_text().rpartition(")")[2].split()
        ticks = int(usage[11]) + int(usage[12])  # fields 14 and 15: user and system time
        fields = dict(line.split(":", 1) for line in Path(f"/proc/{one}/smaps_rollup").read_text().splitlines()[1:])
        for kept, value in (
            (start.cpu, ticks / os.sysconf("SC_CLK_TCK")),
            (start.rss, int(fields["Rss"].split()[0]) / 1024),
            (start.pss, int(fields["Pss"].split()[0]) / 1024),
        ):
            kept[name] = kept.get(name, 0.0) + value


def _stages(starts: list[Start]) -> list[list[str]]:
    rows = []
    for name in dict.fromkeys(name for start in starts for name in start.seconds):
        values = [start.seconds[name] for start in starts if name in start.seconds]
        rows.append([name, f"{statistics.median(values):.2f}", f"{min(values):.2f} to {max(values):.2f}"])
    return rows


def _processes(starts: list[Start]) -> list[list[str]]:
    def row(name: str, of: Callable[[dict[str, float]], float]) -> list[str]:
        cpu, rss, pss = (statistics.median([of(getattr(start, kind)) for start in starts])
                         for kind in ("cpu", "rss", "pss"))  # fmt: skip
        return [name, f"{cpu:.2f}", f"{rss:,.0f}", f"{pss:,.0f}"]

    names = dict.fromkeys(name for start in starts for name in start.cpu)
    return [*(row(name, lambda kept, name=name: kept.get(name, 0.0)) for name in names),
            row("all", lambda kept: sum(kept.values()))]  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
