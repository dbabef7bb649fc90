"""Metrics cheap enough to be booked for every token and step: prometheus_client's own cost ten times as much.

Each is booked by one thread alone, the event loop's, and read by the listener's: a reading is one that was or is about
to be, which is all that a scrape promises.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric


class LeanNumber:
    """One sample of a counter or a gauge: ``value`` is simply added to, or set."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value: float = 0


class _Numbers:
    """Exposes numbers as one metric, told apart by a label unless it is empty."""

    def __init__(
        self, registry: CollectorRegistry, kind: type[CounterMetricFamily] | type[GaugeMetricFamily], name: str,
        text: str, label: str, values: Sequence[str],
    ) -> None:  # fmt: skip
        self._kind, self._name, self._text = kind, name, text
        self.label_names = (label,) if label else ()
        self.numbers = {value: LeanNumber() for value in values}
        registry.register(self)

    def collect(self) -> Iterator[Metric]:
        family = self._kind(self._name, self._text, labels=self.label_names)
        for value, number in self.numbers.items():
            family.add_metric([value] if self.label_names else [], number.value)
        yield family


def lean_counter(registry: CollectorRegistry, name: str, text: str, label: tuple[str, str] | None = None) -> LeanNumber:
    """A counter without a label, or with one whose value is fixed."""
    key, value = label or ("", "")
    return _Numbers(registry, CounterMetricFamily, name, text, key, (value,)).numbers[value]


def lean_counters(
    registry: CollectorRegistry, name: str, text: str, label: str, values: Sequence[str]
) -> dict[str, LeanNumber]:
    """A counter with a label, by its values."""
    return _Numbers(registry, CounterMetricFamily, name, text, label, values).numbers


def lean_gauge(registry: CollectorRegistry, name: str, text: str) -> LeanNumber:
    return _Numbers(registry, GaugeMetricFamily, name, text, "", ("",)).numbers[""]


class LeanHistogram:
    """One histogram of those with its name. ``bounds`` ascend; the last bucket, +Inf, is implied."""

    __slots__ = ("_bounds", "_counts", "_sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = list(bounds)
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def sample(self) -> tuple[list[tuple[str, float]], float]:
        """(cumulative buckets by their upper bounds, sum)."""
        total = 0
        buckets: list[tuple[str, float]] = []
        for bound, count in zip((*self._bounds, float("inf")), self._counts, strict=True):
            total += count
            buckets.append((_bound_text(bound), total))
        return buckets, self._sum


class _Histograms:
    """Exposes histograms as one metric, told apart by a label unless it is empty."""

    def __init__(
        self, registry: CollectorRegistry, name: str, text: str, label: str, values: Sequence[str],
        bounds: Sequence[float],
    ) -> None:  # fmt: skip
        self._name, self._text = name, text
        self.label_names = (label,) if label else ()
        self.histograms = {value: LeanHistogram(bounds) for value in values}
        registry.register(self)

    def collect(self) -> Iterator[Metric]:
        family = HistogramMetricFamily(self._name, self._text, labels=self.label_names)
        for value, histogram in self.histograms.items():
            family.add_metric([value] if self.label_names else [], *histogram.sample())
        yield family


def lean_histogram(
    registry: CollectorRegistry, name: str, text: str, label: tuple[str, str] | None, bounds: Sequence[float]
) -> LeanHistogram:
    """A histogram without a label, or with one whose value is fixed."""
    key, value = label or ("", "")
    return _Histograms(registry, name, text, key, (value,), bounds).histograms[value]


def lean_histograms(
    registry: CollectorRegistry, name: str, text: str, label: str, values: Sequence[str], bounds: Sequence[float]
) -> dict[str, LeanHistogram]:
    """A histogram with a label, by its values."""
    return _Histograms(registry, name, text, label, values, bounds).histograms


def _bound_text(bound: float) -> str:
    return "+Inf" if bound == float("inf") else repr(float(bound))
