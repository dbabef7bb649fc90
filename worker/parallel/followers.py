"""Rank 0's followers: started, set up, told, watched, and ended with it."""

from __future__ import annotations

import dataclasses
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import TypeVar

from shared.lifecycle import ServiceFault, StartupError
from shared.messages import Capacity
from worker.config import WorkerConfig
from worker.parallel.batches import LeadingBatch
from worker.parallel.channel import Blocks, Channel, Failed, Message, Ready, Setup

log = logging.getLogger("headrace.worker.parallel")

T = TypeVar("T")

TELL_S = 60.0
"""A follower that takes nothing for so long hangs."""

LAST_WORD_S = 5.0
"""How long a fault waits for the follower's own word on it, which may be its cause; and a follower's end for it."""

SECRET = ("nats_token", "nats_password", "otlp_endpoint")


class Followers:
    """The ranks from 1 on. ``fault`` is why the worker can't go on, empty as long as it can."""

    def __init__(self, config: WorkerConfig, visible: Callable[[int], Mapping[str, str]], store_port: int) -> None:
        """``visible(rank)`` is what the environment of that rank's process has besides this one's."""
        self.fault = ""
        self._startup = False  # whether the fault is that the worker can't start as it is configured
        self._closing = False
        self._changed = threading.Condition()
        self._heard: dict[type, dict[int, Message]] = {}
        self._batch: LeadingBatch | None = None
        self._channels: list[Channel] = []
        self._processes: list[subprocess.Popen[bytes]] = []
        self._watchers: list[threading.Thread] = []
        fields = {name: value for name, value in dataclasses.asdict(config).items() if name not in SECRET}
        size = config.tensor_parallel
        safe = ["-P"] if sys.flags.safe_path else []  # it must find the modules that this process has found
        for rank in range(1, size):
            ours, theirs = socket.socketpair()
            with theirs:
                # They end with this process because the socket does, however it ends. (The kernel's signal at a
                # parent's death is for the thread that has forked, and ours need not live as long.)
                process = subprocess.Popen(
                    [sys.executable, *safe, "-m", "worker.parallel.follower", str(theirs.fileno())],
                    env={**os.environ, **visible(rank)},
                    stdin=subprocess.DEVNULL,
                    pass_fds=[theirs.fileno()],
                )
            channel = Channel(ours, TELL_S)
            self._channels.append(channel)
            self._processes.append(process)
            watcher = threading.Thread(target=self._watch, args=(rank, process, channel), daemon=True)
            self._watchers.append(watcher)
            watcher.start()
            self.tell(Setup(rank, size, store_port, fields), rank)

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self._processes]

    def batch(self, capacity: Capacity) -> LeadingBatch:
        """The batch of the step loop: what it stages, the followers run too."""
        self._batch = LeadingBatch(capacity, self)
        return self._batch

    def tell(self, message: Message, only: int | None = None) -> None:
        """See :meth:`worker.parallel.batches.Crew.tell`."""
        for rank, channel in enumerate(self._channels, 1):
            if only in (None, rank):
                try:
                    channel.send(message)
                except OSError:
                    self._lose(f"rank {rank} takes no messages any more", startup=False)

    def check(self) -> None:
        """Raises ServiceFault once a follower is lost."""
        if self.fault:
            raise ServiceFault(self.fault)

    def ended_by(self, epoch: int, step: int, reason: str) -> bool:
        """Whether the worker ends because a step of this rank failed: once that was handed on, others wait in it."""
        if not self.fault and self._batch is not None and (epoch, step) in self._batch.handed_on:
            with self._changed:
                self._changed.wait_for(lambda: self.fault, LAST_WORD_S)
            self._lose(f"step {step} failed on rank 0: {reason}", startup=False)
        return bool(self.fault)

    def smallest(self, count: int) -> int:
        """See :class:`worker.parallel.ranks.Ranks`."""
        least = min(count, *(one.count for one in self._hear(Blocks)))
        self.tell(Blocks(least))
        return least

    def ready(self) -> None:
        """Wait until every rank has loaded."""
        self._hear(Ready)
        self.tell(Ready())

    def unless_lost(self, work: Callable[[], T], name: str) -> T:
        """What ``work`` returns, on a thread of that name. Raises what it raises; StartupError or ServiceFault as soon
        as a follower is lost, though the work may then wait for it for ever."""
        done: Future[T] = Future()

        def run() -> None:
            try:
                done.set_result(work())
            except BaseException as error:  # noqa: BLE001  raised again by whoever waits
                done.set_exception(error)
            with self._changed:
                self._changed.notify_all()

        threading.Thread(target=run, name=name, daemon=True).start()
        with self._changed:
            self._changed.wait_for(lambda: self.fault or done.done())
            error = done.exception() if done.done() else None
            if error is not None and not isinstance(error, StartupError):  # perhaps only what a follower's end led to
                self._changed.wait_for(lambda: self.fault, LAST_WORD_S)
        if isinstance(error, StartupError) or not self.fault:
            return done.result()
        raise (StartupError if self._startup else ServiceFault)(self.fault)

    def close(self) -> None:
        """End them."""
        self._closing = True
        for channel in self._channels:
            channel.close()
        for process in self._processes:
            try:
                process.wait(LAST_WORD_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def _hear(self, kind: type[T]) -> list[T]:
        """One message of ``kind`` of every follower. Raises ServiceFault if one is lost before."""
        with self._changed:
            heard = self._heard.setdefault(kind, {})
            self._changed.wait_for(lambda: self.fault or len(heard) == len(self._processes))
            self.check()
            return [heard.pop(rank) for rank in sorted(heard)]  # type: ignore[misc]

    def _watch(self, rank: int, process: subprocess.Popen[bytes], channel: Channel) -> None:
        while (message := channel.receive()) is not None:
            if isinstance(message, Failed):
                self._lose(message.reason if message.startup else f"rank {rank}: {message.reason}", message.startup)
            with self._changed:
                self._heard.setdefault(type(message), {})[rank] = message
                self._changed.notify_all()
        code = process.wait()
        self._lose(f"rank {rank} {_how(code)}", startup=False)

    def _lose(self, reason: str, startup: bool) -> None:
        with self._changed:
            if not self.fault and not self._closing:
                self.fault, self._startup = reason, startup
            self._changed.notify_all()


def _how(code: int) -> str:
    if code < 0:
        return f"was killed by {signal.Signals(-code).name}"
    return f"ended with exit status {code}"
