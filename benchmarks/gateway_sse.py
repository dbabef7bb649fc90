"""What a streamed token costs in the gateway, beside a bare Starlette app that streams constants.

    python benchmarks/gateway_sse.py [--streams 64,512] [--steps 100] [--step-ms 50] [--rounds 5] [--cold] [--json]

A gateway process (``python -m gateway``) serves chat streams. Its scheduler and its worker are this process: every
request is accepted, and each step publishes one TokenBatch over a real NATS server with one token for each open
stream, as a worker does. The bare app runs under uvicorn with the same options, in a process of its own; each of its
streams yields one constant frame, of the gateway's size, per step. Both servers have one core and the rest of the
machine belongs to this process, whose clients only count bytes.

*paced*: a step each ``--step-ms``. *flat out*: a step as soon as all streams have the tokens of the one before.
CPU is the server process's own time (user and system) over the tokens that clients got, once all streams are open and
until the last token has come: opening and closing are left out. Rounds alternate between the servers; medians.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import resource
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

from headrace.nats_server import NatsServer
from shared.bus import NatsBus
from shared.messages import (
    ModelInfo,
    Outcome,
    SchedulerBeat,
    Submit,
    SubmitReply,
    TokenBatch,
    TokenEntry,
    decode,
    encode,
)
from shared.subjects import Subjects

MODEL = "bench"
TOKEN, TOKEN_TEXT = 3, b" the"
FRAME = (
    b'data: {"id":"chatcmpl-0123456789abcdef0123456789abcdef","object":"chat.completion.chunk","created":1700000000,'
    b'"model":"bench","choices":[{"index":0,"delta":{"content":" the"},"logprobs":null,"finish_reason":null}]}\n\n'
)
FRAME_MARK = b'"content":" '
MAX_LEN = 1 << 20
START_S = 20.0  # for a process to come up, or all streams of a round to open
ROUND_S = 300.0


@dataclass(frozen=True, slots=True)
class Figures:
    """One round of one server."""

    server: str
    streams: int
    pace: str
    cpu_us_per_token: float
    tokens_per_s: float  # that clients got, on the clock
    frames_per_token: float  # below 1: tokens came faster than they could be sent, and were merged
    kib_per_stream: float  # memory that the process grew by as the streams opened; 0 if it had had as many before


# --- the bare app (its own process) ---------------------------------------------------------------------------------


def serve_bare(port: int) -> None:
    """Serve constants: one frame a stream for each byte on stdin."""
    import uvicorn
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response, StreamingResponse
    from starlette.routing import Route

    ticks = 0
    wake = asyncio.Event()

    def on_tick() -> None:
        nonlocal ticks, wake
        ticks += len(os.read(0, 4096))
        wake.set()
        wake = asyncio.Event()

    async def frames(count: int) -> Any:
        sent, began = 0, ticks
        while sent < count:
            while ticks - began > sent:
                sent += 1
                yield FRAME
            if sent < count:
                await wake.wait()
        yield b"data: [DONE]\n\n"

    async def chat(request: Request) -> Response:
        count = (await request.json())["max_tokens"]
        return StreamingResponse(frames(count), media_type="text/event-stream")

    async def main() -> None:
        asyncio.get_running_loop().add_reader(0, on_tick)
        app = Starlette(routes=[Route("/v1/chat/completions", chat, methods=["POST"])])
        config = uvicorn.Config(
            app, host="127.0.0.1", port=port, http="httptools", ws="none", lifespan="off", log_config=None,
            access_log=False, server_header=False, backlog=2048,
        )  # fmt: skip
        await uvicorn.Server(config).serve()

    import uvloop

    uvloop.run(main())


# --- the driver: clients, scheduler and worker ----------------------------------------------------------------------


class Client(asyncio.Protocol):
    """One stream's reader: counts tokens and frames, keeps nothing."""

    def __init__(self, body: bytes) -> None:
        self._request = (
            b"POST /v1/chat/completions HTTP/1.1\r\nhost: bench\r\ncontent-type: application/json\r\n"
            b"content-length: %d\r\n\r\n%s" % (len(body), body)
        )
        self._rest = b""
        self.tokens = 0
        self.frames = 0
        self.done = False
        self.answered = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self.transport = transport
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        if not self.answered:
            if not data.startswith(b"HTTP/1.1 200"):
                raise SystemExit(f"not served: {data[:400]!r}")
            self.answered = True
        seen = self._rest + data  # what a cut may have split is found, and nothing is counted twice
        self.tokens += seen[-len(data) - len(TOKEN_TEXT) + 1 :].count(TOKEN_TEXT)
        self.frames += seen[-len(data) - len(FRAME_MARK) + 1 :].count(FRAME_MARK)
        self.done = self.done or b"[DONE]" in seen
        self._rest = seen[-16:]


class Mesh:
    """Scheduler and worker: accepts everything, and gives each open stream one token a step."""

    def __init__(self, bus: NatsBus) -> None:
        self._bus = bus
        self._subjects = Subjects("default")
        self._open: list[Submit] = []
        self._replies: list[tuple[str, bytes]] = []
        self._step = 0

    async def start(self) -> None:
        await self._bus.subscribe(self._subjects.submit_all(1), self._on_submit)

    @property
    def accepted(self) -> int:
        return len(self._open)

    async def run(self) -> None:
        """Beats, and replies to what was submitted."""
        last = 0.0
        while True:
            if time.monotonic() - last > 0.3:
                last = time.monotonic()
                beat = SchedulerBeat("bench", 1, [ModelInfo(MODEL, MAX_LEN, 8, 1)])
                await self._bus.publish(self._subjects.beat("scheduler", "bench"), encode(beat))
            replies, self._replies = self._replies, []
            for subject, payload in replies:
                await self._bus.publish(subject, payload)
            await asyncio.sleep(0.002)

    def clear(self) -> None:
        self._open.clear()
        self._step = 0

    async def step(self) -> None:
        by_gateway: dict[str, list[TokenEntry]] = {}
        position = self._step
        for submit in self._open:
            last = position + 1 == submit.sampling.max_tokens
            entry = TokenEntry(
                submit.request_id,
                submit.attempt,
                0,
                position,
                [TOKEN],
                "length" if last else "",
                position + 1 if last else 0,
            )
            by_gateway.setdefault(submit.gateway, []).append(entry)
        self._step += 1
        for gateway, entries in by_gateway.items():
            batch = TokenBatch(1, "worker", 1, self._step, entries)
            await self._bus.publish(self._subjects.tokens(gateway), encode(batch))

    def _on_submit(self, payload: bytes, reply: str) -> None:
        submit = decode(payload)
        assert isinstance(submit, Submit)
        self._open.append(submit)
        self._replies.append((reply, encode(SubmitReply(Outcome.ACCEPTED, 1))))


@dataclass(slots=True)
class Server:
    name: str
    process: subprocess.Popen[bytes]
    port: int
    step: Callable[[], Any]

    def cpu_s(self) -> float:
        """User and system time of the whole process (clock_getcpuclockid(3): the clock of a process id)."""
        return time.clock_gettime((~self.process.pid << 3) | 2)

    def rss_mib(self) -> float:
        pages = int(Path(f"/proc/{self.process.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE") / (1 << 20)


async def until(condition: Callable[[], bool], every_s: float = 0.0) -> None:
    while not condition():  # noqa: ASYNC110 - what polling costs is this process's, and not measured
        await asyncio.sleep(every_s)


def has_tokens(clients: list[Client], count: int) -> Callable[[], bool]:
    return lambda: sum(client.tokens for client in clients) >= count


async def measure(server: Server, mesh: Mesh, streams: int, steps: int, step_s: float) -> Figures:
    """One round. ``step_s`` 0: flat out."""
    loop = asyncio.get_running_loop()
    mesh.clear()
    body = json.dumps(
        {"model": MODEL, "messages": [{"role": "user", "content": "x"}], "max_tokens": steps, "stream": True}
    ).encode()
    before_mib = server.rss_mib()
    clients: list[Client] = []
    for _ in range(streams):
        _, client = await loop.create_connection(lambda: Client(body), "127.0.0.1", server.port)
        clients.append(client)
    async with asyncio.timeout(START_S):
        await until(lambda: all(client.answered for client in clients), 0.01)
    await asyncio.sleep(0.2)  # so that opening is over on the server's side too
    kib_per_stream = (server.rss_mib() - before_mib) * 1024 / streams
    cpu_s, began_s = server.cpu_s(), time.perf_counter()
    async with asyncio.timeout(ROUND_S):
        for step in range(steps):
            if step_s:
                await asyncio.sleep(max(0.0, began_s + step * step_s - time.perf_counter()))
            else:
                await until(has_tokens(clients, streams * step))
            await server.step()
        await until(lambda: all(client.done for client in clients), 0.001)
    took_s, cpu_s = time.perf_counter() - began_s, server.cpu_s() - cpu_s
    tokens = sum(client.tokens for client in clients)
    assert tokens == streams * steps, f"{server.name}: {tokens} tokens came instead of {streams * steps}"
    frames = sum(client.frames for client in clients)
    for client in clients:
        client.transport.close()
    pace = "paced" if step_s else "flat out"
    return Figures(server.name, streams, pace, cpu_s / tokens * 1e6, tokens / took_s, frames / tokens, kib_per_stream)


# --- processes ------------------------------------------------------------------------------------------------------


def write_tokenizer(folder: Path) -> None:
    """A byte-level tokenizer of a few words, enough for a gateway to start with."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    vocab = {"<|end|>": 0, "x": 1, "Ġ": 2, "Ġthe": TOKEN, "t": 4, "h": 5, "e": 6, "th": 7}
    tokenizer = Tokenizer(models.BPE(vocab, [], unk_token="x"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|end|>", "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


@contextlib.contextmanager
def process(command: list[str], cores: set[int], **options: Any) -> Iterator[subprocess.Popen[bytes]]:
    child = subprocess.Popen(command, preexec_fn=lambda: os.sched_setaffinity(0, cores), **options)
    try:
        yield child
    finally:
        child.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(10)
        child.kill()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


async def until_listening(port: int, child: subprocess.Popen[bytes], path: bytes) -> None:
    """Until ``GET path`` answers anything but 503."""
    async with asyncio.timeout(START_S):
        while True:
            if child.poll() is not None:
                raise SystemExit(f"{child.args!r} ended with {child.returncode}")
            with contextlib.suppress(OSError):
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
                writer.write(b"GET %b HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n" % path)
                status = await reader.read(12)
                writer.close()
                if status and status != b"HTTP/1.1 503":
                    return
            await asyncio.sleep(0.05)


async def compare(arguments: argparse.Namespace) -> list[Figures]:
    cores = sorted(os.sched_getaffinity(0))
    server_cores, driver_cores = {cores[0]}, set(cores[1:] or cores)
    os.sched_setaffinity(0, driver_cores)
    with contextlib.ExitStack() as stack:
        nats = NatsServer()
        stack.callback(nats.close)
        broker = stack.enter_context(process(nats.command, driver_cores, stderr=subprocess.DEVNULL))
        nats.wait_ready(lambda: broker.poll() is None)
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        write_tokenizer(folder)
        bus = await NatsBus.connect(nats.url, "bench", nats.token)
        mesh = Mesh(bus)
        await mesh.start()
        ports = free_port(), free_port()
        gateway = stack.enter_context(
            process(
                [sys.executable, "-m", "gateway", "--nats", nats.url, "--model", str(folder), "--served-model-name",
                 MODEL, "--port", str(ports[0]), "--metrics-port", "0", *arguments.gateway],
                server_cores, stderr=subprocess.DEVNULL, env={**os.environ, "HEADRACE_NATS_TOKEN": nats.token},
            )
        )  # fmt: skip
        bare = stack.enter_context(
            process([sys.executable, __file__, "--serve-bare", str(ports[1])], server_cores, stdin=subprocess.PIPE)
        )
        pipe: IO[bytes] | None = bare.stdin
        assert pipe is not None

        async def tick() -> None:
            os.write(pipe.fileno(), b".")

        servers = [Server("bare app", bare, ports[1], tick), Server("gateway", gateway, ports[0], mesh.step)]
        background = asyncio.create_task(mesh.run())
        await until_listening(ports[0], gateway, b"/ready")
        await until_listening(ports[1], bare, b"/")
        if arguments.attach:
            print(f"gateway: process {gateway.pid}", file=sys.stderr)
        figures = []
        for number in range(arguments.rounds + (not arguments.cold)):  # the first only warms up
            for streams in arguments.streams:
                for step_s in (arguments.step_ms / 1000, 0.0):
                    for server in servers:
                        steps = arguments.steps if number or arguments.cold else 10
                        measured = await measure(server, mesh, streams, steps, step_s)
                        if number or arguments.cold:
                            figures.append(measured)
        background.cancel()
        await bus.close()
        return figures


def table(figures: list[Figures]) -> str:
    lines = [
        "| streams | pace | server | CPU us/token | ratio | tokens/s of a core | on the clock | frames/token "
        "| KiB/stream |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for streams, pace in dict.fromkeys((one.streams, one.pace) for one in figures):
        base = 0.0
        for server in dict.fromkeys(one.server for one in figures):
            rows = [one for one in figures if (one.streams, one.pace, one.server) == (streams, pace, server)]
            cpu_us = statistics.median(one.cpu_us_per_token for one in rows)
            rate = statistics.median(one.tokens_per_s for one in rows)
            frames = statistics.median(one.frames_per_token for one in rows)
            base = base or cpu_us
            lines.append(
                f"| {streams} | {pace} | {server} | {cpu_us:.1f} | {cpu_us / base:.2f} | {1e6 / cpu_us:,.0f} "
                f"| {rate:,.0f} | {frames:.2f} | {max(one.kib_per_stream for one in rows):.0f} |"
            )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=lambda text: [int(part) for part in text.split(",")], default=[64, 512])
    parser.add_argument("--steps", type=int, default=100, help="tokens of each stream")
    parser.add_argument("--step-ms", type=float, default=50.0, help="time between steps where they are paced")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--cold", action="store_true", help="no round to warm up: for the memory of each stream")
    parser.add_argument("--json", action="store_true", help="every round, as JSON lines")
    parser.add_argument("--attach", action="store_true", help="print the gateway's process id, for a profiler")
    parser.add_argument("--serve-bare", type=int, metavar="PORT", help=argparse.SUPPRESS)
    parser.add_argument("gateway", nargs="*", help="more options for the gateway, behind --")
    arguments = parser.parse_args()
    if arguments.serve_bare is not None:
        serve_bare(arguments.serve_bare)
        return
    import uvloop

    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))  # one for each stream, here and in each server
    figures = uvloop.run(compare(arguments))
    if arguments.json:
        for one in figures:
            print(json.dumps(asdict(one)))
    else:
        print(table(figures))


if __name__ == "__main__":
    main()
