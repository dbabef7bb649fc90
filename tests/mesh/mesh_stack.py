"""Real processes around a real NATS server, for whole-mesh tests, and a client that speaks to them on the bus."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from headrace.nats_server import NatsServer, embedded_nats
from shared.bus import NatsBus
from shared.ids import new_process_id
from shared.messages import (
    AnyMessage,
    Cancel,
    GatewayBeat,
    Outcome,
    RequestEvent,
    Sampling,
    SchedulerBeat,
    Submit,
    SubmitReply,
    TokenBatch,
    TokenEntry,
    decode,
    encode,
    pack_tokens,
)
from shared.subjects import Subjects

DEADLINE_S = 60.0
"""Catches hangs; no test is about speed."""


class Process:
    """One service process; its stderr goes to a file that a failure prints."""

    def __init__(self, name: str, command: list[str], env: dict[str, str]) -> None:
        self.name = name
        self.log = tempfile.NamedTemporaryFile(prefix=f"{name}-", suffix=".log", delete=False)  # noqa: SIM115
        self.popen = subprocess.Popen(command, env=env, stdin=subprocess.DEVNULL, stdout=self.log, stderr=self.log)

    def stop(self, timeout_s: float = 40.0) -> int:
        """SIGTERM and the exit code."""
        self.popen.send_signal(signal.SIGTERM)
        try:
            return self.popen.wait(timeout_s)
        finally:
            self.kill()

    def kill(self) -> None:
        if self.popen.poll() is None:
            self.popen.kill()
            self.popen.wait()
        self.log.close()

    def output(self) -> str:
        return Path(self.log.name).read_text("utf-8", "replace")


@dataclass
class Stack:
    nats: NatsServer
    processes: list[Process] = field(default_factory=list)

    def start(self, service: str, *flags: str) -> Process:
        env = {key: value for key, value in os.environ.items() if not key.startswith("HEADRACE_")}
        env |= {"HEADRACE_NATS": self.nats.url, "HEADRACE_NATS_TOKEN": self.nats.token}
        command = [sys.executable, "-m", service, "--metrics-port", "0", *flags]
        process = Process(service, command, env)
        self.processes.append(process)
        return process

    def close(self) -> None:
        for process in self.processes:
            process.kill()

    def logs(self) -> str:
        return "\n".join(f"--- {process.name}\n{process.output()}" for process in self.processes)


@contextlib.contextmanager
def stack() -> Iterator[Stack]:
    with embedded_nats() as nats:
        running = Stack(nats)
        try:
            yield running
        except BaseException:
            print(running.logs(), file=sys.stderr)
            raise
        finally:
            running.close()


async def until(condition: Callable[[], object], what: str, deadline_s: float = DEADLINE_S) -> None:
    """Wait until ``condition()`` holds; AssertionError naming ``what`` if it does not in time."""
    deadline = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {deadline_s:g} s: {what}"
        await asyncio.sleep(0.005)


class BusClient:
    """Plays the gateway on the bus: submits, collects tokens per (request, choice), beats."""

    def __init__(self, bus: NatsBus, mesh: str = "default") -> None:
        self.bus = bus
        self.subjects = Subjects(mesh)
        self.name = new_process_id("gateway")
        self.beat: SchedulerBeat | None = None
        self.tokens: dict[tuple[str, int], list[int]] = {}
        self.ends: dict[tuple[str, int], str] = {}
        self._worker_of: dict[tuple[str, int], str] = {}
        self._early: dict[tuple[str, int], list[tuple[TokenEntry, str]]] = {}
        self.events: list[RequestEvent] = []
        self.live: dict[str, int] = {}
        self.seen: list[AnyMessage] = []  # everything on the mesh, if spied on
        self._beating: asyncio.Task[None] | None = None

    @classmethod
    async def connect(cls, nats: NatsServer) -> BusClient:
        client = cls(await NatsBus.connect(nats.url, "test", nats.token))
        await client.bus.subscribe(client.subjects.beats("scheduler"), client._on_beat)
        await client.bus.subscribe(client.subjects.tokens(client.name), client._on_tokens)
        await client.bus.subscribe(client.subjects.event(client.name), client._on_event)
        await client.bus.flush()
        client._beating = asyncio.create_task(client._beats())
        return client

    async def spy(self) -> None:
        await self.bus.subscribe(self.subjects.everything, lambda payload, _: self.seen.append(decode(payload)))
        await self.bus.flush()

    async def close(self) -> None:
        if self._beating is not None:
            self._beating.cancel()
        await self.bus.close()

    def _on_beat(self, payload: bytes, _: str) -> None:
        message = decode(payload)
        assert isinstance(message, SchedulerBeat)
        if self.beat is None or message.epoch >= self.beat.epoch:
            self.beat = message

    def _on_tokens(self, payload: bytes, _: str) -> None:
        message = decode(payload)
        assert isinstance(message, TokenBatch)
        for entry in message.entries:
            self._take(entry, message.worker)

    def _take(self, entry: TokenEntry, worker: str) -> None:
        key = entry.request_id, entry.choice
        got = self.tokens.setdefault(key, [])
        if entry.offset > len(got) and self._worker_of.get(key, worker) != worker:
            self._early.setdefault(key, []).append((entry, worker))  # it has moved, and overtaken its last tokens there
            return
        assert entry.offset == len(got), f"{entry.request_id}: offset {entry.offset}, have {len(got)}"
        got += entry.tokens
        self._worker_of[key] = worker
        if entry.end:
            assert entry.count == len(got)
            self.ends[key] = entry.end
            self.live.pop(entry.request_id, None)
        for early, other in self._early.pop(key, []):
            self._take(early, other)

    def _on_event(self, payload: bytes, _: str) -> None:
        message = decode(payload)
        assert isinstance(message, RequestEvent)
        self.events.append(message)
        self.live.pop(message.request_id, None)

    async def _beats(self) -> None:
        while True:
            epoch = self.beat.epoch if self.beat else 0
            beat = GatewayBeat(self.name, epoch, list(self.live.items()))
            await self.bus.publish(self.subjects.beat("gateway", self.name), encode(beat))
            await asyncio.sleep(0.5)

    async def ready(self, workers: int = 1) -> SchedulerBeat:
        await until(lambda: self.beat and sum(m.workers for m in self.beat.models) >= workers, "ready workers")
        assert self.beat is not None
        return self.beat

    async def submit(
        self, request_id: str, prompt: list[int], max_tokens: int, *, seed: int = 1, n: int = 1,
        temperature: float = 1.0, ignore_eos: bool = True, traceparent: str = "", adapter: str = "",
        pool: str = "",
    ) -> SubmitReply:  # fmt: skip
        assert self.beat is not None
        submit = Submit(
            request_id=request_id,
            attempt=1,
            gateway=self.name,
            model=self.beat.models[0].name,
            prompt=pack_tokens(prompt),
            sampling=Sampling(seed=seed, max_tokens=max_tokens, ignore_eos=ignore_eos, temperature=temperature),
            arrival_ns=time.time_ns(),
            n=n,
            traceparent=traceparent,
            adapter=adapter,
            pool=pool,
        )
        self.live[request_id] = 1
        subject = self.subjects.submit(submit.model, self.beat.epoch)
        reply = decode(await self.bus.request(subject, encode(submit), timeout_s=10))
        assert isinstance(reply, SubmitReply)
        if reply.outcome is not Outcome.ACCEPTED:
            self.live.pop(request_id, None)
        return reply

    async def cancel(self, request_id: str) -> None:
        assert self.beat is not None
        self.live.pop(request_id, None)
        await self.bus.publish(self.subjects.cancel(self.beat.epoch), encode(Cancel(request_id, 1)))

    async def ended(self, *request_ids: str) -> None:
        await until(
            lambda: all(any(key[0] == name for key in self.ends) for name in request_ids), f"ends of {request_ids}"
        )
