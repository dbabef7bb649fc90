from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from kernels.cpu.library import Library, find


@pytest.fixture(autouse=True)
def one_thread_of_torchs() -> Iterator[None]:
    """Small tensors are quicker so, on a busy machine above all."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def library() -> Iterator[Library]:
    """The C++ library, whose choices of instruction set and threads, which are the process's, are put back."""
    found = find()
    if not isinstance(found, Library):
        pytest.skip("the C++ kernels are not built or turned off")
    isa, threads = found.isa, found.c.headrace_threads()
    yield found
    found.select(isa)
    found.c.headrace_set_threads(threads)
