"""When a batch may take in new sequences, and whether it gives back the slots of ended ones.

``continuous`` decides every iteration (Orca, OSDI 2022, section 4). ``static`` and ``dynamic`` are the baselines it is
measured against: a batch is formed and held until its longest member ends, its prompts left-padded to the longest,
and memory reserved for each member's maximum length.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

DYNAMIC_WINDOW_NS = 50_000_000


@dataclass(frozen=True, slots=True)
class BatchView:
    """What a batching policy may look at."""

    in_batch: int  # sequences in slots, ended ones of a held batch included
    waiting: int
    oldest_wait_ns: int  # since the head of the queue was submitted; 0 if none waits
    max_num_seqs: int


@dataclass(frozen=True, slots=True)
class BatchingPolicy:
    name: str
    admits: Callable[[BatchView], bool]  # asked once before an iteration's admissions
    holds_batch: bool  # ended sequences keep their slots (computed as padding) until the last one ends
    window_ns: int = 0  # longest that ``admits`` makes an idle worker wait


def _always(_: BatchView) -> bool:
    return True


def _when_empty(view: BatchView) -> bool:
    return view.in_batch == 0


def _when_empty_and_full_or_waited(view: BatchView) -> bool:
    return view.in_batch == 0 and (view.waiting >= view.max_num_seqs or view.oldest_wait_ns >= DYNAMIC_WINDOW_NS)


BATCHING_POLICIES: dict[str, BatchingPolicy] = {
    policy.name: policy
    for policy in (
        BatchingPolicy("continuous", _always, holds_batch=False),
        BatchingPolicy("static", _when_empty, holds_batch=True),
        BatchingPolicy("dynamic", _when_empty_and_full_or_waited, holds_batch=True, window_ns=DYNAMIC_WINDOW_NS),
    )
}
