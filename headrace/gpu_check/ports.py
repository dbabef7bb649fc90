"""The runner's port to the device; of a rehearsal to the CPU, where whatever it is given is done when the call
returns."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from headrace.gpu_check.rig import Rig
from worker.device.cuda_port import CudaPort
from worker.device.port import Event, Graph, Port


def port_of(rig: Rig) -> Port:
    return CpuPort() if rig.rehearsal else CudaPort(rig.device)


@dataclass(frozen=True, slots=True)
class _Past:
    at_s: float

    def done(self) -> bool:
        return True

    def wait(self) -> None: ...


@dataclass(frozen=True, slots=True)
class _Recorded:
    work: Callable[[], object]

    def replay(self) -> None:
        self.work()


class CpuPort:
    """Implements :class:`~worker.device.port.Port`. Its graphs are the calls themselves."""

    device = torch.device("cpu")
    out_of_memory: type[Exception] = MemoryError

    def pinned(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(tuple(shape), dtype=dtype)

    @torch.inference_mode()
    def run(self, work: Callable[[], object], *, aside: bool = False) -> None:
        work()

    def record(self, *, aside: bool = False) -> Event:
        return _Past(time.perf_counter())

    def wait(self, event: Event, *, aside: bool = False) -> None: ...

    def elapsed_us(self, first: Event, last: Event) -> int:
        assert isinstance(first, _Past) and isinstance(last, _Past)
        return int((last.at_s - first.at_s) * 1e6)

    def capture(self, work: Callable[[], object]) -> Graph:
        return _Recorded(torch.inference_mode()(work))

    def synchronize(self) -> None: ...

    def answers(self) -> bool:
        return True

    def give_back(self) -> None: ...

    def reserved(self) -> int:
        return 0
