"""What Linux knows of CPU time: of one engine's processes, and of the machine around them."""

from __future__ import annotations

import contextlib
import os
import time
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

TICKS_PER_S = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Usage:
    """CPU seconds so far. ``engine``: by kind of process; ``steal``: what the hypervisor kept from this machine."""

    at_s: float
    engine: Mapping[str, float]
    client: float
    busy: float
    steal: float


def usage(pid: int) -> Usage:
    """Of the process ``pid`` with all of its descendants, of this process, and of the machine."""
    busy, steal = _machine()
    return Usage(time.perf_counter(), _tree(pid), time.process_time(), busy, steal)


@dataclass(frozen=True)
class Spent:
    """CPU seconds between two looks. ``others``: of processes that are neither engine nor client."""

    seconds: float
    engine: Mapping[str, float]
    client: float
    others: float
    steal: float


def spent(before: Usage, after: Usage) -> Spent:
    engine = {name: used - before.engine.get(name, 0.0) for name, used in after.engine.items()}
    client = after.client - before.client
    others = after.busy - before.busy - sum(engine.values()) - client
    return Spent(after.at_s - before.at_s, engine, client, max(0.0, others), after.steal - before.steal)


def kind_of(words: list[str]) -> str:
    """What a process is called in a table, by its command line: the module after ``-m``, else the program's name."""
    if "-m" in words[:-1]:
        return words[words.index("-m") + 1]
    name = Path(words[0].split(" ")[0]).name if words and words[0] else "?"
    script = next((word for word in words[1:] if word.endswith(".py")), "")
    return Path(script).stem if name.startswith("python") and script else name


def _tree(pid: int) -> dict[str, float]:
    """Kind of process -> CPU seconds, those of ended children that were waited for included."""
    used: defaultdict[str, float] = defaultdict(float)
    waiting = [pid]
    while waiting:
        one = waiting.pop()
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it may end while we look
            for task in Path(f"/proc/{one}/task").iterdir():
                waiting += [int(child) for child in (task / "children").read_text().split()]
            words = Path(f"/proc/{one}/cmdline").read_bytes().decode(errors="replace").rstrip("\0").split("\0")
            fields = Path(f"/proc/{one}/stat").read_text().rpartition(") ")[2].split()  # proc(5): from field 3 on
            used[kind_of(words)] += sum(int(field) for field in fields[11:15]) / TICKS_PER_S
    return dict(used)


def _machine() -> tuple[float, float]:
    """(busy, stolen) CPU seconds of all CPUs."""
    user, nice, system, _, _, irq, softirq, steal = (
        int(field) / TICKS_PER_S for field in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]
    )
    return user + nice + system + irq + softirq, steal
