"""A worker's part in transfers: what it fetches, and from where others fetch its own. Made of options and a runner."""

from __future__ import annotations

import logging
import secrets
import socket
from collections.abc import Callable

from shared.lifecycle import StartupError
from shared.messages import Fetched, Role
from shared.ports import listen, listen_problem
from worker.config import WorkerConfig
from worker.ledger import Standing
from worker.transfer import nixl, shared_memory
from worker.transfer.addresses import Address, address_towards, family_of, is_wildcard, join
from worker.transfer.fetches import Fetches
from worker.transfer.gate import Gate
from worker.transfer.launch import Call, OnLoop
from worker.transfer.pages import PageMemory
from worker.transfer.source import MakeSending, SendInline, Source
from worker.transfer.transports import AUTO, NIXL, OFF, SHM, TCP, transports_of
from worker.transfer.ways import Tcp, Way
from worker.transfer.wire import KEY_BYTES

log = logging.getLogger("headrace.worker.transfer")

Served = Callable[[str, int, str], None]
"""(transport, bytes, why not) of each request that a source has answered."""


class Listening:
    """Where others may fetch, bound before the model is loaded; ``addresses`` are told in beats."""

    def __init__(self, config: WorkerConfig) -> None:
        """Raises StartupError, one line, if it can't listen as the options ask."""
        self.key = secrets.token_hex(KEY_BYTES // 2)
        self.sockets: list[socket.socket] = []
        self.addresses: list[str] = []
        self.transports = transports_of(config)
        host = config.transfer_host or (OFF if config.role == Role.MIXED else AUTO)
        if host == OFF:
            if config.role == Role.PREFILL:
                log.warning(
                    "--role prefill with --transfer-host off: nobody can fetch KV blocks from here: this worker hands "
                    "nothing over, and decodes as well"
                )
            return
        place = self._listen(config, host) if {TCP, NIXL} & set(self.transports) else ""
        for transport in self.transports:
            if transport == SHM:
                bound, name = shared_memory.listen()
                self.sockets.append(bound)
                self.addresses.append(str(Address(SHM, name, self.key)))
            else:
                self.addresses.append(str(Address(transport, place, self.key)))

    def _listen(self, config: WorkerConfig, host: str) -> str:
        """The host and port that others connect to."""
        try:
            told = host
            if host == AUTO:
                told = address_towards(config.nats)
            elif is_wildcard(host):
                told = address_towards(config.nats, family_of(host))
        except OSError as error:
            raise StartupError(
                f"transfer-host {host}: this machine's own address is not to be found ({error}); name it"
            ) from None
        host = told if host == AUTO else host
        try:
            bound = listen(host, config.transfer_port)
        except OSError as error:
            raise StartupError(listen_problem(host, config.transfer_port, error, "--transfer-port")) from None
        self.sockets.append(bound)
        return join(told, bound.getsockname()[1])

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
        self.addresses: list[str] = []
        self._source: Source | None = None
        self._ended = ""
        ways: dict[str, Way] = {}
        sending: dict[str, MakeSending] = {}
        if memory is not None:
            ways = {TCP: Tcp(), SHM: shared_memory.SharedMemory()}
            sending = {TCP: SendInline, SHM: shared_memory.send_by_memory}
            if NIXL in listening.transports:
                agent = nixl.Nixl(f"{worker}-{incarnation}", memory)
                ways[NIXL], sending[NIXL] = agent, agent.sending
        ways = {transport: ways[transport] for transport in listening.transports if transport in ways}
        self.fetches = Fetches(worker, incarnation, memory, ways, answer, call)
        if memory is None:
            listening.close()
        elif listening.sockets:
            gate = Gate(incarnation, memory.form, memory.num_blocks, standing)
            launch = OnLoop(call, lambda: self._ended)
            self._source = Source(memory, gate, listening.key, launch, sending, served)
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
