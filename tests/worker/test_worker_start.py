"""What stops a worker before it has loaded its model."""

from __future__ import annotations

import subprocess
import sys

import pytest

from kernels.cpu import library
from shared.lifecycle import StartupError
from worker.__main__ import load_runner
from worker.config import WorkerConfig


@pytest.fixture
def asked_anew() -> None:
    library.find.cache_clear()


@pytest.mark.usefixtures("asked_anew")
def test_an_instruction_set_that_there_is_none_of_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(library.ISA_ENV, "mmx")
    with pytest.raises(StartupError, match=r"^HEADRACE_CPU_ISA: 'mmx' is none of [^\n]*$"):
        load_runner(WorkerConfig(model="/no/such/model"))
    assert load_runner(WorkerConfig(simulate=True)).capacity.device == "simulated", "which runs no kernel"


STOPPED_WHILE_LOADING = """
import asyncio, sys, threading
import torch
from worker import __main__ as worker
from worker.config import WorkerConfig

started = threading.Event()

def load_runner(config):
    while True:
        torch.ones(1000).exp()
        started.set()

async def told_to_stop_at_once():
    worker._load_in_background(WorkerConfig(), load_runner)
    await asyncio.to_thread(started.wait)

def run(main):
    asyncio.run(told_to_stop_at_once())
    print("stopped")
    return 7

worker.run = run
sys.exit(worker.main([]))
"""


def test_a_worker_that_is_stopped_while_it_loads_ends_with_its_own_exit_code() -> None:
    processes = [
        subprocess.Popen([sys.executable, "-c", STOPPED_WHILE_LOADING], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        for _ in range(2)
    ]
    for process in processes:
        out, err = process.communicate(timeout=60)
        assert (process.returncode, out) == (7, b"stopped\n"), err.decode()
