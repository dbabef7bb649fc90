"""One sequence: one choice of one request, from submit to its single end."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, StrEnum
from typing import TYPE_CHECKING

import msgspec

from scheduler.core.beams import BeamSearch
from shared.messages import Submit

if TYPE_CHECKING:
    from scheduler.core.move import Move
    from scheduler.core.waiting import WaitingQueue


class Status(Enum):
    WAITING = "waiting"  # in the queue; holds nothing
    RUNNING = "running"  # has a slot and pages on a worker
    SETTLING = "settling"  # preempted; plans that ran it are still in flight, so its tokens are not all known
    PREEMPTED = "preempted"  # preempted and settled; resumes before anything new is admitted
    HELD = "held"  # ended, but its slot stays in the batch (static batching)
    ENDED = "ended"


# Which status may follow which. The table is the specification; ``Sequence.become`` enforces it.
_NEXT: dict[Status, frozenset[Status]] = {
    Status.WAITING: frozenset({Status.RUNNING, Status.PREEMPTED, Status.ENDED}),  # PREEMPTED: fork of a preempted beam
    Status.RUNNING: frozenset({Status.SETTLING, Status.PREEMPTED, Status.HELD, Status.ENDED}),
    Status.SETTLING: frozenset({Status.PREEMPTED, Status.ENDED}),
    Status.PREEMPTED: frozenset({Status.RUNNING, Status.ENDED}),
    Status.HELD: frozenset({Status.ENDED}),
    Status.ENDED: frozenset(),
}


class Lack(StrEnum):
    """What a sequence waits for, as the scheduler last saw it. One closed set, for records, spans and people."""

    TURN = "turn"  # those before it in the queue
    SLOTS = "slots"  # every place in the batch is taken
    BLOCKS = "blocks"  # KV blocks for its prompt, or for what all are expected to grow by
    HEAD = "head"  # it fits, but would hold up the blocked head of the queue
    PREEMPTED = "preempted"  # preempted sequences come back first
    PREFIX = "prefix"  # another sequence is computing most of its prompt
    LONG = "long contexts"  # long contexts hold their share
    WORKER = "worker"  # another worker is to take it
    SUSPECT = "suspect"  # what ran when a worker ended is tried in turn
    MESSAGE = "message"  # the plan carries all the prompts that fit in one message


MOST_CAUSES = 64
"""Changes of cause that are remembered of one sequence."""

Seniority = tuple[int, int, str, int]
"""(priority, original arrival ns, request id, choice): smaller is more senior. A total order without ties."""


@dataclass(slots=True, eq=False)
class Sequence:
    """``tokens`` are those known here; ``pending`` more are being sampled by plans in flight.

    ``scheduled`` counts the leading tokens whose KV is computed once every plan in flight has run.
    """

    submit: Submit
    choice: int
    tokens: list[int]
    prompt_len: int  # of the original prompt: resumed tokens are not part of it
    seniority: Seniority
    submitted_ns: int
    home: WaitingQueue  # the queue that it waits in, and belongs to wherever it runs
    number: int = 0  # among all that were submitted
    rank: float = 0.5  # its place in (0, 1) among all: which quantile of lengths is expected of it
    status: Status = Status.WAITING
    worker: str = ""
    slot: int = -1
    pages: list[int] = field(default_factory=list)
    scheduled: int = 0
    pending: int = 0
    in_flight: int = 0  # plans in flight that run it
    preemptions: int = 0
    admitted_ns: int = 0  # first admission
    first_token_ns: int = 0  # first result that held a token of it
    computed_before: int = 0  # tokens computed at the last preemption: what is recomputed
    chain: list[bytes] = field(default_factory=list)  # content hashes of its leading full blocks
    chain_root: bytes = b""
    registered: int = 0  # leading pages whose content is indexed
    shares_tail: bool = False  # its last page may be shared with a fork: copy it before the next write
    blocked_since: int = 0  # when it first failed to fit as the head of the queue
    bypasses: int = 0  # sequences admitted past it since
    left_since: int = 0  # when a worker that might have taken it first left it to another one
    left_to: str = ""  # that other one, or to whom it was left later
    left_plan: tuple[int, int] = (0, 0)  # its next plan at that time
    parked: bool = False  # the queue shows it to nobody else meanwhile
    asked: str = ""  # the worker that is the first to be asked to take it
    asked_at: tuple[tuple[int, int], int] = ((0, 0), 0)  # its next plan then, and the openings of its fleet
    asked_since: int = 0  # when anybody was first asked to take it
    began: int = 0  # generated tokens that it was submitted with
    charged: int = 0  # generated tokens that its tenant was charged for
    expected: int = 0  # generated tokens it is expected to end with, as last looked up
    expect_again: int = 0  # generated tokens at which that is looked up again
    deadline: int = 0  # ns on the core's clock; 0: none
    host: list[int] = field(default_factory=list)  # places in host memory that hold its blocks while preempted
    swapped: int = 0  # tokens whose KV they hold
    group: BeamGroup | None = None  # beam search: the beams it belongs to
    children: list[Sequence] = field(default_factory=list)  # choices that fork from it once its prompt is computed
    move: Move | None = None  # it is on its way to another worker
    leaving: bool = False  # and gets no more rows where it still has its slot and its blocks
    failed_moves: int = 0
    balanced: bool = False  # it was handed over once for want of blocks
    end_reason: str = ""
    causes: list[tuple[int, str, str]] = field(default_factory=list)  # (since ns, Lack, request in the way), as changed

    def __post_init__(self) -> None:
        self.home.waiting += 1

    def waits_for(self, lack: Lack, by: str, now: int) -> None:
        """Note why it waits, if that has changed."""
        if self.causes and self.causes[-1][1:] == (lack, by):
            return
        if len(self.causes) < MOST_CAUSES:
            self.causes.append((now, lack, by))

    def move_home(self, queue: WaitingQueue) -> None:
        """Wait in another queue, with the choices that fork from it."""
        self.home.remove(self)
        for one in (self, *self.children):
            one.home.waiting -= 1
            queue.waiting += 1
            one.home = queue
        queue.push(self)

    @property
    def request_id(self) -> str:
        return self.submit.request_id

    @property
    def generated(self) -> int:
        """Tokens generated and known here."""
        return len(self.tokens) - self.prompt_len

    @property
    def remaining(self) -> int:
        """Tokens whose KV is to be scheduled; 1 means a decode. 0: its last token is sampled already, or it leaves."""
        if self.leaving:
            return 0
        if self.group is not None:
            return len(self.tokens) - self.scheduled  # a beam waits for the token that the search gives it
        if self.generated + self.pending >= self.submit.sampling.max_tokens:
            return 0
        return len(self.tokens) + self.pending - self.scheduled

    @property
    def to_fork(self) -> int:
        """Sequences that are still to fork from it: choices, or the beams of its search."""
        if self.group is not None:
            return self.group.width - len(self.group.members) if self is self.group.members[0] else 0
        return len(self.children)

    @property
    def worst_case_tokens(self) -> int:
        """Most KV entries it can ever need: the last sampled token is never computed (DESIGN 6)."""
        return self.prompt_len + self.submit.sampling.max_tokens - 1

    def shed(self) -> None:
        """It has ended, and nothing asks any more what it held: only that it was there is remembered."""
        self.tokens, self.chain = [], []
        self.submit = msgspec.structs.replace(self.submit, prompt=b"", resumed=[])

    def become(self, status: Status) -> None:
        if status not in _NEXT[self.status]:
            raise AssertionError(f"{self.request_id}/{self.choice}: {self.status.value} -> {status.value}")
        self.home.waiting += (status is Status.WAITING) - (self.status is Status.WAITING)
        self.status = status


@dataclass(slots=True, eq=False)
class BeamGroup:
    """The beams of one request, in the order of the search, and the continuations that have come in for them."""

    search: BeamSearch
    members: list[Sequence]
    ready: dict[int, tuple[list[int], list[float]]] = field(default_factory=dict)  # by choice
    next_choice: int = 1

    @property
    def width(self) -> int:
        return self.members[0].submit.sampling.beam_width


def pages_for(tokens: int, block_size: int) -> int:
    """KV blocks that hold ``tokens`` tokens."""
    return -(-tokens // block_size)
