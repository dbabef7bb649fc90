"""How many workers a pool of a model should have, and why: a pure function of what was seen; its memory is passed in
and out.

Work is counted in tokens as a queue counts them (prompt and max_tokens), so that what arrives, waits and is served
compare. Three needs may raise the number:

* *queue*: what waits would wait for longer than the target, at the rate measured while somebody waited, and a worker
  that is asked for now would still find somebody waiting;
* *memory*: more of the KV blocks are in use than the share that leaves room to grow;
* *forecast*: the work that is expected to arrive by the time at which a new worker would be ready takes more than a
  share of that rate. The forecast is double exponential smoothing with a linear trend (Brown 1959; Holt 1957): on a
  line, an average of time constant T lags by T times the slope, so that two averages tell slope and level.

It goes up soon and by no more than twofold at once; it goes down to the most that was needed over ``down_after_s``, and
by thresholds that leave a gap to those of going up: so it neither follows noise nor swings. Where a rate was never
measured (nobody ever had to wait), only batches and memory speak.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from enum import StrEnum

FAST_S, SLOW_S = 120.0, 600.0
"""Time constants of the two averages of arrivals."""

USED_S = 30.0
"""That of the blocks in use: a prompt that comes and goes is no lack of memory."""

RATE_HALF_S = 60.0
"""What was served so much waiting time ago counts for half."""

SETTLE_S = 10.0
"""How long somebody must have waited before what leaves the queue is served work, and does not fill empty batches."""

RELAXED = 0.75
"""Of a threshold for going up: what going down must leave of it."""


class Why(StrEnum):
    QUEUE = "queue"
    MEMORY = "memory"
    FORECAST = "forecast"
    IDLE = "idle"  # there are more workers than the load needs
    STEADY = "steady"  # there are as many as there should be


@dataclass(frozen=True, slots=True)
class ScalingPolicy:
    target_wait_s: float = 10.0  # in the queue
    min_workers: int = 1
    max_workers: int = 16
    ahead_s: float = 120.0  # how long a worker takes from being asked for to being ready
    down_after_s: float = 300.0  # how long fewer must have been enough
    up_every_s: float = 30.0  # least time between two raises
    busy_share: float = 0.85  # of the measured rate that the forecast may take
    memory_share: float = 0.85  # of the KV blocks that may be in use

    def __post_init__(self) -> None:
        """Raises ValueError if the bounds contradict each other."""
        if self.min_workers > self.max_workers:
            raise ValueError(f"scale_min_workers ({self.min_workers}) is over scale_max_workers ({self.max_workers})")


@dataclass(frozen=True, slots=True)
class Load:
    """Of one pool of a model at one moment."""

    workers: int  # ready ones
    waiting: int  # sequences
    waiting_tokens: int
    left_tokens: int  # that have left the queue since ever
    running: int  # sequences
    slots: int  # of all workers' batches
    used_blocks: int  # referenced
    total_blocks: int


@dataclass(frozen=True, slots=True)
class ScalingState:
    """What is remembered between two looks. Times in s."""

    at_s: float
    began_s: float
    arrived: int  # tokens since ever
    left: int
    workers: int
    desired: int
    why: Why = Why.STEADY  # of the last raise, or of what asks for as many now
    raised_s: float = -math.inf
    low_since_s: float = math.inf  # since when fewer have been enough
    low_peak: int = 0  # the most that were needed since then
    waits_since_s: float = math.inf  # since when somebody has waited, with this number of workers
    active_s: float = -math.inf  # when anything last arrived, waited or ran
    served_tokens: float = 0.0  # decayed, while somebody waited
    served_s: float = 0.0  # workers times seconds of that, decayed likewise
    used_blocks: float = 0.0  # average
    fast: float = 0.0  # averages of arriving tokens/s
    slow: float = 0.0
    fast_weight: float = 0.0  # how much of each average was seen
    slow_weight: float = 0.0

    @property
    def rate(self) -> float:
        """Tokens/s that one worker serves; 0 as long as it was not measured."""
        return self.served_tokens / self.served_s if self.served_s >= 1.0 else 0.0

    @property
    def arriving(self) -> float:
        """Tokens/s of late."""
        return self.fast / self.fast_weight if self.fast_weight else 0.0

    def forecast(self, ahead_s: float) -> float:
        """Tokens/s expected in ``ahead_s``; 0 as long as too little was seen to tell."""
        if self.at_s - self.began_s < FAST_S:
            return 0.0
        level = self.arriving
        slope = (level - self.slow / self.slow_weight) / (SLOW_S - FAST_S)
        return max(0.0, level + (FAST_S + ahead_s) * slope)


@dataclass(frozen=True, slots=True)
class Scaling:
    desired: int
    why: Why


def advance(
    policy: ScalingPolicy, state: ScalingState | None, load: Load, now_s: float
) -> tuple[ScalingState, Scaling]:
    """One look, some times a minute or more often. ``state``: None at the first one, which keeps what is there."""
    if state is None:
        desired = min(max(load.workers, policy.min_workers), policy.max_workers)
        arrived = load.left_tokens + load.waiting_tokens
        state = ScalingState(
            now_s, now_s, arrived, load.left_tokens, load.workers, desired, used_blocks=load.used_blocks
        )
    state = _observed(state, load, now_s)
    state = _decided(policy, state, load, now_s)
    why = Why.STEADY
    if state.desired > load.workers:
        why = state.why
    elif state.desired < load.workers:
        why = Why.IDLE
    return state, Scaling(state.desired, why)


def _observed(state: ScalingState, load: Load, now_s: float) -> ScalingState:
    arrived = load.left_tokens + load.waiting_tokens
    elapsed_s = now_s - state.at_s
    fast, slow, fast_weight, slow_weight = state.fast, state.slow, state.fast_weight, state.slow_weight
    served_tokens, served_s, used = state.served_tokens, state.served_s, state.used_blocks
    if elapsed_s > 0:
        used += (load.used_blocks - used) * (1 - math.exp(-elapsed_s / USED_S))
        arriving = max(0, arrived - state.arrived) / elapsed_s
        kept = math.exp(-elapsed_s / FAST_S)
        fast, fast_weight = fast * kept + arriving * (1 - kept), fast_weight * kept + 1 - kept
        kept = math.exp(-elapsed_s / SLOW_S)
        slow, slow_weight = slow * kept + arriving * (1 - kept), slow_weight * kept + 1 - kept
        if load.waiting and state.at_s - state.waits_since_s >= SETTLE_S and load.workers == state.workers > 0:
            kept = 0.5 ** (elapsed_s / RATE_HALF_S)
            served_tokens = served_tokens * kept + max(0, load.left_tokens - state.left)
            served_s = served_s * kept + elapsed_s * load.workers
        elif served_s >= 1.0 and not load.waiting and load.workers:
            # Nobody waits and more than the rate arrives: a worker serves more than it did.
            served_tokens = max(served_tokens, served_s * fast / fast_weight / load.workers)
    waits = load.waiting > 0 and load.workers == state.workers
    active = arrived > state.arrived or load.waiting > 0 or load.running > 0 or state.active_s == -math.inf
    return replace(
        state,
        at_s=now_s,
        arrived=arrived,
        left=load.left_tokens,
        workers=load.workers,
        waits_since_s=min(state.waits_since_s, now_s) if waits else now_s if load.waiting else math.inf,
        active_s=now_s if active else state.active_s,
        served_tokens=served_tokens,
        served_s=served_s,
        used_blocks=used,
        fast=fast,
        slow=slow,
        fast_weight=fast_weight,
        slow_weight=slow_weight,
    )  # fmt: skip


def _decided(policy: ScalingPolicy, state: ScalingState, load: Load, now_s: float) -> ScalingState:
    needs = _needs(policy, state, load, now_s)
    why = max(needs, key=lambda one: needs[one])
    up = _bounded(policy, load, needs[why])
    down = up if _quiet(policy, state, now_s) else _bounded(policy, load, max(needs[why], _enough(policy, state, load)))
    desired = state.desired
    if now_s - state.began_s < policy.down_after_s:
        desired = max(desired, min(load.workers, policy.max_workers))  # this may have begun before all were heard of
    if up > desired:
        if desired and now_s - state.raised_s < policy.up_every_s:
            return replace(state, desired=desired, low_since_s=math.inf)
        desired = min(up, max(1, 2 * desired))
        return replace(state, desired=desired, why=why, raised_s=now_s, low_since_s=math.inf)
    if down >= desired:
        why = why if up == desired > load.workers else state.why
        return replace(state, desired=desired, why=why, low_since_s=math.inf)
    if state.low_since_s == math.inf:
        return replace(state, desired=desired, low_since_s=now_s, low_peak=down)
    peak = max(state.low_peak, down)
    if now_s - state.low_since_s < policy.down_after_s:
        return replace(state, desired=desired, low_peak=peak)
    return replace(state, desired=peak, low_since_s=now_s, low_peak=down)


def _needs(policy: ScalingPolicy, state: ScalingState, load: Load, now_s: float) -> dict[Why, int]:
    """Workers that each reason asks for."""
    queue = memory = forecast = 0
    if _quiet(policy, state, now_s):
        return {Why.QUEUE: 0}
    rate = state.rate
    if load.waiting:
        queue = 1
        if rate:
            served = rate * load.workers
            # Whom a worker would find waiting that is asked for now: what clears by itself before is not its to help.
            found = load.waiting_tokens + (state.arriving - served) * policy.ahead_s
            late = found > 0 and load.waiting_tokens > served * policy.target_wait_s
        else:
            late = now_s - state.waits_since_s > policy.target_wait_s
        if late:
            clearing_s = policy.target_wait_s + policy.ahead_s
            queue = math.ceil((load.waiting_tokens / clearing_s + state.arriving) / rate) if rate else 0
            queue = max(queue, load.workers + 1)
    if load.total_blocks:
        memory = math.ceil(state.used_blocks * load.workers / (load.total_blocks * policy.memory_share))
    if rate:
        forecast = math.ceil(state.forecast(policy.ahead_s) / (rate * policy.busy_share))
    return {Why.QUEUE: queue, Why.MEMORY: memory, Why.FORECAST: forecast}


def _quiet(policy: ScalingPolicy, state: ScalingState, now_s: float) -> bool:
    """Nothing came, waited or ran for so long that no average need be asked: none of them ever says zero."""
    return now_s - state.active_s >= policy.down_after_s


def _enough(policy: ScalingPolicy, state: ScalingState, load: Load) -> int:
    """How many would carry the load with room to spare."""
    enough = 1
    if load.workers:
        busy = load.running / load.slots / (RELAXED * policy.busy_share) if load.slots else 0.0
        held = state.used_blocks / load.total_blocks / (RELAXED * policy.memory_share) if load.total_blocks else 0.0
        enough = max(enough, math.ceil(load.workers * max(busy, held)))
    if rate := state.rate:
        enough = max(enough, math.ceil(state.arriving / (rate * RELAXED * policy.busy_share)))
    return enough


def _bounded(policy: ScalingPolicy, load: Load, workers: int) -> int:
    least = max(policy.min_workers, 1 if load.waiting or load.running else 0)
    return min(max(workers, least), policy.max_workers)
