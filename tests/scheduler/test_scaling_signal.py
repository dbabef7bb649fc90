"""What a leader tells an autoscaler: from the core's state to the metrics."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from mesh_in_a_box import Box, request
from prometheus_client import CollectorRegistry

from scheduler.config import SchedulerConfig
from scheduler.core.core import SchedulerCore
from scheduler.core.limits import Limits
from scheduler.core.pools import QueueKey
from scheduler.metrics import SchedulerMetrics
from scheduler.policies.scaling import ScalingPolicy, Why
from scheduler.scaling import SILENT_S, Autoscaling
from shared.messages import Capacity
from shared.pool_name import DEFAULT_POOL


def told(registry: CollectorRegistry, model: str) -> tuple[float | None, Sequence[str]]:
    labels = {"model_name": model, "pool": DEFAULT_POOL}
    reasons = [
        why.value
        for why in Why
        if registry.get_sample_value("headrace_desired_workers_reason", {**labels, "reason": why.value})
    ]
    return registry.get_sample_value("headrace_desired_workers", labels), reasons


def ticks(scaling: Autoscaling, first_s: float, last_s: float) -> None:
    for quarter in range(int(first_s * 4), int(last_s * 4) + 1):
        scaling.tick(quarter / 4)


def test_each_model_has_its_number_and_one_reason_once_all_workers_can_have_been_heard() -> None:
    registry = CollectorRegistry()
    metrics = SchedulerMetrics(registry)
    core = SchedulerCore(Limits(max_num_seqs=1, max_num_batched_tokens=64, run_ahead=1))
    scaling = Autoscaling(core, metrics, ScalingPolicy())
    for name, model in (("a", "m"), ("b", "m"), ("c", "idle")):
        core.worker_up(name, 1, Capacity(model, 400, 16, 50, 997, []), 0)
    ticks(scaling, 100, 100 + SILENT_S - 1)
    assert told(registry, "m") == (None, []), "not all may have been heard of"
    ticks(scaling, 100 + SILENT_S, 102 + SILENT_S)
    assert told(registry, "m") == (2.0, ["steady"]) and told(registry, "idle") == (1.0, ["steady"])
    core.worker_lost("b", "gone", 1)
    ticks(scaling, 113, 115)
    assert told(registry, "m") == (2.0, ["steady"]), "as many as there were"
    for index in range(6):
        core.submit(request(f"r{index}", prompt_len=20, arrival_ns=index), 1)
    ticks(scaling, 116, 160)
    assert told(registry, "m") == (2.0, ["queue"])
    metrics.stands_by()
    assert told(registry, "m") == (None, []), "who does not lead asks for nothing"


def test_what_leaves_a_queue_is_counted_in_its_own_tokens() -> None:
    box = Box(Limits(max_num_seqs=2, max_num_batched_tokens=64))
    for index in range(3):
        box.submit(request(f"r{index}", prompt_len=20, max_tokens=10))
    queue = box.core.queues["m", DEFAULT_POOL]
    assert (queue.tokens, queue.left_tokens) == (90, 0)
    box.step()
    assert (queue.tokens, queue.left_tokens) == (30, 60)
    box.run()
    assert (queue.tokens, queue.left_tokens) == (0, 90)


def test_a_worker_that_drains_is_none() -> None:
    core = SchedulerCore(Limits(max_num_seqs=1, max_num_batched_tokens=64, run_ahead=1))
    for name in ("a", "b"):
        core.worker_up(name, 1, Capacity("m", 400, 16, 50, 997, []), 0)
    core.workers["a"].draining = True
    load = Autoscaling(core, SchedulerMetrics(CollectorRegistry()), ScalingPolicy())._load(QueueKey("m", DEFAULT_POOL))
    assert (load.workers, load.slots, load.total_blocks) == (1, 1, 50)


def test_options_become_the_policy() -> None:
    config = SchedulerConfig(
        scale_min_workers=0, scale_max_workers=3, scale_target_wait_s=4.0, scale_memory_share=0.7, scale_ahead_s=9.0,
        scale_down_after_s=77.0,
    )  # fmt: skip
    assert config.scaling() == ScalingPolicy(4.0, 0, 3, 9.0, 77.0, memory_share=0.7)
    with pytest.raises(ValueError, match=r"scale_min_workers \(4\) is over scale_max_workers \(3\)"):
        SchedulerConfig(scale_min_workers=4, scale_max_workers=3).scaling()
