"""A mesh kept saturated while something is done to it again and again: every answer is compared, memory is watched."""

from __future__ import annotations

import random
import re
import statistics
import threading
import time
import uuid
from array import array
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
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
    gaps_s: array[float] = field(default_factory=lambda: array("d"))  # between two pieces of a stream
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


class Pressure:
    """``clients`` that ask for one known answer after another, and compare. Of a ``with`` block's length."""

    def __init__(
        self, urls: Sequence[str], known: Known, clients: int, seed: int, show: Callable[[str], None],
        resumes: bool = False,
    ) -> None:  # fmt: skip
        """``show`` gets a line for each answer that is not right. ``resumes``: the clients come again."""
        self.booked = Soaked()
        self.booking = threading.Lock()
        self._urls, self._known, self._seed, self._show, self._resumes = urls, known, seed, show, resumes
        self._over = threading.Event()
        self._reader = Client(MODEL)
        self._threads = [threading.Thread(target=self._ask_on, args=(index,), daemon=True) for index in range(clients)]

    def __enter__(self) -> Pressure:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Waits for the answers that are under way."""
        self._over.set()
        for thread in self._threads:
            thread.join()
        self._reader.close()

    def _ask_on(self, index: int) -> None:
        choose = random.Random(f"{self._seed} {index}")
        while not self._over.is_set():
            at, first = choose.randrange(len(self._known.wanted)), choose.randrange(len(self._urls))
            ask = self._known.wanted[at]
            if self._resumes:
                ask = replace(ask, resumes=True, key=uuid.uuid4().hex)
            answer = Answer()
            self._reader.read([*self._urls[first:], *self._urls[:first]], ask, answer)
            what = verdict(answer, self._known.answers[at])
            with self.booking:
                self.booked.answers += 1
                self.booked.gaps_s.extend(answer.gaps_s())
                if what:
                    self.booked.verdicts[what] += 1
                    self.booked.errors[answer.error] += 1
                    self._show(f"{what}: {ask.name}: {answer.error}")


def soak(
    mesh: FaultMesh, known: Known, minutes: float, *, clients: int, every_s: float, seed: int,
    show: Callable[[str], None],
) -> Soaked:  # fmt: skip
    """Keep ``clients`` requests open for ``minutes`` and do a fault each ``every_s``. The mesh has two of each kind."""
    over = threading.Event()
    draw = random.Random(seed)
    faults = [fault for fault in FAULTS if fault.kind != "nothing"]
    with Pressure(mesh.urls, known, clients, seed, show, resumes=True) as pressure:
        booked = pressure.booked

        def look_on() -> None:
            while not over.wait(LOOK_EVERY_S):
                for name in (mesh.nats.name, *mesh.services):
                    pid = mesh.member(name).pid
                    size = resident_bytes(pid)
                    if size:
                        booked.rss[name, pid].append((time.monotonic(), size))

        watcher = threading.Thread(target=look_on, daemon=True)
        watcher.start()
        ends_s = time.monotonic() + 60 * minutes
        next_s = time.monotonic() + every_s
        while time.monotonic() < ends_s - every_s:  # the last one leaves time to go on
            time.sleep(max(0.0, next_s - time.monotonic()))
            next_s += every_s
            fault, length_s = draw.choice(faults), draw.uniform(SHORTEST_S, LONGEST_S)
            booked.faults[fault.name] += 1
            show(f"{booked.answers} answers; {fault.name}{f' for {length_s:.1f} s' if fault.kind != 'kill' else ''}")
            fault.inflict(mesh, length_s, draw.randrange(2))
        time.sleep(max(0.0, ends_s - time.monotonic()))
        over.set()
        watcher.join()
    return booked


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
