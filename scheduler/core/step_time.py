"""How long a step will take, learned from those that ran: when to send the next plan, and how much prefill fits. Pure.

Two fits, since steps of two kinds teach different things. A decode-only step says what decodes cost (reading weights,
and their contexts, which change so slowly that the intercept follows them), but nothing of what a prompt token costs.
What a step with prompt tokens takes beyond that is fitted apart, over its prompt tokens and over the (token, context
token) pairs that their attention visits: at long contexts the pairs dominate. The model's shape is that of
``T = t0 + c·N + a·attention`` (Vidur, MLSys 2024, section 4.3; REFERENCE gives the roofline behind it).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PlannedWork:
    """Rows of one step. ``pairs``: over its prompt tokens, the sum of the contexts that each attends to."""

    decodes: int = 0
    prefill: int = 0
    pairs: int = 0


def attention_pairs(before: int, count: int) -> int:
    """Pairs that ``count`` tokens attend to whose sequence has ``before`` tokens already."""
    return count * before + count * (count + 1) // 2


MOSTLY_DECODING = 0.75
"""Of the target: from here on decodes leave too little to prompts, and the target gives way."""

ENOUGH_STEPS = 8
"""That only decode, seen of late, before their duration is believed so far."""


class StepTimePredictor:
    """Least squares, fitted online with exponential forgetting."""

    def __init__(self) -> None:
        self._decode = _DecodeFit()
        self._prefill = _PrefillFit()

    def observe(self, work: PlannedWork, duration_us: float) -> None:
        if work.prefill:
            if work.decodes and duration_us < self._decode.predict(work.decodes):
                # Its decodes took no longer than all of it: what was learned of them (a worker's cold first step,
                # say) is wrong, and no step without prompts may come for long to put it right.
                self._decode.observe(work.decodes, duration_us)
            self._prefill.observe(work.prefill, work.pairs, duration_us - self._decode.predict(work.decodes))
        elif work.decodes:
            self._decode.observe(work.decodes, duration_us)

    def predict_us(self, work: PlannedWork) -> float:
        """Predicted duration; 0 before anything was observed."""
        base = self._decode.predict(work.decodes)
        return max(0.0, base + self._prefill.predict(work.prefill, work.pairs)) if work.prefill else base

    def decode_us(self, rows: int) -> float:
        """Predicted duration of a step that only decodes; 0 before anything was observed."""
        return self._decode.predict(rows) or max(0.0, self._prefill.intercept)

    def prompt_us(self, tokens: int) -> float:
        """What ``tokens`` prompt tokens from the start of a sequence add to the steps that they are computed in."""
        return self._prefill.per_token * tokens + self._prefill.per_pair * attention_pairs(0, tokens)

    def prefill_within(
        self, duration_us: float, decodes: int, budget: int, least: int, pairs: Callable[[int], int]
    ) -> int:
        """Most prompt tokens, of ``budget``, beside ``decodes`` that the step is predicted to run in ``duration_us``.

        ``pairs(tokens)``: the attention pairs of the chunks that so many tokens would be shared out to, monotonic.
        ``least``: never fewer (prompts must go on); and where decoding alone takes most of the duration or passes it,
        so many as take half as long as the decodes: a model that is slow for the target still reads prompts at a third
        of its pace. No more than half again the most seen of late either: past what
        was measured a line says little, since a step is bound by reading weights up to some hundred tokens and by
        arithmetic from there on.
        """
        high = min(budget, max(least, int(1.5 * self._prefill.widest)))
        allowed = duration_us - min(self._prefill.error, duration_us / 4) - self._decode.predict(decodes)
        # As measured, not as predicted: a prediction that is too high would feed itself by longer steps.
        if self._decode.steps >= ENOUGH_STEPS and self._decode.mean > MOSTLY_DECODING * duration_us:
            allowed = max(allowed, self._decode.mean / 2)
        low = min(budget, least)
        while low < high:
            middle = (low + high + 1) // 2
            if self._prefill.predict(middle, pairs(middle)) <= allowed:
                low = middle
            else:
                high = middle - 1
        return low


class _DecodeFit:
    """``T = a + b·rows`` over decode-only steps."""

    KEEP = 0.95
    RIDGE = 0.02
    RIDGE_ROWS = 1.0

    def __init__(self) -> None:
        self._n = self._x = self._y = self._xx = self._xy = 0.0

    def observe(self, rows: int, duration_us: float) -> None:
        keep = self.KEEP
        self._n = self._n * keep + 1
        self._x = self._x * keep + rows
        self._y = self._y * keep + duration_us
        self._xx = self._xx * keep + rows * rows
        self._xy = self._xy * keep + rows * duration_us

    def predict(self, rows: int) -> float:
        if not self._n:
            return 0.0
        mean_x, mean_y = self._x / self._n, self._y / self._n
        variance = self._xx / self._n - mean_x * mean_x
        # Pulled towards 0 (ridge): a few steps of one, two and three rows would else tell what sixty cost.
        spread = variance + self.RIDGE * mean_x * mean_x + self.RIDGE_ROWS
        slope = max(0.0, (self._xy / self._n - mean_x * mean_y) / spread)
        return max(0.0, mean_y + slope * (rows - mean_x))

    @property
    def steps(self) -> float:
        """How many were seen, those of long ago counting less."""
        return self._n

    @property
    def mean(self) -> float:
        """What the steps seen of late took, us; 0 before any."""
        return self._y / self._n if self._n else 0.0


class _PrefillFit:
    """``T - decodes = a + b·tokens + c·pairs`` over steps with prompt tokens; ``b`` and ``c`` are never negative.

    Chunks are often all of one length, and then nothing in the data tells ``a`` from ``b``: a few pseudo-observations
    pull towards cost in proportion to tokens (ridge regression).
    """

    KEEP = 0.97
    RIDGE = 0.02

    def __init__(self) -> None:
        self._n = 0.0
        self._sums = [0.0] * 8  # x, z, y, xx, xz, zz, xy, zy (x: tokens, z: pairs, y: us)
        self.intercept = 0.0
        self.per_token = 0.0
        self.per_pair = 0.0
        self.error = 0.0  # us, mean of |measured - predicted| of late
        self.widest = 0.0  # the most tokens in one step of late

    def observe(self, tokens: int, pairs: int, extra_us: float) -> None:
        keep = self.KEEP
        if self._n:
            missed = abs(extra_us - self.predict(tokens, pairs))
            self.error = 0.9 * self.error + 0.1 * missed
        self.widest = max(float(tokens), 0.8 * self.widest)
        self._n = self._n * keep + 1
        x, z, y = float(tokens), float(pairs), extra_us
        products = (x, z, y, x * x, x * z, z * z, x * y, z * y)
        self._sums = [keep * before + new for before, new in zip(self._sums, products, strict=True)]
        self._solve()

    def predict(self, tokens: int, pairs: int) -> float:
        return max(0.0, self.intercept + self.per_token * tokens + self.per_pair * pairs)

    def _solve(self) -> None:
        mean = [total / self._n for total in self._sums]
        x, z, y = mean[0], mean[1], mean[2]
        proportional = max(0.0, y / x)
        xx = mean[3] - x * x + self.RIDGE * x * x
        xz = mean[4] - x * z
        zz = mean[5] - z * z + self.RIDGE * z * z
        xy = mean[6] - x * y + self.RIDGE * x * x * proportional
        zy = mean[7] - z * y
        determinant = xx * zz - xz * xz
        per_token = (xy * zz - zy * xz) / determinant
        per_pair = (zy * xx - xy * xz) / determinant
        if per_pair < 0:
            per_token, per_pair = max(0.0, xy / xx), 0.0
        elif per_token < 0:
            per_token, per_pair = 0.0, max(0.0, zy / zz)
        self.per_token, self.per_pair = per_token, per_pair
        self.intercept = y - per_token * x - per_pair * z
