"""Predicts how long a step will take, so that the next plan can be sent just before it ends. Pure."""

from __future__ import annotations


class StepTimePredictor:
    """``T = a + b * tokens``, fitted online by least squares with exponential forgetting."""

    def __init__(self, forgetting: float = 0.95) -> None:
        self._keep = forgetting
        self._n = self._x = self._y = self._xx = self._xy = 0.0

    def observe(self, tokens: int, duration_us: float) -> None:
        keep = self._keep
        self._n = self._n * keep + 1
        self._x = self._x * keep + tokens
        self._y = self._y * keep + duration_us
        self._xx = self._xx * keep + tokens * tokens
        self._xy = self._xy * keep + tokens * duration_us

    def tokens_within(self, duration_us: float) -> int | None:
        """Most tokens that a step is predicted to run in ``duration_us``; None before the slope is known."""
        slope = self._slope()
        if slope is None or slope <= 0:
            return None
        base = self._y / self._n - slope * self._x / self._n
        return max(0, int((duration_us - base) / slope))

    def _slope(self) -> float | None:
        if self._n == 0:
            return None
        mean_x, mean_y = self._x / self._n, self._y / self._n
        variance = self._xx / self._n - mean_x * mean_x
        if variance < 1e-6:
            return None
        return max(0.0, (self._xy / self._n - mean_x * mean_y) / variance)

    def predict_us(self, tokens: int) -> float:
        """Predicted duration; 0 before anything was observed."""
        if self._n == 0:
            return 0.0
        slope = self._slope() or 0.0
        return max(0.0, self._y / self._n + slope * (tokens - self._x / self._n))
