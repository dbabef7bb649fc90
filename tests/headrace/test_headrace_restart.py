"""``headrace restart``: replacements under supervision, the control socket, and what the command says."""

from __future__ import annotations

import asyncio
import json
import os
import select
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from test_headrace_supervisor import FAST, Shown

from headrace import restart
from headrace.control import KINDS, ControlServer, Wish
from headrace.launch import Mesh
from headrace.notices import Notices
from headrace.rolling import Rolling
from headrace.runtime_folder import CONTROL, NOTIFY, candidates, control_socket, running, runtime_folder
from headrace.sockets import Sockets
from headrace.supervisor import Backoff, ChildSpec, ReplacementFailed, Supervisor
from shared.supervision import LEADS, STANDS_BY

DEADLINE_S = 30.0


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The private folder of sockets, of this test alone."""
    monkeypatch.setattr("headrace.runtime_folder.candidates", lambda environ=None: iter([tmp_path / "run"]))
    return runtime_folder()


# --- replacements -------------------------------------------------------------------------------------------------

# Tells its name and what it has come to; accepts at its socket; ends on SIGTERM or SIGUSR1.
SERVER = """
import os, signal, socket, sys
from shared.supervision import inherited_socket, tell
name, status = sys.argv[1:]
for signum in (signal.SIGTERM, signal.SIGUSR1):
    signal.signal(signum, lambda number, _: sys.exit(print(name, "got", signal.Signals(number).name, flush=True)))
listening = inherited_socket(metrics=False)
print(name, "is up", flush=True)
if status:
    tell(status)
if listening is None:
    signal.pause()
listening.setblocking(True)
while True:
    connection, _ = listening.accept()
    connection.sendall(name.encode())
    connection.close()
"""


def child(name: str, says: str = "one", status: str = "serves", program: str = SERVER, **options: Any) -> ChildSpec:
    return ChildSpec(name, [sys.executable, "-c", program, says, status], **options)


Scenario = Callable[[Supervisor, Shown], Awaitable[None]]


def supervised(folder: Path, scenario: Scenario, backoff: Backoff = FAST) -> Shown:
    async def body() -> Shown:
        shown = Shown()
        with closing(Notices(folder / f"1{NOTIFY}")) as notices:
            async with asyncio.TaskGroup() as tasks:
                supervisor = Supervisor(tasks, shown, backoff, notices)
                try:
                    async with asyncio.timeout(DEADLINE_S):
                        await scenario(supervisor, shown)
                finally:
                    await supervisor.stop()
        return shown

    return asyncio.run(body())


def asked(port: int) -> str:
    with socket.create_connection(("127.0.0.1", port), timeout=DEADLINE_S) as connection:
        return connection.recv(100).decode()


def test_a_replacement_takes_over_once_it_says_that_it_is_up(folder: Path) -> None:
    async def scenario(supervisor: Supervisor, shown: Shown) -> None:
        supervisor.start(child("x", "one"))
        supervisor.settled()
        await supervisor.until("x", ("serves",), DEADLINE_S)
        old = supervisor.pid("x")
        retire = await supervisor.replace(child("x", "two"), ("leads", "serves"), lambda: True, DEADLINE_S)
        assert supervisor.pid("x") not in (None, old)
        assert ("x", "one got SIGUSR1") not in shown.lines
        await retire(signal.SIGUSR1, 10)
        assert ("x", "one got SIGUSR1") in shown.lines
        assert old is not None
        with pytest.raises(ProcessLookupError):
            os.kill(old, 0)

    shown = supervised(folder, scenario)
    assert not any("starting it again" in line for _, line in shown.lines)
    assert shown.lines[-1] == ("x", "two got SIGTERM")


def test_a_replacement_that_is_killed_later_is_started_again(folder: Path) -> None:
    async def scenario(supervisor: Supervisor, shown: Shown) -> None:
        supervisor.start(child("x", "one"))
        supervisor.settled()
        retire = await supervisor.replace(child("x", "two"), ("serves",), lambda: True, DEADLINE_S)
        await retire(signal.SIGTERM, 10)
        pid = supervisor.pid("x")
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        await shown.wait_for("x", "two is up", 2)

    supervised(folder, scenario)


@pytest.mark.parametrize(
    ("program", "status", "why"),
    [
        ("import sys; sys.exit('headrace: no memory for two')", "", "^no memory for two$"),
        ("import sys; sys.exit(3)", "", "^ended with exit status 3$"),
        (SERVER, "stands by", "^it was not up within 1.5 s$"),
    ],
)
def test_where_the_replacement_does_not_come_up_the_old_one_stays(
    program: str, status: str, why: str, folder: Path
) -> None:
    async def scenario(supervisor: Supervisor, shown: Shown) -> None:
        supervisor.start(child("x", "one"))
        supervisor.settled()
        await supervisor.until("x", ("serves",), DEADLINE_S)
        old = supervisor.pid("x")
        spec = child("x", "two", status, program)
        within_s = 1.5 if program is SERVER else DEADLINE_S
        with pytest.raises(ReplacementFailed, match=why):
            await supervisor.replace(spec, ("serves",), lambda: True, within_s)
        assert supervisor.pid("x") == old
        assert supervisor.restarts("x") == 0

    shown = supervised(folder, scenario)
    assert shown.lines[-1] == ("x", "one got SIGTERM")


def test_a_replacement_that_nobody_waits_for_is_given_up(folder: Path) -> None:
    wanted = [True]

    async def scenario(supervisor: Supervisor, shown: Shown) -> None:
        supervisor.start(child("x", "one"))
        replacing = asyncio.ensure_future(
            supervisor.replace(child("x", "two", ""), ("serves",), lambda: wanted[0], DEADLINE_S)
        )
        await shown.wait_for("x", "two is up")
        wanted[0] = False
        with pytest.raises(ReplacementFailed, match="nobody waits"):
            await replacing
        assert supervisor.pid("x") is not None

    supervised(folder, scenario)


def test_stopping_stops_those_that_replace_and_those_that_are_replaced(folder: Path) -> None:
    failed: list[BaseException] = []

    async def scenario(supervisor: Supervisor, shown: Shown) -> None:
        deaf = SERVER.replace("signal.SIGUSR1):", "):\n    signal.signal(signal.SIGUSR1, signal.SIG_IGN)")
        supervisor.start(child("x", "one", program=deaf))
        await supervisor.until("x", ("serves",), DEADLINE_S)
        retire = await supervisor.replace(child("x", "two"), ("serves",), lambda: True, DEADLINE_S)
        leaving = asyncio.ensure_future(retire(signal.SIGUSR1, 3600))
        third = asyncio.ensure_future(
            supervisor.replace(child("x", "three", ""), ("serves",), lambda: True, DEADLINE_S)
        )
        await shown.wait_for("x", "three is up")
        await supervisor.stop()
        await leaving
        failed.extend(error for error in await asyncio.gather(third, return_exceptions=True) if error is not None)  # type: ignore[misc]

    shown = supervised(folder, scenario)
    assert {f"{name} got SIGTERM" for name in ("one", "two")} <= {line for _, line in shown.lines}
    assert [type(error) for error in failed] == [ReplacementFailed]


def test_one_that_crashes_while_its_replacement_starts_lives_on_until_then(folder: Path) -> None:
    async def scenario(supervisor: Supervisor, shown: Shown) -> None:
        supervisor.start(child("x", "one"))
        supervisor.settled()
        await shown.wait_for("x", "one is up")
        replacing = asyncio.ensure_future(
            supervisor.replace(child("x", "two", ""), ("serves",), lambda: True, DEADLINE_S)
        )
        await shown.wait_for("x", "two is up")
        pid = supervisor.pid("x")
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        await shown.wait_for("x", "one is up", 2)
        replacing.cancel()
        await asyncio.gather(replacing, return_exceptions=True)

    supervised(folder, scenario)


def test_a_restart_in_place(folder: Path) -> None:
    async def scenario(supervisor: Supervisor, shown: Shown) -> None:
        supervisor.start(child("x", "one"))
        supervisor.settled()
        await supervisor.until("x", ("serves",), DEADLINE_S)
        old = supervisor.pid("x")
        await supervisor.restart("x", 10)
        await supervisor.until("x", ("serves",), DEADLINE_S)
        assert supervisor.pid("x") not in (None, old)

    shown = supervised(folder, scenario)
    assert [line for _, line in shown.lines[:3]] == ["one is up", "one got SIGTERM", "one is up"]


def test_a_socket_outlives_the_processes_that_accept_at_it(folder: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
        sockets = {"metrics": listening, "http": listening}

        async def scenario(supervisor: Supervisor, shown: Shown) -> None:
            early = asyncio.ensure_future(asyncio.to_thread(asked, port))  # nobody accepts yet
            supervisor.start(child("x", "one", sockets=sockets))
            supervisor.settled()
            assert await early == "one"
            retire = await supervisor.replace(child("x", "two", sockets=sockets), ("serves",), lambda: True, DEADLINE_S)
            await retire(signal.SIGTERM, 10)
            assert [await asyncio.to_thread(asked, port) for _ in range(3)] == ["two"] * 3
            pid = supervisor.pid("x")
            assert pid is not None
            os.kill(pid, signal.SIGKILL)
            await shown.wait_for("x", "was killed by SIGKILL; starting it again in 0.01 s")
            assert await asyncio.to_thread(asked, port) == "two"

        supervised(folder, scenario)


def test_after_a_calm_life_it_starts_again_at_once(folder: Path) -> None:
    backoff = Backoff(at_once_s=0.01, first_s=3600, calm_s=0.2)

    async def scenario(supervisor: Supervisor, shown: Shown) -> None:
        supervisor.start(child("x"))
        supervisor.settled()
        await shown.wait_for("x", "one is up")
        await asyncio.sleep(0.25)
        pid = supervisor.pid("x")
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        await shown.wait_for("x", "one is up", 2)

    shown = supervised(folder, scenario, backoff)
    assert ("x", "was killed by SIGKILL; starting it again in 0.01 s") in shown.lines


def test_of_several_schedulers_the_one_that_leads_comes_last() -> None:
    """The lease then changes hands once."""

    class Told:
        leads = "scheduler-0"

        def status(self, name: str) -> str:
            return LEADS if name == self.leads else STANDS_BY

    supervisor: Any = Told()
    settings: Any = SimpleNamespace(schedulers=3, workers=2)
    nats: Any = object()

    async def serving() -> None: ...

    rolling = Rolling(settings, Mesh("", "", "", ""), Sockets(), nats, supervisor, asyncio.TaskGroup(), serving)
    names = []
    for kind, name in rolling._processes(Wish(KINDS, True, print, asyncio.Event())):
        if kind == "nats":
            supervisor.leads = "scheduler-1"  # it is another one by now
        names.append(name)
    assert names == ["nats", "scheduler-0", "scheduler-2", "scheduler-1", "worker-0", "worker-1", "gateway"]


def test_some_child_tells_what_is_waited_for(folder: Path) -> None:
    async def scenario(supervisor: Supervisor, shown: Shown) -> None:
        supervisor.start(child("x", "one", STANDS_BY))
        with pytest.raises(ReplacementFailed, match=f"^nobody told within 0.2 s that it {LEADS}$"):
            await supervisor.until_some(("x",), (LEADS,), 0.2)
        supervisor.start(child("y", "two", LEADS))
        await supervisor.until_some(("x", "y"), (LEADS,), DEADLINE_S)
        assert (supervisor.status("x"), supervisor.status("y")) == (STANDS_BY, LEADS)

    supervised(folder, scenario)


# --- the control socket -------------------------------------------------------------------------------------------


@contextmanager
def controlled(path: Path, perform: Callable[[Wish], Awaitable[bool]]) -> Iterator[None]:
    """A control server on a thread of its own."""
    ready, stop = threading.Event(), threading.Event()

    async def body() -> None:
        server = ControlServer(path, perform)
        await server.start()
        ready.set()
        await asyncio.to_thread(stop.wait)
        await server.close()
        await server.closed()

    thread = threading.Thread(target=asyncio.run, args=(body(),))
    thread.start()
    assert ready.wait(DEADLINE_S)
    try:
        yield
    finally:
        stop.set()
        thread.join()


async def everything(wish: Wish) -> bool:
    wish.say(f"{','.join(wish.kinds)} surge={wish.surge}")
    return "nats" in wish.kinds


def test_the_command_shows_what_is_done_and_exits_by_it(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = control_socket(folder, 8000)
    with controlled(path, everything):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600 and stat.S_IMODE(folder.stat().st_mode) == 0o700
        assert restart.main([]) == 0
        assert restart.main(["--port", "8000", "--only", "worker, gateway", "--no-surge"]) == 1
    assert capsys.readouterr().out.splitlines() == [
        "nats,scheduler,worker,gateway surge=True", "worker,gateway surge=False",
    ]  # fmt: skip
    assert not path.exists()


def test_two_meshes_are_told_apart_by_their_ports(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with controlled(control_socket(folder, 8001), everything), controlled(control_socket(folder, 8000), everything):
        with pytest.raises(SystemExit) as ended:
            restart.main([])
        assert ended.value.code == 2
        assert "several meshes run here; choose one with --port: 8000, 8001" in capsys.readouterr().err
        assert restart.main(["--port", "8001"]) == 0


@pytest.mark.parametrize(
    ("argv", "complaint"),
    [
        ([], "no `headrace up` of this user runs here"),
        (["--port", "8000"], "no `headrace up` of this user runs here at port 8000"),
        (["--only", "gateway,workers"], "--only: 'workers' is none of nats, scheduler, worker, gateway"),
        (["--only", ","], "--only: name some of"),
        (["--port", "x"], "--port"),
    ],
)
def test_what_cannot_be_done_is_one_line_and_exit_2(
    argv: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        restart.main(argv)
    assert ended.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith(f"headrace restart: {complaint}" if complaint != "--port" else "headrace restart: ")
    assert complaint in error and error.count("\n") == 1


def test_the_socket_of_a_dead_mesh_is_removed(folder: Path) -> None:
    path = control_socket(folder, 8000)
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
        dead.listen()
    path.with_suffix(NOTIFY).touch()
    assert running() == {}
    assert list(folder.iterdir()) == []
    with controlled(path, everything):
        assert running() == {8000: path}


def test_a_live_mesh_keeps_its_socket(folder: Path) -> None:
    path = control_socket(folder, 8000)

    async def second() -> None:
        with pytest.raises(FileExistsError):
            await ControlServer(path, everything).start()

    with controlled(path, everything):
        asyncio.run(second())
        assert restart.main([]) == 0


def test_a_second_restart_is_refused_and_a_client_that_leaves_gives_up_the_first(folder: Path) -> None:
    path = control_socket(folder, 8000)
    wishes: list[Wish] = []

    async def until_given_up(wish: Wish) -> bool:
        wishes.append(wish)
        await wish.given_up.wait()
        return False

    def ask(text: bytes) -> socket.socket:
        client = socket.socket(socket.AF_UNIX)
        client.settimeout(DEADLINE_S)
        client.connect(str(path))
        client.sendall(text)
        return client

    def answer(client: socket.socket) -> list[dict[str, Any]]:
        with client, client.makefile() as lines:
            return [json.loads(line) for line in lines]

    request = b'{"restart": ["gateway"]}\n'
    with controlled(path, until_given_up):
        first = ask(request)
        deadline = time.monotonic() + DEADLINE_S
        while not wishes:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert answer(ask(request)) == [{"say": "refused: a restart is going on already"}, {"exit": 1}]
        assert answer(ask(b"what?\n"))[-1] == {"exit": 2}
        assert answer(ask(b'{"restart": ["dns"]}\n')) == [{"say": "not understood: dns"}, {"exit": 2}]
        first.close()
        while not wishes[0].given_up.is_set():
            assert time.monotonic() < deadline
            time.sleep(0.01)
        while len(wishes) < 2:  # it is free again
            assert time.monotonic() < deadline
            with ask(request) as again:
                while len(wishes) < 2 and not select.select([again], [], [], 0.01)[0]:
                    assert time.monotonic() < deadline


def test_a_fault_in_a_restart_is_told_and_survived(
    folder: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    async def broken(wish: Wish) -> bool:
        raise ValueError("broken")

    with controlled(control_socket(folder, 8000), broken):
        assert [restart.main([]), restart.main([])] == [1, 1]
    assert capsys.readouterr().out == "failed: broken\n" * 2
    assert "a restart failed" in caplog.text


def test_the_folder_must_be_private(tmp_path: Path) -> None:
    (tmp_path / "run").chmod(0o755)
    with pytest.raises(OSError, match="no private folder"):
        runtime_folder()


def test_where_it_is_does_not_hang_on_the_shell_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    with_variable, without = list(candidates({"XDG_RUNTIME_DIR": "/run/x"})), list(candidates({}))
    assert with_variable[0] == Path("/run/x/headrace")
    assert set(without) <= set(with_variable)
    assert all(len(str(path / f"65535{CONTROL}")) <= 107 for path in candidates({"XDG_RUNTIME_DIR": "/" + "x" * 200}))


def test_the_client_imports_little() -> None:
    code = "import sys, headrace.restart; assert not {'gateway', 'uvicorn', 'torch', 'nats'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
