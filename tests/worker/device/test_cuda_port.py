"""The port to a CUDA device, as far as it goes without one: what surrounds a capture, with torch's part made up."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from worker.device.cuda_port import CudaPort


class Streams:
    """Torch's current stream, and a capture that fails as it does there: its own stream stays the current one."""

    def __init__(self) -> None:
        self.current = "step"
        self.ended: list[tuple[int, Any]] = []

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
        self.ended.append((device, pool))


def test_a_capture_that_fails_leaves_neither_its_stream_nor_its_pool_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    streams = Streams()
    monkeypatch.setattr(torch.cuda, "default_stream", lambda device: "step")
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: "side")
    monkeypatch.setattr(torch.cuda, "CUDAGraph", object)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 7))
    monkeypatch.setattr(torch.cuda, "stream", streams.stream)
    monkeypatch.setattr(torch.cuda, "graph", streams.graph)
    monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", streams.end, raising=False)
    port = CudaPort(torch.device("cuda", 0))

    def waits_for_the_device() -> None:
        assert streams.current == "capturing"
        raise RuntimeError("operation not permitted when stream is capturing")

    with pytest.raises(RuntimeError, match="not permitted"):
        port.capture(waits_for_the_device)
    assert streams.current == "step" and streams.ended == [(0, (0, 7))]
