"""The port to a CUDA device, as far as it goes without one: what surrounds a capture, with torch's part made up."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from worker.device.cuda_port import CudaPort, told_apart


class Streams:
    """Torch's current stream, and a capture that fails as it does there: its own stream stays the current one."""

    def __init__(self) -> None:
        self.current = "step"
        self.knows = False
        self.ended: list[tuple[int, Any]] = []
        self.released: list[tuple[int, Any]] = []

    @contextmanager
    def stream(self, wanted: str) -> Iterator[None]:
        before, self.current = self.current, wanted
        try:
            yield
        finally:
            self.current = before

    @contextmanager
    def graph(self, graph: Any, pool: Any, capture_error_mode: str) -> Iterator[None]:
        self.current = "capturing"
        yield
        self.current = "step"

    def end(self, device: int, pool: Any) -> None:
        if self.knows:
            raise RuntimeError("endAllocatePool: not currently recording to mempool_id")
        self.ended.append((device, pool))

    def release(self, device: int, pool: Any) -> None:
        self.released.append((device, pool))


@pytest.mark.parametrize("knows", [False, True])
def test_a_capture_that_fails_leaves_neither_its_stream_nor_its_pool_behind(
    knows: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``knows``: torch has ended the capture itself. Then the graph holds on to the pool, and lets go of it."""
    streams = Streams()
    streams.knows = knows
    monkeypatch.setattr(torch.cuda, "default_stream", lambda device: "step")
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: "side")
    monkeypatch.setattr(torch.cuda, "CUDAGraph", object)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 7))
    monkeypatch.setattr(torch.cuda, "stream", streams.stream)
    monkeypatch.setattr(torch.cuda, "graph", streams.graph)
    monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", streams.end, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_releasePool", streams.release, raising=False)
    port = CudaPort(torch.device("cuda", 0))

    def waits_for_the_device() -> None:
        assert streams.current == "capturing"
        raise RuntimeError("operation not permitted when stream is capturing")

    with pytest.raises(RuntimeError, match="not permitted"):
        port.capture(waits_for_the_device)
    assert streams.current == "step" and streams.ended == streams.released == ([] if knows else [(0, (0, 7))])


@pytest.mark.parametrize(
    "words",
    [
        "CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported",
        "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
        "CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`",
        "Triton Error [CUDA]: out of memory",
    ],
)
def test_want_of_memory_is_told_as_such_whoever_wants_it(words: str) -> None:
    with pytest.raises(torch.OutOfMemoryError) as told, told_apart():
        raise RuntimeError(words)
    assert str(told.value) == words.splitlines()[0]


def test_other_errors_stay_what_they_are() -> None:
    for error in (
        RuntimeError("CUDA error: an illegal memory access was encountered"),
        RuntimeError("CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasGemmEx`"),
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 8.00 GiB"),
        ValueError("CUDA error: out of memory"),
    ):
        with pytest.raises(type(error)) as told, told_apart():
            raise error
        assert told.value is error
