"""What the scheduler's metrics say of a mesh that serves several models."""

from __future__ import annotations

import logging

import msgspec
import pytest
from mesh_in_a_box import request
from prometheus_client import CollectorRegistry

from observability.tracing import Tracing
from scheduler.core.core import SchedulerCore
from scheduler.core.limits import Limits
from scheduler.metrics import SchedulerMetrics
from scheduler.reporting import Reporter
from shared.messages import Capacity
from shared.subjects import Subjects

EACH = (
    "vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc",
    "vllm:prefix_cache_queries_total", "vllm:prefix_cache_hits_total", "vllm:num_preemptions_total",
    "vllm:request_queue_time_seconds_count",
)  # fmt: skip


@pytest.mark.parametrize("models", [("m",), ("m", "idle")])
def test_each_model_is_told_apart(models: tuple[str, ...]) -> None:
    registry = CollectorRegistry()
    core = SchedulerCore(Limits(max_num_seqs=1, max_num_batched_tokens=64, run_ahead=1))
    reporter = Reporter(
        core, Subjects("blue"), lambda subject, payload: None, SchedulerMetrics(registry),
        Tracing("scheduler", "s", "", 0.0), 0,
    )  # fmt: skip
    for model in models:
        core.worker_up(f"worker-{model}", 1, Capacity(model, 400, 16, 50, 997, []), 0)

    def told(model: str) -> list[float | None]:
        return [registry.get_sample_value(name, {"model_name": model}) for name in EACH]

    assert told("m") == [None] * len(EACH)
    reporter.observe()
    assert told("m") == [0.0] * len(EACH), "at 0 before anything has happened, so that the first one is a rise"
    for index in range(3):
        core.submit(
            msgspec.structs.replace(request(f"r{index}", prompt_len=20, arrival_ns=index), n=2 if index else 1), 1
        )
    core.plan("worker-m", 2)
    for _ in range(2):
        reporter.observe()
        assert told("m") == [1.0, 4.0, 2 / 50, 20.0, 0.0, 0.0, 0.0], "choices that will fork wait too"
        assert told("idle") == ([0.0] if "idle" in models else [None]) * len(EACH)
    reporter.carry_out(core.cancel("r0", 1, -1, 3))
    core.worker_lost("worker-m", "gone", 4)
    reporter.observe()
    assert told("m")[:3] == [0.0, 4.0, 0.0] and told("m")[-1] == 1.0


def test_the_choices_of_a_lost_worker_are_one_line_of_the_log(caplog: pytest.LogCaptureFixture) -> None:
    core = SchedulerCore(Limits(max_num_seqs=8, max_num_batched_tokens=64, run_ahead=1))
    tracing = Tracing("scheduler", "s", "", 0.0)
    events: list[bytes] = []
    reporter = Reporter(
        core, Subjects(), lambda subject, payload: events.append(payload), SchedulerMetrics(CollectorRegistry()),
        tracing, 0,
    )  # fmt: skip
    core.worker_up("w", 1, Capacity("m", 400, 16, 50, 997, []), 0)
    for index in range(3):
        core.submit(msgspec.structs.replace(request(f"r{index}", prompt_len=8, arrival_ns=index), n=1), 1)
    core.plan("w", 2)
    with caplog.at_level(logging.INFO):
        reporter.carry_out(core.worker_lost("w", "gone", 3))
    assert len(events) == 3
    assert [record.getMessage() for record in caplog.records] == ["3 choices lost, to be resumed: gone"]
