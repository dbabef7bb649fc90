"""A client that measures what it waited, and the explanation that a mesh gives of it."""

from __future__ import annotations

import json
import re
import socket
import threading
import time
from dataclasses import dataclass
from typing import Any

import httpx
from loopback_http import HTTP
from mesh_stack import DEADLINE_S
from whole_mesh import Mesh, eventually

SHARE, MS = 0.1, 250.0
"""How far an explanation may be from what the client measured: the larger of a share and so many ms.

A busy machine gets to the one or to the other later: to a client's thread that has its answer, or to a gateway that has
written it and notes when.
"""


class Call:
    """One streamed completion on a socket and a thread of its own. ``ms``: from its first byte to the answer's last."""

    def __init__(
        self, mesh: Mesh, name: str, prompt: Any, max_tokens: int, *, path: str = "/v1/completions",
        receive_buffer: int = 0, reads_on: threading.Event | None = None, **body: Any,
    ) -> None:  # fmt: skip
        self.name = name
        self.ms = 0.0
        self.answer = b""
        self.first = threading.Event()  # something of the answer has come
        body = {
            "model": mesh.model,
            "prompt": prompt,
            "max_tokens": max_tokens,
            "stream": True,
            "ignore_eos": True,
        } | body
        payload = json.dumps(body).encode()
        self._request = (
            f"POST {path} HTTP/1.1\r\nhost: x\r\nx-request-id: {name}\r\ncontent-type: application/json\r\n"
            f"content-length: {len(payload)}\r\nconnection: close\r\n\r\n"
        ).encode() + payload
        self._socket = socket.socket()
        if receive_buffer:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        self._socket.settimeout(DEADLINE_S)
        self._socket.connect(("127.0.0.1", mesh.port))
        self._reads_on = reads_on
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        began = time.perf_counter()
        self._socket.sendall(self._request)
        pieces = []
        try:
            while piece := self._socket.recv(1 << 20):
                pieces.append(piece)
                self.ms = 1000 * (time.perf_counter() - began)
                if b"data:" in piece and not self.first.is_set():
                    self.first.set()
                    if self._reads_on is not None:  # what is tested: it takes nothing until then
                        self._reads_on.wait(DEADLINE_S)
        except OSError:
            self.ms = 1000 * (time.perf_counter() - began)
        self.answer = b"".join(pieces)
        self._socket.close()

    def running(self) -> Call:
        """Wait for its first token."""
        assert self.first.wait(DEADLINE_S), f"{self.name}: no token came"
        return self

    def hang_up(self) -> None:
        self._socket.shutdown(socket.SHUT_RDWR)

    def done(self) -> Call:
        self._thread.join(DEADLINE_S)
        assert not self._thread.is_alive(), f"{self.name} does not end"
        return self


@dataclass(frozen=True, slots=True)
class Explained:
    """What ``/debug/requests/{id}`` says, as JSON."""

    told: dict[str, Any]

    def ms_of(self, stage: str, cause: str, by: str = "") -> float:
        """Time in intervals of the stage whose cause has this in it, with this request in the way if one is given."""
        return sum(
            one["ms"]
            for one in self.told["intervals"]
            if one["stage"] == stage and cause in one["cause"] and (not by or one["by"] == by)
        )

    def main_cause(self, stage: str) -> tuple[str, str]:
        """(cause, request in the way) of the longest interval of a stage."""
        longest = max((one for one in self.told["intervals"] if one["stage"] == stage), key=lambda one: one["ms"])
        return longest["cause"], longest["by"]


def debug_url(mesh: Mesh) -> str:
    """The scheduler's internal listener."""
    port = re.search(r"metrics on http://[^:]+:(\d+)/", mesh.scheduler.output())
    assert port is not None, mesh.scheduler.output()
    return f"http://127.0.0.1:{port.group(1)}"


def ask(mesh: Mesh, name: str) -> httpx.Response:
    return HTTP.get(f"{debug_url(mesh)}/debug/requests/{name}", params={"format": "json"})


def explained(mesh: Mesh, call: Call) -> Explained:
    """The explanation of a call that is done. It has no gap and adds up to what its client measured."""
    call.done()
    told = whole(mesh, call.name)
    assert abs(told["total_ms"] - call.ms) <= max(MS, SHARE * call.ms), (
        f"{told['total_ms']} ms explained of {call.ms}: {told['by_cause']}"
    )
    return Explained(told)


def whole(mesh: Mesh, name: str) -> dict[str, Any]:
    """The explanation once the gateway has told its part; its intervals lie end to end."""
    eventually(lambda: ask(mesh, name).json().get("answered"), f"the gateway to tell of {name}")
    return end_to_end(ask(mesh, name).json())


def end_to_end(told: dict[str, Any]) -> dict[str, Any]:
    """An explanation whose intervals lie end to end."""
    at = 0.0
    for one in told["intervals"]:
        assert abs(one["at_ms"] - at) < 0.01, told["intervals"]
        at = one["at_ms"] + one["ms"]
    assert abs(at - told["total_ms"]) < 0.01
    return told


def id_of(mesh: Mesh, call: Call) -> str:
    """The scheduler's name of a call that is done."""
    return str(whole(mesh, call.name)["request_id"])
