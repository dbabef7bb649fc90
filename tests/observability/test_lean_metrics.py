"""The lean metrics are exposed just as prometheus_client's own would be."""

from __future__ import annotations

import random

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from observability.lean_metrics import lean_counter, lean_counters, lean_gauge, lean_histogram, lean_histograms

BOUNDS = (0.001, 0.01, 0.25, 1.0, 40.0)


def exposed(registry: CollectorRegistry) -> list[str]:
    """What a scrape sees, without the times of creation."""
    return [line for line in generate_latest(registry).decode().splitlines() if "_created" not in line]


def test_same_exposition_as_the_library() -> None:
    library, lean = CollectorRegistry(), CollectorRegistry()
    counter = Counter("x:tokens", "Tokens", ["model_name"], registry=library).labels("m")
    histogram = Histogram("x:seconds", "Seconds", ["model_name"], buckets=BOUNDS, registry=library).labels("m")
    lean_tokens = lean_counter(lean, "x:tokens", "Tokens", ("model_name", "m"))
    lean_one = lean_histogram(lean, "x:seconds", "Seconds", ("model_name", "m"), BOUNDS)
    assert exposed(lean) == exposed(library)
    rng = random.Random(0)
    for value in (*BOUNDS, *(rng.uniform(0, 60) for _ in range(100))):  # bounds are inclusive
        counter.inc(3)
        lean_tokens.value += 3
        histogram.observe(value)
        lean_one.observe(value)
    assert exposed(lean) == exposed(library)


def test_without_a_label_too() -> None:
    library, lean = CollectorRegistry(), CollectorRegistry()
    histogram = Histogram("x_seconds", "Seconds", buckets=BOUNDS, registry=library)
    lean_one = lean_histogram(lean, "x_seconds", "Seconds", None, BOUNDS)
    for value in (0.5, 0.25, 100.0):
        histogram.observe(value)
        lean_one.observe(value)
    assert exposed(lean) == exposed(library)


def test_a_histogram_with_several_values_of_a_label() -> None:
    library, lean = CollectorRegistry(), CollectorRegistry()
    histogram = Histogram("x_seconds", "Seconds", ["model_name"], buckets=BOUNDS, registry=library)
    lean_of = lean_histograms(lean, "x_seconds", "Seconds", "model_name", ("a", "b"), BOUNDS)
    by_library = {model: histogram.labels(model) for model in ("a", "b")}
    for model, value in (("a", 0.5), ("b", 0.25), ("a", 100.0)):
        by_library[model].observe(value)
        lean_of[model].observe(value)
    assert exposed(lean) == exposed(library)


def test_several_values_of_a_label_and_gauges() -> None:
    library, lean = CollectorRegistry(), CollectorRegistry()
    rows = Counter("x_rows", "Rows", ["kind"], registry=library)
    busy, level = Counter("x_busy", "Busy", registry=library), Gauge("x_level", "Level", registry=library)
    kinds = {kind: rows.labels(kind) for kind in ("prefill", "decode")}
    lean_rows = lean_counters(lean, "x_rows", "Rows", "kind", ("prefill", "decode"))
    lean_busy, lean_level = lean_counter(lean, "x_busy", "Busy"), lean_gauge(lean, "x_level", "Level")
    assert exposed(lean) == exposed(library)
    kinds["decode"].inc(7)
    busy.inc(0.25)
    level.set(3)
    lean_rows["decode"].value += 7
    lean_busy.value += 0.25
    lean_level.value = 3
    assert exposed(lean) == exposed(library)
