"""Which workers compute prompts and which decode, where each does one of both: a pure function of what was seen, its
memory passed in and out.

Both kinds of load are counted in workers that they would keep busy all of the time. Prompts by what arrives: the time
that steps took because of them, and what is left of them, in the queue and at workers, more than before; so a shift is
seen at once, however few workers compute prompts. That comes by the request and is averaged. Where decode workers are
past their limit too, only what was done counts: a mesh does as much as the scarcer kind of worker lets it, so that the
two loads stand to each other as the numbers of workers should. Decodes by the share of a batch, of the KV blocks or of
a step's target time that they take, wherever they run: what found no room among decode workers counts where its prompt
was computed. That is a sum over what has come for a while, and is taken as it stands. What is left of prompts comes on
top, up to a limit: it is to be cleared.

The best number of prefill workers is the one with which the busier kind is least busy. It is taken only when that kind
is busy at all, would be less so by a margin, and this has held for a while; then the effect is awaited. So it follows a
load that shifts, and neither noise nor its own transients.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from shared.capacity import Role

MOST_BACKLOG = 0.125
"""Of all workers: what prompts that are left add to the load at most. Where both kinds are past their limits, there is
always more of them, and it tells nothing."""


@dataclass(frozen=True, slots=True)
class RolePolicy:
    busy: float = 0.6  # of a kind of worker: below it nobody is moved
    gain: float = 0.15  # share of the busier kind's load that a change must take off it
    average_s: float = 5.0  # time constant of the average of prompts
    hold_s: float = 2.0  # how long a change must have been better
    every_s: float = 5.0  # least time between two changes
    clear_s: float = 5.0  # in which the prompts that are left should be computed


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
    backlog_s: float = 0.0  # of prompts, at the last look
    prompts: float = 0.0  # the average, and how much of it was seen
    weight: float = 0.0
    decodes: float = 0.0
    better_since_s: float = math.inf  # since when another number has been better
    changed_s: float = -math.inf

    @property
    def loads(self) -> tuple[float, float]:
        """Workers that prompts would keep busy, of late, and that decodes do; zeros as long as nothing was seen."""
        return (self.prompts / self.weight, self.decodes) if self.weight else (0.0, 0.0)


def advance(
    policy: RolePolicy, state: RolesState | None, members: Sequence[Member], now_s: float, waiting_s: float = 0.0
) -> tuple[RolesState, dict[str, Role]]:
    """One look, about once a second: what to remember, and the roles to change. ``state``: None at the first one;
    ``waiting_s``: of a worker's time, what the prompts need that wait for one.

    Among two or more there is always one of each; a single one does both.
    """
    state = _observed(policy, state or RolesState(now_s), members, now_s, waiting_s)
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


def _observed(
    policy: RolePolicy, state: RolesState, members: Sequence[Member], now_s: float, waiting_s: float
) -> RolesState:  # fmt: skip
    elapsed_s = now_s - state.at_s
    done = {one.name: one.prompts_s for one in members}
    backlog_s = waiting_s + sum(one.backlog_s for one in members)
    if elapsed_s <= 0:
        return replace(state, prompts_s=done, backlog_s=backlog_s)
    # A worker that was not there at the last look, or has begun again, counts from the next one on.
    took_s = sum(max(0.0, at - state.prompts_s.get(name, at)) for name, at in done.items())
    decodes = sum(one.decodes for one in members)
    more_s = backlog_s - state.backlog_s  # what has arrived and was not done
    if more_s > 0:
        more_s *= _unsaturated(decodes, sum(one.role is not Role.PREFILL for one in members))
    prompts = max(0.0, took_s + more_s) / elapsed_s + min(MOST_BACKLOG * len(members), backlog_s / policy.clear_s)
    kept = math.exp(-elapsed_s / policy.average_s)
    return replace(
        state,
        at_s=now_s,
        prompts_s=done,
        backlog_s=backlog_s,
        prompts=state.prompts * kept + prompts * (1 - kept),
        weight=state.weight * kept + 1 - kept,
        decodes=decodes,
    )  # fmt: skip


def _unsaturated(decodes: float, workers: int) -> float:
    """How far decode workers are from their limit: 1 up to half of it, 0 from there on."""
    return min(1.0, max(0.0, 2 - 2 * decodes / max(1, workers)))


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
