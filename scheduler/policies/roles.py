"""Which workers compute prompts and which decode, where each does one of both: a pure function of what was seen, its
memory passed in and out.

Both kinds of load are counted in workers that they would keep busy all of the time: prompts by the time that steps
took because of them; decodes by the share of a batch, of the KV blocks or of a step's target time that they take,
wherever they run. What was done is counted and not what arrived: past its limits a mesh does as much as the scarcer
kind of worker lets it, so that the two loads stand to each other as the numbers of workers should. What queues on
either side (prompts at their workers, decodes that found no room elsewhere) comes on top, and tells of a shift before
the other load has followed.

The best number of prefill workers is the one with which the busier kind is least busy. It is taken only when that kind
is busy at all, would be less so by a margin, and this has held for a while; then the effect is awaited. So it follows a
load that shifts, and neither noise nor its own transients.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from shared.capacity import Role

MOST_BACKLOG = 0.5
"""Of a worker: what prompts that wait at one add to its load. Where both kinds are past their limits, what was done
tells more than what is left."""


@dataclass(frozen=True, slots=True)
class RolePolicy:
    busy: float = 0.6  # of a kind of worker: below it nobody is moved
    gain: float = 0.15  # share of the busier kind's load that a change must take off it
    average_s: float = 10.0  # time constant of the averages
    hold_s: float = 5.0  # how long a change must have been better
    every_s: float = 15.0  # least time between two changes
    clear_s: float = 5.0  # of prompts that wait at a worker: they count as much as one that is busy


@dataclass(frozen=True, slots=True)
class Member:
    """A worker whose role may change, at one moment."""

    name: str
    role: Role
    prompts_s: float  # of its time that prompts have taken, since ever
    backlog_s: float  # that the prompts which were given to it still need
    decodes: float  # what decodes there, as a share of what one worker should run
    sequences: int


@dataclass(frozen=True, slots=True)
class RolesState:
    """What is remembered between two looks. Times in s, loads in workers."""

    at_s: float
    prompts_s: Mapping[str, float] = field(default_factory=dict)  # by worker, as of the last look
    prompts: float = 0.0  # averages, and how much of them was seen
    decodes: float = 0.0
    weight: float = 0.0
    better_since_s: float = math.inf  # since when another number has been better
    changed_s: float = -math.inf

    @property
    def loads(self) -> tuple[float, float]:
        """Workers that prompts and decodes keep busy, of late; zeros as long as nothing was seen."""
        return (self.prompts / self.weight, self.decodes / self.weight) if self.weight else (0.0, 0.0)


def advance(
    policy: RolePolicy, state: RolesState | None, members: Sequence[Member], now_s: float
) -> tuple[RolesState, dict[str, Role]]:
    """One look, about once a second: what to remember, and the roles to change. ``state``: None at the first one.

    Among two or more there is always one of each; a single one does both.
    """
    state = _observed(policy, state or RolesState(now_s), members, now_s)
    if len(members) < 2:
        return state, {one.name: Role.MIXED for one in members if one.role is not Role.MIXED}
    prefill = sum(one.role is Role.PREFILL for one in members)
    loads = state.loads
    best = best_split(*loads, len(members), prefill)
    if not 0 < prefill < len(members) or any(one.role is Role.MIXED for one in members):
        return replace(state, better_since_s=math.inf, changed_s=now_s), _changes(members, best)
    worst = _busier(*loads, prefill, len(members))
    if worst < policy.busy or _busier(*loads, best, len(members)) > (1 - policy.gain) * worst:
        return replace(state, better_since_s=math.inf), {}
    since_s = min(state.better_since_s, now_s)
    if now_s - since_s < policy.hold_s or now_s - state.changed_s < policy.every_s:
        return replace(state, better_since_s=since_s), {}
    return replace(state, better_since_s=math.inf, changed_s=now_s), _changes(members, best)


def best_split(prompts: float, decodes: float, workers: int, prefill: int) -> int:
    """How many of two or more workers should compute prompts. ``prefill``: how many do; of equals the nearest to it."""
    return min(
        range(1, workers),
        key=lambda count: (_busier(prompts, decodes, count, workers), abs(count - prefill), count),
    )  # fmt: skip


def _busier(prompts: float, decodes: float, prefill: int, workers: int) -> float:
    """The load of one worker of the busier kind."""
    return max(prompts / prefill, decodes / (workers - prefill))


def _observed(policy: RolePolicy, state: RolesState, members: Iterable[Member], now_s: float) -> RolesState:
    elapsed_s = now_s - state.at_s
    done = {one.name: one.prompts_s for one in members}
    if elapsed_s <= 0:
        return replace(state, prompts_s=done)
    # A worker that was not there at the last look, or has begun again, counts from the next one on.
    took_s = sum(max(0.0, at - state.prompts_s.get(name, at)) for name, at in done.items())
    prompts = took_s / elapsed_s + sum(min(MOST_BACKLOG, one.backlog_s / policy.clear_s) for one in members)
    decodes = sum(one.decodes for one in members)
    kept = math.exp(-elapsed_s / policy.average_s)
    return replace(
        state,
        at_s=now_s,
        prompts_s=done,
        prompts=state.prompts * kept + prompts * (1 - kept),
        decodes=state.decodes * kept + decodes * (1 - kept),
        weight=state.weight * kept + 1 - kept,
    )  # fmt: skip


def _changes(members: Sequence[Member], prefill: int) -> dict[str, Role]:
    """What makes ``prefill`` of them compute prompts and the others decode, moving the least work."""
    keep = {Role.PREFILL: 0, Role.MIXED: 1, Role.DECODE: 2}
    order = sorted(
        members,
        key=lambda one: (
            keep[one.role],
            # Of prefill workers those with the most to do stay, of the others those with the least to hand over come.
            -one.backlog_s if one.role is Role.PREFILL else 0.0,
            -one.sequences if one.role is Role.PREFILL else one.sequences,
            one.name,
        ),
    )  # fmt: skip
    wanted = {one.name: Role.PREFILL if place < prefill else Role.DECODE for place, one in enumerate(order)}
    return {one.name: wanted[one.name] for one in members if one.role is not wanted[one.name]}
