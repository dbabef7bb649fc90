"""What traces and metrics cost: CPU-seconds of all processes for 1,000 tokens, with them and without.

    python benchmarks/observability_cost.py [--restarts 10] [--pairs 5] [--sampling 0.1] [--what both]
    python benchmarks/observability_cost.py --model default --streams 16 --tokens 48 [--dtype bfloat16]

Two whole meshes run side by side, each with its own NATS server, scheduler, worker and gateway. One exports traces at
the default sampling to an OTLP/HTTP receiver and is scraped every five seconds; in the other no trace is made, and
booking a metric does nothing (but for adding to a plain number). ``--what`` compares one of the two alone, or
``nothing``: by how much two meshes without either differ is what the method cannot tell.

The worker is a simulated one, which computes nothing: the cost is then a share of what the mesh itself takes, the
harshest reading. With ``--model`` it is a real one, and its forward passes count as they do for whoever pays for them.

A round opens ``--streams`` chat streams and reads them to their ends. ``--order turns`` loads the meshes in turns, the
order alternating from pair to pair: right for a machine that does nothing else. ``--order together`` loads both at the
same time, so that whatever else the machine does takes from both alike.

Two meshes without either differ all the same, by as much as two per cent for as long as they live: processes settle
into different rhythms. So they are started anew ``--restarts`` times. CPU is the four processes' own time (user and
system, all threads, in ns), exports and scrapes included. Each start gives one ratio, over all of its rounds; the cost
is their geometric mean with its 95 % confidence interval (Student's t over the logarithms).
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import math
import os
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from gateway_sse import free_port, write_tokenizer

from headrace.models import ModelError, resolve_model
from headrace.nats_server import NatsServer

SERVICES = ("scheduler", "worker", "gateway")
SCRAPE_EVERY_S = 5.0
SETTLE_S = 0.3
WARM_S = 6.0  # the first scrape and the first export load code and open connections, once in a process's life
START_S = 120.0
SIMULATED = ("--simulate", "--simulate-vocab-size", "8", "--simulate-base-us", "4000", "--simulate-token-us", "1")
MODEL = "bench"
T_975 = {
    2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 7: 2.365, 9: 2.262, 11: 2.201, 14: 2.145, 19: 2.093, 24: 2.064, 29: 2.045,
    39: 2.023,
}  # fmt: skip


def serve(service: str, metrics: bool, argv: list[str]) -> int:
    """A service; without ``metrics`` booking one does nothing."""
    main = __import__(f"{service}.__main__", fromlist=["main"]).main
    if not metrics:
        book_nothing()
    return int(main(argv))


def book_nothing() -> None:
    import prometheus_client

    from observability import lean_metrics

    def nothing(*_: object, **__: object) -> None: ...

    for kind, methods in (
        (prometheus_client.Counter, ("inc",)),
        (prometheus_client.Gauge, ("inc", "dec", "set")),
        (prometheus_client.Histogram, ("observe",)),
        (lean_metrics.LeanHistogram, ("observe",)),
    ):
        for method in methods:
            setattr(kind, method, nothing)


class Receiver:
    """Takes whatever is exported to it, and counts the requests."""

    def __init__(self) -> None:
        receiver = self
        self.exports = 0

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                self.rfile.read(int(self.headers["content-length"]))
                receiver.exports += 1
                self.send_response(200)
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, *_: object) -> None: ...

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()


class Mesh:
    """Four processes; ``observed`` with what is compared, else without traces and metrics."""

    def __init__(
        self, folder: Path, model: Path, worker: list[str], observed: bool, endpoint: str, sampling: float, what: str
    ) -> None:
        """``folder`` takes its logs; ``worker``: how its worker is started, beside the names."""
        self.nats = NatsServer()
        self.observed = observed
        traces = observed and what in ("both", "traces")
        metrics = observed and what in ("both", "metrics")
        self._logs: dict[str, Path] = {}
        self.port = free_port()
        quiet = subprocess.DEVNULL
        self.processes = {"nats": subprocess.Popen(self.nats.command, stdin=quiet, stdout=quiet, stderr=quiet)}
        self.nats.wait_ready(lambda: self.processes["nats"].poll() is None)
        every = ["--metrics-port", "0"]
        if traces:
            every += ["--otlp-endpoint", endpoint, "--trace-sampling", str(sampling)]
        own = {
            "scheduler": ["--max-num-seqs", "256"],
            "worker": [*worker, "--served-model-name", MODEL],
            "gateway": ["--model", str(model), "--served-model-name", MODEL, "--port", str(self.port)],
        }  # fmt: skip
        env = {key: value for key, value in os.environ.items() if not key.startswith("HEADRACE_")}
        env |= {"HEADRACE_NATS": self.nats.url, "HEADRACE_NATS_TOKEN": self.nats.token}
        for service in SERVICES:
            command = [sys.executable, __file__, "--serve", service, "with" if metrics else "without"]
            self._logs[service] = folder / f"{service}-{observed}.log"
            with self._logs[service].open("wb") as log:
                self.processes[service] = subprocess.Popen(
                    [*command, *every, *own[service]], env=env, stdin=quiet, stdout=log, stderr=log
                )

    def wait_ready(self) -> None:
        deadline = time.monotonic() + START_S
        while True:
            url = f"http://127.0.0.1:{self.port}/ready"
            with contextlib.suppress(OSError), urllib.request.urlopen(url, timeout=2):
                return
            if time.monotonic() > deadline:
                sys.exit("\n".join(log.read_text() for log in self._logs.values()))
            time.sleep(0.05)

    def cpu_s(self) -> dict[str, float]:
        """CPU seconds of each process so far, by its own clock (Linux)."""
        return {name: time.clock_gettime(~process.pid << 3 | 2) for name, process in self.processes.items()}

    def scrape_forever(self) -> None:
        """As Prometheus does, from a thread of its own."""
        urls = []
        for log in self._logs.values():
            found = re.search(r"metrics on (http://[^\s\"]+)", log.read_text())
            assert found is not None
            urls.append(found.group(1))

        def scrape() -> None:
            while True:
                for url in urls:
                    with contextlib.suppress(OSError), urllib.request.urlopen(url, timeout=5) as answer:
                        answer.read()
                time.sleep(SCRAPE_EVERY_S)

        threading.Thread(target=scrape, daemon=True).start()

    def close(self) -> None:
        for process in reversed(self.processes.values()):
            process.terminate()
        for process in self.processes.values():
            process.wait(40)
        self.nats.close()


async def stream(port: int, number: int, tokens: int) -> None:
    """One chat stream, read to its end."""
    body = {
        "model": MODEL, "messages": [{"role": "user", "content": f"the {number}"}], "max_tokens": tokens,
        "seed": number, "ignore_eos": True, "stream": True,
    }  # fmt: skip
    payload = json.dumps(body).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(
        b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-type: application/json\r\n"
        b"content-length: %d\r\n\r\n%s" % (len(payload), payload)
    )
    tail = b""
    while piece := await reader.read(1 << 16):
        tail = (tail + piece)[-64:]
    writer.close()
    if b"[DONE]" not in tail:
        sys.exit(f"a stream broke off: {tail!r}")


async def load(port: int, streams: int, tokens: int) -> None:
    async with asyncio.TaskGroup() as group:
        for number in range(streams):
            group.create_task(stream(port, number, tokens))


@dataclass(frozen=True)
class Round:
    """CPU seconds for 1,000 tokens, by process."""

    cpu_s: dict[str, float]

    @property
    def total_s(self) -> float:
        return sum(self.cpu_s.values())


def measured(loaded: list[Mesh], streams: int, tokens: int) -> dict[bool, Round]:
    """By whether the mesh is the observed one. Several meshes are loaded at the same time."""

    async def all_at_once() -> None:
        await asyncio.gather(*(load(mesh.port, streams, tokens) for mesh in loaded))

    before = [mesh.cpu_s() for mesh in loaded]
    asyncio.run(all_at_once())
    time.sleep(SETTLE_S)
    after = [mesh.cpu_s() for mesh in loaded]
    return {
        mesh.observed: Round({name: (now[name] - then[name]) / (streams * tokens) * 1000 for name in now})
        for mesh, then, now in zip(loaded, before, after, strict=True)
    }


def mean(rounds: list[Round]) -> Round:
    return Round({name: statistics.fmean(one.cpu_s[name] for one in rounds) for name in rounds[0].cpu_s})


def interval(ratios: list[float]) -> tuple[float, float, float]:
    """Geometric mean of ratios, and its 95 % confidence interval."""
    logs = [math.log(ratio) for ratio in ratios]
    degrees = max(known for known in T_975 if known < len(logs))
    half = T_975[degrees] * statistics.stdev(logs) / math.sqrt(len(logs))
    middle = statistics.fmean(logs)
    return math.exp(middle), math.exp(middle - half), math.exp(middle + half)


@contextlib.contextmanager
def meshes(
    model: Path | None, dtype: str, sampling: float, what: str, observed_first: bool
) -> Iterator[tuple[Mesh, Mesh, Receiver]]:
    """The observed mesh and the other one. Without a ``model`` their workers are simulated."""
    receiver = Receiver()
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as closing:
        folder = Path(name)
        worker = [*SIMULATED]
        if model is None:
            write_tokenizer(folder)
        else:
            worker = ["--model", str(model), "--dtype", dtype]
        both = {}
        for observed in (observed_first, not observed_first):
            both[observed] = Mesh(folder, model or folder, worker, observed, receiver.url, sampling, what)
            closing.callback(both[observed].close)
        for mesh in both.values():
            mesh.wait_ready()
        if what in ("both", "metrics"):
            both[True].scrape_forever()
        yield both[True], both[False], receiver


def main() -> int:
    if sys.argv[1:2] == ["--serve"]:
        return serve(sys.argv[2], sys.argv[3] == "with", sys.argv[4:])
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--restarts", type=int, default=10, help="starts of both meshes, at least 3 (default: 10)")
    parser.add_argument("--pairs", type=int, default=5, help="pairs of rounds of a start (default: 5)")
    parser.add_argument("--streams", type=int, default=32, help="streams of a round (default: 32)")
    parser.add_argument("--tokens", type=int, default=300, help="tokens of a stream (default: 300)")
    parser.add_argument("--sampling", type=float, default=0.1, help="share of requests traced (default: 0.1)")
    parser.add_argument("--order", choices=("turns", "together"), default="turns")
    parser.add_argument("--what", choices=("both", "traces", "metrics", "nothing"), default="both")
    parser.add_argument("--model", default="", help="as of headrace up: a real worker's (default: a simulated worker)")
    parser.add_argument("--dtype", default="auto", help="of a real worker (default: auto)")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    if args.restarts < 3:
        parser.error("--restarts must be at least 3")
    try:
        model = Path(resolve_model(args.model)[0]) if args.model else None
    except ModelError as error:
        parser.error(str(error))
    pairs: list[tuple[Round, Round]] = []  # one for each start
    exports = 0
    for start in range(args.restarts):
        with meshes(model, args.dtype, args.sampling, args.what, start % 2 == 0) as (on, off, receiver):
            warm_until_s = time.monotonic() + WARM_S
            while time.monotonic() < warm_until_s:
                measured([on, off], args.streams, args.tokens)
            rounds: dict[bool, list[Round]] = {True: [], False: []}
            for number in range(args.pairs):
                order = [on, off] if number % 2 else [off, on]
                for loaded in [order] if args.order == "together" else [order[:1], order[1:]]:
                    for observed, found in measured(loaded, args.streams, args.tokens).items():
                        rounds[observed].append(found)
            pairs.append((mean(rounds[True]), mean(rounds[False])))
            exports += receiver.exports
    ratio, low, high = interval([observed.total_s / bare.total_s for observed, bare in pairs])
    by_process = {
        name: (statistics.median(a.cpu_s[name] for a, _ in pairs), statistics.median(b.cpu_s[name] for _, b in pairs))
        for name in pairs[0][0].cpu_s
    }
    if args.json:
        print(json.dumps({
            "model": args.model, "restarts": args.restarts, "pairs": args.pairs, "what": args.what,
            "streams": args.streams, "tokens": args.tokens, "sampling": args.sampling, "exports": exports,
            "cost": ratio - 1, "low": low - 1, "high": high - 1,
            "cpu_s_per_1000_tokens": {name: {"on": on_s, "off": off_s} for name, (on_s, off_s) in by_process.items()},
        }))  # fmt: skip
        return 0
    print(f"{args.restarts} starts, {args.pairs} pairs of {args.streams} streams of {args.tokens} tokens: {args.what}")
    print(f"{'CPU-ms for 1,000 tokens':<26}{'on':>9}{'off':>9}")
    for name, (on_s, off_s) in by_process.items():
        print(f"  {name:<24}{on_s * 1e3:>9.2f}{off_s * 1e3:>9.2f}")
    totals = [statistics.median(one.total_s for one in side) for side in zip(*pairs, strict=True)]
    print(f"  {'all':<24}{totals[0] * 1e3:>9.2f}{totals[1] * 1e3:>9.2f}")
    print(f"cost: {ratio - 1:+.2%} (95 % interval {low - 1:+.2%} to {high - 1:+.2%}); {exports} exports")
    return 0


if __name__ == "__main__":
    sys.exit(main())
