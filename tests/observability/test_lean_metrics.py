"""The lean metrics are exposed just as prometheus_client's own would be."""

from __future__ import annotations

import random

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest

from observability.lean_metrics import LeanCounter, LeanHistogram

BOUNDS = (0.001, 0.01, 0.25, 1.0, 40.0)


def exposed(registry: CollectorRegistry) -> list[str]:
    """What a scrape sees, without the times of creation."""
    return [line for line in generate_latest(registry).decode().splitlines() if "_created" not in line]


def test_same_exposition_as_the_library() -> None:
    library, lean = CollectorRegistry(), CollectorRegistry()
    counter = Counter("x:tokens", "Tokens", ["model_name"], registry=library).labels("m")
    histogram = Histogram("x:seconds", "Seconds", ["model_name"], buckets=BOUNDS, registry=library).labels("m")
    lean_counter = LeanCounter(lean, "x:tokens", "Tokens", ("model_name", "m"))
    lean_histogram = LeanHistogram(lean, "x:seconds", "Seconds", ("model_name", "m"), BOUNDS)
    assert exposed(lean) == exposed(library)
    rng = random.Random(0)
    for value in (*BOUNDS, *(rng.uniform(0, 60) for _ in range(100))):  # bounds are inclusive
        counter.inc(3)
        lean_counter.value += 3
        histogram.observe(value)
        lean_histogram.observe(value)
    assert exposed(lean) == exposed(library)


def test_without_a_label_too() -> None:
    library, lean = CollectorRegistry(), CollectorRegistry()
    histogram = Histogram("x_seconds", "Seconds", buckets=BOUNDS, registry=library)
    lean_histogram = LeanHistogram(lean, "x_seconds", "Seconds", None, BOUNDS)
    for value in (0.5, 0.25, 100.0):
        histogram.observe(value)
        lean_histogram.observe(value)
    assert exposed(lean) == exposed(library)
