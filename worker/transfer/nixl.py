"""Through NIXL, NVIDIA's library for transfers between inference workers, where it is installed: RDMA where there is a
network for it, else whatever its UCX backend finds. It reads the source's memory; a connection carries what is said.

Pages in host memory are registered with it as they are; those of a GPU go through the host's.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import select
import socket
import threading
import time
from collections.abc import Sequence
from types import ModuleType
from typing import Any

from worker.transfer.addresses import Address
from worker.transfer.errors import TransferFailed, WayUnusable
from worker.transfer.nixl_installed import installed_as
from worker.transfer.pages import PageMemory, Segment
from worker.transfer.shared_memory import SendPlaces, pieces, receive_places
from worker.transfer.source import Sending
from worker.transfer.ways import Taking, connect
from worker.transfer.wire import ACK, STALL_S, Frame, receive_body

MOST_SETUP_BYTES = 16 << 20
MOST_SOURCES = 64
"""That are kept connected."""

LOOKS_S = 0.0002
"""How often a transfer is asked whether it is done."""

MEMORY = "DRAM"


def _load() -> ModuleType:
    name = installed_as()
    if not name:
        raise WayUnusable("NIXL is not installed")
    module = importlib.import_module(f"{name}._api")
    logging.getLogger("nixl").setLevel(logging.WARNING)  # it tells of each agent that is made
    return module


class Nixl:
    """A worker's agent, made when it is first needed: for what it fetches and for what others fetch of it.

    Implements :class:`~worker.transfer.ways.Way`. ``name`` is known nowhere else in the mesh. NIXL's calls come from
    one thread at a time.
    """

    scheme = "nixl"

    def __init__(self, name: str, memory: PageMemory) -> None:
        self._name = name
        self._memory = memory
        self._calls = threading.Lock()
        self._agent: Any = None
        self._failure = ""
        self._sources: dict[bytes, str] = {}  # what a source has said of itself: its agent's name

    def connect(self, address: Address) -> socket.socket:
        return connect(address)

    def taking(self, connection: socket.socket) -> Taking:
        return _TakeByNixl(self, connection)

    def sending(self, connection: socket.socket) -> Sending:
        """What answers a request. Raises WayUnusable."""
        with self._calls:
            setup = self._ready().get_agent_metadata()
        return SendPlaces(connection, setup)

    def source(self, setup: bytes) -> str:
        """The name of the agent that has said ``setup``. Raises WayUnusable."""
        with self._calls:
            agent = self._ready()
            if setup not in self._sources:
                while len(self._sources) >= MOST_SOURCES:
                    agent.remove_remote_agent(self._sources.pop(next(iter(self._sources))))
                try:
                    self._sources[setup] = agent.add_remote_agent(setup)
                except Exception as error:  # noqa: BLE001  of kinds that only its bindings know
                    raise WayUnusable(str(error)) from None
            return self._sources[setup]

    def read(self, source: str, parts: Sequence[tuple[int, int, int]], connection: socket.socket) -> None:
        """Copy (address here, address there, bytes). Raises OSError if ``connection`` ends or NIXL gives up."""
        with self._calls:
            agent = self._ready()
            here = agent.get_xfer_descs([(address, size, 0) for address, _, size in parts], MEMORY)
            there = agent.get_xfer_descs([(address, size, 0) for _, address, size in parts], MEMORY)
            handle = agent.initialize_xfer("READ", here, there, source)
        try:
            with self._calls:
                state = agent.transfer(handle)
            state, ends = self._followed(agent, handle, state, connection)
        finally:
            self._release(agent, handle)
        if ends:
            raise ConnectionResetError("the connection ended")
        if state != "DONE":
            raise OSError("it timed out" if state == "PROC" else "it gave up")

    def _followed(self, agent: Any, handle: Any, state: str, connection: socket.socket) -> tuple[str, bool]:
        """(what has become of it, whether ``connection`` has ended before)."""
        stalls = time.monotonic() + STALL_S
        said = select.poll()
        said.register(connection, select.POLLIN)
        while state == "PROC" and time.monotonic() <= stalls:
            if said.poll(0):  # nothing is said now but that it is over
                return state, True
            time.sleep(LOOKS_S)
            with self._calls:
                state = agent.check_xfer_state(handle)
        return state, False

    def _release(self, agent: Any, handle: Any) -> None:
        """Returns once nothing is written any more: one that is under way may have to come to its end first."""
        while True:
            with self._calls, contextlib.suppress(Exception):  # of kinds that only its bindings know
                try:
                    agent.release_xfer_handle(handle)
                    return
                except Exception:  # noqa: BLE001  it can't be cancelled
                    if agent.check_xfer_state(handle) != "PROC":
                        return
            time.sleep(LOOKS_S)

    def _ready(self) -> Any:
        if self._failure:
            raise WayUnusable(self._failure)
        if self._agent is None:
            try:
                api = _load()
                agent = api.nixl_agent(self._name, api.nixl_agent_config(backends=["UCX"]))
                regions = [(region.ctypes.data, region.nbytes, 0, "") for region in self._memory.regions()]
                agent.register_memory(regions, MEMORY)
            except Exception as error:  # noqa: BLE001  whatever it lacks here: other ways are left
                self._failure = str(error) or type(error).__name__
                raise WayUnusable(self._failure) from None
            self._agent = agent
        return self._agent


class _TakeByNixl:
    checksum = 0

    def __init__(self, nixl: Nixl, connection: socket.socket) -> None:
        self._nixl = nixl
        self._connection = connection
        self._source = ""

    def take(self, segments: Sequence[Segment]) -> None:
        if not self._source:
            setup = receive_body(self._connection, Frame.SETUP, MOST_SETUP_BYTES)
            self._source = self._nixl.source(setup)
        parts = list(pieces(segments, receive_places(self._connection)))
        try:
            self._nixl.read(self._source, parts, self._connection)
        except OSError:
            raise
        except Exception as error:  # noqa: BLE001  of kinds that only its bindings know
            raise TransferFailed(f"nixl: {error}") from None
        self._connection.sendall(ACK)
