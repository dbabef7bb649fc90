"""Recording a run: every input of the core with its time, and every plan, as one append-only file.

A trace is a stream of msgpack arrays, one after the other, that any msgpack library reads: ``[time_ns, kind, ...]``.
The first is the header. Times are the core's (monotonic); the header has the wall clock at the same moment.

    [t, "trace", version, {"unix_ns", "epoch", "policy", "limits": {field: value}}]
    [t, "epoch", epoch]
    [t, "worker_up", worker, incarnation, capacity, first_step, [[page, hash]]]
    [t, "worker_lost", worker, reason, suspect]         [t, "worker_draining", worker]
    [t, "hand_over", worker]                   [t, "set_role", worker, role]
    [t, "submit", Submit]                      [t, "cancel", Cancel]
    [t, "reconcile", gateway, [request ids that live], before_ns]
    [t, "result", StepResult]                  [t, "fetched", Fetched]
    [t, "tick"]
    [t, "plan", worker, StepPlan or nil]       asked for at t; nil: nothing to run

Messages are embedded as they are on the bus, less the version in front of them. Feeding the inputs to a core with the
same limits gives the same plans, byte for byte (``headrace replay``).
"""

from __future__ import annotations

import dataclasses
import logging
import queue
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from scheduler.core.core import SchedulerCore
from scheduler.core.events import CoreEvent
from scheduler.core.limits import Limits
from shared.messages import Cancel, Capacity, Fetched, Role, StepPlan, StepResult, Submit, SubmitReply

log = logging.getLogger("headrace.scheduler")

VERSION = 2
MOST_QUEUED = 100_000
"""Records that wait for the disk; a disk that is slower ends the recording, never the service."""


class TraceWriter:
    """Appends records to a file on a thread of its own. A failing disk ends the recording with one log line."""

    def __init__(self, path: Path) -> None:
        """Raises OSError if the file cannot be made."""
        self._file: BinaryIO = path.open("wb", buffering=1 << 20)
        self._encoder = msgspec.msgpack.Encoder()
        self._records: queue.Queue[bytes | None] = queue.Queue(MOST_QUEUED)
        self._broken = False
        self._thread = threading.Thread(target=self._write, name="trace-writer", daemon=True)
        self._thread.start()

    def put(self, *record: Any) -> None:
        """Encode now (the caller may change its objects), write later. Never blocks."""
        if self._broken:
            return
        try:
            self._records.put_nowait(self._encoder.encode(record))
        except queue.Full:
            self._broken = True
            log.error("recording stopped: the disk is too slow for %d records", MOST_QUEUED)

    def close(self) -> None:
        """Write what is queued, and close the file."""
        self._records.put(None)
        self._thread.join(10)

    def _write(self) -> None:
        try:
            with self._file:
                while (record := self._records.get()) is not None:
                    self._file.write(record)
                    if self._records.empty():
                        self._file.flush()
        except OSError as error:
            self._broken = True
            log.error("recording stopped: %s", error)
            while self._records.get() is not None:  # so that close() is never stuck
                pass


class Recording:
    """One file for each time of leading: ``path``, then ``path.2``, ``path.3``, as each begins with an empty core."""

    def __init__(self, path: Path) -> None:
        """Raises OSError if the first file cannot be made."""
        self._path = path
        self._times = 0
        self._writer: TraceWriter | None = TraceWriter(path)

    def begin(self) -> TraceWriter | None:
        """The file of a time of leading that begins now. Of a later one: None, and a log line, if it can't be made."""
        self._times += 1
        if self._times > 1:
            self.close()
            try:
                self._writer = TraceWriter(self._path.with_name(f"{self._path.name}.{self._times}"))
            except OSError as error:
                log.error("not recorded: %s", error)
        return self._writer

    def close(self) -> None:
        """Write what is queued, and close the file."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None


class RecordingCore(SchedulerCore):
    """The core, with each call from outside written down before it is carried out."""

    def __init__(self, limits: Limits, policy: str, writer: TraceWriter) -> None:
        self._writer = writer
        self._inside = False  # entry points call one another; only calls from outside are inputs
        self._epoch_written = 0
        self._latest = 0
        super().__init__(limits, policy)
        about = {"unix_ns": time.time_ns(), "epoch": self.epoch, "policy": policy, "limits": dataclasses.asdict(limits)}
        writer.put(time.monotonic_ns(), "trace", VERSION, about)

    @contextmanager
    def _input(self, now: int, *record: Any) -> Iterator[None]:
        if self._inside:
            yield
            return
        self._latest = now
        if self.epoch != self._epoch_written:
            self._epoch_written = self.epoch
            self._writer.put(now, "epoch", self.epoch)
        self._writer.put(now, *record)
        self._inside = True
        try:
            yield
        finally:
            self._inside = False

    def worker_up(
        self, name: str, incarnation: int, capacity: Capacity, now: int, first_step: int = 1,
        cached: Iterable[tuple[int, bytes]] = (),
    ) -> list[CoreEvent]:  # fmt: skip
        cached = list(cached)
        with self._input(now, "worker_up", name, incarnation, capacity, first_step, cached):
            return super().worker_up(name, incarnation, capacity, now, first_step, cached)

    def worker_lost(self, name: str, reason: str, now: int, suspect: bool = True) -> list[CoreEvent]:
        with self._input(now, "worker_lost", name, reason, suspect):
            return super().worker_lost(name, reason, now, suspect)

    def worker_draining(self, name: str) -> None:
        with self._input(self._latest, "worker_draining", name):
            super().worker_draining(name)

    def hand_over(self, name: str, now: int) -> list[CoreEvent]:
        with self._input(now, "hand_over", name):
            return super().hand_over(name, now)

    def set_role(self, name: str, role: Role, now: int) -> list[CoreEvent]:
        with self._input(now, "set_role", name, role):
            return super().set_role(name, role, now)

    def fetched(self, answer: Fetched, now: int) -> list[CoreEvent]:
        with self._input(now, "fetched", answer):
            return super().fetched(answer, now)

    def submit(self, submit: Submit, now: int) -> SubmitReply:
        with self._input(now, "submit", submit):
            return super().submit(submit, now)

    def cancel(self, request_id: str, attempt: int, choice: int, now: int) -> list[CoreEvent]:
        with self._input(now, "cancel", Cancel(request_id, attempt, choice)):
            return super().cancel(request_id, attempt, choice, now)

    def reconcile(self, gateway: str, live: Iterable[str], before_ns: int, now: int) -> list[CoreEvent]:
        live = list(live)
        with self._input(now, "reconcile", gateway, live, before_ns):
            return super().reconcile(gateway, live, before_ns, now)

    def apply(self, result: StepResult, now: int) -> list[CoreEvent]:
        with self._input(now, "result", result):
            return super().apply(result, now)

    def tick(self, now: int) -> list[CoreEvent]:
        with self._input(now, "tick"):
            return super().tick(now)

    def plan(self, worker_name: str, now: int) -> tuple[StepPlan | None, list[CoreEvent]]:
        plan, events = super().plan(worker_name, now)
        self._writer.put(now, "plan", worker_name, plan)
        return plan, events
