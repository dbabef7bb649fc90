"""The oracles of the acceptance cases, over HTTP.

O1 survival: a fixed greedy request gives the text it gave before, and health is 200. O2 transport parity: what is
streamed, joined, is the whole text. O3 memory parity and O4 company parity: texts under other loads are equal (plain
comparisons in the tests). O5 quiescence: :meth:`whole_mesh.Mesh.quiescence`.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx
from whole_mesh import Mesh

CANARY = {"prompt": "a canary sings", "max_tokens": 8, "temperature": 0, "seed": 1, "ignore_eos": True}


@contextlib.contextmanager
def survival(mesh: Mesh) -> Iterator[None]:
    """O1, around whatever is done to the mesh."""
    before = mesh.text(**CANARY)
    yield
    assert mesh.text(**CANARY) == before
    assert mesh.http.get("/health").status_code == 200
    for process in (mesh.scheduler, *mesh.workers, mesh.gateway):
        assert process.popen.poll() is None, process.output()


def strict_json(body: bytes) -> Any:
    """Parsed as a strict parser would: UTF-8, no NaN or Infinity, no unpaired surrogates."""

    def refuse(constant: str) -> Any:
        raise ValueError(f"{constant} is no JSON")

    value = json.loads(body.decode("utf-8"), parse_constant=refuse)
    json.dumps(value, ensure_ascii=False).encode("utf-8")
    return value


def refused(reply: httpx.Response, *statuses: int) -> dict[str, Any]:
    """The error of a refusal in OpenAI's shape, with one of ``statuses`` (default 400)."""
    assert reply.status_code in (statuses or (400,)), (reply.status_code, reply.text[:300])
    assert reply.headers["content-type"].startswith("application/json")
    body = strict_json(reply.content)
    assert set(body) == {"error"} and set(body["error"]) >= {"message", "type", "param", "code"}
    error: dict[str, Any] = body["error"]
    assert isinstance(error["message"], str) and error["message"]
    if reply.status_code in (429, 503):
        assert int(reply.headers["retry-after"]) >= 1
    return error


@dataclass
class Streamed:
    """A stream that was read to its end."""

    events: list[dict[str, Any]] = field(default_factory=list)
    pieces: dict[int, list[str]] = field(default_factory=dict)
    finishes: dict[int, list[str]] = field(default_factory=dict)
    errors: list[dict[str, Any]] = field(default_factory=list)
    usage: dict[str, Any] | None = None
    done: bool = False

    def text(self, index: int = 0) -> str:
        return "".join(self.pieces.get(index, ()))

    def texts(self) -> list[str]:
        return [self.text(index) for index in sorted(self.pieces)]

    def finish(self, index: int = 0) -> str:
        (reason,) = self.finishes[index]
        return reason

    def add(self, line: str) -> None:
        """Take in one line of the body."""
        if not line:
            return
        assert line.startswith("data: ") and not self.done, line
        if line == "data: [DONE]":
            self.done = True
            return
        event = strict_json(line[6:].encode())
        self.events.append(event)
        if "error" in event:
            self.errors.append(event["error"])
            return
        if event.get("usage"):
            self.usage = event["usage"]
        for choice in event["choices"]:
            text = choice["text"] if "text" in choice else choice["delta"].get("content")
            if text:
                self.pieces.setdefault(choice["index"], []).append(text)
            if choice["finish_reason"] is not None:
                self.finishes.setdefault(choice["index"], []).append(choice["finish_reason"])


@contextlib.contextmanager
def open_stream(mesh: Mesh, path: str = "/v1/completions", **body: Any) -> Iterator[Iterator[str]]:
    """The lines of a stream as they come."""
    with mesh.http.stream("POST", path, json={"model": mesh.model, "stream": True, **body}) as reply:
        assert reply.status_code == 200, reply.read()
        assert reply.headers["content-type"].startswith("text/event-stream")
        yield reply.iter_lines()


def streamed(mesh: Mesh, path: str = "/v1/completions", **body: Any) -> Streamed:
    """A whole stream; one that breaks off shows in ``errors`` and ``done``."""
    got = Streamed()
    with open_stream(mesh, path, **body) as lines:
        for line in lines:
            got.add(line)
    return got


def transport_parity(mesh: Mesh, **body: Any) -> Streamed:
    """O2 of one request: the stream, after comparing it with the whole answer, usage and ends included."""
    stream = streamed(mesh, stream_options={"include_usage": True}, **body)
    whole = mesh.answer(**body)
    for choice in whole["choices"]:
        assert stream.text(choice["index"]) == choice["text"]
        assert stream.finish(choice["index"]) == choice["finish_reason"]
    assert stream.done and not stream.errors
    assert without_details(stream.usage) == without_details(whole["usage"])
    return stream


def without_details(usage: dict[str, Any] | None) -> dict[str, Any]:
    """Token counts; how much of the prompt the cache had differs between equal requests, and is left out."""
    assert usage is not None
    return {key: value for key, value in usage.items() if isinstance(value, int)}
