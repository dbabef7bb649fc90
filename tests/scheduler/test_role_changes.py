"""The planner of roles in a leader: what it reads off the core's workers, and what becomes of its answers."""

from __future__ import annotations

import logging

import pytest
from mesh_in_a_box import Box, capacity, request
from mesh_stack import until
from prometheus_client import CollectorRegistry
from service_mesh import ServiceMesh, run

from scheduler import roles as scheduler_roles
from scheduler.config import SchedulerConfig
from scheduler.core.core import SchedulerCore
from scheduler.core.limits import Limits
from scheduler.metrics import SchedulerMetrics
from scheduler.policies.roles import RolePolicy
from scheduler.roles import SILENT_NS, RolePlanner, Roles
from shared.messages import Role

S = 1_000_000_000
POLICY = RolePolicy(average_s=2.0, hold_s=1.0, every_s=2.0)


def mesh(*roles: Role) -> SchedulerCore:
    core = SchedulerCore(Limits(max_num_seqs=4, max_num_batched_tokens=16))
    for index, role in enumerate(roles):
        core.worker_up(f"w{index}", 1, capacity(role=role), 0)
    return core


def test_a_change_is_carried_out_logged_and_counted(caplog: pytest.LogCaptureFixture) -> None:
    registry = CollectorRegistry()
    metrics = SchedulerMetrics(registry)
    core = mesh(Role.PREFILL, Role.DECODE, Role.DECODE, Role.DECODE, Role.MIXED)
    roles = Roles(core, metrics, POLICY)
    first = next(tick for tick in range(400) if _changes(roles, core, tick, caplog))
    assert first * 250_000_000 > SILENT_NS, "not all may have been heard of before"
    assert [worker.role for worker in core.workers.values()].count(Role.PREFILL) == 3, "nothing decodes"
    assert core.workers["w4"].role is Role.MIXED, "nobody asked it to be anything else"
    assert "worker w1 changes from decode to prefill" in caplog.text
    value = registry.get_sample_value
    assert value("headrace_role_changes_total", {"role": "prefill"}) == 2
    load = {"model_name": "m", "pool": core.workers["w0"].serves.pool}
    assert value("headrace_role_load", {**load, "role": "prefill"}) == pytest.approx(1.0, rel=0.1)
    assert value("headrace_role_load", {**load, "role": "decode"}) == 0
    metrics.of_pool(core.workers["w0"].serves).observe(0, list(core.workers.values()))
    assert [value("headrace_role_workers", {**load, "role": role.value}) for role in Role] == [1, 3, 1]
    metrics.stands_by()
    assert value("headrace_role_load", {**load, "role": "prefill"}) is None


def _changes(roles: Roles, core: SchedulerCore, tick: int, caplog: pytest.LogCaptureFixture) -> bool:
    """A quarter of a second in which prefill workers do nothing but prompts, and then a look."""
    for worker in core.workers.values():
        worker.prompts_us += 250_000 * (worker.role is Role.PREFILL)
    with caplog.at_level(logging.INFO, "headrace.scheduler"):
        roles.tick(tick * 250_000_000)
    return bool(caplog.records)


def test_pools_are_planned_apart() -> None:
    core = SchedulerCore(Limits(max_num_seqs=4, max_num_batched_tokens=16))
    for index, (pool, role) in enumerate([("a", Role.PREFILL), ("a", Role.DECODE), ("b", Role.DECODE)]):
        core.worker_up(f"w{index}", 1, capacity(pool=pool, role=role), 0)
    assert RolePlanner(core, POLICY).tick(S) == [("w2", Role.MIXED)], "alone in its pool it does both"


def test_one_that_drains_is_not_counted_on() -> None:
    core = mesh(Role.PREFILL, Role.DECODE, Role.DECODE)
    core.worker_draining("w0")
    assert RolePlanner(core, POLICY).tick(S) == [("w1", Role.PREFILL)]


def test_what_is_seen_of_a_worker() -> None:
    """Two of four places in the batch decode, and more of the blocks than that."""
    box = Box(Limits(max_num_seqs=4, max_num_batched_tokens=16, prefill_chunk_limit=8), num_blocks=32)
    for index in range(2):
        box.submit(request(f"r{index}", prompt_len=40, max_tokens=20))
    worker = box.core.workers["w0"]
    planner = RolePlanner(box.core, POLICY)
    box.step()
    member = planner._member(worker)
    assert member.decodes == 0 and member.sequences == 2 and worker.prompts_us > 0
    assert member.prompts_s == worker.prompts_us / 1e6 and worker.prompts_left > 0
    while any(one.remaining > 1 for one in worker.running):
        box.step()
    decodes = planner._member(worker).decodes
    assert decodes == worker.pool.num_used / 32 > 2 / 4


def test_prompts_that_wait_in_the_queue_count() -> None:
    """At the pace at which prompts were computed here; as long as none was, nothing is known of them."""
    box = Box(Limits(max_num_seqs=1, max_num_batched_tokens=16), num_blocks=32)
    planner, key = RolePlanner(box.core, POLICY), box.core.workers["w0"].serves
    for index in range(3):
        box.submit(request(f"r{index}", prompt_len=40, max_tokens=20))
    assert planner._waiting_s(key) == 0
    while box.core.queues[key].prompt_tokens > 80 or not planner._waiting_s(key):
        box.step()
    pace_us = box.core.workers["w0"].predictor.prompt_us(512) / 512
    assert planner._waiting_s(key) == pytest.approx(80 * pace_us / 1e6)


def test_steps_longer_than_the_target_are_more_than_one_workers_work() -> None:
    core = SchedulerCore(Limits(max_num_seqs=64, max_num_batched_tokens=64, target_itl_ns=10_000_000))
    core.worker_up("w0", 1, capacity(num_blocks=1000, role=Role.DECODE), 0)
    worker = core.workers["w0"]
    box = Box(core.limits, num_blocks=1000)
    for index in range(20):
        box.submit(request(f"r{index}", prompt_len=3, max_tokens=60))
    while len(box.core.workers["w0"].running) < 20 or any(one.remaining > 1 for one in box.core.workers["w0"].running):
        box.step()
    seen = box.core.workers["w0"]
    seen.predictor = worker.predictor
    for rows in (4, 8, 12, 16, 20) * 20:
        worker.predictor._decode.observe(rows, 4000 + 500 * rows)  # 10 ms at 12 rows
    share = RolePlanner(box.core, POLICY)._decodes(seen)
    assert share == pytest.approx(20 / 12, rel=0.2)


def test_the_option_turns_it_on() -> None:
    assert SchedulerConfig().roles() is None
    assert SchedulerConfig(plan_roles=True).roles() == RolePolicy()


def test_a_leader_gives_its_workers_their_roles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two decode workers, one of which is to compute prompts; then it is left alone, and does both."""
    monkeypatch.setattr(scheduler_roles, "SILENT_NS", 0)

    async def scenario(mesh: ServiceMesh) -> None:
        scheduler = await mesh.scheduler()
        _, second = [await mesh.worker(name, role="decode", transfer_host="off") for name in ("first", "second")]

        def roles() -> list[Role]:
            return sorted(one.role for one in scheduler.service.core.workers.values())

        await until(lambda: roles() == [Role.DECODE, Role.PREFILL], "one of each", 20)
        await mesh.submit(scheduler, "r")
        await mesh.ended("r")
        await second.end()
        await until(lambda: roles() == [Role.MIXED], "the first to do both", 20)
        await mesh.submit(scheduler, "s")
        await mesh.ended("s")

    run(scenario, plan_roles=True)
