"""To which queue a request goes: that of the pool it asks for, else the one whose range its prompt is in, else of any
pool of its model. Judged once, at submit; it is bound to a pool and to no worker.

A pool that has no worker which could ever hold the request gives it away by the rules of overflow only, so that long
work never comes to workers that are kept for short work.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from scheduler.core.admissible import judge
from scheduler.core.limits import Limits
from scheduler.core.pools import PoolRules, QueueKey
from scheduler.core.state import QueueState
from shared.messages import Capacity, Outcome, Submit
from shared.pool_name import DEFAULT_POOL

_GIVEN_AWAY = frozenset((Outcome.NO_WORKER, Outcome.TOO_LONG, Outcome.NEVER_FITS, Outcome.UNKNOWN_MODEL))
"""Verdicts after which another pool is asked, where the rules name one. (What is not known is the adapter.)"""

Queues = Mapping[QueueKey, QueueState]


@dataclass(frozen=True, slots=True)
class Routed:
    """``queue`` is where an accepted request goes, or where a refused one would have gone; None: nowhere."""

    outcome: Outcome
    reason: str
    queue: QueueState | None = None
    tokens: list[int] = field(default_factory=list)  # of the prompt


@dataclass(frozen=True, slots=True)
class _Wanted:
    """``pools`` in the order in which they are asked; ``alike``: any of them will do."""

    pools: list[str]
    alike: bool = False


def route(submit: Submit, queues: Queues, rules: PoolRules, limits: Limits) -> Routed:
    """Where the request goes, and whether it is taken there."""
    pools = {key.pool: state for key, state in queues.items() if key.model == submit.model}
    if not pools:  # a leader that has met nobody yet knows no model
        outcome, reason, _ = judge(submit, None if queues else [], 0, limits)
        return Routed(outcome, reason)
    wanted = _wanted(submit, pools, rules)
    if isinstance(wanted, Routed):
        return wanted
    first: Routed | None = None
    for pool in wanted.pools:
        routed = _judged(submit, pool, pools, limits)
        if routed.outcome not in _GIVEN_AWAY and not (wanted.alike and routed.outcome is Outcome.QUEUE_FULL):
            return routed
        first = first or routed
    assert first is not None, "some pool was wanted"
    return first


def live_capacities(state: QueueState) -> list[Capacity]:
    """Of the workers that take newcomers, one of each kind."""
    return state.fleet.capacities


def _judged(submit: Submit, pool: str, pools: Mapping[str, QueueState], limits: Limits) -> Routed:
    state = pools.get(pool)
    if state is None:
        return Routed(Outcome.NO_WORKER, _nobody(submit, pool))
    waiting, tokens_waiting = state.queue.waiting, state.queue.tokens
    outcome, reason, tokens = judge(submit, live_capacities(state), waiting, limits, tokens_waiting)
    if len(pools) > 1 and outcome is Outcome.NO_WORKER:
        reason = _nobody(submit, pool)
    elif len(pools) > 1 and outcome is not Outcome.ACCEPTED:
        reason = f"pool {pool}: {reason}"
    return Routed(outcome, reason, state, tokens)


def _nobody(submit: Submit, pool: str) -> str:
    return f"no live worker of the pool {pool!r} serves the model {submit.model!r}"


def _wanted(submit: Submit, pools: Mapping[str, QueueState], rules: PoolRules) -> _Wanted | Routed:
    """The pools that are asked, or a refusal.

    A resumed request may ask for a pool that its new leader has not met yet.
    """
    length = len(submit.prompt) // 4
    if submit.pool:
        if submit.pool not in pools and submit.pool not in rules.names and submit.attempt == 1:
            known = ", ".join(sorted({*pools, *rules.names}))
            return Routed(Outcome.INVALID, f"no pool {submit.pool!r} of the model {submit.model!r}; pools: {known}")
        if rules.too_long_for(submit.pool, length):
            takes = f"the pool {submit.pool!r} takes prompts of at most {rules.ranges[submit.pool].high} tokens"
            return Routed(Outcome.TOO_LONG, f"{takes}; this one has {length}")
        return _Wanted([submit.pool, *rules.overflow.get(submit.pool, ())])
    having = pools
    if submit.adapter:  # a pool may be there for its adapters
        having = {pool: state for pool, state in pools.items() if _has_adapter(state, submit.adapter)} or pools
    by_length = rules.by_length(length) if any(pool in rules.ranges for pool in pools) else None
    any_of = _by_backlog(having, (pool for pool in having if not rules.too_long_for(pool, length)))
    if by_length is not None and (by_length in having or having is pools or not any_of):
        return _Wanted([by_length, *rules.overflow.get(by_length, ())])
    if not any_of:
        return Routed(Outcome.TOO_LONG, f"the prompt has {length} tokens; no pool of {submit.model!r} takes so many")
    return _Wanted(any_of, alike=True)


def _by_backlog(pools: Mapping[str, QueueState], names: Iterable[str]) -> list[str]:
    """Those without a name first, then those in which a newcomer waits least."""

    def backlog(pool: str) -> tuple[bool, float, str]:
        state = pools[pool]
        workers = len(state.fleet.names)
        return pool != DEFAULT_POOL, state.queue.tokens / workers if workers else float("inf"), pool

    return sorted(names, key=backlog)


def _has_adapter(state: QueueState, adapter: str) -> bool:
    return any(adapter in capacity.adapters for capacity in live_capacities(state))
