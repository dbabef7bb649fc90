"""Sockets that come inherited, and readiness that is told, as systemd has both."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace.inheritance import environ_without_protocol, listen_environ, placing
from shared.supervision import LEADS, inherited_socket, tell

PROGRAM = """
import socket, sys
from shared.supervision import inherited_socket
for metrics in (False, True):
    found = inherited_socket(metrics)
    print(found.getsockname()[1] if found is not None else 0, found is not None and found.getblocking())
"""


@pytest.fixture
def sockets() -> Iterator[dict[str, socket.socket]]:
    with socket.create_server(("127.0.0.1", 0)) as http, socket.create_server(("127.0.0.1", 0)) as metrics:
        yield {"http": http, "metrics": metrics}


def port(one: socket.socket) -> int:
    return int(one.getsockname()[1])


def found_by_a_child(sockets: dict[str, socket.socket], environ: dict[str, str]) -> list[str]:
    return subprocess.run(
        [sys.executable, "-c", PROGRAM], env=environ_without_protocol(os.environ) | environ, stdout=subprocess.PIPE,
        text=True, check=True, preexec_fn=placing(sockets, None), pass_fds=range(3, 3 + len(sockets)),
    ).stdout.splitlines()  # fmt: skip


def test_a_child_finds_each_socket_by_its_name(sockets: dict[str, socket.socket]) -> None:
    http, metrics = f"{port(sockets['http'])} False", f"{port(sockets['metrics'])} False"
    assert found_by_a_child(sockets, listen_environ(sockets)) == [http, metrics]
    swapped = dict(reversed(sockets.items()))
    assert found_by_a_child(swapped, listen_environ(swapped)) == [http, metrics]


def test_the_only_socket_of_a_unit_without_names_is_for_clients(sockets: dict[str, socket.socket]) -> None:
    one = {"http": sockets["http"]}
    for environ in ({"LISTEN_FDS": "1"}, {"LISTEN_FDS": "1", "LISTEN_FDNAMES": "headrace.socket"}):
        assert found_by_a_child(one, environ) == [f"{port(sockets['http'])} False", "0 False"]


def test_what_is_meant_for_another_process_is_left_alone(sockets: dict[str, socket.socket]) -> None:
    assert found_by_a_child(sockets, listen_environ(sockets) | {"LISTEN_PID": "1"}) == ["0 False", "0 False"]
    assert inherited_socket(metrics=False, environ={}) is None
    assert inherited_socket(metrics=False, environ={"LISTEN_FDS": "many"}) is None


def test_who_started_it_hears_how_far_it_has_come(tmp_path: Path) -> None:
    path = str(tmp_path / "notify")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listening:
        listening.bind(path)
        tell(LEADS, {"NOTIFY_SOCKET": path})
        assert listening.recv(1000) == b"READY=1\nSTATUS=leads\n"
    tell(LEADS, {"NOTIFY_SOCKET": path})  # nobody is there any more
    tell(LEADS, {})


def test_an_abstract_socket_is_spelled_with_an_at_sign() -> None:
    name = f"headrace-test-{os.getpid()}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listening:
        listening.bind(f"\0{name}")
        tell(LEADS, {"NOTIFY_SOCKET": f"@{name}"})
        assert b"STATUS=leads" in listening.recv(1000)
