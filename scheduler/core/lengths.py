"""How long outputs are, learned as they end: what growth to expect of a sequence that runs or wants to."""

from __future__ import annotations

from bisect import bisect_left

_RATIO = 1.2
_HALF_LIFE = 2000  # ended sequences after which an observation counts half
_GOLDEN = (5**0.5 - 1) / 2
_PRIOR = 20  # observations until history outweighs the prior


def _bounds() -> list[int]:
    bounds = [1]
    while bounds[-1] < 1 << 20:
        bounds.append(max(bounds[-1] + 1, int(bounds[-1] * _RATIO)))
    return bounds


class OutputLengths:
    """A decaying histogram of output lengths in geometric buckets.

    The expectation for a running sequence is conditional on its being longer than now (Past-Future scheduler,
    LightLLM, ASPLOS 2025: a length distribution from recent history instead of the maximum). There each sequence's
    length is drawn from that distribution; here it stands at a quantile of its own, evenly spread over the sequences,
    which says the same of all together without chance: some end early, some late, and their sum is about right, where
    one quantile for all would have all of them end together. ``quantile`` is the mean of those quantiles: 0.5 expects
    what was observed, more is cautious.
    """

    BOUNDS = _bounds()

    def __init__(self, quantile: float = 0.5) -> None:
        self._bend = (1 - quantile) / quantile  # u ** bend has this mean for u uniform in (0, 1)
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

    def expected_left(self, rank: float, generated: int, max_left: int) -> int:
        """Tokens still to come of a sequence that has ``generated`` and may have ``max_left`` more. ``rank`` in (0, 1)
        is its place among all sequences (see ``rank_of``). Between 1 and ``max_left`` (0 if that is 0)."""
        return self.left_at(rank**self._bend, generated, max_left)

    def left_at(self, quantile: float, generated: int, max_left: int) -> int:
        """Tokens still to come at one quantile."""
        if max_left <= 1:
            return max_left
        prior = max(1, round(max_left * quantile))
        if self.observed == 0:
            return prior
        above = self._cumulated()
        first = bisect_left(self.BOUNDS, generated + 1)
        total = above[first] if first < len(above) else 0.0
        if total <= 1e-9:
            learned = prior
        else:
            left = total * (1 - quantile)
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


def rank_of(number: int) -> float:
    """The place in (0, 1) of the sequence with this number: multiples of the golden ratio, which any run of
    consecutive numbers spreads evenly (Weyl; the additive low-discrepancy sequence in one dimension)."""
    return (number * _GOLDEN) % 1.0
