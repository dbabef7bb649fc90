"""A mesh kept saturated while something is done to it again and again: every answer is compared, memory is watched."""

from __future__ import annotations

import random
import re
import statistics
import threading
import time
import uuid
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from fault_matrix import FAULTS, Known
from fault_mesh import MODEL, FaultMesh
from fault_streams import Answer, Client, verdict

LOOK_EVERY_S = 5.0
SETTLE_S = 30.0  # of a life, in which a process loads and its caches fill
SHORTEST_S, LONGEST_S = 1.0, 8.0  # of a stop or a partition


@dataclass
class Soaked:
    """What came of it."""

    answers: int = 0
    verdicts: Counter[str] = field(default_factory=Counter)  # but for right answers
    errors: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)
    pauses_s: list[float] = field(default_factory=list)
    rss: dict[tuple[str, int], list[tuple[float, int]]] = field(default_factory=lambda: defaultdict(list))
    """(process, pid) -> (monotonic s, resident bytes), as it was seen."""

    def growth(self) -> dict[str, tuple[int, float]]:
        """Process -> (largest resident bytes, growth in bytes a minute over its longest life once that had settled)."""
        found: dict[str, tuple[int, float]] = {}
        for name in dict.fromkeys(name for name, _ in self.rss):
            lives = [seen for (owner, _), seen in self.rss.items() if owner == name]
            longest = max(lives, key=lambda seen: seen[-1][0] - seen[0][0])
            settled = [(at_s, size) for at_s, size in longest if at_s - longest[0][0] >= SETTLE_S]
            slope = statistics.linear_regression(*zip(*settled, strict=True)).slope if len(settled) > 3 else 0.0
            found[name] = (max(size for seen in lives for _, size in seen), slope * 60)
        return found


def soak(
    mesh: FaultMesh, known: Known, minutes: float, *, clients: int, every_s: float, seed: int,
    show: Callable[[str], None],
) -> Soaked:  # fmt: skip
    """Keep ``clients`` requests open for ``minutes`` and do a fault each ``every_s``. The mesh has two of each kind."""
    soaked = Soaked()
    booking = threading.Lock()
    over = threading.Event()
    reader = Client(MODEL)

    def ask_on(index: int) -> None:
        choose = random.Random(f"{seed} {index}")
        while not over.is_set():
            at = choose.randrange(len(known.wanted))
            first = choose.randrange(len(mesh.urls))
            ask = replace(known.wanted[at], resumes=True, key=uuid.uuid4().hex)
            answer = Answer()
            reader.read([*mesh.urls[first:], *mesh.urls[:first]], ask, answer)
            what = verdict(answer, known.answers[at])
            with booking:
                soaked.answers += 1
                soaked.pauses_s.append(answer.pause_s())
                if what:
                    soaked.verdicts[what] += 1
                    soaked.errors[answer.error] += 1
                    show(f"{what}: {ask.name}: {answer.error}")

    def look_on() -> None:
        while not over.wait(LOOK_EVERY_S):
            for name in (mesh.nats.name, *mesh.services):
                pid = mesh.member(name).pid
                size = resident_bytes(pid)
                if size:
                    soaked.rss[name, pid].append((time.monotonic(), size))

    threads = [threading.Thread(target=ask_on, args=(index,), daemon=True) for index in range(clients)]
    watcher = threading.Thread(target=look_on, daemon=True)
    for thread in (*threads, watcher):
        thread.start()
    draw = random.Random(seed)
    faults = [fault for fault in FAULTS if fault.kind != "nothing"]
    ends_s = time.monotonic() + 60 * minutes
    next_s = time.monotonic() + every_s
    while time.monotonic() < ends_s - every_s:  # the last one leaves time to go on
        time.sleep(max(0.0, next_s - time.monotonic()))
        next_s += every_s
        fault, length_s = draw.choice(faults), draw.uniform(SHORTEST_S, LONGEST_S)
        with booking:
            soaked.faults[fault.name] += 1
            show(f"{soaked.answers} answers; {fault.name}{f' for {length_s:.1f} s' if fault.kind != 'kill' else ''}")
        fault.inflict(mesh, length_s)
    time.sleep(max(0.0, ends_s - time.monotonic()))
    over.set()
    for thread in (*threads, watcher):
        thread.join()
    reader.close()
    return soaked


def resident_bytes(pid: int) -> int:
    """Resident memory of a process (Linux); 0 if it has ended."""
    try:
        found = re.search(r"VmRSS:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    except OSError:
        return 0
    return int(found.group(1)) * 1024 if found else 0


def many(known: Mapping[int, Known]) -> Known:
    """Several sets of requests as one."""
    sets = known.values()
    return Known([ask for one in sets for ask in one.wanted], [answer for one in sets for answer in one.answers])
