"""One simulated set-up: hardware, model, limits and policy; and a run of requests on it."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec
import numpy as np

from headrace.simulate.baselines import BASELINES
from headrace.simulate.engine import Simulation, simulated_capacity
from headrace.simulate.hardware import Deployment, gpu_named, model_named
from headrace.simulate.measure import Measurements
from headrace.simulate.report import Figures, Slo, figures
from headrace.simulate.roles import roles_of
from headrace.simulate.step_time import Roofline, StepTime
from headrace.simulate.transfers import SCHEME, Link
from headrace.simulate.worker import Population, SimulatedWorker
from headrace.simulate.worker_pools import pools_of
from headrace.simulate.workload import Request
from scheduler.core.core import SchedulerCore
from scheduler.core.limits import Limits
from scheduler.policies.roles import RolePolicy
from shared.messages import StepPlan

SIMULATED_LIMITS = Limits(max_num_seqs=256, max_num_batched_tokens=2048, max_num_queued_reqs=1 << 30)
"""The core's defaults, but a batch and a budget for a GPU, and a queue without an end."""


@dataclass(frozen=True)
class Scenario:
    model: str = "llama-3.1-8b"
    gpu: str = "a100-80"
    tp: int = 1
    workers: int = 1
    worker_pools: str = ""  # their pools, see headrace.simulate.worker_pools
    block_size: int = 16
    max_model_len: int = 8192
    kv_tokens: int = 0  # 0: what the card has left (see Deployment)
    host_tokens: int = 0  # KV entries that fit in host memory set aside for swapping
    limits: Limits = field(default_factory=lambda: SIMULATED_LIMITS)
    policy: str = "continuous"
    baseline: str = ""  # a variant of the core in headrace.simulate.baselines; empty: the core itself
    t0_ms: float = 2.0
    bus_us: float = 125.0
    roles: str = ""  # of the workers, see headrace.simulate.roles; empty: mixed ones, and no KV blocks move
    plan_roles: bool = False  # the roles follow the load
    role_policy: RolePolicy = field(default_factory=RolePolicy)  # how they do
    link_gbit: float = 100.0  # of each worker, a second in either direction: what KV blocks move over
    link_us: float = 50.0  # until a transfer's first byte
    slo: Slo = field(default_factory=Slo)

    def with_limits(self, **changes: Any) -> Scenario:
        return replace(self, limits=replace(self.limits, **changes))

    @property
    def deployment(self) -> Deployment:
        return Deployment(model_named(self.model), gpu_named(self.gpu), self.tp)

    @property
    def link(self) -> Link:
        return Link(self.link_gbit * 1e9 / 8, int(self.link_us * 1e3))

    def core(self) -> SchedulerCore:
        return BASELINES[self.baseline](self.limits, self.policy)


@dataclass
class Run:
    figures: Figures
    measured: Measurements
    core: SchedulerCore


def run(
    scenario: Scenario, requests: Sequence[Request], variant: str = "", *, concurrency: int = 0,
    progress: Callable[[int, int], None] | None = None, on_plan: Callable[[StepPlan], None] | None = None,
    step_time: StepTime | None = None, until_s: float = 0, drain: bool = True,
    watch: Callable[[Request], bool] | None = None,
) -> Run:  # fmt: skip
    """Simulate ``requests``, to their ends, or for ``until_s`` virtual seconds, or until none is left to submit.

    Gaps between the tokens of those that ``watch`` picks are counted apart, too (``Measurements.watched_gaps``).

    Raises UnknownHardware if the model does not fit, ConfigError for pools or roles that make no sense, Stalled if the
    scheduler is stuck.
    """
    deployment = scenario.deployment
    capacity = simulated_capacity(
        scenario.kv_tokens or deployment.kv_tokens, scenario.block_size, scenario.max_model_len, scenario.host_tokens,
        deployment.model.kv_bytes_per_token,
    )  # fmt: skip
    population = Population(requests)
    core = scenario.core()
    timing = step_time or Roofline(deployment, scenario.t0_ms)
    places = zip(
        pools_of(scenario.workers, scenario.worker_pools), roles_of(scenario.workers, scenario.roles), strict=True
    )
    workers = [
        SimulatedWorker(
            f"w{index}",
            msgspec.structs.replace(
                capacity, pool=pool, role=role, transfer=[f"{SCHEME}://w{index}"] if scenario.roles else []
            ),
            timing,
            population,
        )
        for index, (pool, role) in enumerate(places)
    ]
    simulation = Simulation(
        core, workers, population, bus_ns=int(scenario.bus_us * 1e3), concurrency=concurrency, progress=progress,
        on_plan=on_plan, link=scenario.link, plan_roles=scenario.role_policy if scenario.plan_roles else None,
    )  # fmt: skip
    if watch is not None:
        simulation.measured.watched = np.array([watch(request) for request in requests], bool)[population.request_of]
    with _without_gc():
        measured = simulation.run(int(until_s * 1e9), drain)
    return Run(figures(variant, core, measured, scenario.slo), measured, core)


@contextmanager
def _without_gc() -> Iterator[None]:
    """Nearly nothing here is cyclic, and collections over 100,000 live sequences cost a quarter of the time."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
