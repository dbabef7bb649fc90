"""What the fault tests rest on: a proxy that parts two sides, and a verdict that tells how an answer differs."""

from __future__ import annotations

import copy
import socket
import threading
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
from fault_matrix import FAULTS, Fault
from fault_proxy import Proxy
from fault_streams import Answer, asks, resuming, verdict, with_stops

SOON_S = 0.2  # in which what is held would have come


@dataclass
class Sides:
    """Two ends of one connection through a proxy."""

    proxy: Proxy
    near: socket.socket
    far: socket.socket
    listener: socket.socket


@pytest.fixture
def sides() -> Iterator[Sides]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        proxy = Proxy(listener.getsockname())
        with socket.create_connection((proxy.host, proxy.port), 20) as near, listener.accept()[0] as far:
            far.settimeout(20)
            yield Sides(proxy, near, far, listener)
        proxy.close()


def test_both_directions_pass(sides: Sides) -> None:
    sides.near.sendall(b"there")
    assert sides.far.recv(9) == b"there"
    sides.far.sendall(b"back")
    assert sides.near.recv(9) == b"back"
    sides.near.shutdown(socket.SHUT_WR)
    assert sides.far.recv(9) == b""


def test_what_is_held_comes_late_and_whole(sides: Sides) -> None:
    sides.proxy.hold()
    sent = bytes(range(256)) * 8000  # more than the buffers on the way take
    sending = threading.Thread(target=sides.near.sendall, args=(sent,))
    sending.start()
    sides.far.settimeout(SOON_S)
    with pytest.raises(TimeoutError):
        sides.far.recv(1)
    with socket.create_connection((sides.proxy.host, sides.proxy.port), 20) as newcomer:
        newcomer.settimeout(SOON_S)
        with pytest.raises(TimeoutError):
            newcomer.recv(1)
        sides.proxy.heal()
        sides.listener.settimeout(20)
        sides.listener.accept()[0].close()
    sides.far.settimeout(20)
    got = b""
    while len(got) < len(sent):
        got += sides.far.recv(1 << 20)
    assert got == sent
    sending.join()


def test_what_is_cut_is_reset_and_the_next_connection_passes(sides: Sides) -> None:
    sides.near.sendall(b"x")
    assert sides.far.recv(1) == b"x"
    sides.proxy.cut()
    for side in (sides.near, sides.far):
        with pytest.raises(ConnectionResetError):
            side.recv(9)
    with socket.create_connection((sides.proxy.host, sides.proxy.port), 20) as again:
        sides.listener.settimeout(20)
        with sides.listener.accept()[0] as far:
            again.sendall(b"z")
            far.settimeout(20)
            assert far.recv(1) == b"z"


RIGHT = Answer({0: "one two three", 1: "four"}, {0: [1, 2, 3]}, {}, {0: ["stop"], 1: ["length"]}, {"n": 4}, "", True)


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({}, ""),
        ({"texts": {0: "one three", 1: "four"}}, "missing"),
        ({"texts": {0: "one two two three", 1: "four"}}, "doubled"),
        ({"texts": {0: "one two tree!", 1: "four"}}, "wrong"),
        ({"tokens": {0: [1, 2, 4]}}, "wrong"),
        ({"usage": {"n": 5}}, "wrong"),
        ({"finishes": {0: ["stop", "stop"], 1: ["length"]}}, "wrong"),
        ({"texts": {0: "one t"}, "whole": False, "error": "given up"}, "failed"),
        ({"texts": {0: "one x"}, "whole": False, "error": "given up"}, "wrong"),
        ({"whole": False, "error": "cut off"}, "failed"),
    ],
)
def test_an_answer_that_differs_is_told(change: dict[str, object], what: str) -> None:
    got = copy.deepcopy(RIGHT)
    for name, value in change.items():
        setattr(got, name, value)
    assert verdict(got, RIGHT) == what


def test_a_pause_is_the_longest_gap_beyond_the_usual_one() -> None:
    assert Answer(came_s=[0.0, 1.0, 2.0, 9.0, 10.0]).pause_s() == 6.0
    assert Answer(came_s=[3.0]).pause_s() == 0.0


def test_the_requests_are_what_is_promised() -> None:
    plain = asks(100)
    assert sum(ask.streams for ask in plain) == 24 and len({ask.name for ask in plain}) == len(plain) == 28
    assert all("seed" not in ask.body and ask.key for ask in resuming(plain))
    text = "aXYZ" * 15 + "new" + "aXYZ" * 3
    stopping = with_stops(plain, lambda _: Answer({0: text}))
    stops = [ask.body["stop"] for ask in stopping if "stop" in ask.body]
    assert len(stops) == 3 and all(text.find(stop) >= 2 * len(text) // 3 - 6 for (stop,) in stops)


def test_every_fault_has_a_name_and_an_aim_of_its_own() -> None:
    assert len({fault.name for fault in FAULTS}) == len(FAULTS)
    assert Fault("worker", "kill").aim_s(10) == 6
    assert Fault("worker", "kill", spare=True).aim_s(10) == Fault("scheduler", "kill").aim_s(10) == 2
    assert Fault("nats", "stop").aim_s(10) == Fault("worker", "part", spare=True).aim_s(10) == 12
    assert Fault("gateway", "kill", spare=True).aim_s(10) is None
