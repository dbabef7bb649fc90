"""What beats, metrics and the dashboard say of pools, and that a full one leaves the others alone."""

from __future__ import annotations

from typing import Any

import pytest
from mesh_in_a_box import Box, capacity, request
from prometheus_client import CollectorRegistry

from observability.tracing import Tracing
from scheduler.config import SchedulerConfig
from scheduler.core.limits import Limits
from scheduler.core.pools import QueueKey
from scheduler.look import _queue
from scheduler.metrics import SchedulerMetrics
from scheduler.policies.scaling import ScalingPolicy
from scheduler.reporting import Reporter
from scheduler.scaling import SILENT_S, Autoscaling
from shared.config import ConfigError, resolve
from shared.messages import ModelInfo, Outcome
from shared.subjects import Subjects

POOLS = "chat:-8,long:9-"
GAUGES = ("headrace_pool_workers", "headrace_pool_requests_running", "headrace_pool_requests_waiting")


class Told:
    def __init__(self, **limits: Any) -> None:
        apart = Limits(max_num_seqs=1, max_num_batched_tokens=64, pools=POOLS, pool_lend="", **limits)
        self.box = Box(apart, workers=0)
        for name, pool in (("c0", "chat"), ("c1", "chat"), ("l0", "long")):
            self.box.add_worker(name, capacity(pool=pool))
        self.registry = CollectorRegistry()
        self.metrics = SchedulerMetrics(self.registry)
        self.reporter = Reporter(
            self.box.core, Subjects("blue"), lambda subject, payload: None, self.metrics,
            Tracing("scheduler", "s", "", 0.0), 0,
        )  # fmt: skip

    def submit(self, count: int, tokens: int, begin: int = 0) -> list[Outcome]:
        names = [f"r{tokens}-{index}" for index in range(begin, begin + count)]
        return [self.box.submit(request(name, tokens, 6)).outcome for name in names]

    def info(self) -> ModelInfo:
        (info,) = self.reporter.beat("s", False).models
        return info

    def gauges(self, pool: str) -> list[float | None]:
        self.reporter.observe()
        labels = {"model_name": "m", "pool": pool}
        return [self.registry.get_sample_value(name, labels) for name in GAUGES]


def test_a_full_pool_refuses_its_own_and_nobody_elses() -> None:
    told = Told(max_num_queued_reqs=3)
    assert told.submit(4, 20) == [*[Outcome.ACCEPTED] * 3, Outcome.QUEUE_FULL]
    assert told.box.core.full_queues == {QueueKey("m", "long")}
    assert told.submit(3, 4) == [Outcome.ACCEPTED] * 3
    assert told.submit(1, 4, begin=9) == [Outcome.QUEUE_FULL]
    assert told.box.core.full_queues == {QueueKey("m", "long"), QueueKey("m", "chat")}


def test_beats_tell_each_pools_queue_and_a_model_is_full_when_all_of_them_are() -> None:
    told = Told(max_num_queued_reqs=3, max_num_queued_tokens=60)
    told.submit(3, 20)
    info = told.info()
    assert (info.workers, info.waiting, info.waiting_tokens) == (3, 2, 52)
    assert (info.max_waiting, info.queue_size, info.max_waiting_tokens) == (2 + 3, 3, 52 + 60), "chat takes three more"
    pools = {pool.name: pool for pool in info.pools}
    assert [*pools] == ["chat", "long"]
    assert (pools["chat"].workers, pools["chat"].waiting, pools["chat"].max_waiting) == (2, 0, 3)
    assert (pools["long"].workers, pools["long"].waiting, pools["long"].waiting_tokens) == (1, 2, 52)
    assert pools["long"].max_waiting_tokens == 60
    told.submit(3, 4)
    assert told.info().max_waiting == told.info().waiting + 1, "long has room for one more"
    told.box.core.worker_draining("l0")
    assert told.info().max_waiting == told.info().waiting, "and takes nobody now"


def test_beats_tell_what_each_pool_is_for_and_what_it_takes() -> None:
    told = Told()
    told.box.add_worker("l1", capacity(pool="long", max_model_len=90, adapters=["sql", "old"]))
    told.box.add_worker("l2", capacity(pool="long", max_model_len=70, num_blocks=3, adapters=["sql", "new"]))
    pools = {pool.name: pool for pool in told.info().pools}
    assert (pools["chat"].shortest_prompt, pools["chat"].longest_prompt) == (0, 8)
    assert pools["long"].shortest_prompt == 9 and pools["long"].longest_prompt > 1 << 32
    own = told.box.core.workers["l0"].max_model_len
    assert pools["chat"].max_model_len == pools["long"].max_model_len == own > 90
    held = 3 * told.box.core.workers["l2"].capacity.block_size + 1
    assert held < 70 and pools["long"].adapters == [("new", held), ("old", 90), ("sql", 90)]
    told.box.core.worker_draining("l1")
    told.box.core.worker_draining("c0")
    told.box.core.worker_draining("c1")
    pools = {pool.name: pool for pool in told.info().pools}
    assert pools["chat"].max_model_len == 0, "no worker of it takes newcomers"
    assert pools["long"].adapters == [("new", held), ("sql", held)]
    assert [pool.overflow for pool in Told(pool_overflow="chat>long").info().pools] == [["long"], []]


def test_each_pool_has_its_gauges() -> None:
    told = Told()
    assert told.gauges("chat") == [2, 0, 0] and told.gauges("default") == [None] * 3
    told.submit(3, 20)
    told.submit(1, 4)
    for name in told.box.queues:
        told.box.plan(name)
    assert told.gauges("long") == [1, 1, 2] and told.gauges("chat") == [2, 1, 0]
    told.metrics.stands_by()
    assert [told.registry.get_sample_value(name, {"model_name": "m", "pool": "long"}) for name in GAUGES] == [0, 0, 0]


def test_each_pool_has_a_number_of_workers_that_it_should_have() -> None:
    told = Told()
    scaling = Autoscaling(told.box.core, told.metrics, ScalingPolicy())
    told.submit(8, 20)
    for second in range(int(SILENT_S) + 40):
        scaling.tick(float(second))

    def desired(pool: str) -> float | None:
        return told.registry.get_sample_value("headrace_desired_workers", {"model_name": "m", "pool": pool})

    assert (desired("chat"), desired("long")) == (2, 2), "only long ones wait"


def test_the_dashboard_names_the_pool_of_a_queue() -> None:
    told = Told()
    told.submit(2, 20)
    workers = list(told.box.core.workers.values())
    rows = [_queue(queue, workers, told.box.now) for queue in told.box.core.queues.values()]
    assert [(row["model"], row["pool"], row["waiting"]) for row in rows] == [("m", "chat", 0), ("m", "long", 2)]


def test_options_become_limits() -> None:
    config = SchedulerConfig(pools=POOLS, pool_overflow="chat>long", pool_lend="")
    limits = config.limits()
    assert (limits.pools, limits.pool_overflow, limits.pool_lend) == (POOLS, "chat>long", "")
    with pytest.raises(ValueError, match="pools: chat is declared twice"):
        SchedulerConfig(pools="chat,chat").limits()


def test_a_workers_pool_has_a_name_that_others_can_write() -> None:
    from worker.config import WorkerConfig

    assert resolve(WorkerConfig, "worker", {"pool": "chat-2.b_C"}, environ={}).pool == "chat-2.b_C"
    for bad in ("a b", "a,b", "a>b", "a:b", "x" * 65, "ä"):
        with pytest.raises(ConfigError, match="is no pool's name"):
            resolve(WorkerConfig, "worker", {"pool": bad}, environ={})
