"""Acceptance cases of kinds O and T, operations and NATS: B22 to B26, on simulated workers, whose tokens are known."""

from __future__ import annotations

import asyncio
import json
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from loopback_http import NO_AUTHORITIES
from mesh_stack import BusClient, until
from oracles import Streamed, open_stream, refused, streamed, survival
from tiny_models import make_tokenizer
from whole_mesh import SIMULATED, VOCAB_SIZE, Mesh, at_once, eventually, running_mesh

from shared.messages import Outcome, StepPlan, Submit, SubmitReply, decode, encode
from worker.simulated import expected_tokens

pytestmark = pytest.mark.mesh

HF = make_tokenizer()
HELD_S = 2.0
"""How long a new request waits for a worker or scheduler that was there just now."""
RESUME_TIMEOUT_S = 2.0
BOUND_S = RESUME_TIMEOUT_S + 8.0
"""Within which a request of an impatient gateway ends once a component has died and does not come back."""


def expected(prompt: str, seed: int, count: int) -> str:
    text: str = HF.decode(expected_tokens(HF.encode(prompt), seed, count, VOCAB_SIZE), skip_special_tokens=True)
    return text


class Load:
    """Streams that are open while a test does something to the mesh. Each has its seed and its known text."""

    def __init__(self, mesh: Mesh, streams: int, max_tokens: int) -> None:
        self.mesh = mesh
        self.max_tokens = max_tokens
        self._pool = ThreadPoolExecutor(streams)
        self._begun = [threading.Event() for _ in range(streams)]
        self._streams: list[Future[tuple[Streamed, float]]] = [
            self._pool.submit(self._read, index) for index in range(streams)
        ]
        for index, event in enumerate(self._begun):
            eventually(lambda i=index, e=event: e.is_set() or self._streams[i].done(), "a first token")

    def _read(self, index: int) -> tuple[Streamed, float]:
        got = Streamed()
        body = {"prompt": f"open {index}", "seed": index, "max_tokens": self.max_tokens, "ignore_eos": True}
        with open_stream(self.mesh, **body) as lines:
            for line in lines:
                got.add(line)
                self._begun[index].set()
        return got, time.monotonic()

    def whole(self) -> None:
        """Every stream ends with its exact text."""
        for index, stream in enumerate(self._streams):
            got, _ = stream.result()
            assert (got.text(), got.finish(), got.done) == (self._want(index), "length", True)
        self._pool.shutdown()

    def interrupted(self, since_s: float) -> None:
        """Every stream ends within the bound, with an error behind a part without holes."""
        for index, stream in enumerate(self._streams):
            got, ended_s = stream.result()
            assert len(got.errors) == 1 and ended_s - since_s < BOUND_S
            assert not got.finishes and not got.done
            assert self._want(index).startswith(got.text().rstrip("\ufffd"))
            assert set(got.errors[0]) >= {"message", "type", "param", "code"}
        self._pool.shutdown()

    def _want(self, index: int) -> str:
        return expected(f"open {index}", index, self.max_tokens)


@pytest.fixture(scope="module")
def fragile(tiny: Path) -> Iterator[Mesh]:
    """A simulated worker, 4 ms a step; every test leaves it serving. Its gateway waits long for what has died."""
    patient = ("--resume-timeout-s", "120")
    with running_mesh(tiny, worker=(*SIMULATED, "--simulate-base-us", "4000"), gateway=patient) as mesh:
        yield mesh


@pytest.fixture(scope="module")
def impatient(fragile: Mesh, tiny: Path) -> Iterator[Mesh]:
    """Another gateway of the same mesh, which gives up soon."""
    flags = ("--resume-timeout-s", str(RESUME_TIMEOUT_S))
    mesh = Mesh(fragile.nats, tiny, gateway=flags, workers=0, beside=fragile)
    mesh.wait_ready()
    yield mesh
    mesh.close()


# --- B22 --------------------------------------------------------------------------------------------------------------


def check_a_death(mesh: Mesh, impatient: Mesh, victim: str) -> None:
    """Streams go on with their exact text once ``victim`` is back; where it is not in time, they end with an error."""
    load, given_up = Load(mesh, 5, 1000), Load(impatient, 2, 1000)
    body = {"prompt": "not streamed", "seed": 6, "max_tokens": 1000, "ignore_eos": True}
    with ThreadPoolExecutor(2) as pool:
        whole, half = pool.submit(mesh.post, **body), pool.submit(impatient.post, **body)
        eventually(lambda: mesh.metrics(mesh.scheduler)["vllm:num_requests_running"] == 9, "all run")
        (mesh.scheduler if victim == "scheduler" else mesh.workers[0]).kill()
        since_s = time.monotonic()
        mesh.wait_ready(False)
        for _ in range(3):
            began = time.monotonic()
            refused(mesh.post(prompt="x"), 503)
            if victim == "worker":
                assert time.monotonic() - began < HELD_S + 1
        given_up.interrupted(since_s)
        refused(half.result(), 503)
        assert mesh.http.get("/health").status_code == impatient.http.get("/health").status_code == 200
        if victim == "scheduler":
            mesh.start_scheduler()
        else:
            mesh.workers[0] = mesh.start_worker()
        load.whole()
        assert whole.result().json()["choices"][0]["text"] == expected("not streamed", 6, 1000)
    mesh.wait_ready()
    assert mesh.text(prompt="again", seed=4, max_tokens=5, ignore_eos=True) == expected("again", 4, 5)
    mesh.quiescence()


def test_b22_a_worker_dies(fragile: Mesh, impatient: Mesh) -> None:
    check_a_death(fragile, impatient, "worker")


def test_b22_the_scheduler_dies(fragile: Mesh, impatient: Mesh) -> None:
    check_a_death(fragile, impatient, "scheduler")


# --- B26 --------------------------------------------------------------------------------------------------------------


def test_b26_a_request_that_comes_twice_runs_once(fragile: Mesh) -> None:
    finished = 'headrace_gateway_requests_total{endpoint="completions",outcome="finished"}'
    replica = fragile.start_worker()
    prompt, count = "twice", 600  # some 2.5 s: longer than the gateway waits for a reply before it asks again

    async def scenario(client: BusClient) -> None:
        await client.ready(workers=2)
        await client.spy()
        before = fragile.metrics(fragile.gateway)[finished]
        body = {"prompt": prompt, "seed": 8, "max_tokens": count, "ignore_eos": True}
        asked = asyncio.create_task(asyncio.to_thread(streamed, fragile, **body))
        await until(lambda: any(isinstance(message, StepPlan) for message in client.seen), "its first step")
        (submit,) = [message for message in client.seen if isinstance(message, Submit)]
        assert client.beat is not None
        for _ in range(3):
            subject = client.subjects.submit(submit.model, client.beat.epoch)
            reply = decode(await client.bus.request(subject, encode(submit), timeout_s=10))
            assert isinstance(reply, SubmitReply) and reply.outcome is Outcome.DUPLICATE
        got = await asked
        assert (got.text(), got.finish()) == (expected(prompt, 8, count), "length")
        starts = [start for plan in client.seen if isinstance(plan, StepPlan) for start in plan.starts]
        assert [start.request_id for start in starts] == [submit.request_id]
        assert fragile.metrics(fragile.gateway)[finished] - before == 1
        reply = decode(await client.bus.request(subject, encode(submit), timeout_s=10))
        assert isinstance(reply, SubmitReply) and reply.outcome is not Outcome.ACCEPTED, "not run again when it is over"

    fragile.on_the_bus(scenario)
    fragile.quiescence()
    assert replica.stop() == 0


def test_b26_an_attempt_that_a_fault_has_ended_does_not_come_back(fragile: Mesh) -> None:
    finished = 'headrace_gateway_requests_total{endpoint="completions",outcome="finished"}'
    prompt, count = "resumed", 900

    async def scenario(client: BusClient) -> None:
        await client.ready()
        await client.spy()
        before = fragile.metrics(fragile.gateway)[finished]
        body = {"prompt": prompt, "seed": 8, "max_tokens": count, "ignore_eos": True}
        asked = asyncio.create_task(asyncio.to_thread(streamed, fragile, **body))

        def submits() -> list[Submit]:
            return [message for message in client.seen if isinstance(message, Submit)]

        def runs(attempt: int) -> bool:
            plans = (message for message in client.seen if isinstance(message, StepPlan))
            return any(start.attempt == attempt for plan in plans for start in plan.starts)

        await until(lambda: runs(1), "its first step")
        await asyncio.to_thread(fragile.workers[0].kill)
        fragile.workers[0] = fragile.start_worker()
        await until(lambda: runs(2), "its first step of the second attempt")
        first = submits()[0]
        assert first.attempt == 1 and client.beat is not None
        for _ in range(3):
            subject = client.subjects.submit(first.model, client.beat.epoch)
            reply = decode(await client.bus.request(subject, encode(first), timeout_s=10))
            assert isinstance(reply, SubmitReply) and reply.outcome is not Outcome.ACCEPTED
        got = await asked
        assert (got.text(), got.finish()) == (expected(prompt, 8, count), "length")
        assert fragile.metrics(fragile.gateway)[finished] - before == 1

    fragile.on_the_bus(scenario)
    fragile.quiescence()


# --- B25 --------------------------------------------------------------------------------------------------------------


def test_b25_nats_is_restarted(fragile: Mesh, impatient: Mesh) -> None:
    load, given_up = Load(fragile, 5, 1000), Load(impatient, 2, 1000)
    fragile.nats.kill()
    given_up.interrupted(time.monotonic())
    fragile.nats.start()
    load.whole()
    fragile.wait_ready()

    def ask(index: int) -> None:
        body = {"prompt": f"new {index}", "seed": index, "max_tokens": 20, "ignore_eos": True}
        eventually(lambda: fragile.post(**body).status_code == 200, "a new request is served")
        assert fragile.text(**body) == expected(f"new {index}", index, 20)

    at_once([lambda index=index: ask(index) for index in range(5)])
    fragile.quiescence()
    assert all(process.popen.poll() is None for process in (fragile.scheduler, *fragile.workers, fragile.gateway))


# --- B23 --------------------------------------------------------------------------------------------------------------


def test_b23_a_taken_port_is_named(fragile: Mesh) -> None:
    second = fragile.start_gateway(fragile.port)
    assert second.popen.wait(20) not in (0, None)
    assert str(fragile.port) in second.output()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        command = [sys.executable, "-m", "scheduler", "--nats", fragile.nats.server.url, "--metrics-port", port]
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    assert done.returncode != 0 and port in done.stderr


def test_b23_sigterm_to_a_worker_and_to_the_scheduler(fragile: Mesh) -> None:
    load = Load(fragile, 3, 400)
    assert fragile.workers[0].stop() == 0
    fragile.wait_ready(False)
    fragile.workers[0] = fragile.start_worker()
    load.whole()
    fragile.wait_ready()
    load = Load(fragile, 3, 400)
    assert fragile.scheduler.stop() == 0
    fragile.start_scheduler()
    load.whole()
    fragile.wait_ready()


def test_b23_sigterm_to_the_gateway(tiny: Path) -> None:
    grace_s = 3
    flags = ("--max-num-seqs", "25")
    worker = (*SIMULATED, "--simulate-base-us", "2000")
    with running_mesh(tiny, scheduler=flags, worker=worker, gateway=("--drain-grace-s", str(grace_s))) as mesh:
        payload = json.dumps({"prompt": "x", "n": 20, "max_tokens": 1900, "ignore_eos": True, "stream": True}).encode()
        with socket.create_connection(("127.0.0.1", mesh.port)) as never_reads, ThreadPoolExecutor(3) as pool:
            head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(payload)}\r\n\r\n"
            never_reads.sendall(head.encode() + payload)

            def load_is(running: int, waiting: int) -> bool:
                load = mesh.metrics(mesh.scheduler)
                return (load["vllm:num_requests_running"], load["vllm:num_requests_waiting"]) == (running, waiting)

            eventually(lambda: load_is(20, 0), "the client that never reads is served")
            load = Load(mesh, 5, 300)
            queued = [pool.submit(mesh.post, prompt="queued", seed=1, max_tokens=9, ignore_eos=True) for _ in range(3)]
            eventually(lambda: load_is(25, 3), "three are queued")
            with httpx.Client(verify=NO_AUTHORITIES, base_url=mesh.url) as kept_open:
                assert kept_open.get("/ready").status_code == 200
                mesh.gateway.popen.terminate()
                since_s = time.monotonic()
                eventually(lambda: kept_open.get("/ready").status_code == 503, "readiness is 503")
                refused(kept_open.post("/v1/completions", json={"prompt": "new"}), 503)
            load.whole()
            for reply in (future.result() for future in queued):
                if reply.status_code == 200:
                    assert reply.json()["choices"][0]["text"] == expected("queued", 1, 9)
                else:
                    refused(reply, 503)
            assert mesh.gateway.popen.wait(30) == 0
            assert time.monotonic() - since_s < grace_s + 5


# --- B24 --------------------------------------------------------------------------------------------------------------


def test_b24_bodies_larger_than_a_message(simulated: Mesh) -> None:
    with survival(simulated):
        load = Load(simulated, 3, 1500)
        began = time.monotonic()
        assert refused(simulated.post(prompt="long " * 600_000), 400, 413)
        assert refused(simulated.post(prompt=[[5] * 2000] * 1025), 400, 413)
        assert time.monotonic() - began < 10, "at once, not when a message was given up"
        prompts = [f"{index:04d} a legal prompt. " + "and on. " * 250 for index in range(1000)]
        reply = simulated.post(prompt=prompts, max_tokens=1, ignore_eos=True)
        if reply.status_code == 200:
            assert [choice["index"] for choice in reply.json()["choices"]] == list(range(1000))
        else:
            refused(reply, 400, 413)
        load.whole()
    assert "nats: reconnected" not in simulated.stack.logs()


def test_b24_an_answer_larger_than_a_message(mesh: Mesh) -> None:
    body = {"prompt": "a big reply", "n": 16, "max_tokens": 120, "logprobs": 5, "ignore_eos": True}
    reply = mesh.post(**body)
    assert reply.status_code == 200 and len(reply.content) > 1 << 18
    for choice in reply.json()["choices"]:
        assert len(choice["logprobs"]["token_logprobs"]) == 120 == len(choice["logprobs"]["top_logprobs"])
    assert "nats: reconnected" not in mesh.stack.logs()
