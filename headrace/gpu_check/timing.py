"""The timing seam: device seconds of calls, by CUDA events on a GPU, and by the host's clock in a rehearsal."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from worker.device.cuda_port import has_failed

Call = Callable[[], object]

SAMPLE_S = 0.06
"""Of measuring one thing; bounded by the numbers of repeats below."""

FEWEST, MOST = 5, 40
L2_FACTOR = 2
"""Inputs of so many times the L2 cache in all are not found there again when their turn comes."""

MOST_SETS = 16


class Timer(Protocol):
    device: torch.device
    l2_bytes: int

    def seconds(self, calls: Sequence[Call], data_bytes: int) -> float:
        """Median seconds on the device of one of ``calls``: the same work on inputs of their own of ``data_bytes``.

        Where all of them together fit in the L2 cache, or nearly, it is flushed before each.
        """
        ...

    def host_seconds(self, call: Call) -> float:
        """Median seconds until ``call`` returns to the host, whatever the device still has to do."""
        ...

    def sync(self) -> None:
        """Wait until the device has done everything."""
        ...


def sets_for(data_bytes: int, l2_bytes: int, room_bytes: int) -> int:
    """How many sets of inputs to take turns with: enough to outgrow the L2 cache, if there is room for them."""
    wanted = -(-L2_FACTOR * l2_bytes // max(1, data_bytes)) + 1
    return max(1, min(max(2, wanted), MOST_SETS, room_bytes // max(1, data_bytes)))


class EventTimer:
    """Calls are captured in CUDA graphs, so that the host's share of a launch is no part of the time; where one can't
    be captured it is launched as it is, behind the flush, which takes longer than a launch does."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.l2_bytes = int(getattr(torch.cuda.get_device_properties(device), "L2_cache_size", 0)) or 50 << 20
        self._flush = torch.empty(4 * self.l2_bytes, dtype=torch.int8, device=device)

    def sync(self) -> None:
        torch.cuda.synchronize(self.device)

    def seconds(self, calls: Sequence[Call], data_bytes: int) -> float:
        cold = data_bytes * len(calls) < L2_FACTOR * self.l2_bytes
        for call in calls:
            call()
        self.sync()
        runs = [captured([call]) for call in calls[:4]] if cold else [captured(calls)]
        each = 1 if cold else len(calls)
        first = self._once(runs[0], cold)
        repeats = min(MOST, max(FEWEST, int(SAMPLE_S / max(first, 1e-6))))
        events = [self._begun(runs[number % len(runs)], cold) for number in range(repeats)]
        self.sync()
        return float(statistics.median(start.elapsed_time(end) for start, end in events)) / 1e3 / each

    def host_seconds(self, call: Call) -> float:
        call()
        self.sync()
        taken = []
        for _ in range(FEWEST):
            began = time.perf_counter()
            for _ in range(50):
                call()
            taken.append((time.perf_counter() - began) / 50)
            self.sync()
        return statistics.median(taken)

    def _begun(self, run: Call, cold: bool) -> tuple[torch.cuda.Event, torch.cuda.Event]:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        if cold:
            self._flush.zero_()
        start.record()
        run()
        end.record()
        return start, end

    def _once(self, run: Call, cold: bool) -> float:
        start, end = self._begun(run, cold)
        self.sync()
        return float(start.elapsed_time(end)) / 1e3


def captured(calls: Sequence[Call]) -> Call:
    """One CUDA graph of ``calls``, in order; they themselves where something in them can't be captured."""

    def eager() -> None:
        for call in calls:
            call()

    graph, pool = torch.cuda.CUDAGraph(), torch.cuda.graph_pool_handle()
    try:
        # The outer context puts the stream back, which a capture that fails does not.
        with torch.cuda.stream(torch.cuda.current_stream()), torch.cuda.graph(graph, pool=pool):
            eager()
    except RuntimeError:
        has_failed(pool, torch.device("cuda", torch.cuda.current_device()))
        torch.cuda.synchronize()
        return eager
    return graph.replay


class HostTimer:
    """For a rehearsal: what it says means nothing."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.l2_bytes = 1 << 12

    def sync(self) -> None:
        """A CPU has done what it was asked."""

    def seconds(self, calls: Sequence[Call], data_bytes: int) -> float:
        return self.host_seconds(calls[0])

    def host_seconds(self, call: Call) -> float:
        began = time.perf_counter()
        call()
        return time.perf_counter() - began
