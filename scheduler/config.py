"""The scheduler's options, declared once."""

from __future__ import annotations

from dataclasses import dataclass

from scheduler.core.limits import PLACEMENTS, Limits
from scheduler.core.pools import SHORTER
from scheduler.policies.batching import BATCHING_POLICIES
from scheduler.policies.roles import RolePolicy
from scheduler.policies.scaling import ScalingPolicy
from shared.config import MeshConfig, at_least, between, option


@dataclass(frozen=True)
class SchedulerConfig(MeshConfig):
    """The Headrace scheduler: decides every iteration of every worker."""

    scheduler_id: str = option("", "name of this scheduler on the bus (default: a random one)")
    policy: str = option(
        "continuous", "when a batch takes in new sequences; static and dynamic are baselines",
        choices=tuple(BATCHING_POLICIES),
    )  # fmt: skip
    placement: str = option(
        "prefix",
        "which worker of a model takes a request: prefix weighs what each has cached, its load and its speed; "
        "least-loaded and round-robin are baselines",
        choices=PLACEMENTS,
    )  # fmt: skip
    pools: str = option(
        "",
        "pools of workers (--pool of a worker) by prompt tokens, both ends included: NAME:LOW-HIGH, comma-separated, "
        "e.g. chat:-4096,long:4097-; a pool without a range is for requests that ask for it, or that no range takes",
    )
    pool_overflow: str = option(
        "",
        "FROM>TO, comma-separated: whose requests go where if a pool has no worker that can hold them, e.g. chat>long",
    )
    pool_lend: str = option(
        SHORTER,
        "LENDER>TO, comma-separated: whose requests the idle workers of a pool take while those of their own pool have "
        "no room; shorter: of every pool with a range those of shorter prompts; empty: nobody's",
    )
    max_num_seqs: int = option(64, "most sequences in one worker's batch", check=at_least(1))
    max_num_batched_tokens: int = option(1024, "token budget of one iteration", check=at_least(1))
    enable_chunked_prefill: bool = option(True, "split long prompts over iterations")
    enable_prefix_caching: bool = option(True, "use the KV blocks of equal prompt beginnings again")
    growth_aware_admission: bool = option(True, "admit a sequence only if what all are expected to grow by fits too")
    length_quantile: float = option(
        0.6,
        "mean quantile of recent output lengths that growth is expected from: 0.5 as observed, more is cautious",
        check=between(0.05, 0.95),
    )
    backfill_window: int = option(
        64, "how many waiting sequences are looked at behind a head that does not fit in memory", check=at_least(0)
    )
    max_bypasses: int = option(
        32, "how many may pass a head that does not fit before it holds a reservation; 0: strict order",
        check=at_least(0),
    )  # fmt: skip
    max_bypass_wait_s: float = option(
        5.0, "how long a head may be blocked before it holds a reservation", check=at_least(0)
    )
    max_bypass_lead: int = option(
        32_768,
        "service (input + 2 x output tokens, by weight) by which a tenant may lead those it leaves waiting for memory",
        check=at_least(0),
    )
    priority_aging_s: float = option(
        10.0, "waiting so long raises a request by one priority class; 0: never", check=at_least(0)
    )
    long_context_tokens: int = option(
        0, "prompts from this length on are long contexts, kept to their share; 0: none is", check=at_least(0)
    )
    long_context_share: float = option(
        0.5, "share of KV blocks and prefill budget that long contexts may hold while shorter ones wait",
        check=between(0.01, 1.0),
    )  # fmt: skip
    target_itl_ms: float = option(
        60.0,
        "shrink prefill chunks beside decodes so that an iteration is predicted to stay under it, or under twice that "
        "if prompts get their first token by it; 0: fixed budget",
        check=at_least(0),
    )  # fmt: skip
    prefill_chunk_limit: int = option(512, "most prompt tokens of one sequence in one iteration", check=at_least(1))
    max_num_queued_reqs: int = option(
        1024,
        "most waiting sequences of one queue (each pool of a model has one); more are refused with 429, or 400 if one "
        "request alone has more",
        check=at_least(1),
    )
    max_num_queued_tokens: int = option(
        0,
        "most waiting tokens of one queue, prompts and max_tokens together; more are refused with 429; 0: no bound",
        check=at_least(0),
    )  # fmt: skip
    admission_watermark: float = option(
        0.02, "share of the KV blocks kept free when a sequence is admitted", check=between(0, 0.5)
    )
    max_arrivals: int = option(
        32, "most sequences that are on their way to one worker, by their KV blocks", check=at_least(1)
    )
    transfer_timeout_s: float = option(
        5.0,
        "how long a fetch of KV blocks may take, and a sequence pause for it; then it goes on where it is",
        check=at_least(0.1),
    )
    balance: bool = option(
        True, "a worker that is about to preempt hands over to one with room, where it offers its KV blocks"
    )
    plan_roles: bool = option(
        False,
        "move workers that were started with --role prefill or decode from one to the other, as there is more to do of "
        "either kind",
    )
    run_ahead: int = option(2, "plans in flight per worker; 1 turns run-ahead off", check=between(1, 8))
    lease_s: float = option(
        1.5,
        "length of the lease by which a scheduler leads: the pause before another one takes over from one that died",
        check=between(0.3, 60),
    )
    worker_timeout_s: float = option(5.0, "a worker silent for so long is lost", check=at_least(1))
    step_timeout_s: float = option(
        300.0, "a worker whose step runs longer is stuck, and its batch lost", check=at_least(1)
    )
    gateway_timeout_s: float = option(
        10.0, "a gateway silent for so long is gone, and its requests are cancelled", check=at_least(1)
    )
    recorded_requests: int = option(
        2048, "requests whose life is remembered, for `headrace explain`", check=between(16, 1_000_000)
    )
    recorded_steps: int = option(16_384, "steps that are remembered beside them", check=between(64, 10_000_000))
    record: str = option(
        "",
        "write every input and every plan to this file (each later time of leading: FILE.2, ...), for headrace replay; "
        "it grows without end",
    )
    scale_min_workers: int = option(
        1, "least that headrace_desired_workers asks for, of each pool; 0: none when nothing comes", check=at_least(0)
    )
    scale_max_workers: int = option(16, "most that it asks for", check=at_least(1))
    scale_target_wait_s: float = option(
        10.0, "wait in the queue beyond which it asks for more workers", check=at_least(0.1)
    )
    scale_memory_share: float = option(
        0.85, "share of the KV blocks in use beyond which it does", check=between(0.1, 1.0)
    )
    scale_ahead_s: float = option(
        120.0, "how long a worker takes to be there: load is forecast for so far ahead", check=between(0, 3600)
    )
    scale_down_after_s: float = option(
        300.0, "how long fewer workers must have been enough before it asks for fewer", check=at_least(1)
    )
    metrics_host: str = option("127.0.0.1", "address of the metrics listener")
    metrics_port: int = option(9401, "port of the metrics listener; 0: any free one", check=between(0, 65535))

    def limits(self) -> Limits:
        """Raises ValueError if the numbers contradict each other."""
        return Limits(
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            enable_chunked_prefill=self.enable_chunked_prefill,
            prefill_chunk_limit=self.prefill_chunk_limit,
            run_ahead=self.run_ahead,
            placement=self.placement,
            pools=self.pools,
            pool_overflow=self.pool_overflow,
            pool_lend=self.pool_lend,
            enable_prefix_caching=self.enable_prefix_caching,
            growth_aware_admission=self.growth_aware_admission,
            length_quantile=self.length_quantile,
            backfill_window=self.backfill_window,
            max_bypasses=self.max_bypasses,
            max_bypass_wait_ns=int(self.max_bypass_wait_s * 1e9),
            max_bypass_lead=self.max_bypass_lead,
            priority_aging_ns=int(self.priority_aging_s * 1e9),
            long_context_tokens=self.long_context_tokens,
            long_context_share=self.long_context_share,
            target_itl_ns=int(self.target_itl_ms * 1e6),
            max_num_queued_reqs=self.max_num_queued_reqs,
            max_num_queued_tokens=self.max_num_queued_tokens,
            admission_watermark=self.admission_watermark,
            max_arrivals=self.max_arrivals,
            transfer_timeout_ns=int(self.transfer_timeout_s * 1e9),
            balance=self.balance,
        )

    def roles(self) -> RolePolicy | None:
        """How roles follow the load; None: they stay."""
        return RolePolicy() if self.plan_roles else None

    def scaling(self) -> ScalingPolicy:
        """Raises ValueError if the bounds contradict each other."""
        return ScalingPolicy(
            target_wait_s=self.scale_target_wait_s,
            min_workers=self.scale_min_workers,
            max_workers=self.scale_max_workers,
            ahead_s=self.scale_ahead_s,
            down_after_s=self.scale_down_after_s,
            memory_share=self.scale_memory_share,
        )
