"""A port without a device: work is kept in each stream's queue, and runs when somebody waits for it or, with a seed,
at odd moments too. So a copy reads its source as late as a device might, and a stream that should have waited for the
other one did not.

A capture records operations as a graph holds them: on the tensors of then, with the numbers of then.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from worker.device.model import waits
from worker.device.port import Event, Graph

CPU = torch.device("cpu")


class RehearsedOutOfMemory(RuntimeError):
    pass


class RehearsalPort:
    """``seed`` None: nothing runs before it must."""

    device = CPU
    out_of_memory: type[Exception] = RehearsedOutOfMemory

    def __init__(self, seed: int | None = None) -> None:
        self._rng = None if seed is None else random.Random(seed)
        # Of each stream: (whether it is a step's work, or a matter of the streams, and what to do).
        self._lanes: tuple[deque[tuple[bool, Callable[[], object]]], ...] = (deque(), deque())
        self._inside = False  # work is running
        self._clock = 0
        # Of what is to be launched: None if there is memory for it, else how many operations of it run before it lacks.
        self.lacking: Callable[[], int | None] = lambda: None
        self.refuses_graphs: Exception | None = None
        self.captures = 0
        self.lost = False
        self.held = 0  # bytes, in graphs
        self.kept = 0  # bytes, in nothing

    def pinned(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(tuple(shape), dtype=dtype)

    def run(self, work: Callable[[], object], *, aside: bool = False) -> None:
        if self._inside:
            work()  # a launch in a launch is in its place already
            return
        if not aside and (operations := self.lacking()) is not None:
            self._run_in_part(work, operations)
            return
        self._lanes[aside].append((True, work))
        self._stir()

    def record(self, *, aside: bool = False) -> RehearsedEvent:
        event = RehearsedEvent(self, aside)
        if self._inside:
            event.fire()
        else:
            self._lanes[aside].append((False, event.fire))
            self._stir()
        return event

    def wait(self, event: Event, *, aside: bool = False) -> None:
        assert isinstance(event, RehearsedEvent)
        self._lanes[aside].append((False, lambda: self.until(event)))
        self._stir()

    def elapsed_us(self, first: Event, last: Event) -> int:
        assert isinstance(first, RehearsedEvent) and isinstance(last, RehearsedEvent)
        assert first.at and last.at, "the time of an event that has not come"
        return last.at - first.at

    def capture(self, work: Callable[[], object]) -> Graph:
        self.synchronize()
        if self.refuses_graphs is not None:
            raise self.refuses_graphs
        recorded = Recorded()
        with torch.inference_mode():
            found = waits(lambda: recorded.record(work))
        if found:
            raise RuntimeError(f"operation not permitted when stream is capturing: {found}")
        self.captures += 1
        self.kept = 0  # as torch does
        self.held += 1 << 20
        return recorded

    def synchronize(self) -> None:
        for lane in (False, True):
            while self._lanes[lane]:
                self._next(lane)

    def answers(self) -> bool:
        return not self.lost

    def give_back(self) -> None:
        self.kept = 0

    def reserved(self) -> int:
        return self.held + self.kept

    # --- what a device does -----------------------------------------------------------------------------------------

    def until(self, event: RehearsedEvent) -> None:
        while not event.at:
            assert self._lanes[event.lane], "an event that nothing leads to"
            self._next(event.lane)

    def now(self) -> int:
        self._clock += 1
        return self._clock

    def _next(self, lane: bool) -> None:
        is_work, work = self._lanes[lane].popleft()
        if not is_work:
            work()
            return
        self._inside = True
        try:
            with torch.inference_mode():
                found = waits(work)
        finally:
            self._inside = False
        assert not found, f"the host would wait for the device in a step: {found}"

    def _run_in_part(self, work: Callable[[], object], operations: int) -> None:
        while self._lanes[False]:  # it has its turn
            self._next(False)
        self._inside = True
        try:
            with torch.inference_mode(), _Lacks(operations):
                work()
        finally:
            self._inside = False

    def _stir(self) -> None:
        if self._rng is None:
            return
        for _ in range(self._rng.choice((0, 0, 0, 1, 2, 5, 40))):
            lane = self._rng.random() < 0.5
            if self._lanes[lane]:
                self._next(lane)


class RehearsedEvent:
    def __init__(self, port: RehearsalPort, lane: bool) -> None:
        self._port = port
        self.lane = lane
        self.at = 0  # when it fired, on the port's clock

    def fire(self) -> None:
        self.at = self._port.now()

    def done(self) -> bool:
        self._port._stir()
        return self.at > 0

    def wait(self) -> None:
        assert self.at or not self._port._inside, "a wait in work that must not wait"
        self._port.until(self)


class _Lacks(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, operations: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._left = operations

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if self._left <= 0:
            raise RehearsedOutOfMemory("out of memory. Tried to allocate")
        self._left -= 1
        return func(*args, **(kwargs or {}))


class Recorded(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The operations of some work, with the tensors that they had."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._operations: list[tuple[Any, Sequence[Any], Mapping[str, Any], list[torch.Tensor]]] = []
        self._made: list[torch.Tensor] = []
        self._before: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}

    def record(self, work: Callable[[], object]) -> None:
        """Nothing has run in the end: what it has changed is put back, and what it has made is no number."""
        with self:
            work()
        for storage, before in self._before.values():
            storage.copy_(before)
        for tensor in self._made:
            if tensor.is_floating_point():
                tensor.fill_(float("nan"))
        self._before.clear()

    def replay(self) -> None:
        for func, args, kwargs, made in self._operations:
            out = func(*args, **kwargs)
            for target, new in zip(made, _tensors(out), strict=bool(made)):
                target.copy_(new)

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        given = _tensors([*args, *kwargs.values()])
        ours = {_storage(tensor) for tensor in self._made}
        for place, argument in enumerate(func._schema.arguments):
            if argument.alias_info is None or not argument.alias_info.is_write:
                continue
            for tensor in _tensors([args[place] if place < len(args) else kwargs.get(argument.name)]):
                if _storage(tensor) not in ours and _storage(tensor) not in self._before:
                    storage = tensor.untyped_storage()
                    self._before[_storage(tensor)] = storage, storage.clone()
        out = func(*args, **kwargs)
        theirs = {_storage(tensor) for tensor in given}
        made = [tensor for tensor in _tensors(out) if _storage(tensor) not in theirs]
        assert not made or len(made) == len(_tensors(out))
        self._made += made
        self._operations.append((func, args, kwargs, made))
        return out


def _tensors(values: Any) -> list[torch.Tensor]:
    if isinstance(values, torch.Tensor):
        return [values]
    if isinstance(values, list | tuple):
        return [tensor for value in values for tensor in _tensors(value)]
    return []


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata
