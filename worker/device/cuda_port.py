"""The port to a CUDA device. Steps run on its default stream, like whatever else torch does there."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from weakref import WeakSet

import torch

from worker.device.port import Event, Graph

LACKS = (
    "CUDA error: out of memory",  # of the host's, where it is to be pinned; of the driver's own
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate",  # what it says where its handle finds no memory
    "Triton Error [CUDA]: out of memory",
)
"""What errors say that want for memory and are no OutOfMemoryError of torch's."""


@contextmanager
def told_apart() -> Iterator[None]:
    """Raise want of memory as such, whoever wants it."""
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, torch.OutOfMemoryError) or not any(words in str(error) for words in LACKS):
            raise
        raise torch.OutOfMemoryError(str(error).splitlines()[0]) from error


class CudaPort:
    """Implements :class:`~worker.device.port.Port`. One thread launches; others may look at events."""

    out_of_memory: type[Exception] = torch.cuda.OutOfMemoryError

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._step = torch.cuda.default_stream(device)
        self._side = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._graph_memory: Any = None  # one pool for all graphs: they never run at once
        self._graphs: WeakSet[_CudaGraph] = WeakSet()

    def pinned(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        with told_apart():
            return torch.empty(tuple(shape), dtype=dtype, pin_memory=True)

    @torch.inference_mode()
    def run(self, work: Callable[[], object], *, aside: bool = False) -> None:
        with told_apart(), torch.cuda.stream(self._side if aside else self._step):  # and its device
            work()

    def record(self, *, aside: bool = False) -> Event:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(self._side if aside else self._step)
        return _CudaEvent(event)

    def wait(self, event: Event, *, aside: bool = False) -> None:
        assert isinstance(event, _CudaEvent)
        (self._side if aside else self._step).wait_event(event.event)

    def elapsed_us(self, first: Event, last: Event) -> int:
        assert isinstance(first, _CudaEvent) and isinstance(last, _CudaEvent)
        return int(1000 * first.event.elapsed_time(last.event))

    @torch.inference_mode()
    def capture(self, work: Callable[[], object]) -> Graph:
        # A capture that fails leaves its stream the current one: this puts the right one back.
        with told_apart(), torch.cuda.stream(self._step):
            if not self._graphs:  # a pool goes with the last of its graphs
                self._graph_memory = torch.cuda.graph_pool_handle()
            graph = torch.cuda.CUDAGraph()
            # Other threads of the process (a collective library's watchdog) may go on with calls of their own.
            try:
                with torch.cuda.graph(graph, pool=self._graph_memory, capture_error_mode="thread_local"):
                    work()
            except Exception:
                has_failed(self._graph_memory, self.device)
                raise
        captured = _CudaGraph(graph)
        self._graphs.add(captured)
        return captured

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.device)

    def answers(self) -> bool:
        try:
            self.synchronize()
        except RuntimeError:  # once a kernel has done what it may not, all that this process asks is refused
            return False
        return True

    def give_back(self) -> None:
        gc.collect()
        torch.cuda.empty_cache()
        if empty := getattr(torch._C, "_host_emptyCache", None):
            empty()

    def reserved(self) -> int:
        return torch.cuda.memory_reserved(self.device)


def has_failed(pool: Any, device: torch.device) -> None:
    """Tell torch's allocator that a capture into ``pool`` is over. Before torch 2.12 it takes one that has failed as
    going on, and frees nothing that it keeps from then on. Nor does its graph let go of the pool, which outlives all
    others that were captured into it."""
    end: Any = getattr(torch._C, "_cuda_endAllocateToPool", None)
    release: Any = getattr(torch._C, "_cuda_releasePool", None)
    if end is not None and release is not None:
        with contextlib.suppress(RuntimeError):  # it knows
            end(device.index, pool)
            release(device.index, pool)


class _CudaGraph:
    def __init__(self, graph: torch.cuda.CUDAGraph) -> None:
        self._graph = graph

    def replay(self) -> None:
        self._graph.replay()


class _CudaEvent:
    def __init__(self, event: torch.cuda.Event) -> None:
        self.event = event

    def done(self) -> bool:
        return bool(self.event.query())  # type: ignore[no-untyped-call]

    def wait(self) -> None:
        self.event.synchronize()
