"""A recorded scheduler run: its configuration, its inputs fed to a core again, and the requests in it.

See ``scheduler.recording`` for what a trace holds.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from headrace.trace.stream import BadTrace, message, records, same_bytes
from scheduler.core.core import BadResult, ResultGap, SchedulerCore
from scheduler.core.events import CoreEvent
from scheduler.core.limits import Limits
from scheduler.policies.batching import BATCHING_POLICIES
from scheduler.recording import VERSION
from shared.messages import Cancel, Capacity, Fetched, Role, StepPlan, StepResult, Submit


@dataclass(frozen=True)
class Header:
    at_ns: int
    epoch: int
    policy: str
    limits: Limits
    unknown: tuple[str, ...]  # recorded limits that this version does not have


def header(path: Path) -> Header:
    """The configuration that a trace was recorded under. Raises BadTrace if it is not a scheduler's trace."""
    first = next(records(path), None)
    if first is None or first[1] != "trace" or len(first) < 4:
        raise BadTrace(f"{path}: not a scheduler's trace (headrace scheduler --record FILE writes one)")
    if first[2] != VERSION:
        raise BadTrace(f"{path}: a trace of version {first[2]}; this is version {VERSION}")
    about = first[3]
    known = {one.name for one in dataclasses.fields(Limits)}
    try:
        given = {name: value for name, value in about["limits"].items() if name in known}
        limits = Limits(**given)
        if about["policy"] not in BATCHING_POLICIES:
            raise BadTrace(f"{path}: recorded with the policy {about['policy']!r}, which this version lacks")
        return Header(first[0], int(about["epoch"]), about["policy"], limits, tuple(set(about["limits"]) - known))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        if isinstance(error, BadTrace):
            raise
        raise BadTrace(f"{path}: a header that cannot be read: {error}") from None


@dataclass
class Outcome:
    """What feeding a trace to a core came to."""

    inputs: int = 0
    plans: int = 0
    difference: str = ""  # the first plan that is not the recorded one; empty: every byte the same
    first_ns: int = 0
    last_ns: int = 0


class Watcher:
    """What happens while a trace is fed. Each is called after the core has taken the record in."""

    def capacity(self, worker: str, capacity: Capacity) -> None: ...
    def submit(self, submit: Submit, now: int) -> None: ...
    def plan(self, core: SchedulerCore, plan: StepPlan, now: int) -> None: ...
    def result(self, result: StepResult, now: int) -> None: ...
    def events(self, events: list[CoreEvent]) -> None: ...


def feed(path: Path, core: SchedulerCore, watch: Watcher | None = None) -> Outcome:
    """Give a core every recorded input at its time, and compare its plans with the recorded ones.

    Where the core decides otherwise, recorded results may not fit its plans any more: feeding ends there.
    """
    watch = watch or Watcher()
    outcome = Outcome()
    for record in _after_header(path):
        now, kind, *rest = record
        outcome.first_ns = outcome.first_ns or now
        outcome.last_ns = max(outcome.last_ns, now)
        if kind == "plan":
            worker, raw = rest
            plan, events = core.plan(worker, now)
            outcome.plans += plan is not None
            same = plan is None if raw is None else plan is not None and same_bytes(raw, msgspec.msgpack.encode(plan))
            if not same:
                outcome.difference = f"plan {outcome.plans} at {now} for {worker}: {_difference(raw, plan)}"
                return outcome
            if plan is not None:
                watch.plan(core, plan, now)
        else:
            outcome.inputs += 1
            events = _give(core, kind, rest, now, watch)
        watch.events(events)
    return outcome


def _after_header(path: Path) -> Iterator[list[Any]]:
    return (record for index, record in enumerate(records(path)) if index)


def _give(core: SchedulerCore, kind: str, rest: list[Any], now: int, watch: Watcher) -> list[CoreEvent]:
    if kind == "tick":
        return core.tick(now)
    if kind == "result":
        result = message(rest[0])
        assert isinstance(result, StepResult)
        try:
            events = core.apply(result, now)
        except (ResultGap, BadResult):  # as it was when recorded: the driver then asked again, or lost the batch
            return []
        watch.result(result, now)
        return events
    if kind == "submit":
        submit = message(rest[0])
        assert isinstance(submit, Submit)
        core.submit(submit, now)
        watch.submit(submit, now)
        return []
    if kind == "cancel":
        cancel = message(rest[0])
        assert isinstance(cancel, Cancel)
        return core.cancel(cancel.request_id, cancel.attempt, cancel.choice, now)
    if kind == "reconcile":
        gateway, live, before_ns = rest
        return core.reconcile(gateway, live, before_ns, now)
    if kind == "worker_up":
        name, incarnation, raw, first_step, cached = rest
        capacity = msgspec.convert(raw, Capacity)
        watch.capacity(name, capacity)
        return core.worker_up(name, incarnation, capacity, now, first_step, [(page, digest) for page, digest in cached])
    if kind == "worker_lost":
        name, reason, suspect = rest
        return core.worker_lost(name, reason, now, suspect)
    if kind == "hand_over":
        return core.hand_over(rest[0], now)
    if kind == "set_role":
        name, role = rest
        return core.set_role(name, Role(role), now)
    if kind == "fetched":
        answer = message(rest[0])
        assert isinstance(answer, Fetched)
        return core.fetched(answer, now)
    if kind == "worker_draining":
        core.worker_draining(rest[0])
        return []
    if kind == "epoch":
        core.epoch = rest[0]
        return []
    raise BadTrace(f"a record of kind {kind!r}, which this version does not know")


def _difference(raw: Any, plan: StepPlan | None) -> str:
    if raw is None or plan is None:
        return "recorded no plan, now there is one" if raw is None else "recorded a plan, now there is none"
    recorded = message(raw)
    names = [name for name in plan.__struct_fields__ if getattr(plan, name) != getattr(recorded, name)]
    return f"differs in {', '.join(names) or 'its bytes'}"
