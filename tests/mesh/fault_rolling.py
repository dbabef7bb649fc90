"""A mesh as ``headrace up`` runs it, whose every process is restarted by ``headrace restart`` while clients read."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from fault_mesh import MODEL
from fault_soak import Pressure, Soaked
from test_whole_mesh import free_port
from whole_mesh import eventually

START_S = 180.0
END_S = 60.0


@dataclass(frozen=True)
class Up:
    """A running ``headrace up``."""

    port: int
    log: Path

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def restart(self) -> list[str]:
        """Restart every process, one by one; what was said. An assertion fails if one could not be."""
        command = [sys.executable, "-m", "headrace", "restart", "--port", str(self.port)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{done.stdout}{done.stderr}{self.log.read_text()[-4000:]}"
        return done.stdout.splitlines()


@contextlib.contextmanager
def running_up(folder: Path, *flags: str) -> Iterator[Up]:
    """A serving mesh, with a NATS server of its own."""
    port = free_port()
    command = [sys.executable, "-m", "headrace", "up", "--model", str(folder), "--served-model-name", MODEL,
               "--port", str(port), "--metrics-port", "0", *flags]  # fmt: skip
    env = {key: value for key, value in os.environ.items() if not key.startswith("HEADRACE_")}
    with tempfile.TemporaryDirectory() as home:
        log = Path(home) / "up.log"
        with log.open("wb") as file:
            process = subprocess.Popen(command, env=env, stdin=subprocess.DEVNULL, stdout=file, stderr=file)
            try:
                eventually(
                    lambda: "is served at" in log.read_text() or process.poll() is not None, "headrace up", START_S
                )
                assert process.poll() is None, log.read_text()
                yield Up(port, log)
            finally:
                process.send_signal(signal.SIGTERM)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(END_S)
                process.kill()
                process.wait()


@dataclass(frozen=True)
class Rolled:
    """What clients saw: while nothing happened for a while, and during the restarts."""

    before: Soaked
    during: Soaked
    took_s: float
    said: list[str]


def rolled(up: Up, pressure: tuple[Pressure, Pressure], times: int, before_s: float) -> Rolled:
    """Restart everything ``times`` times under the second pressure; the first is for ``before_s`` alone."""
    with pressure[0] as quiet:
        time.sleep(before_s)  # a measurement's length
    said = []
    with pressure[1] as loaded:
        eventually(lambda: loaded.booked.answers, "answers under load")
        began_s = time.monotonic()
        for _ in range(times):
            said += up.restart()
        took_s = time.monotonic() - began_s
    return Rolled(quiet.booked, loaded.booked, took_s, said)
