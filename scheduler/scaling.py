"""The autoscaling signal of a leader: what a model's load is told to ``scheduler/policies/scaling.py``, and its answer
to the metrics."""

from __future__ import annotations

from scheduler.core.core import SchedulerCore
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
        self._states: dict[str, ScalingState] = {}
        self._began_s: float | None = None
        self._looked_s = 0.0

    def tick(self, now_s: float) -> None:
        if self._began_s is None:
            self._began_s = now_s
        elif now_s - self._looked_s < LOOK_S:
            return
        self._looked_s = now_s
        for model in self._core.queues:
            self._states[model], scaling = advance(self._policy, self._states.get(model), self._load(model), now_s)
            if now_s - self._began_s >= SILENT_S:
                self._metrics.desired_workers.labels(model).set(scaling.desired)
                for why in Why:
                    self._metrics.desired_workers_reason.labels(model, why.value).set(why is scaling.why)

    def _load(self, model: str) -> Load:
        core = self._core
        queue = core.queue_of(model)
        workers = [one for one in core.workers.values() if one.capacity.model == model and not one.draining]
        return Load(
            workers=len(workers),
            waiting=queue.waiting,
            waiting_tokens=queue.tokens,
            left_tokens=core.queues[model].left_tokens,
            running=sum(len(worker.running) for worker in workers),
            slots=sum(core.limits.batch_slots(worker.capacity) for worker in workers),
            used_blocks=sum(worker.pool.num_used for worker in workers),
            total_blocks=sum(worker.pool.num_blocks for worker in workers),
        )
