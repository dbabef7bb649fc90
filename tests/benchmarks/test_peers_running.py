"""Engines at work: the closed loops, the lines that a driver and we exchange, and a whole mesh of our own."""

from __future__ import annotations

import asyncio
import json
import shutil
import sys
import time
from pathlib import Path

import pytest

from benchmarks.peers.cli import main
from benchmarks.peers.drivers.driving import Request, Run
from benchmarks.peers.drivers.driving import closed_loop as driven_loop
from benchmarks.peers.engines import DRIVERS, ENGINES, cpu_list
from benchmarks.peers.running import Command, EngineFailed, closed_loop, driven, served
from benchmarks.peers.workloads import LOADS
from headrace.bench.client import Client
from headrace.bench.taken import Taken
from headrace.bench.workload import Shot

FAKE_DRIVER = """
import sys
sys.path.insert(0, {drivers!r})
from driving import closed_loop, serve

class Engine:
    def __init__(self):
        self.open = {{}}
    def add(self, request):
        if request.want == 13:
            sys.exit("it broke")
        self.open[request.number] = request.want
    def step(self):
        print("a library's chatter")
        for number in list(self.open):
            self.open[number] -= 1
            yield number, 1, not self.open[number]
            if not self.open[number]:
                del self.open[number]

serve(lambda settings: lambda run: closed_loop(Engine(), run))
"""


class Steps:
    """One token of each open request a step; notes how many were open."""

    def __init__(self) -> None:
        self.left: dict[int, int] = {}
        self.most_open = 0
        self.sent: list[int] = []

    def add(self, request: Request) -> None:
        self.left[request.number] = request.want
        self.sent.append(request.number)
        self.most_open = max(self.most_open, len(self.left))

    def step(self) -> list[tuple[int, int, bool]]:
        self.left = {number: left - 1 for number, left in self.left.items()}
        stepped = [(number, 1, left == 0) for number, left in self.left.items()]
        self.left = {number: left for number, left in self.left.items() if left}
        return stepped


def requests(*wants: int) -> list[Request]:
    return [Request(number, [5], want) for number, want in enumerate(wants)]


def test_a_driven_loop_keeps_its_users_busy_and_counts_every_token() -> None:
    engine, told = Steps(), []
    records = driven_loop(engine, Run(requests(3, 1, 2, 1), 2, None, told.append))
    assert (engine.most_open, engine.sent) == (2, [0, 1, 2, 3])
    assert [len(record.tokens) for record in records] == [3, 1, 2, 1]
    assert all(record.since <= record.tokens[0] <= record.ended == record.tokens[-1] for record in records)
    assert records[2].since >= records[1].ended
    assert told[-1] == 4


def test_a_driven_loop_sends_nothing_after_its_seconds() -> None:
    engine = Steps()
    assert driven_loop(engine, Run(requests(1, 1), 1, 0.0, lambda _: None)) == []
    assert engine.sent == []


class SlowestFirst(Client):
    """Answers without a network; how long each took is a number of turns of the loop."""

    def __init__(self) -> None:
        super().__init__("http://127.0.0.1:1", "m")
        self.open = self.most_open = 0

    async def ask(self, shot: Shot, taken: Taken) -> None:
        self.open += 1
        self.most_open = max(self.most_open, self.open)
        for _ in range(shot.max_tokens):
            await asyncio.sleep(0)
            taken.text_s.append(time.perf_counter())
        self.open -= 1
        taken.ended_s, taken.completion_tokens = time.perf_counter(), shot.max_tokens


def test_a_loop_over_http_has_its_users_and_asks_everything_once() -> None:
    client, told = SlowestFirst(), []
    shots = [Shot(0.0, [1], 2 + number) for number in range(7)]
    taken = asyncio.run(closed_loop(client, shots, 3, None, told.append))
    assert client.most_open == 3
    assert [one.want_tokens for one in taken] == [shot.max_tokens for shot in shots]
    assert told == list(range(1, 8))


def test_a_loop_over_http_sends_nothing_after_its_seconds() -> None:
    assert asyncio.run(closed_loop(SlowestFirst(), [Shot(0.0, [1], 2)], 1, 0.0, lambda _: None)) == []


def fake_driver(folder: Path) -> Command:
    script = folder / "driver.py"
    script.write_text(FAKE_DRIVER.format(drivers=str(DRIVERS)))
    return Command([sys.executable, str(script)], folder / "driver.log")


def test_a_driver_gives_raw_times_of_every_token_on_our_own_clock(tmp_path: Path) -> None:
    with driven(fake_driver(tmp_path), {}) as running:
        began = time.perf_counter()
        for _ in range(2):
            taken = running.run([Shot(0.0, [1, 2], 3), Shot(0.0, [3], 1)], 1, None, lambda _: None)
            assert [one.completion_tokens for one in taken] == [3, 1]
            assert began <= taken[0].since_s <= taken[0].text_s[0] <= taken[1].since_s <= time.perf_counter()
    assert "a library's chatter" in (tmp_path / "driver.log").read_text()


def test_a_driver_that_breaks_says_what_it_logged(tmp_path: Path) -> None:
    with driven(fake_driver(tmp_path), {}) as running, pytest.raises(EngineFailed, match="it broke"):
        running.run([Shot(0.0, [1], 13)], 1, None, lambda _: None)


def test_a_server_that_ends_before_it_is_ready_says_what_it_logged(tmp_path: Path) -> None:
    command = Command([sys.executable, "-c", "raise SystemExit('no such model')"], tmp_path / "log")
    with pytest.raises(EngineFailed, match="no such model"), served(command, "http://127.0.0.1:9", "/", "m", 60.0):
        pass


def test_every_engine_names_loads_that_exist_and_only_ours_needs_no_environment(tmp_path: Path) -> None:
    assert all(set(engine.loads) <= set(LOADS) for engine in ENGINES.values())
    assert [name for name, engine in ENGINES.items() if engine.installed(tmp_path)] == ["headrace", "headrace-core"]


def test_cpus_are_listed_as_ranges_where_they_are_one() -> None:
    assert (cpu_list([0, 1, 2]), cpu_list([4]), cpu_list([0, 2])) == ("0-2", "4-4", "0,2")


@pytest.mark.parametrize(
    "bad",
    [["--engines", "sglang"], ["--workloads", ","], ["--requests", "0"], ["--seconds", "0"], ["--repeat", "0"]],
)
def test_a_bad_command_line_is_refused(bad: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--engines", "vllm", "--venvs", str(tmp_path), *bad])
    assert ended.value.code == 2
    assert "error:" in capsys.readouterr().err


@pytest.mark.mesh
def test_a_whole_mesh_is_measured_and_a_missing_peer_is_named(
    tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(tiny, tmp_path / "models" / "bf16")
    figures = tmp_path / "figures.json"
    code = main([
        "--venvs", str(tmp_path), "--engines", "headrace,vllm", "--workloads", "uniform32", "--requests", "40",
        "--json", str(figures), "--", "--simulate", "--simulate-base-us", "100", "--simulate-vocab-size", "320",
    ])  # fmt: skip
    printed = capsys.readouterr().out
    assert code == 0, printed
    assert "vllm: not installed" in printed
    found = json.loads(figures.read_text())
    assert found["absent"] == {"vllm": "not installed"}
    (run,) = found["runs"]
    assert (run["engine"], run["load"], run["failed"], run["output_tokens"]) == ("headrace", "uniform32", 0, 40 * 50)
    assert {"gateway", "scheduler", "worker", "nats-server"} <= set(run["cpu_s_per_1000_by_process"])
