"""A worker's part in transfers: what it fetches, and from where others fetch its own. Made of options and a runner."""

from __future__ import annotations

import logging
import secrets
import socket
from collections.abc import Callable

from shared.lifecycle import StartupError
from shared.messages import Fetched
from shared.ports import listen, listen_problem
from worker.config import WorkerConfig
from worker.ledger import Standing
from worker.transfer.addresses import Address, address_towards, is_wildcard, join
from worker.transfer.fetches import Fetches
from worker.transfer.gate import Gate
from worker.transfer.launch import Call, OnLoop
from worker.transfer.pages import PageMemory
from worker.transfer.source import SendInline, Source
from worker.transfer.ways import Tcp
from worker.transfer.wire import KEY_BYTES

log = logging.getLogger("headrace.worker.transfer")

AUTO = "auto"

Served = Callable[[str, int, str], None]
"""(scheme, bytes, why not) of each request that a source has answered."""


class Listening:
    """The port at which others may fetch, bound before the model is loaded; ``addresses`` are told in beats."""

    def __init__(self, config: WorkerConfig) -> None:
        """Raises StartupError, one line, if it can't listen as the options ask."""
        self.key = secrets.token_hex(KEY_BYTES // 2)
        self.sockets: list[socket.socket] = []
        self.addresses: list[str] = []
        if not config.transfer_host:
            return
        host = config.transfer_host
        try:
            towards = address_towards(config.nats) if host == AUTO or is_wildcard(host) else host
        except OSError as error:
            raise StartupError(
                f"transfer-host {host}: this machine's own address is not to be found ({error}); name it"
            ) from None
        host = towards if host == AUTO else host
        try:
            bound = listen(host, config.transfer_port)
        except OSError as error:
            raise StartupError(listen_problem(host, config.transfer_port, error, "--transfer-port")) from None
        self.sockets.append(bound)
        self.addresses.append(str(Address("tcp", join(towards, bound.getsockname()[1]), self.key)))

    def close(self) -> None:
        for bound in self.sockets:
            bound.close()


class Exchange:
    """``memory`` None: the runner's pages can't be transferred. ``standing`` is where the worker stands, by its ledger;
    ``call`` has the step loop's thread do something. ``answer`` and ``served`` are called on threads of transfers."""

    def __init__(
        self, worker: str, incarnation: int, memory: PageMemory | None, listening: Listening,
        standing: Callable[[], Standing], call: Call, answer: Callable[[Fetched], None], served: Served,
    ) -> None:  # fmt: skip
        self.fetches = Fetches(worker, incarnation, memory, {way.scheme: way for way in (Tcp(),)}, answer, call)
        self.addresses: list[str] = []
        self._source: Source | None = None
        self._ended = ""
        if memory is None:
            listening.close()
        elif listening.sockets:
            gate = Gate(incarnation, memory.form, memory.num_blocks, standing)
            ways = {"tcp": SendInline}
            self._source = Source(memory, gate, listening.key, OnLoop(call, lambda: self._ended), ways, served)
            self._source.listen(listening.sockets)
            self.addresses = listening.addresses
            log.info("KV blocks can be fetched from %s", ", ".join(one.rpartition("/")[0] for one in self.addresses))

    def idle_s(self) -> float | None:
        """How long nobody has fetched from here (infinity: nobody ever has); None where nobody can."""
        return self._source.idle_s() if self._source is not None else None

    def close(self) -> None:
        """End everything. Nothing is written to pages once this returns."""
        self._ended = "the worker stops"
        if self._source is not None:
            self._source.close()
        self.fetches.end()
