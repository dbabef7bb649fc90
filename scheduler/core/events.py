"""What the core tells its driver, beside plans: ends of sequences, and what must be said to gateways."""

from __future__ import annotations

from dataclasses import dataclass, field

from scheduler.core.beams import Hypothesis
from scheduler.core.sequence import Sequence
from shared.messages import Submit


@dataclass(frozen=True, slots=True)
class Ended:
    """A sequence ended at the worker or by a cancel; its gateway knows already."""

    sequence: Sequence
    reason: str
    now_ns: int


@dataclass(frozen=True, slots=True)
class Failed:
    """A sequence is lost to its gateway: ``kind`` is failed, dropped or lost (shared.messages.RequestEvent)."""

    sequence: Sequence
    kind: str
    reason: str
    now_ns: int


@dataclass(frozen=True, slots=True)
class Applied:
    """A step's result was taken in."""

    worker: str
    step: int
    new_tokens: int
    prefill_tokens: int
    padding_tokens: int
    now_ns: int


@dataclass(frozen=True, slots=True)
class Preempted:
    sequence: Sequence
    cause: str
    by: str  # the request whose growth needed the pages
    now_ns: int


@dataclass(frozen=True, slots=True)
class Found:
    """A beam search is done: its ``n`` best hypotheses, best first."""

    submit: Submit
    hypotheses: list[Hypothesis]
    now_ns: int


@dataclass(frozen=True, slots=True)
class Moved:
    """A sequence goes on at another worker: the plan that this came with starts it there."""

    sequence: Sequence
    source: str
    why: str  # scheduler.core.move.Why
    blocks: int  # that were fetched; the target had the others
    bytes: int
    fetch_us: int
    paused_ns: int  # since the result of its last step at the source was in
    transport: str
    now_ns: int


@dataclass(frozen=True, slots=True)
class NotMoved:
    """A move has failed: the sequence goes on where it is."""

    sequence: Sequence
    target: str
    why: str
    reason: str
    now_ns: int


CoreEvent = Ended | Failed | Applied | Preempted | Found | Moved | NotMoved


@dataclass(slots=True)
class Counters:
    """Totals since start. Integers only, so that a replay compares them."""

    submitted: int = 0
    admitted: int = 0
    finished: int = 0
    cancelled: int = 0
    failed: int = 0
    preemptions: int = 0
    new_tokens: int = 0
    prefill_tokens: int = 0
    recomputed_tokens: int = 0
    padding_tokens: int = 0
    prefix_queries: int = 0  # prompt tokens looked up at first admissions
    prefix_hits: int = 0  # of those, tokens found
    prefix_of: dict[str, tuple[int, int]] = field(default_factory=dict)  # model -> those two
    resumed_hits: int = 0  # tokens that a preempted sequence found again
    forks: int = 0
    page_copies: int = 0
    bypasses: int = 0  # admissions past a blocked head
    worst_head_wait_ns: int = 0  # longest from blocked to admitted
    deadline_drops: int = 0
    swapped_out: int = 0  # blocks
    swapped_in: int = 0
    moves: int = 0  # sequences that went on at another worker
    failed_moves: int = 0
    fetched_blocks: int = 0  # by those that moved
    fetched_bytes: int = 0  # by whatever was fetched to its end
    idle_slot_iterations: int = 0  # a slot that sat in a batch in an iteration and yielded no wanted token
    plans: int = 0

    def looked_up(self, model: str, queries: int, hits: int) -> None:
        """Of a sequence's prompt tokens, so many were in the prefix cache at its first admission."""
        self.prefix_queries += queries
        self.prefix_hits += hits
        before = self.prefix_of.get(model, (0, 0))
        self.prefix_of[model] = (before[0] + queries, before[1] + hits)
