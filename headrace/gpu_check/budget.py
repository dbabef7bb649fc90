"""Who may take how long. One budget for all: what a stage leaves is divided among those after it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

GRACE_S = 40.0
"""How long a stage whose time is up may still need to finish what it has begun, before it is stopped from outside: a
case of a kernel may have half a dozen variants to compile."""

REPORT_S = 3.0
"""Kept for the report itself."""


class Budget:
    """``seconds`` from ``began`` (default: now) on ``clock``, which gives seconds that never go back."""

    def __init__(self, seconds: float, clock: Callable[[], float], began: float | None = None) -> None:
        self._clock = clock
        self._began = clock() if began is None else began
        self.seconds = seconds

    @property
    def passed_s(self) -> float:
        return self._clock() - self._began

    @property
    def left_s(self) -> float:
        return max(0.0, self.seconds - REPORT_S - self.passed_s)

    def allot(self, weights: Sequence[float]) -> float:
        """Seconds for the first of the stages that are still to run, by its share of their weights."""
        return self.left_s * weights[0] / sum(weights)

    def stop_after(self, allotted_s: float) -> float:
        """Seconds from now after which a stage that was given ``allotted_s`` is stopped."""
        return min(allotted_s + GRACE_S, self.left_s)
