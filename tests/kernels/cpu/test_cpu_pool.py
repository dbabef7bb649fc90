"""The library's threads: many short steps on more threads than cores, several callers, forks, a process's end."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from small_decoder import make_decoder, run

from kernels.cpu.decoder import PackedMatrix
from kernels.cpu.library import Library
from kernels.cpu.sampling import RowChoice, choose_tokens

HERE = Path(__file__).parent


def child(code: str, library: Library) -> subprocess.Popen[str]:
    """A process of its own that has the library, on ``library``'s instruction set."""
    return subprocess.Popen(
        [sys.executable, "-c", f"import sys\nsys.path.insert(0, {str(HERE)!r})\n{PREAMBLE}\n{code}"],
        env=os.environ | {"HEADRACE_CPU_ISA": library.isa}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


PREAMBLE = """
import os, signal, threading
import torch
torch.set_num_threads(1)
from kernels.cpu.library import load
from small_decoder import make_decoder, run
library = load()
library.c.headrace_set_threads(4)
decoder = make_decoder(library)
first = run(decoder, [20, 3], [19, 22])
"""


def end_of(process: subprocess.Popen[str]) -> str:
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    assert not err
    return out.strip()


def test_thousands_of_short_steps_on_more_threads_than_cores(library: Library) -> None:
    """Steps of other lengths and other decoders follow one another; a late thread finds the step over."""
    rng = random.Random(1)
    wanted = {(): torch.empty((0, 50))}
    shapes = [([1], [0]), ([1, 1, 1], [0, 2]), ([20, 3], [19, 22]), ([1], [])]
    decoders = {}
    for threads in (1, 4, 8, 2):
        library.c.headrace_set_threads(threads)
        decoders[threads] = make_decoder(library, layers=1 + threads % 3)
        for number, (counts, keep) in enumerate(shapes):
            key = (1 + threads % 3, number)
            got = run(decoders[threads], counts, keep)
            assert torch.equal(wanted.setdefault(key, got), got)
    for step in range(3000):
        if step % 100 == 0:  # one goes, with late threads perhaps still in its step; one comes
            threads = rng.choice((2, 4, 8))
            library.c.headrace_set_threads(threads)
            decoders[threads] = make_decoder(library, layers=1 + threads % 3)
        threads = rng.choice(list(decoders))
        number = rng.randrange(len(shapes))
        assert torch.equal(run(decoders[threads], *shapes[number]), wanted[1 + threads % 3, number])


def test_callers_in_several_threads_wait_for_one_another(library: Library) -> None:
    """Two decoders, products and sampling at once, while the number of threads changes."""
    library.c.headrace_set_threads(3)
    decoders = [make_decoder(library), make_decoder(library, torch.bfloat16)]
    matrix = PackedMatrix(library, torch.randn(70, 64, generator=torch.Generator().manual_seed(0)))
    logits = torch.randn(9, 300, generator=torch.Generator().manual_seed(1))
    choices = [RowChoice(1.0, 0.9, 0.0, 0, (seed, 0, 0, 0)) for seed in range(9)]
    calls = [
        lambda: run(decoders[0], [20, 3], [19, 22]),
        lambda: run(decoders[1], [20, 3], [19, 22]),
        lambda: matrix(logits[:, :64]),
        lambda: torch.from_numpy(choose_tokens(library, logits, choices)),
    ]
    wanted = [call() for call in calls]
    wrong: list[object] = []

    def repeat(number: int) -> None:
        for step in range(300):
            if number == 2 and step % 10 == 0:
                library.c.headrace_set_threads(1 + step // 10 % 4)
            if not torch.equal(calls[number](), wanted[number]):
                wrong.append((number, step))

    threads = [threading.Thread(target=repeat, args=(number,)) for number in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_a_forked_child_goes_on_with_the_decoders_that_it_has(library: Library) -> None:
    """Forks come while another thread computes; neither side waits for threads that are not there."""
    code = """
stop = threading.Event()
def compute():
    while not stop.is_set():
        assert torch.equal(run(decoder, [20, 3], [19, 22]), first)
busy = threading.Thread(target=compute)
busy.start()
other = make_decoder(library, layers=1)
wanted = run(other, [5], [4])
for _ in range(20):
    pid = os.fork()
    if pid == 0:
        same = all(torch.equal(run(other, [5], [4]), wanted) for _ in range(20))
        del other
        library.c.headrace_set_threads(2)
        fresh = make_decoder(library, layers=1)
        os._exit(0 if same and torch.equal(run(fresh, [5], [4]), wanted) else 3)
    assert os.waitpid(pid, 0)[1] == 0
stop.set()
busy.join()
pid = os.fork()
if pid == 0:
    raise SystemExit(0)  # by the interpreter's own end, with what runs then
assert os.waitpid(pid, 0)[1] == 0
print("same", torch.equal(run(decoder, [20, 3], [19, 22]), first))
"""
    assert end_of(child(code, library)) == "same True"


@pytest.mark.parametrize("ending", ["pass", "del decoder"])
def test_a_process_ends_while_the_threads_sleep(library: Library, ending: str) -> None:
    assert end_of(child(ending, library)) == ""


def test_a_process_ends_while_a_daemon_thread_computes(library: Library) -> None:
    """The interpreter lets go of what it has at its end; a thread is still inside a step, and goes on to the next."""
    code = """
import ctypes
import numpy as np
from kernels.contract import RaggedBatch
from kernels.cpu.attention import ragged_struct
place = np.arange(150)
batch = RaggedBatch(np.array([0, 150]), place + 1, np.arange(1, 11, dtype=np.int32)[None], place + 16)
keep, logits = np.arange(150), np.empty((150, 50), dtype=np.float32)
struct = ragged_struct(batch)
struct.tokens = struct.positions = place.ctypes.data
struct.keep, struct.num_keep, struct.logits, struct.logits_stride = keep.ctypes.data, 150, logits.ctypes.data, 50
started = threading.Event()
def compute():  # without torch, whose own functions end a process that is ending
    forward, handle, arguments = library.c.headrace_decoder_forward, decoder._handle, ctypes.byref(struct)
    while True:
        forward(handle, arguments)
        started.set()
for _ in range(2):
    threading.Thread(target=compute, daemon=True).start()
started.wait()
"""
    processes = [child(code, library) for _ in range(2)]
    assert [end_of(process) for process in processes] == [""] * 2


def test_sigterm_ends_a_process_at_once(library: Library) -> None:
    code = """
print("ready", flush=True)
while True:
    run(decoder, [20, 3], [19, 22])
"""
    process = child(code, library)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=30)
    assert process.returncode == -signal.SIGTERM


def test_a_system_that_gives_few_threads_still_computes(library: Library) -> None:
    """Of 1,024 wanted, the address space has room for the stacks of some."""
    code = """
import resource
from kernels.cpu.sampling import RowChoice, choose_tokens
logits, choice = torch.zeros((1, 50)), [RowChoice(0.0, 1.0, 0.0, 0, (0, 0, 0, 0))]
library.c.headrace_set_threads(1024)
size = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (size + (1 << 28), resource.RLIM_INFINITY))
choose_tokens(library, logits, choice)
resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
assert 5 < len(os.listdir("/proc/self/task")) < 100
print("same", torch.equal(run(make_decoder(library), [20, 3], [19, 22]), first))
"""
    assert end_of(child(code, library)) == "same True"
