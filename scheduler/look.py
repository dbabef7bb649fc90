"""What the dashboard shows of the scheduler as it stands: read on the event loop, so it must be quick.

Costs in proportion to what runs, to the tenants that wait and to the steps since the last look, never to what is
remembered or waits.
"""

from __future__ import annotations

import heapq
import itertools
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from observability.dashboard import Dashboard
from observability.explanation import LACKS
from observability.explanation_page import summary
from scheduler.core.figures import memory_figures
from scheduler.core.sequence import Lack, Status
from scheduler.core.sequence import Sequence as CoreSequence
from scheduler.core.waiting import WaitingQueue
from scheduler.core.worker_state import WorkerState
from scheduler.recorder import slowest
from scheduler.service import SchedulerService
from shared.flight_record import RequestTrace, StepTrace

MOST_ROWS = 40
MOST_LINES = 20
SLOWEST = 12
SLOWEST_EVERY_S = 2.0
"""Ranking all that are remembered takes some milliseconds (of another thread): not at each poll."""


@dataclass(frozen=True, slots=True)
class Look:
    """What was read on the event loop. Times are monotonic ns."""

    now_ns: int
    settled: int
    steps: list[StepTrace]  # with a result, since the look before
    first_tokens: list[tuple[int, int]]
    requests: list[RequestTrace]
    state: dict[str, Any]


def look(service: SchedulerService, taken: int) -> Look:
    """``taken``: how many steps with results the one before had taken in. On the event loop."""
    core, recorder = service.core, service.recorder
    now = time.monotonic_ns()
    missing = min(recorder.num_settled - taken, len(recorder.settled_steps))
    steps = list(itertools.islice(reversed(recorder.settled_steps), max(0, missing)))
    steps.reverse()
    workers = sorted(core.workers.values(), key=lambda one: one.name)
    rows = heapq.nsmallest(
        MOST_ROWS, itertools.chain.from_iterable(one.sequences() for one in workers), key=lambda one: one.submitted_ns
    )
    state: dict[str, Any] = {
        "scheduler": service.name,
        "epoch": core.epoch,
        "policy": core.policy.name,
        "max_num_seqs": core.limits.max_num_seqs,
        "num_running": core.num_running,
        "num_waiting": core.num_waiting,
        "num_preempted": core.num_preempted,
        "workers": [_worker(worker) for worker in workers],
        "queues": [_queue(queue, workers, now) for queue in core.queues.values()],
        "running": [_row(one, now) for one in rows],
    }
    return Look(now, recorder.num_settled, steps, list(recorder.first_tokens), recorder.requests(), state)


def _worker(worker: WorkerState) -> dict[str, Any]:
    memory = memory_figures(worker)
    lack, lack_of = worker.lack
    return {
        "name": worker.name,
        "model": worker.capacity.model,
        "pool": worker.serves.pool,
        "device": worker.capacity.device,
        "draining": worker.draining,
        "role": worker.role,
        "moves": {"to": len(worker.arriving), "from": len(worker.departing)},
        "running": len(worker.running),
        "preempted": len(worker.preempted),
        "block_size": worker.capacity.block_size,
        "blocks": {
            "total": memory.total,
            "own": memory.used - memory.shared,
            "shared": memory.shared,
            "cached": memory.cached,
            "free": memory.total - memory.used - memory.cached,
        },
        "waste_share": round(memory.waste_share, 4),
        "lack": LACKS.get(lack, lack),
        "lack_of": lack_of,
    }


def _queue(queue: WaitingQueue, workers: Sequence[WorkerState], now: int) -> dict[str, Any]:
    lines = heapq.nlargest(MOST_LINES, queue.lines(), key=lambda line: (-line[0], line[2]))
    head = queue.head(now)
    told = None
    if head is not None:
        lack, by = _lack(head, [one.lack for one in workers if one.serves == queue.key])
        told = {
            "request": head.request_id, "waited_ms": (now - head.submitted_ns) / 1e6, "lack": LACKS.get(lack, lack),
            "by": by, "bypasses": head.bypasses, "prompt": head.prompt_len,
        }  # fmt: skip
    return {
        "model": queue.key.model,
        "pool": queue.key.pool,
        "waiting": len(queue),
        "tokens": queue.tokens,
        "head": told,
        "lines": [
            {
                "priority": priority, "tenant": tenant, "waiting": waiting,
                "waited_ms": (now - first.submitted_ns) / 1e6, "first": first.request_id,
            }
            for priority, tenant, waiting, first in lines
        ],
    }  # fmt: skip


def _lack(head: CoreSequence, lacks: Sequence[tuple[str, str]]) -> tuple[str, str]:
    """What the head of a queue waits for: what a worker noted of it, or of the whole queue, or what was noted last."""
    for lack, of in lacks:
        if of == head.request_id:
            return lack, ""
    for lack, of in lacks:
        if lack in (Lack.SLOTS, Lack.PREEMPTED):
            return lack, of
    return head.causes[-1][1:] if head.causes else ("", "")


def _row(one: CoreSequence, now: int) -> dict[str, Any]:
    stage = "decode" if one.first_token_ns else "prefill"
    if one.status in (Status.SETTLING, Status.PREEMPTED):
        stage = "preempted"
    elif one.leaving:
        stage = "move"
    elif one.preemptions and one.remaining > 1:
        stage = "recompute"
    return {
        "request": one.request_id, "choice": one.choice, "tenant": one.submit.tenant, "priority": one.submit.priority,
        "worker": one.worker, "stage": stage, "prompt": one.prompt_len, "computed": one.scheduled,
        "generated": one.generated, "max_tokens": one.submit.sampling.max_tokens, "blocks": len(one.pages),
        "preemptions": one.preemptions, "age_ms": (now - one.submitted_ns) / 1e6,
    }  # fmt: skip


class LiveState:
    """Turns looks into what the page polls. On a thread of the listener; several may poll at once."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._dashboard = Dashboard()
        self._slowest: list[dict[str, Any]] = []
        self._slowest_at = -1e9

    @property
    def taken(self) -> int:
        return self._dashboard.taken

    def tell(self, seen: Look, since: int) -> dict[str, Any]:
        """The state, with those film frames that came after result ``since``."""
        with self._lock:
            board, now = self._dashboard, seen.now_ns
            new = seen.settled - board.taken  # another poll may have been quicker
            if new > 0:
                board.take(seen.steps[-new:], seen.settled)
            workers: Sequence[dict[str, Any]] = seen.state["workers"]
            board.keep((worker["name"] for worker in workers), now)
            if now / 1e9 - self._slowest_at >= SLOWEST_EVERY_S:
                self._slowest_at = now / 1e9
                self._slowest = [_slow(one, now) for one in slowest(seen.requests, SLOWEST)]
            busy = [board.busy(worker["name"], now) for worker in workers]
            told = [
                worker | {"busy": round(share, 4), "film": board.film(worker["name"], since)}
                for worker, share in zip(workers, busy, strict=True)
            ]
            return {
                **seen.state,
                **board.figures(seen.first_tokens, now),
                "busy": round(sum(busy) / len(busy), 4) if busy else 0.0,
                "workers": told,
                "slowest": self._slowest,
                "settled": board.taken,
            }


def _slow(request: RequestTrace, now: int) -> dict[str, Any]:
    return summary(request) | {"ended_ago_s": round((now - request.ended_ns) / 1e9, 1)}
