"""A read through NIXL, whose calls may fail at any point: nothing is written any more once it has ended."""

from __future__ import annotations

import os
import resource
import socket
from collections.abc import Iterator

import pytest
from transfer_pair import host_pages

from worker.transfer.nixl import Nixl


class Agent:
    """NIXL's calls. ``fails``: the one that raises. What was begun is written until it is released or done."""

    def __init__(self, fails: str = "", states: tuple[str, ...] = ("PROC", "DONE")) -> None:
        self.fails = fails
        self.states = list(states)
        self.writing = False

    def get_xfer_descs(self, parts: list[tuple[int, int, int]], memory: str) -> object:
        return parts

    def initialize_xfer(self, *given: object) -> object:
        return object()

    def transfer(self, handle: object) -> str:
        self.writing = True
        self._fail("transfer")
        return "PROC"

    def check_xfer_state(self, handle: object) -> str:
        self._fail("check_xfer_state")
        state = self.states.pop(0)
        self.writing = state == "PROC"
        return state

    def release_xfer_handle(self, handle: object) -> None:
        self.writing = False

    def _fail(self, call: str) -> None:
        if call == self.fails:
            raise RuntimeError(f"NIXL_ERR_BACKEND in {call}")


@pytest.fixture
def connection() -> Iterator[socket.socket]:
    ours, theirs = socket.socketpair()
    yield ours
    ours.close()
    theirs.close()


def read(agent: Agent, connection: socket.socket) -> None:
    nixl = Nixl("a-1", host_pages())
    nixl._agent = agent
    nixl.read("b-1", [(1, 2, 3)], connection)


@pytest.mark.parametrize("call", ["transfer", "check_xfer_state"])
def test_what_fails_under_way_is_called_off_first(call: str, connection: socket.socket) -> None:
    agent = Agent(fails=call)
    with pytest.raises(RuntimeError, match=call):
        read(agent, connection)
    assert not agent.writing


def test_it_ends_where_the_process_has_many_files_open(connection: socket.socket) -> None:
    """More than ``select`` knows."""
    number = 1500
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard <= number:
        pytest.skip("this machine allows fewer")
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(before[0], number + 1), hard))
    high = os.dup2(connection.fileno(), number)
    try:
        agent = Agent()
        with socket.socket(fileno=high) as other:
            read(agent, other)
        assert not agent.writing
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
