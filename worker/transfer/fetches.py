"""The fetches of a worker: begun by its plans, each on a thread, ended by a reset or a plan, and answered once.

An answer is kept until a plan says that it was heard. After a reset nothing is answered: the scheduler has given up all
that it had ordered.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping

from shared.messages import Fetch, Fetched, StepPlan, pack_tokens
from worker.transfer.addresses import parse
from worker.transfer.errors import TransferFailed, WayUnusable
from worker.transfer.gate import Request
from worker.transfer.launch import Call, OnLoop
from worker.transfer.pages import Launch, PageMemory
from worker.transfer.ways import Way, fetch

log = logging.getLogger("headrace.worker.transfer")

MOST_AT_ONCE = 4
"""Others wait for their turn: a link is not quicker for more, and each is done sooner."""


MOST_END_S = 30.0
"""A fetch that is to end and has not let go of pages for so long never may: better no worker than a wrong token."""


class _Job:
    """One fetch under way. ``ended`` says why it is to end, empty as long as it may go on."""

    def __init__(self, epoch: int, order: Fetch) -> None:
        self.epoch = epoch
        self.order = order
        self.began_ns = time.perf_counter_ns()
        self.ended = ""
        self.forgotten = False  # by a reset: nobody waits for its answer
        self.writes = False  # pages of this worker may change by it
        self.connection: socket.socket | None = None


class Fetches:
    """Implements :class:`~worker.step_loop.Fetching`. ``memory`` None: this worker can't be given pages.

    ``answer`` gets each answer on the thread of its fetch. ``call`` is needed by memory that only the step loop's
    thread may have written to.
    """

    def __init__(
        self, worker: str, incarnation: int, memory: PageMemory | None, ways: Mapping[str, Way],
        answer: Callable[[Fetched], None], call: Call,
    ) -> None:  # fmt: skip
        self._worker = worker
        self._incarnation = incarnation
        self._memory = memory
        self._ways = ways
        self._answer = answer
        self._call = call
        self._changed = threading.Condition()
        self._jobs: dict[int, _Job] = {}
        self._waiting: deque[_Job] = deque()
        self._threads = 0
        self._unheard: dict[int, Fetched] = {}

    @property
    def unheard(self) -> list[Fetched]:
        """Answers that no plan has dropped yet. From any thread."""
        with self._changed:
            return list(self._unheard.values())

    def begin(self, plan: StepPlan) -> None:
        """See :meth:`worker.step_loop.Fetching.begin`."""
        with self._changed:
            for number in plan.drop_fetches:
                self._unheard.pop(number, None)
                if number in self._jobs:
                    self._end(self._jobs[number], "a plan has ended it")
            for order in plan.fetches:
                if order.fetch in self._jobs or order.fetch in self._unheard:
                    continue
                job = self._jobs[order.fetch] = _Job(plan.epoch, order)
                self._waiting.append(job)
                if self._threads < MOST_AT_ONCE:
                    self._start_thread(job)

    def _start_thread(self, job: _Job) -> None:
        try:
            threading.Thread(target=self._run, name="transfer-fetch", daemon=True).start()
            self._threads += 1
        except RuntimeError as error:  # the process has as many as it may
            if not self._threads:  # else one of those takes the job in its turn
                self._waiting.remove(job)
                self._finish(job, "", str(error))

    def end(self) -> None:
        """See :meth:`worker.step_loop.Fetching.end`."""
        with self._changed:
            jobs = list(self._jobs.values())
            for job in jobs:
                job.forgotten = True
                self._end(job, "the worker was reset")
            self._jobs.clear()
            self._waiting.clear()
            self._unheard.clear()
            if not self._changed.wait_for(lambda: not any(job.writes for job in jobs), MOST_END_S):
                raise RuntimeError(f"fetches of KV blocks did not end within {MOST_END_S:g} s")

    def _end(self, job: _Job, why: str) -> None:
        job.ended = job.ended or why
        if job.connection is not None:
            with contextlib.suppress(OSError):
                job.connection.shutdown(socket.SHUT_RDWR)  # whoever waits for its bytes wakes up
        self._changed.notify_all()

    def _run(self) -> None:
        while True:
            with self._changed:
                if not self._waiting:
                    self._threads -= 1
                    return
                job = self._waiting.popleft()
            self._finish(job, *self._carry_out(job))

    def _finish(self, job: _Job, scheme: str, reason: str) -> None:
        order = job.order
        size = 0 if reason or self._memory is None else len(order.pages) * self._memory.page_bytes
        us = (time.perf_counter_ns() - job.began_ns) // 1000
        fetched = Fetched(job.epoch, self._worker, self._incarnation, order.fetch, reason, size, us, scheme)
        with self._changed:
            job.writes = False
            self._changed.notify_all()
            if job.forgotten:
                return
            del self._jobs[order.fetch]
            self._unheard[order.fetch] = fetched
        if reason:
            log.warning("%d KV blocks of worker %s did not come: %s", len(order.pages), order.source, reason)
        self._answer(fetched)

    def _carry_out(self, job: _Job) -> tuple[str, str]:
        """(scheme of the address that served, why it failed)."""
        scheme = ""
        try:
            memory = self._room_for(job.order)
            failures = []
            for text in job.order.addresses:
                try:
                    address = parse(text)
                    way = self._ways.get(address.scheme)
                    if way is None:
                        continue
                    scheme = way.scheme
                    connection = way.connect(address)
                except (OSError, ValueError, WayUnusable) as error:
                    failures.append(_line(scheme or "address", error))
                    continue
                try:
                    self._through(connection, way, address.key, job, memory)
                except WayUnusable as error:
                    failures.append(_line(scheme, error))
                    continue
                finally:
                    connection.close()
                return scheme, ""
            raise TransferFailed("; ".join(failures) or "it has no address that this worker knows to use")
        except TransferFailed as error:
            return scheme, job.ended or str(error)
        except OSError as error:
            return scheme, job.ended or _line(scheme, error)
        except Exception as error:  # a fault in here is no more than a fetch that failed
            log.exception("a fetch of KV blocks failed")
            return scheme, job.ended or _line(type(error).__name__, error)

    def _room_for(self, order: Fetch) -> PageMemory:
        if self._memory is None:
            raise TransferFailed("this worker can't be given KV blocks")
        pages = [page for _, page in order.pages]
        if not pages or len(set(pages)) < len(pages) or not all(0 < page <= self._memory.num_blocks for page in pages):
            raise TransferFailed(f"to pages outside 1..{self._memory.num_blocks}, to one twice, or to none")
        return self._memory

    def _through(self, connection: socket.socket, way: Way, key: str, job: _Job, memory: PageMemory) -> None:
        with self._changed:
            if job.ended:
                raise TransferFailed(job.ended)
            job.connection = connection
            job.writes = True
        try:
            order = job.order
            pages = pack_tokens(there for there, _ in order.pages)
            request = Request(way.scheme, order.incarnation, job.epoch, order.after, memory.form, pages)
            fetch(connection, way, key, request, memory, [here for _, here in order.pages], self._launch(job))
            if job.ended:  # in the last moment: it is answered as one that was ended
                raise TransferFailed(job.ended)
        finally:
            with self._changed:
                job.connection = None
                job.writes = False
                self._changed.notify_all()

    def _launch(self, job: _Job) -> Launch:
        return OnLoop(self._call, lambda: job.ended)


def _line(what: str, error: Exception) -> str:
    return f"{what}: {error}".splitlines()[0]
