"""Roles that follow the load: what the workers do is told to ``scheduler/policies/roles.py``, its answer to the core.

The simulator drives ``RolePlanner`` as ``Roles`` does in the NATS service.
"""

from __future__ import annotations

import logging

from scheduler.core.core import SchedulerCore
from scheduler.core.events import CoreEvent
from scheduler.core.pools import QueueKey
from scheduler.core.sequence import pages_for
from scheduler.core.worker_state import WorkerState
from scheduler.metrics import SchedulerMetrics
from scheduler.policies.roles import Member, RolePolicy, RolesState, advance
from shared.messages import Role

log = logging.getLogger("headrace.scheduler")

LOOK_NS = 1_000_000_000
"""Between two looks."""

SILENT_NS = 10_000_000_000
"""A leader that has just begun may not have heard of every worker."""

_USUAL_PROMPT = 512


class RolePlanner:
    """Of one time of leading. Workers that were started as mixed ones stay so. It changes nothing for ``silent_ns``."""

    def __init__(self, core: SchedulerCore, policy: RolePolicy, silent_ns: int = 0) -> None:
        self._core = core
        self._policy = policy
        self._silent_ns = silent_ns
        self._states: dict[QueueKey, RolesState] = {}
        self._began: int | None = None
        self._looked = 0

    def tick(self, now: int) -> list[tuple[str, Role]]:
        """(worker, the role to give it: ``SchedulerCore.set_role``). Asked some times a second, or less often."""
        if self._began is None:
            self._began = now
        if now - self._began < self._silent_ns or now - self._looked < LOOK_NS:
            return []
        self._looked = now
        groups: dict[QueueKey, list[Member]] = {}
        for worker in self._core.workers.values():
            if worker.capacity.role is not Role.MIXED and not worker.draining:
                groups.setdefault(worker.serves, []).append(self._member(worker))
        changed: list[tuple[str, Role]] = []
        for key, members in groups.items():
            self._states[key], changes = advance(
                self._policy, self._states.get(key), members, now / 1e9, self._waiting_s(key)
            )
            changed += changes.items()
        return changed

    def loads(self) -> dict[QueueKey, tuple[float, float]]:
        """By queue: workers that prompts and that decodes keep busy, of late."""
        return {key: state.loads for key, state in self._states.items()}

    def _waiting_s(self, key: QueueKey) -> float:
        """What the prompts that wait for a worker need of one, as if no cache had anything of them."""
        measured = [pace for pace in map(_token_us, self._core.workers_of(*key)) if pace]
        if not measured:
            return 0.0
        return self._core.queues[key].prompt_tokens * sum(measured) / len(measured) / 1e6

    def _member(self, worker: WorkerState) -> Member:
        return Member(
            name=worker.name,
            role=worker.role,
            prompts_s=worker.prompts_us / 1e6,
            backlog_s=worker.prompts_left * _token_us(worker) / 1e6,
            decodes=self._decodes(worker),
            sequences=len(worker.running) + len(worker.preempted),
        )

    def _decodes(self, worker: WorkerState) -> float:
        """What decodes there, or did until it was preempted, as a share of what it could hold, or of what it could run
        within the target inter-token latency."""
        limits, size = self._core.limits, worker.capacity.block_size
        decoding = [one for one in worker.running if one.remaining <= 1]
        rows = len(decoding) + len(worker.preempted)
        blocks = min(worker.pool.num_used, sum(len(one.pages) for one in decoding))  # shared ones are counted once
        blocks += sum(pages_for(len(one.tokens), size) for one in worker.preempted)
        share = max(rows / limits.batch_slots(worker.capacity), blocks / worker.pool.num_blocks)
        if limits.target_itl_ns and rows and worker.role is not Role.PREFILL:
            step_us = worker.predictor.decode_us(rows)
            row_us = worker.predictor.decode_us(rows + 1) - step_us
            if step_us and row_us > 0:
                within = rows + (limits.target_itl_ns / 1000 - step_us) / row_us
                share = max(share, rows / max(1.0, within))
        return share


def _token_us(worker: WorkerState) -> float:
    """What a prompt token takes there; 0 as long as no prompt was computed."""
    return worker.predictor.prompt_us(_USUAL_PROMPT) / _USUAL_PROMPT


class Roles:
    """The planner of a leader, with what it does carried out, logged and counted."""

    def __init__(self, core: SchedulerCore, metrics: SchedulerMetrics, policy: RolePolicy) -> None:
        self._core = core
        self._metrics = metrics
        self._planner = RolePlanner(core, policy, SILENT_NS)

    def tick(self, now: int) -> list[CoreEvent]:
        events: list[CoreEvent] = []
        for name, role in self._planner.tick(now):
            log.info("worker %s changes from %s to %s", name, self._core.workers[name].role.value, role.value)
            events += self._core.set_role(name, role, now)
            self._metrics.role_changes.labels(role.value).inc()
        for key, (prompts, decodes) in self._planner.loads().items():
            self._metrics.role_load.labels(*key, Role.PREFILL.value).set(prompts)
            self._metrics.role_load.labels(*key, Role.DECODE.value).set(decodes)
        return events
