"""The autoscaling signal of a leader: ``scheduler/policies/scaling.py`` is told the load of each pool, and what it
answers goes to the metrics."""

from __future__ import annotations

from scheduler.core.core import SchedulerCore
from scheduler.core.pools import QueueKey
from scheduler.metrics import SchedulerMetrics
from scheduler.policies.scaling import Load, ScalingPolicy, ScalingState, Why, advance

LOOK_S = 1.0
"""Between two looks."""

SILENT_S = 10.0
"""A leader that has just begun may not have heard of every worker: it says nothing for so long."""


class Autoscaling:
    """Of one time of leading. Times in s."""

    def __init__(self, core: SchedulerCore, metrics: SchedulerMetrics, policy: ScalingPolicy) -> None:
        self._core = core
        self._metrics = metrics
        self._policy = policy
        self._states: dict[QueueKey, ScalingState] = {}
        self._began_s: float | None = None
        self._looked_s = 0.0

    def tick(self, now_s: float) -> None:
        if self._began_s is None:
            self._began_s = now_s
        elif now_s - self._looked_s < LOOK_S:
            return
        self._looked_s = now_s
        for key in self._core.queues:
            self._states[key], scaling = advance(self._policy, self._states.get(key), self._load(key), now_s)
            if now_s - self._began_s >= SILENT_S:
                self._metrics.desired_workers.labels(*key).set(scaling.desired)
                for why in Why:
                    self._metrics.desired_workers_reason.labels(*key, why.value).set(why is scaling.why)

    def _load(self, key: QueueKey) -> Load:
        core = self._core
        queue = core.queue_of(*key)
        workers = [one for one in core.workers_of(*key) if not one.draining]
        return Load(
            workers=len(workers),
            waiting=queue.waiting,
            waiting_tokens=queue.tokens,
            left_tokens=core.queues[key].left_tokens,
            running=sum(len(worker.running) for worker in workers),
            slots=sum(core.limits.batch_slots(worker.capacity) for worker in workers),
            used_blocks=sum(worker.pool.num_used for worker in workers),
            total_blocks=sum(worker.pool.num_blocks for worker in workers),
        )
