"""``headrace up`` as a person meets it: real processes, a simulated model, real signals."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from rolling_load import Load, percentile
from tiny_models import make_tiny_model

from headrace.up import look_inside, main

pytestmark = pytest.mark.mesh

DEADLINE_S = 60.0


class Up:
    """One ``headrace up`` in a session of its own, its output in files."""

    def __init__(self, folder: Path, *argv: str) -> None:
        self.output, self.errors = folder / "out", folder / "err"
        # As a person's shell has it: none of the test runner's own settings.
        environ = {name: value for name, value in os.environ.items() if not name.startswith("HEADRACE_")}
        (folder / "run").mkdir(exist_ok=True)
        self.environ = environ | {"TMPDIR": str(folder), "XDG_RUNTIME_DIR": str(folder / "run")}
        with self.output.open("w") as output, self.errors.open("w") as errors:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "headrace", "up", "--metrics-port", "0", *argv],  # the last one given counts
                cwd=folder, env=self.environ, stdout=output, stderr=errors,
                stdin=subprocess.DEVNULL, start_new_session=True,
            )  # fmt: skip

    def wait_for(self, pattern: str) -> str:
        """The first group of ``pattern`` once stdout or stderr has it."""
        deadline = time.monotonic() + DEADLINE_S
        while True:
            text = self.output.read_text() + self.errors.read_text()
            if found := re.search(pattern, text):
                return found[1]
            assert self.process.poll() is None, text
            assert time.monotonic() < deadline, text
            time.sleep(0.05)

    def children(self) -> list[int]:
        text = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text()
        return [int(pid) for pid in text.split()]

    def end(self, signum: int) -> int:
        self.process.send_signal(signum)
        return self.process.wait(DEADLINE_S)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture
def up(tmp_path: Path, model: Path) -> Iterator[Up]:
    running = Up(
        tmp_path, "--simulate", "--model", str(model), "--port", "0", "--workers", "2", "--simulate-base-us=100"
    )
    yield running
    running.process.kill()
    running.process.wait()


def test_a_gguf_file_is_served_as_transformers_reads_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch
    from tiny_gguf import TOKENS, write_gguf
    from transformers import AutoModelForCausalLM

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    write_gguf(tmp_path / "Tiny.Q4_1.gguf")
    up = Up(tmp_path, "--model", "Tiny.Q4_1.gguf", "--port", "0", "--kv-cache-memory", "4MiB", "--threads", "1")
    try:
        url = up.wait_for(r"Tiny\.Q4_1 is served at (\S+)\n")
        body = {"model": "Tiny.Q4_1", "prompt": "he 20", "max_tokens": 12, "temperature": 0, "return_token_ids": True}
        body["ignore_eos"] = True
        request = urllib.request.Request(
            f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=DEADLINE_S) as answer:
            choice = json.load(answer)["choices"][0]
        assert up.end(signal.SIGINT) == 0
    finally:
        up.process.kill()
        up.process.wait()
    reference = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="Tiny.Q4_1.gguf", dtype=torch.float32)
    prompt = torch.tensor([[TOKENS.index(token) for token in ("he", "Ġ", "2", "0")]])
    with torch.inference_mode():
        for _ in range(12):
            best = reference(prompt).logits[:, -1].argmax(-1, keepdim=True)
            prompt = torch.cat([prompt, best], dim=1)
    assert choice["token_ids"] == prompt[0, 4:].tolist()


def gone(pids: list[int]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    for pid in pids:
        while Path(f"/proc/{pid}").exists() and "State:\tZ" not in Path(f"/proc/{pid}/status").read_text():
            assert time.monotonic() < deadline, f"process {pid} is still there"
            time.sleep(0.02)


def test_only_another_scheduler_than_the_usual_needs_an_address() -> None:
    assert look_inside("http://127.0.0.1:9401")[1].endswith("headrace explain ID")
    assert look_inside("http://127.0.0.1:9501") == [
        "Dashboard: http://127.0.0.1:9501/dashboard",
        "Why a request took its time: headrace explain ID --scheduler http://127.0.0.1:9501",
    ]
    assert look_inside("http://a:1", "http://b:2") == [
        "Dashboard: http://a:1/dashboard",
        "Once another scheduler leads it is there: http://b:2/dashboard",
        "Why a request took its time: headrace explain ID --scheduler http://a:1,http://b:2",
    ]


@pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")
def test_serves_answers_the_printed_curl_line_and_stops_on_ctrl_c(up: Up, tmp_path: Path) -> None:
    url = up.wait_for(r"tiny is served at (http://127\.0\.0\.1:\d+)\n")
    command = shlex.split(up.wait_for(r"\n  (curl -N .*)\n"))
    assert command[2].startswith(url)
    body = json.loads(command[-1])
    command[-1] = json.dumps(body | {"max_tokens": 4})
    answer = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S).stdout
    events = [line.removeprefix("data: ") for line in answer.splitlines() if line]
    assert events[-1] == "[DONE]"
    assert json.loads(events[-2])["choices"][0]["finish_reason"] == "length"

    dashboard = up.wait_for(r"\nDashboard: (\S+)\n")
    with urllib.request.urlopen(dashboard, timeout=DEADLINE_S) as page:
        assert page.status == 200
    words = up.wait_for(r"\nWhy a request took its time: headrace (explain ID --scheduler \S+)\n").split()
    asked = [
        sys.executable,
        "-m",
        "headrace",
        *(json.loads(events[-2])["id"] if word == "ID" else word for word in words),
    ]
    deadline = time.monotonic() + DEADLINE_S
    while (told := subprocess.run(asked, capture_output=True, text=True, timeout=DEADLINE_S)).returncode == 1:
        assert time.monotonic() < deadline, told.stderr  # the gateway tells of its answer only after it
    assert "where the time went:" in told.stdout, told.stderr
    assert "of mesh default at http" in told.stderr

    children = up.children()
    assert len(children) == 5  # NATS, scheduler, gateway, two workers
    for pid in children:
        # A token given by a command line could be read by every user of the machine.
        assert b"token" not in Path(f"/proc/{pid}/cmdline").read_bytes()
    assert up.end(signal.SIGINT) == 0
    gone(children)
    assert not list(tmp_path.glob("headrace-nats-*"))
    errors = up.errors.read_text()
    assert errors.index("gateway     | ") < errors.index("stopping")
    assert "was killed" not in errors
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", int(url.rsplit(":", 1)[1])), timeout=5).close()


def test_sigterm_finishes_an_open_stream_first(up: Up) -> None:
    url = up.wait_for(r"tiny is served at (\S+)\n")
    body = {"model": "tiny", "prompt": "Hello", "max_tokens": 500, "ignore_eos": True, "stream": True}
    request = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=DEADLINE_S) as stream:
        first = stream.readline()
        up.process.terminate()
        rest = stream.read()
    assert up.process.wait(DEADLINE_S) == 0
    events = [line for line in (first + rest).decode().splitlines() if line]
    assert events[-1] == "data: [DONE]"
    assert '"finish_reason":"length"' in events[-2]


def test_a_killed_worker_is_started_again(up: Up) -> None:
    up.wait_for(r"tiny is served at (\S+)\n")
    up.wait_for(r"(worker-1) +\| .*serves")
    worker = next(pid for pid in up.children() if b"\0worker\0" in Path(f"/proc/{pid}/cmdline").read_bytes())
    os.kill(worker, signal.SIGKILL)
    name = up.wait_for(r"(worker-[01]) +\| was killed by SIGKILL; starting it again")
    up.wait_for(rf"(?s)starting it again.*({name}) +\| \S+ INFO +worker \S+ serves tiny")


def restarted(up: Up, *argv: str) -> tuple[int, str]:
    """Exit code and words of one ``headrace restart``."""
    command = [sys.executable, "-m", "headrace", "restart", *argv]
    done = subprocess.run(command, env=up.environ, capture_output=True, text=True, timeout=5 * DEADLINE_S)
    return done.returncode, done.stdout + done.stderr


async def _restarted_under_load(up: Up, load: Load) -> list[str]:
    stop = asyncio.Event()
    running = asyncio.create_task(load.run(stop))
    said: list[str] = []
    try:
        for _ in range(2):
            code, words = await asyncio.to_thread(restarted, up)
            said.append(words)
            assert code == 0, words
        finished = load.finished
        while load.finished < finished + load.streams + load.plain:  # noqa: ASYNC110  it runs on the same loop
            await asyncio.sleep(0.1)
    finally:
        stop.set()
        await running
    return said


def test_every_process_is_restarted_twice_under_load_and_no_request_fails(
    up: Up, record_property: Callable[[str, object], None]
) -> None:
    url = up.wait_for(r"tiny is served at (\S+)\n")
    before = up.children()
    load = Load(url, streams=4, plain=2)
    said = asyncio.run(_restarted_under_load(up, load))
    assert load.failures == []
    assert len(load.texts) == 1, "a stream that went on elsewhere has another text"
    for words in said:
        for name in ("nats", "scheduler", "worker-0", "worker-1", "gateway"):
            assert re.search(rf"^{name}: re(started|placed)", words, re.MULTILINE), words
    assert not set(before) & set(up.children()) - {before[2]}  # (a gateway stays for its idle connections)
    figures = {"p99_itl_ms": percentile(load.gaps_s, 0.99) * 1e3, "max_itl_ms": max(load.gaps_s) * 1e3}
    for name, value in figures.items():
        record_property(name, round(value, 1))
    print(figures, load.finished)
    dashboard = up.wait_for(r"\nDashboard: (\S+)\n")
    with urllib.request.urlopen(dashboard, timeout=DEADLINE_S) as page:  # at the same port as ever
        assert page.status == 200
    assert restarted(up, "--only", "worker", "--no-surge")[0] == 0
    assert up.end(signal.SIGINT) == 0


def leader(up: Up, epoch: int) -> tuple[str, str]:
    """The child that leads in an epoch, and its name on the bus."""
    leads = rf" +\| .*scheduler (\S+) leads mesh default in epoch {epoch}\n"
    child = up.wait_for(rf"(scheduler-[01]){leads}")
    return child, up.wait_for(child + leads)


def killed(up: Up, scheduler_id: str) -> None:
    commands = {pid: Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0") for pid in up.children()}
    (pid,) = (pid for pid, words in commands.items() if f"--scheduler-id={scheduler_id}".encode() in words)
    os.kill(pid, signal.SIGKILL)


def leading(urls: list[str]) -> list[float]:
    """Each scheduler's own metric."""
    found = []
    for url in urls:
        with urllib.request.urlopen(f"{url}/metrics", timeout=DEADLINE_S) as answer:
            value = re.search(r"^headrace_scheduler_leading (\S+)", answer.read().decode(), re.MULTILINE)
            assert value is not None
            found.append(float(value[1]))
    return found


async def _leaders_killed_under_load(up: Up, load: Load) -> str:
    """Two leaders are killed, then all schedulers restarted; the words of that."""
    stop = asyncio.Event()
    running = asyncio.create_task(load.run(stop))

    async def goes_on() -> None:
        finished = load.finished
        while load.finished < finished + 2 * (load.streams + load.plain):  # noqa: ASYNC110  it runs on the same loop
            await asyncio.sleep(0.05)

    try:
        for epoch in (1, 2):
            await goes_on()
            killed(up, (await asyncio.to_thread(leader, up, epoch))[1])
            await asyncio.to_thread(leader, up, epoch + 1)
            await goes_on()
        code, words = await asyncio.to_thread(restarted, up, "--only", "scheduler")
        assert code == 0, words
        await goes_on()
    finally:
        stop.set()
        await running
    return words


def test_the_leading_one_of_two_schedulers_is_killed_and_streams_go_on(tmp_path: Path, model: Path) -> None:
    up = Up(
        tmp_path, "--model", str(model), "--port", "0", "--schedulers", "2", "--kv-cache-memory", "16MiB",
        "--threads", "1",
    )  # fmt: skip
    try:
        url = up.wait_for(r"tiny is served at (\S+)\n")
        assert len(up.children()) == 5  # NATS, two schedulers, gateway, worker
        urls = up.wait_for(r"headrace explain ID --scheduler (\S+)\n").split(",")
        assert len(set(urls)) == 2 and leading(urls) == [1, 0], "the leader's comes first"
        load = Load(url, streams=3, plain=1)
        words = asyncio.run(_leaders_killed_under_load(up, load))
        assert load.failures == []
        assert len(load.texts) == 1, "a stream that went on elsewhere has another text"
        assert f"{leader(up, 1)[0]} | was killed by SIGKILL; starting it again" in up.errors.read_text()
        assert sorted(re.findall(r"^(\S+): replaced", words, re.MULTILINE)) == ["scheduler-0", "scheduler-1"]
        assert sorted(leading(urls)) == [0, 1], "each still has its own port"
        assert up.end(signal.SIGINT) == 0
    finally:
        up.process.kill()
        up.process.wait()


def test_a_replacement_that_cannot_start_leaves_the_old_process(tmp_path: Path, model: Path) -> None:
    own = shutil.copytree(model, tmp_path / "tiny")
    up = Up(tmp_path, "--simulate", "--model", str(own), "--port", "0")
    try:
        url = up.wait_for(r"tiny is served at (\S+)\n")
        before = up.children()
        (own / "tokenizer.json").unlink()
        code, words = restarted(up, "--only", "gateway")
        assert code == 1 and "\ngateway could not be restarted: " in words
        assert up.children() == before
        with urllib.request.urlopen(f"{url}/ready", timeout=DEADLINE_S) as answer:
            assert answer.status == 200
        assert up.end(signal.SIGINT) == 0
    finally:
        up.process.kill()
        up.process.wait()


def test_ctrl_c_in_the_middle_of_a_restart_stops_everything(up: Up) -> None:
    up.wait_for(r"tiny is served at (\S+)\n")
    command = [sys.executable, "-m", "headrace", "restart", "--only", "worker"]
    with subprocess.Popen(command, env=up.environ, stdout=subprocess.PIPE, text=True) as client:
        assert client.stdout is not None
        assert client.stdout.readline() == "worker-0: restarting\n"
        deadline = time.monotonic() + DEADLINE_S
        while len(children := up.children()) < 6:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert up.end(signal.SIGINT) == 0
        client.stdout.read()
        assert client.wait(DEADLINE_S) == 1
    gone(children)


def test_nothing_outlives_up_itself_and_what_it_leaves_goes_at_the_next_start(up: Up, tmp_path: Path) -> None:
    up.wait_for(r"tiny is served at (\S+)\n")
    children = up.children()
    assert len(children) == 5
    up.end(signal.SIGKILL)
    gone(children)
    (left,) = tmp_path.glob("headrace-nats-*")
    assert restarted(up)[0] == 2
    aged = time.time() - 60
    os.utime(left, (aged, aged))
    refused(tmp_path, "--model", "/no/such/model", "--port", "0")  # it gets no further
    assert not left.exists()
    assert not list((tmp_path / "run" / "headrace").iterdir())


def refused(tmp_path: Path, *argv: str) -> str:
    """What ``up`` says on stderr when it refuses to start with exit 2."""
    started = time.monotonic()
    up = Up(tmp_path, *argv)
    assert up.process.wait(DEADLINE_S) == 2, up.errors.read_text()
    assert time.monotonic() - started < DEADLINE_S
    assert up.output.read_text() == ""
    return up.errors.read_text()


def test_a_taken_port_is_named_before_anything_starts(tmp_path: Path, model: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        errors = refused(tmp_path, "--model", str(model), "--port", str(port))
    assert errors == f"headrace: port {port} on 127.0.0.1 is taken; choose another with --port\n"


@pytest.mark.parametrize(
    ("argv", "complaint"),
    [
        (["--kv-cache-memory", "5XB"], "headrace up: --kv-cache-memory: '5XB' is no size; "),
        (["--api-keys", "/no/such.toml"], "headrace: --api-keys /no/such.toml: No such file"),
        (["--tls-cert", "/no/such.pem"], "headrace: --tls-cert /no/such.pem: No such file"),
        (["--max-num-seqs", "64", "--max-num-batched-tokens", "8"], "headrace: max_num_batched_tokens (8) is less "),
        (["--record", "/no/such/folder/trace"], "headrace: --record /no/such/folder/trace: no such folder"),
        (["--nats", "tls://n", "--nats-ca", "/no/such.pem"], "headrace: --nats-ca /no/such.pem: No such file"),
        (["--metrics-host", "192.0.2.1"], "headrace: cannot listen on port 0 of 192.0.2.1 (--metrics-host)"),
    ],
)
def test_what_cannot_be_used_is_named_before_anything_starts(
    argv: list[str], complaint: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headrace.up.NatsServer", None)  # nothing is started
    monkeypatch.setattr("headrace.up.resolve_model", None)  # nor fetched
    try:
        code = main(["--port", "0", "--metrics-port", "0", *argv])
    except SystemExit as ended:
        code = ended.code
    output, errors = capsys.readouterr()
    assert (code, output, errors.count("\n")) == (2, "", 1)
    assert errors.startswith(complaint)


def test_a_missing_model_is_named(tmp_path: Path) -> None:
    assert refused(tmp_path, "--model", "/no/such/model", "--port", "0") == "headrace: /no/such/model: no such folder\n"


def test_a_child_that_cannot_start_as_configured_ends_everything(tmp_path: Path, model: Path) -> None:
    errors = refused(tmp_path, "--model", str(model), "--port", "0", "--max-model-len", "1000000")
    assert re.search(r"headrace: worker cannot start: max-model-len 1000000 is more than", errors)
