"""What a start takes on itself so that no step has to: all of it, or as much as there is time for."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from device_box import make_runner
from rehearsal_port import RehearsalPort

from kernels.contract import LayerAttention, LayerCache
from shared.lifecycle import StartupError
from shared.messages import Capacity
from worker.device import warm_up as module
from worker.device.runner import DeviceRunner
from worker.device.warm_up import warm_up


@dataclass
class Kernel:
    """Each of its launches takes a second of the clock."""

    launches: int = 5
    made: int = 0
    now: float = 0.0
    layers: list[Sequence[LayerAttention]] = field(default_factory=list)

    def warm_ups(self, cache: LayerCache, layers: Sequence[LayerAttention]) -> Iterator[Callable[[], None]]:
        self.layers.append(layers)
        return iter([self._launch] * self.launches)

    def _launch(self) -> None:
        self.made += 1

    def clock(self) -> float:
        self.now += 1.0
        return self.now


def stand(kernel: Kernel) -> tuple[Any, DeviceRunner]:
    capacity = Capacity("m", 1200, 4, 400, 29, [5], "device")
    runner = make_runner(RehearsalPort(), capacity, graph_rows=3)
    return SimpleNamespace(kernel=kernel, model=runner.model, layers=[LayerAttention(1.0)]), runner


def test_everything_is_ready_where_there_is_time(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    kernel = Kernel()
    prepared, runner = stand(kernel)
    warm_up(prepared, runner, 1000.0, kernel.clock)
    assert kernel.made == 5 and kernel.layers == [prepared.layers]
    assert len(runner.graphs) == 9 == len(runner.graphs.ahead())
    assert "5 attention kernels, 9 of 9 decode steps captured" in caplog.text
    assert "warming up, 5 s so far: 4 of 5 attention kernels" in caplog.text


@pytest.mark.parametrize(("seconds", "kernels", "graphs"), [(0.0, 0, 0), (3.0, 2, 0), (8.0, 5, 2)])
def test_no_more_is_begun_once_the_time_is_over(seconds: float, kernels: int, graphs: int) -> None:
    kernel = Kernel()
    prepared, runner = stand(kernel)
    warm_up(prepared, runner, seconds, kernel.clock)
    assert (kernel.made, len(runner.graphs)) == (kernels, graphs)


def test_a_start_that_lacks_memory_for_more_serves_with_what_it_has(caplog: pytest.LogCaptureFixture) -> None:
    kernel = Kernel()
    prepared, runner = stand(kernel)
    launched = itertools.count()
    runner.port.lacking = lambda: 0 if next(launched) >= 3 else None  # type: ignore[attr-defined]
    launches = [kernel._launch] * 3 + [lambda: torch.zeros(1).add_(1)] * 2
    prepared.kernel.warm_ups = lambda cache, layers: iter(launches)
    warm_up(prepared, runner, 1000.0, kernel.clock)
    assert kernel.made == 3 and not len(runner.graphs)
    assert "3 of 5 attention kernels" in caplog.text


def test_ranks_capture_as_many_as_the_one_that_gives_up_first(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool] = []

    def all_agree(yes: bool) -> bool:
        asked.append(yes)
        return yes and len(asked) < 4

    monkeypatch.setattr(module, "mine", lambda: SimpleNamespace(all_agree=all_agree, begin_steps=lambda: None))
    kernel = Kernel()
    prepared, runner = stand(kernel)
    warm_up(prepared, runner, 1000.0, kernel.clock)
    assert asked == [True] * 4 and len(runner.graphs) == 3


def test_what_is_captured_has_its_sums_in_the_group_of_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a rank that has given up its graphs waits in one group for those that replay theirs in another."""
    groups = ["loading"]
    used = []
    ranks = SimpleNamespace(all_agree=lambda yes: yes, begin_steps=lambda: groups.append("steps"))
    monkeypatch.setattr(module, "mine", lambda: ranks)
    kernel = Kernel()
    prepared, runner = stand(kernel)
    forward = runner.model.forward

    def summed(*args: Any) -> Any:
        used.append(groups[-1])
        return forward(*args)

    monkeypatch.setattr(runner.model, "forward", summed)
    warm_up(prepared, runner, 1000.0, kernel.clock)
    assert len(runner.graphs) == 9 and set(used) == {"steps"}


def test_a_rank_that_lacks_memory_in_a_step_of_all_ends_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """The others wait for its sums: it may not just go on without graphs."""
    ranks = SimpleNamespace(all_agree=lambda yes: yes, begin_steps=lambda: None)
    monkeypatch.setattr(module, "mine", lambda: ranks)
    kernel = Kernel(launches=0)
    prepared, runner = stand(kernel)

    def lacking() -> int | None:
        return 2 if sys._getframe(2).f_code.co_name == "capture" else None

    runner.port.lacking = lacking  # type: ignore[attr-defined]
    with pytest.raises(StartupError, match="lacks memory for a step of 3 sequences"):
        warm_up(prepared, runner, 1000.0, kernel.clock)
