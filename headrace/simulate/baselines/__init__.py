"""Schedulers to compare with that the core has no setting for. Each is a core whose planner is another one.

What the core can express is not here: static and dynamic batching are policies; contiguous reservation is a block size
of the maximum length; no copy-on-write is ``n`` requests without prefix cache.
"""

from __future__ import annotations

from collections.abc import Callable

from headrace.simulate.baselines.eager import eager_core, first_chunk_core
from scheduler.core.core import SchedulerCore
from scheduler.core.limits import Limits

BASELINES: dict[str, Callable[[Limits, str], SchedulerCore]] = {
    "": SchedulerCore,
    "vllm-v0": eager_core,
    "first-chunk": first_chunk_core,
}
