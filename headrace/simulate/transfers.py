"""How long KV blocks take from worker to worker: bytes over links that they share.

Each worker has one link, as wide in either direction. A fetch begins after a latency, then gets the lesser of what its
source's and its target's link have for each of the fetches that go on there at that moment: shares are equal, and what
one fetch cannot use the others do not get (less than max-min fairness gives; Bertsekas and Gallager, Data Networks,
section 6.5.2).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from headrace.simulate.worker import SimulatedWorker
from shared.messages import Fetch, Fetched, StepPlan

SCHEME = "simulated"


@dataclass(frozen=True)
class Link:
    bytes_per_s: float = 12.5e9  # 100 Gbit/s
    latency_ns: int = 50_000  # of a fetch: its request, and until the first byte is on its way


@dataclass(slots=True)
class _Flow:
    source: str
    target: str
    left: float  # bytes
    rate: float = 0.0  # bytes per ns


class Network:
    """Fetches under way, by number. Times never go back."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._per_ns = link.bytes_per_s / 1e9
        self._latent: list[tuple[int, int, _Flow]] = []  # (when its bytes begin, number, flow), in order
        self._flows: dict[int, _Flow] = {}
        self._now = 0

    def start(self, number: int, source: str, target: str, size: float, now: int) -> None:
        """A fetch of ``size`` bytes by ``target``."""
        self._latent.append((now + self._link.latency_ns, number, _Flow(source, target, size)))

    def stop(self, number: int, now: int) -> bool:
        """End a fetch before its time. False if it is not under way."""
        before = len(self._latent)
        self._latent = [one for one in self._latent if one[1] != number]
        if number not in self._flows:
            return len(self._latent) < before
        self._advance(now)
        del self._flows[number]
        self._share()
        return True

    def next_ns(self) -> int | None:
        """When ``ended`` should be asked next, if nothing is started before; None: nothing is under way."""
        soonest = self._latent[0][0] if self._latent else None
        for flow in self._flows.values():
            at = self._now + max(1, -int(-flow.left // flow.rate))
            soonest = at if soonest is None else min(soonest, at)
        return soonest

    def ended(self, now: int) -> list[int]:
        """The fetches that are over by ``now``, in the order of their numbers."""
        self._advance(now)
        over = sorted(number for number, flow in self._flows.items() if flow.left <= 1e-6)
        for number in over:
            del self._flows[number]
        begun = False
        while self._latent and self._latent[0][0] <= now:
            _, number, flow = self._latent.pop(0)
            self._flows[number] = flow
            begun = True
        if over or begun:
            self._share()
        return over

    def _advance(self, now: int) -> None:
        elapsed = now - self._now
        self._now = now
        for flow in self._flows.values():
            flow.left -= flow.rate * elapsed

    def _share(self) -> None:
        sent = Counter(flow.source for flow in self._flows.values())
        taken = Counter(flow.target for flow in self._flows.values())
        for flow in self._flows.values():
            flow.rate = self._per_ns / max(sent[flow.source], taken[flow.target])


@dataclass(frozen=True, slots=True)
class _Asked:
    worker: SimulatedWorker
    epoch: int
    fetch: Fetch
    size: int
    began_ns: int


class Fetches:
    """Carries out what plans ask simulated workers to fetch. ``at(when, call)`` has a call made at that time;
    ``answer`` gets what a worker answers, as it leaves there."""

    def __init__(
        self, link: Link, at: Callable[[int, Callable[[int], None]], None], answer: Callable[[Fetched], None]
    ) -> None:
        self._network = Network(link)
        self._at = at
        self._answer = answer
        self._asked: dict[int, _Asked] = {}
        self._number = 0
        self._due: int | None = None

    def begin(self, worker: SimulatedWorker, plan: StepPlan, now: int) -> None:
        """What a plan asks for when its step begins."""
        for dropped in plan.drop_fetches:
            self._drop(worker, dropped, now)
        for fetch in plan.fetches:
            self._number += 1
            capacity = worker.capacity
            size = len(fetch.pages) * capacity.block_size * capacity.kv_bytes_per_token
            self._asked[self._number] = _Asked(worker, plan.epoch, fetch, size, now)
            self._network.start(self._number, fetch.source, worker.name, size, now)
        if plan.fetches or plan.drop_fetches:
            self._schedule()

    def _drop(self, worker: SimulatedWorker, dropped: int, now: int) -> None:
        for number, asked in list(self._asked.items()):
            if asked.worker is worker and asked.fetch.fetch == dropped and self._network.stop(number, now):
                self._end(number, now, "ended by the scheduler")

    def _look(self, now: int) -> None:
        if now != self._due:
            return  # something ended or began since this was asked for
        self._due = None
        for number in self._network.ended(now):
            self._end(number, now)
        self._schedule()

    def _schedule(self) -> None:
        due = self._network.next_ns()
        if due is not None and due != self._due:
            self._due = due
            self._at(due, self._look)

    def _end(self, number: int, now: int, reason: str = "") -> None:
        asked = self._asked.pop(number)
        took_ns = now - asked.began_ns
        worker, done = asked.worker, 0 if reason else asked.size
        self._answer(
            Fetched(
                asked.epoch, worker.name, worker.incarnation, asked.fetch.fetch, reason, done, took_ns // 1000, SCHEME
            )
        )
