"""Every limit of the core, declared once. Plain numbers; the service's configuration fills them in."""

from __future__ import annotations

from dataclasses import dataclass

from scheduler.core.pools import SHORTER, PoolRules
from shared.messages import Capacity

_AT_LEAST_ONE = frozenset(
    ("max_num_seqs", "max_num_batched_tokens", "prefill_chunk_limit", "run_ahead", "max_num_queued_reqs",
     "max_plan_start_bytes", "max_arrivals", "transfer_timeout_ns")
)  # fmt: skip
PLACEMENTS = ("prefix", "least-loaded", "round-robin")

_SHARES = frozenset(("oldest_prefill_share", "long_context_share", "admission_watermark"))


@dataclass(frozen=True)
class Limits:
    max_num_seqs: int = 64  # sequences in one worker's batch
    max_num_batched_tokens: int = 1024  # token budget of one iteration
    enable_chunked_prefill: bool = True
    enable_prefix_caching: bool = True
    prefill_chunk_limit: int = 512  # most prompt tokens of one sequence in one iteration
    oldest_prefill_share: float = 0.25  # of the prefill budget, for the oldest unfinished prompt
    growth_aware_admission: bool = True  # admit only if what all are expected to grow by fits too
    length_quantile: float = 0.6  # of recent output lengths, on average: 0.5 expects what was seen, more is cautious
    backfill_window: int = 64  # how many waiting sequences are looked at behind a head that does not fit
    max_bypasses: int = 32  # so many may pass a blocked head before it holds a reservation; 0: strict order
    max_bypass_wait_ns: int = 5_000_000_000  # or so long it may be blocked
    max_bypass_lead: int = 32_768  # service by which a tenant may lead those that it leaves waiting for memory
    priority_aging_ns: int = 10_000_000_000  # waiting so long raises a sequence by one priority class; 0: never
    long_context_tokens: int = 0  # prompts from here on are long; 0: none is
    long_context_share: float = 0.5  # of blocks and prefill budget, that long prompts may hold while shorter ones wait
    target_itl_ns: int = 0  # shrink the prefill chunk so that a step is predicted to stay under it; 0: fixed budget
    min_prefill_tokens: int = 32  # prefill per step that the target never takes away
    swap: bool = True  # where a worker sets host memory aside: move a victim's blocks there if that is cheaper
    run_ahead: int = 2  # plans in flight per worker
    placement: str = "prefix"  # which worker takes a sequence that several could take: one of PLACEMENTS
    pools: str = ""  # of workers, by prompt lengths, as PoolRules reads them; those without a range need not be named
    pool_overflow: str = ""  # whose requests go where if a pool has no worker that can hold them
    pool_lend: str = SHORTER  # whose requests the idle workers of a pool take
    max_num_queued_reqs: int = 1024  # waiting sequences of one queue
    max_num_queued_tokens: int = 0  # prompt and max_tokens that wait in it, unless nothing else does; 0: no bound
    admission_watermark: float = 0.02  # share of the pool kept free at admissions, never against the only sequence
    max_plan_start_bytes: int = 512 * 1024  # of prompts and grammars that join in one plan: it stays under max_payload
    tombstone_ns: int = 60_000_000_000  # how long a cancel that overtook its submit, or a finished id, is remembered
    no_worker_grace_ns: int = 10_000_000_000  # how long waiting requests outlive the last worker of their model
    reserve_after_preemptions: int = 2  # after so many, a sequence resumes only with its whole worst case reserved
    max_arrivals: int = 32  # sequences that are on their way to one worker
    transfer_timeout_ns: int = 5_000_000_000  # how long a fetch may take, and a sequence pause for its move
    balance: bool = True  # a worker that is about to preempt hands over to one with room

    def __post_init__(self) -> None:
        """Raises ValueError, one line that names the limit, where a number is out of its range."""
        if self.placement not in PLACEMENTS:
            raise ValueError(f"placement ({self.placement}) is one of {', '.join(PLACEMENTS)}")
        for name, value in vars(self).items():
            if isinstance(value, str):
                continue
            least = 1 if name in _AT_LEAST_ONE else 0
            if not value >= least:
                raise ValueError(f"{name} ({value}) is at least {least}")
            if name in _SHARES and value > 1:
                raise ValueError(f"{name} ({value}) is a share, at most 1")
        PoolRules.parse(self.pools, self.pool_overflow, self.pool_lend)
        if not 0 < self.length_quantile < 1:
            raise ValueError(f"length_quantile ({self.length_quantile}) is above 0 and below 1")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) is less than max_num_seqs "
                f"({self.max_num_seqs}): every running sequence needs one token of the budget"
            )

    def step_tokens(self, capacity: Capacity) -> int:
        """Token budget of one iteration of such a worker, whose memory may bound it too."""
        return min(self.max_num_batched_tokens, capacity.max_batched_tokens or self.max_num_batched_tokens)

    def batch_slots(self, capacity: Capacity) -> int:
        """Sequences in such a worker's batch: each needs one token of the budget."""
        return min(self.max_num_seqs, self.step_tokens(capacity))
