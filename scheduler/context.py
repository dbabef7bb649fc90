"""What the parts of a scheduler share: what lasts as long as its process, and what one time of leading adds."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

from observability.tracing import Tracing
from scheduler.config import SchedulerConfig
from scheduler.core.core import SchedulerCore
from scheduler.core.events import CoreEvent
from scheduler.metrics import SchedulerMetrics
from scheduler.pacing import PlanSender
from scheduler.recorder import FlightRecorder
from shared.bus import Bus
from shared.subjects import Subjects


@dataclass(frozen=True)
class Means:
    """``post`` and ``post_step`` send (subject, payload); ``leads`` says whether the lease holds at this moment: a
    leader that cannot be sure of that does nothing. ``unix_offset_ns`` turns monotonic times into unix times."""

    name: str
    config: SchedulerConfig
    subjects: Subjects
    metrics: SchedulerMetrics
    tracing: Tracing
    recorder: FlightRecorder
    step_bus: Bus
    bus: Bus
    post: Callable[[str, bytes], None]
    post_step: Callable[[str, bytes], None]
    leads: Callable[[], bool]
    unix_offset_ns: int


@dataclass(frozen=True)
class LeadContext:
    """``carry_out`` tells what the core's events say, ``beat`` tells gateways at once how things stand, ``spawn``
    starts a task that ends with this time of leading."""

    means: Means
    core: SchedulerCore
    plans: PlanSender
    carry_out: Callable[[Sequence[CoreEvent]], None]
    beat: Callable[[], None]
    spawn: Callable[[Coroutine[Any, Any, None]], None]
