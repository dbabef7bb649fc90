"""The faults of which a mesh of real processes promises that no stream shows them, and how one is tried."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

from fault_mesh import MODEL, FaultMesh
from fault_streams import Answer, Ask, Reading, asks, difference, resuming, verdict, with_stops
from whole_mesh import eventually

PIECES_BEFORE = 15  # that every stream has had when the fault comes
RESTART_S = 6.0  # what a worker that starts anew may take
FAIL_OVER_S = 2.0


@dataclass(frozen=True)
class Fault:
    """``victim``: a kind of service, or nats. ``spare``: there is a second of its kind."""

    victim: str
    kind: str  # kill, stop, part; nothing, to compare with
    spare: bool = False

    @property
    def name(self) -> str:
        if self.kind == "nothing":
            return "nothing"
        verb = {"kill": "kill -9 of", "stop": "SIGSTOP of", "part": "partition of"}.get(self.kind, self.kind)
        whom = {"nats": "NATS"}.get(self.victim, f"the {self.victim}")
        spare = {"worker": ", one of two", "scheduler": ", with a standby", "gateway": ", clients resume"}
        return f"{verb} {whom}{spare[self.victim] if self.spare else ''}"

    def aim_s(self, length_s: float) -> float | None:
        """The longest pause aimed at; None where there is no aim. ``length_s``: of a stop or a partition."""
        if self.kind in ("stop", "part"):
            spared = self.spare and self.victim == "scheduler"
            return FAIL_OVER_S if spared else length_s + FAIL_OVER_S
        if self.kind == "kill" and self.victim in ("worker", "scheduler"):
            return RESTART_S if self.victim == "worker" and not self.spare else FAIL_OVER_S
        return None

    def counts(self) -> dict[str, int]:
        """How many processes of each kind the mesh has."""
        return {f"{kind}s": 1 + (self.spare and kind == self.victim) for kind in ("scheduler", "worker", "gateway")}

    def inflict(self, mesh: FaultMesh, length_s: float, index: int = 0) -> None:
        """Returns when it is over: for a kill at once. ``index``: which worker or gateway; of schedulers the leader."""
        if self.kind == "nothing":
            return
        victim = self.victim if self.victim == "nats" else f"{self.victim}{index}"
        if self.victim == "scheduler":
            eventually(mesh.leader, "a leader")
            victim = mesh.leader()
        if self.kind == "kill":
            mesh.kill(victim)
            return
        begin, end = (mesh.stop, mesh.go_on) if self.kind == "stop" else (mesh.part, mesh.heal)
        begin(victim)
        time.sleep(length_s)  # the fault itself
        end(victim)


FAULTS = (
    Fault("worker", "nothing"),
    Fault("worker", "kill"),
    Fault("worker", "kill", spare=True),
    Fault("scheduler", "kill"),
    Fault("scheduler", "kill", spare=True),
    Fault("nats", "kill"),
    Fault("gateway", "kill", spare=True),
    Fault("worker", "stop"),
    Fault("worker", "stop", spare=True),
    Fault("scheduler", "stop"),
    Fault("scheduler", "stop", spare=True),
    Fault("nats", "stop"),
    Fault("gateway", "stop"),
    Fault("worker", "part"),
    Fault("worker", "part", spare=True),
    Fault("scheduler", "part"),
    Fault("scheduler", "part", spare=True),
    Fault("nats", "part"),
    Fault("gateway", "part"),
)


@dataclass(frozen=True)
class Known:
    """Requests and what they are answered when nothing happens."""

    wanted: list[Ask]
    answers: list[Answer]


@dataclass(frozen=True)
class Outcome:
    """What came of one fault. ``verdicts``: by request, '' for a right answer."""

    fault: str
    streams: int
    cut: int  # streams that the fault met before their end
    verdicts: dict[str, str]
    pauses_s: list[float]  # of the streams
    aim_s: float | None
    errors: list[str]
    wrong: dict[str, str]  # by request: where an answer that is not right differs

    def count(self, what: str) -> int:
        return sum(verdict == what for verdict in self.verdicts.values())

    @property
    def pause_p50_s(self) -> float:
        return statistics.median(self.pauses_s)

    @property
    def pause_max_s(self) -> float:
        return max(self.pauses_s)


def undisturbed(urls: Sequence[str], length: int, *, resume: bool = False) -> Known:
    """Ask the gateways for everything, of ``length`` tokens, while nothing happens."""
    wanted = resuming(asks(length)) if resume else asks(length)
    stopping = [ask for ask in wanted if ask.body.get("stop") == []]
    without = dict(zip((ask.name for ask in stopping), _whole(urls, stopping), strict=True))
    wanted = with_stops(wanted, lambda ask: without[ask.name])
    return Known(wanted, _whole(urls, wanted))


def _whole(urls: Sequence[str], wanted: Sequence[Ask]) -> list[Answer]:
    answers = Reading(urls, wanted, MODEL).result()
    for ask, answer in zip(wanted, answers, strict=True):
        assert answer.whole and not answer.error, f"{ask.name}: {answer.error or 'no end'}"
    return answers


def tried(mesh: FaultMesh, known: Known, fault: Fault, length_s: float) -> Outcome:
    """The same requests, with ``fault`` in the middle of their streams."""
    reading = Reading(mesh.urls, known.wanted, MODEL)
    try:
        eventually(lambda: reading.begun(PIECES_BEFORE), "every stream has begun")
        cut = reading.open()
        fault.inflict(mesh, length_s)
    except BaseException:
        reading.close()
        raise
    answers = reading.result()
    pairs = list(zip(known.wanted, answers, known.answers, strict=True))
    return Outcome(
        fault.name,
        sum(ask.streams for ask in known.wanted),
        cut,
        {ask.name: verdict(got, want) for ask, got, want in pairs},
        [got.pause_s() for ask, got, _ in pairs if ask.streams],
        fault.aim_s(length_s),
        sorted({got.error for got in answers if got.error}),
        {ask.name: f"{what}: {difference(got, want)}" for ask, got, want in pairs if (what := verdict(got, want))},
    )
