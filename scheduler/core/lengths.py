"""How long outputs are, learned as they end: what growth to expect of a sequence that runs or wants to."""

from __future__ import annotations

from bisect import bisect_left

_RATIO = 1.2
_HALF_LIFE = 2000  # ended sequences after which an observation counts half
_PRIOR = 20  # observations until history outweighs the prior


def _bounds() -> list[int]:
    bounds = [1]
    while bounds[-1] < 1 << 20:
        bounds.append(max(bounds[-1] + 1, int(bounds[-1] * _RATIO)))
    return bounds


class OutputLengths:
    """A decaying histogram of output lengths in geometric buckets.

    The expectation for a running sequence is conditional on its being longer than now (Past-Future scheduler,
    LightLLM: a length distribution from recent history instead of the maximum).
    """

    BOUNDS = _bounds()

    def __init__(self, quantile: float = 0.7) -> None:
        self._quantile = quantile
        self._counts = [0.0] * len(self.BOUNDS)
        self._weight = 1.0
        self._above: list[float] | None = None  # observations in this bucket and those after it
        self.observed = 0

    def observe(self, length: int) -> None:
        """A sequence ended by itself after ``length`` tokens (a cancel says nothing about length)."""
        self._weight *= 2 ** (1 / _HALF_LIFE)
        self._counts[min(bisect_left(self.BOUNDS, length), len(self._counts) - 1)] += self._weight
        self._above = None
        self.observed += 1
        if self._weight > 1e12:
            self._counts = [count / self._weight for count in self._counts]
            self._weight = 1.0

    def expected_left(self, generated: int, max_left: int) -> int:
        """Tokens still to come, at the configured quantile, of a sequence that has ``generated`` and may have
        ``max_left`` more. Between 1 and ``max_left`` (0 if that is 0)."""
        if max_left <= 1:
            return max_left
        prior = max(1, round(max_left * self._quantile))
        if self.observed == 0:
            return prior
        above = self._cumulated()
        first = bisect_left(self.BOUNDS, generated + 1)
        total = above[first] if first < len(above) else 0.0
        if total <= 1e-9:
            learned = prior
        else:
            left = total * (1 - self._quantile)
            low, high = first, len(above) - 1
            while low < high:  # the first bucket after which less than ``left`` remains
                middle = (low + high) // 2
                if above[middle + 1] <= left:
                    high = middle
                else:
                    low = middle + 1
            learned = max(1, self.BOUNDS[low] - generated)
        trust = self.observed / (self.observed + _PRIOR)
        return max(1, min(max_left, round(trust * learned + (1 - trust) * prior)))

    def _cumulated(self) -> list[float]:
        if self._above is None:
            total = 0.0
            above = [0.0] * len(self._counts)
            for index in range(len(self._counts) - 1, -1, -1):
                total += self._counts[index]
                above[index] = total
            self._above = above
        return self._above
