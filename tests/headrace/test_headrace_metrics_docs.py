"""``docs/metrics.md`` is what the declarations say, and every metric says what it means and in which unit."""

from __future__ import annotations

from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from headrace.metrics_docs import metrics_markdown, tables
from observability.metric_table import Described, described, unit_of

DOCS = Path(__file__).parents[2] / "docs" / "metrics.md"


def test_the_document_is_up_to_date() -> None:
    assert DOCS.read_text() == metrics_markdown(), "run `headrace metrics-docs > docs/metrics.md`"


def test_every_name_belongs_to_us_or_is_one_that_others_know() -> None:
    for service, metrics in tables().items():
        names = [one.name for one in metrics]
        assert len(names) == len(set(names)), service
        for one in metrics:
            assert one.name.startswith(("headrace_", "vllm:", "gen_ai_")), one.name
            assert not one.name.startswith("vllm:") or "model_name" in one.labels, f"{one.name}: vLLM's have the label"
            assert len(one.text) > 10 and not one.text.endswith("."), one.name


@pytest.mark.parametrize(
    ("name", "unit"),
    [
        ("headrace_plan_seconds", "seconds"), ("vllm:kv_cache_usage_perc", "ratio"), ("headrace_workers", "count"),
        ("vllm:iteration_tokens_total", "tokens"), ("headrace_kv_blocks_shared", "blocks"),
        ("gen_ai_server_time_per_output_token_seconds", "seconds"),
    ],
)  # fmt: skip
def test_units(name: str, unit: str) -> None:
    assert unit_of(name) == unit


def test_what_is_declared_is_what_is_described() -> None:
    registry = CollectorRegistry()
    Counter("headrace_things", "Things seen", ["kind"], registry=registry)
    Gauge("headrace_level", "How high", registry=registry)
    Histogram("headrace_wait_seconds", "How long", registry=registry)
    level, things, wait = described(registry)
    assert things == Described("headrace_things_total", "counter", "count", ("kind",), "Things seen")
    assert (level.kind, level.series) == ("gauge", ("headrace_level",))
    assert wait.series == ("headrace_wait_seconds_bucket", "headrace_wait_seconds_sum", "headrace_wait_seconds_count")
