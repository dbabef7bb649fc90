"""Virtual time: a clock that jumps from one event to the next, and one event loop for each node of a simulated mesh.

Every node has a loop of its own, as every process has. So one can be stopped while the clock goes on (SIGSTOP), or be
thrown away with all that it was about to do (kill -9), and the others notice nothing but its silence.
"""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import itertools
import math
import time
from asyncio import events
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

START_NS = 1_000_000_000_000  # of the monotonic clock
UNIX_NS = 1_700_000_000_000_000_000  # what unix time is then


class Clock:
    """``work_ns`` is what the code that runs just now has spent since ``now_ns``, in ``time.sleep``."""

    def __init__(self) -> None:
        self.now_ns = START_NS
        self.work_ns = 0
        self.unix_offset_ns = 0  # of the node that runs just now

    def monotonic_ns(self) -> int:
        return self.now_ns + self.work_ns

    def monotonic(self) -> float:
        return (self.now_ns + self.work_ns) / 1e9

    def time_ns(self) -> int:
        return self.now_ns + self.work_ns + UNIX_NS - START_NS + self.unix_offset_ns

    def time(self) -> float:
        return self.time_ns() / 1e9

    def sleep(self, seconds: float) -> None:
        self.work_ns += int(seconds * 1e9)

    def take_work(self) -> float:
        """Seconds spent since this was asked last."""
        spent, self.work_ns = self.work_ns, 0
        return spent / 1e9


@contextlib.contextmanager
def virtual_time(clock: Clock) -> Iterator[None]:
    """All clocks of the ``time`` module are ``clock``, for the whole process: nothing else may run meanwhile."""
    virtual = {
        "monotonic": clock.monotonic, "perf_counter": clock.monotonic, "monotonic_ns": clock.monotonic_ns,
        "perf_counter_ns": clock.monotonic_ns, "time": clock.time, "time_ns": clock.time_ns, "sleep": clock.sleep,
    }  # fmt: skip
    real = {name: getattr(time, name) for name in virtual}
    for name, function in virtual.items():
        setattr(time, name, function)
    try:
        yield
    finally:
        for name, function in real.items():
            setattr(time, name, function)


class Agenda:
    """What happens when: (time, action), in order of time, then of entry; and the loops that are awake now."""

    def __init__(self, clock: Clock) -> None:
        self.awake: deque[NodeLoop] = deque()
        self._clock = clock
        self._heap: list[tuple[int, int, Callable[..., None], tuple[Any, ...]]] = []
        self._serial = itertools.count()

    def at(self, when_ns: int, action: Callable[..., None], *args: Any) -> None:
        heapq.heappush(self._heap, (when_ns, next(self._serial), action, args))

    def after(self, seconds: float, action: Callable[..., None], *args: Any) -> None:
        self.at(self._clock.now_ns + int(seconds * 1e9), action, *args)

    @property
    def due_ns(self) -> float:
        return self._heap[0][0] if self._heap else math.inf

    def run_due(self) -> None:
        heap, now = self._heap, self._clock.now_ns
        while heap and heap[0][0] <= now:
            _, _, action, args = heapq.heappop(heap)
            action(*args)


class NodeLoop(asyncio.BaseEventLoop):
    """The event loop of one process of a node, run by the simulation whenever it has something to do."""

    def __init__(self, clock: Clock, agenda: Agenda, node: Any) -> None:
        super().__init__()
        self.node = node
        self.faults: list[str] = []
        self._clock = clock
        self._agenda = agenda
        self._clock_resolution = 1e-9
        self._waking = False  # it is among those that are awake
        self._tasks: list[asyncio.Task[Any]] = []
        self.set_exception_handler(self._note_fault)

    def time(self) -> float:
        return self._clock.now_ns / 1e9

    def call_at(self, when: float, callback: Callable[..., Any], *args: Any, context: Any = None) -> Any:
        timer = super().call_at(when, callback, *args, context=context)
        self._agenda.at(math.ceil(when * 1e9), self.wake)
        return timer

    def create_task(self, coro: Any, *, name: Any = None, context: Any = None) -> Any:
        task = super().create_task(coro, name=name, context=context)
        self._tasks.append(task)
        return task

    def wake(self) -> None:
        """It has something to do, or may have."""
        if not self._waking:
            self._waking = True
            self._agenda.awake.append(self)

    def deliver(self, callback: Callable[..., Any], *args: Any) -> None:
        """``call_soon`` from outside: something has come in from the network, the supervisor or the kernel."""
        if not self.is_closed():
            self.call_soon(callback, *args)
            self.wake()

    def run(self) -> None:
        """Whatever it has to do now, as ``BaseEventLoop._run_once`` does it, until it would wait."""
        self._waking = False
        ready, timers = self._ready, self._scheduled
        now = self._clock.now_ns / 1e9 + self._clock_resolution
        while timers and timers[0]._when < now:
            timer = heapq.heappop(timers)
            timer._scheduled = False
            ready.append(timer)
        events._set_running_loop(self)
        try:
            while ready:
                handle = ready.popleft()
                if not handle._cancelled:
                    handle._run()
        finally:
            events._set_running_loop(None)

    def end(self) -> None:
        """Cancel every task and let it unwind; nothing of it is heard outside."""
        for _ in range(100):
            tasks = [task for task in self._tasks if not task.done()]
            if not tasks and not self._ready:
                break
            for task in tasks:
                task.cancel()
            self.run()
        self.close()

    def run_in_executor(self, executor: Any, func: Callable[..., Any], *args: Any) -> Any:
        future = self.create_future()
        future.set_result(func(*args))
        return future

    def _process_events(self, event_list: list[Any]) -> None: ...

    def _write_to_self(self) -> None: ...

    def _note_fault(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        self.faults.append(f"{context.get('message')}: {context.get('exception')!r}")
