"""``python -m worker.parallel.follower FD``: one of the ranks from 1 on. Started by rank 0, and ends with it."""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
import threading
from typing import NoReturn

from observability.logs import setup_logging
from shared.lifecycle import StartupError
from shared.messages import Reset
from worker.config import WorkerConfig
from worker.parallel.batches import FollowingBatch
from worker.parallel.channel import Blocks, Channel, Clear, Failed, Message, Order, Ready, Setup
from worker.step_loop import Executed, StepLoop
from worker.torch_import import import_torch

log = logging.getLogger("headrace.worker.parallel")

SEND_TIMEOUT_S = 60.0


def main() -> NoReturn:
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, signal.SIG_IGN)  # they come to the whole process group; rank 0 says when it is over
    channel = Channel(socket.socket(fileno=int(sys.argv[1])), SEND_TIMEOUT_S)
    setup = channel.receive()
    if isinstance(setup, Setup):
        _Follower(channel, setup).run()
    os._exit(0)


class _Follower:
    def __init__(self, channel: Channel, setup: Setup) -> None:
        self._channel = channel
        self._setup = setup
        self._config = WorkerConfig(**setup.config)
        self._agreed: dict[type, Message] = {}
        self._heard = threading.Condition()
        self._loop: StepLoop | None = None
        self._batch: FollowingBatch | None = None

    def run(self) -> None:
        """Load, then run what rank 0 hands on, until it is gone."""
        setup_logging(f"rank {self._setup.rank}", "error")  # rank 0 has said the rest
        threading.Thread(target=self._listen, name="orders", daemon=True).start()
        try:
            self._load()
        except StartupError as error:
            self._fail(str(error), startup=True)
        except Exception as error:
            log.debug("can't load", exc_info=True)
            self._fail(f"{type(error).__name__}: {error}")
        threading.Event().wait()  # the other threads end the process

    def _load(self) -> None:
        import_torch(one_process=False)
        from worker.model import device_of
        from worker.parallel.load import load_part, wants_invariance
        from worker.parallel.ranks import Ranks, join, reach_store

        size = self._setup.size
        kind = device_of(self._config.device).type
        ranks = Ranks(self._setup.rank, size, self._smallest, wants_invariance(self._config, kind))
        join(ranks, reach_store(self._setup.store_port, size), kind)
        runner = load_part(self._config)
        self._batch = FollowingBatch(runner.capacity, self._fail)
        self._loop = StepLoop(runner, self._batch, lambda _: True, self._executed, lambda *_: None)
        self._channel.send(Ready())
        self._wait_for(Ready)
        ranks.begin_steps()
        self._loop.start()

    def _smallest(self, count: int) -> int:
        self._channel.send(Blocks(count))
        agreed = self._wait_for(Blocks)
        assert isinstance(agreed, Blocks)
        return agreed.count

    def _wait_for(self, kind: type) -> Message:
        with self._heard:
            self._heard.wait_for(lambda: kind in self._agreed)
            return self._agreed.pop(kind)

    def _listen(self) -> None:
        while (message := self._channel.receive()) is not None:
            if isinstance(message, Order) and self._loop is not None and self._batch is not None:
                self._batch.expect(message)
                self._loop.put(message.plan)
            elif isinstance(message, Clear) and self._loop is not None:
                self._loop.reset(Reset(0, "", 0, 0))
            else:
                with self._heard:
                    self._agreed[type(message)] = message
                    self._heard.notify_all()
        os._exit(0)  # rank 0 is gone, and whatever runs here waits for it

    def _executed(self, executed: Executed) -> None:
        if executed.fault:
            self._fail(f"step {executed.plan.step} failed: {executed.fault}")

    def _fail(self, reason: str, startup: bool = False) -> NoReturn:
        """The worker can't go on without this rank: say why, and end."""
        try:
            self._channel.send(Failed(reason, startup))
        finally:
            os._exit(1)


if __name__ == "__main__":
    main()
