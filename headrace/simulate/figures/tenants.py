"""Fairness between two tenants that wait: the greatest difference in service, beside the bound that is proven for it.

The bound and its proof are in docs/architecture.md, "Bounds". Service is kept here apart from the scheduler's own
counters, so that a scheduler that charges wrongly is found out.
"""

from __future__ import annotations

from collections.abc import Sequence as Several
from dataclasses import dataclass, field, fields, replace

import msgspec

from headrace.simulate.figures.claim import Bench, Holds, Row
from headrace.simulate.scenario import Run, Scenario, run
from headrace.simulate.workload import LENGTHS, OWN, Lengths, Request, lognormal, merged, stream
from scheduler.core.core import SchedulerCore
from scheduler.core.events import CoreEvent
from scheduler.core.fairness import INPUT_WEIGHT, OUTPUT_WEIGHT
from scheduler.core.limits import Limits
from scheduler.core.sequence import Sequence, Status
from scheduler.core.waiting import WaitingQueue
from shared.messages import StepPlan, Submit, SubmitReply


@dataclass
class Ledger:
    """Service by weight of two tenants, and how far one may be ahead of the other by the bound."""

    pair: tuple[str, str]
    weight: dict[str, int] = field(default_factory=dict)  # percent; 100 where it is not named
    apart: float = 0.0  # most that service differed over any interval in which both waited
    bound: float = 0.0  # and what the bound allowed over that interval, at its greatest
    excess: float = 0.0  # most that a lead was over what the bound allowed at that time; 0: never
    passed: float = 0.0  # most that the bound owed to passing blocked heads
    served: dict[str, float] = field(default_factory=dict)
    together: bool = False  # both wait
    _lifted: dict[str, float] = field(default_factory=dict)
    _leads: tuple[float, float] = (0.0, 0.0)  # least and greatest lead of the first tenant since both wait
    _most: dict[str, float] = field(default_factory=dict)  # greatest lead that was allowed since both wait
    _allowed: dict[str, float] = field(default_factory=dict)  # service of each that its last turn allows
    _passed: dict[str, float] = field(default_factory=dict)  # most that passing may have brought it since

    def __post_init__(self) -> None:
        self.served = dict.fromkeys(self.pair, 0.0)

    def other(self, tenant: str) -> str:
        return self.pair[self.pair[0] == tenant]

    def look(self, units: dict[str, int], committed: dict[str, int], both_wait: bool) -> None:
        """To be told before and after every plan: service so far, and what those that had their turn may still get."""
        self.served = {t: self.by_weight(t, count) + self._lifted.get(t, 0.0) for t, count in units.items()}
        if not both_wait:
            self.together = False
            return
        if not self.together:
            self.together = True
            self._leads = (self._lead(self.pair[0]),) * 2
            self._most = dict.fromkeys(self.pair, 0.0)
            for tenant in self.pair:
                self._allowed[tenant] = self.served[tenant] + self.by_weight(tenant, committed[tenant])
                self._passed[tenant] = 0.0
        ahead = self._lead(self.pair[0])
        self._leads = (min(self._leads[0], ahead), max(self._leads[1], ahead))
        for tenant in self.pair:
            allowed = self._allowed[tenant] + self._passed[tenant] - self.served[self.other(tenant)]
            self._most[tenant] = max(self._most[tenant], allowed)
            self.excess = max(self.excess, self._lead(tenant) - allowed)
            self.passed = max(self.passed, self._passed[tenant])
        self.apart = max(self.apart, self._leads[1] - self._leads[0])
        self.bound = max(self.bound, sum(self._most.values()))

    def lift(self, tenant: str) -> None:
        """It was idle, and begins level with the other."""
        self._lifted[tenant] = self._lifted.get(tenant, 0.0) + max(0.0, -self._lead(tenant))

    def its_turn(self, tenant: str, committed: int, slack: float = 0.0) -> None:
        """The tenant had the least service, and a sequence of it was admitted or became the blocked head.

        ``committed``: the most that this one and those admitted before it may still bring. ``slack``: how far the order
        may have been off.
        """
        self._allowed[tenant] = self.served[self.other(tenant)] + self.by_weight(tenant, committed) + slack
        self._passed[tenant] = 0.0

    def enters(self, tenant: str, units: int) -> None:
        """The tenant is charged for a prompt; later turns in this plan are judged by that."""
        self.served[tenant] += self.by_weight(tenant, units)

    def passes(self, tenant: str, units: int) -> None:
        """A sequence of the tenant passed a blocked head; it can bring it ``units`` at most."""
        self._passed[tenant] = self._passed.get(tenant, 0.0) + self.by_weight(tenant, units)

    def by_weight(self, tenant: str, units: int) -> float:
        return units * 100 / self.weight.get(tenant, 100)

    def _lead(self, tenant: str) -> float:
        return self.served[tenant] - self.served[self.other(tenant)]


class WatchedCore(SchedulerCore):
    """The core, with a ledger of two tenants beside it. One class, one worker, no beam search."""

    def __init__(self, limits: Limits, ledger: Ledger, policy: str = "continuous") -> None:
        super().__init__(limits, policy)
        self.ledger = ledger
        self.heads = 0  # that were blocked while both tenants waited
        self.most_passes = 0  # past one head
        self._ended: dict[str, int] = dict.fromkeys(ledger.pair, 0)  # output of ended sequences
        self._inputs: dict[str, int] = dict.fromkeys(ledger.pair, 0)
        self._admitted: set[tuple[str, int]] = set()

    def submit(self, submit: Submit, now: int) -> SubmitReply:
        tenant = submit.tenant
        if tenant in self.ledger.weight:  # simulated requests have none of their own
            submit = msgspec.structs.replace(submit, tenant_weight=self.ledger.weight[tenant])
        if self.fairness.starts_level(tenant):
            self._look(self._models[submit.model].queue)
            self.ledger.lift(tenant)
        return super().submit(submit, now)

    def plan(self, worker_name: str, now: int) -> tuple[StepPlan | None, list[CoreEvent]]:
        queue = self._models[self.workers[worker_name].capacity.model].queue
        committed = self._look(queue)
        head, passes = queue.blocked, self.counters.bypasses
        plan, events = super().plan(worker_name, now)
        fresh = self._enter(plan) if plan is not None else []
        in_order = len(fresh) - (self.counters.bypasses - passes)
        slack = 0.0
        for sequence in fresh[:in_order]:
            tenant = sequence.submit.tenant
            if sequence is head:  # its turn was when it was blocked; its input is counted twice in this pass's order
                slack = self.ledger.by_weight(tenant, INPUT_WEIGHT * len(sequence.tokens))
            else:
                off = slack if head is not None and head.submit.tenant != tenant else 0.0
                self.ledger.its_turn(tenant, committed[tenant] + most_service(sequence), off)
            committed[tenant] += most_service(sequence)
            self.ledger.enters(tenant, INPUT_WEIGHT * len(sequence.tokens))
        if queue.blocked is not None and queue.blocked is not head:
            tenant = queue.blocked.submit.tenant
            self.heads += self.ledger.together
            off = slack if head is not None and head.submit.tenant != tenant else 0.0
            self.ledger.its_turn(tenant, committed[tenant] + most_service(queue.blocked), off)
        for sequence in fresh[in_order:]:
            self.ledger.passes(sequence.submit.tenant, most_service(sequence))
        if queue.blocked is not None:
            self.most_passes = max(self.most_passes, queue.blocked.bypasses)
        self._look(queue)
        return plan, events

    def _enter(self, plan: StepPlan) -> list[Sequence]:
        """The sequences that the plan admits, in order; forks come with their parents."""
        fresh = []
        for start in plan.starts:
            if (start.request_id, start.choice) not in self._admitted:
                self._admitted.add((start.request_id, start.choice))
                if start.parent < 0:
                    sequence = next(s for s in self._requests[start.request_id].sequences if s.choice == start.choice)
                    self._inputs[sequence.submit.tenant] += INPUT_WEIGHT * len(sequence.tokens)
                    fresh.append(sequence)
        return fresh

    def _look(self, queue: WaitingQueue) -> dict[str, int]:
        """Tell the ledger how things stand; returns what the admitted ones may still bring each tenant."""
        units = {tenant: self._inputs[tenant] + count for tenant, count in self._ended.items()}
        committed = dict.fromkeys(units, 0)
        for worker in self.workers.values():
            for sequence in worker.sequences():
                tenant, most = sequence.submit.tenant, sequence.submit.sampling.max_tokens
                units[tenant] += OUTPUT_WEIGHT * sequence.generated
                committed[tenant] += OUTPUT_WEIGHT * ((1 + len(sequence.children)) * most - sequence.generated)
        may_enter = dict(committed)
        if queue.blocked is not None:  # it has had its turn
            may_enter[queue.blocked.submit.tenant] += most_service(queue.blocked)
        waiting = {tenant for tenants in queue._classes.values() for tenant in tenants}
        self.ledger.look(units, may_enter, waiting.issuperset(self.ledger.pair))
        return committed

    def _end(self, sequence: Sequence, reason: str, now: int, status: Status = Status.ENDED) -> None:
        if sequence.status is not Status.WAITING:
            self._ended[sequence.submit.tenant] += OUTPUT_WEIGHT * sequence.generated
        super()._end(sequence, reason, now, status)


def most_service(sequence: Sequence) -> int:
    """Most service that admitting the sequence can bring its tenant, its forks with it."""
    outputs = sequence.submit.n * sequence.submit.sampling.max_tokens
    return INPUT_WEIGHT * len(sequence.tokens) + OUTPUT_WEIGHT * outputs


@dataclass(frozen=True)
class _Watched(Scenario):
    ledger: Ledger = field(default_factory=lambda: Ledger(("", "other")))

    def core(self) -> SchedulerCore:
        return WatchedCore(self.limits, self.ledger, self.policy)


def watched(scenario: Scenario, requests: Several[Request], ledger: Ledger, until_s: float) -> tuple[Run, WatchedCore]:
    """A run of the requests of the ledger's two tenants, and its core."""
    setting = {one.name: getattr(scenario, one.name) for one in fields(Scenario)}
    done = run(_Watched(**setting, ledger=ledger), requests, until_s=until_s)
    assert isinstance(done.core, WatchedCore)
    return done, done.core


# --- the figures ----------------------------------------------------------------------------------------------------

_POOL = 32_000
_DOCUMENTS = Lengths(
    "documents", "documents of 8k to 20k tokens around 12k, outputs up to 64",
    lambda rng: (((OWN, lognormal(rng, 12_000, 0.3, 8_000, 20_000)),), 64, rng.randint(16, 64)),
)  # fmt: skip
_NEVER_TWO = Lengths(
    "halves", "documents of more than half the pool, outputs up to 400",
    lambda rng: (((OWN, rng.randint(9_000, 10_000)),), 400, rng.randint(300, 400)),
)  # fmt: skip
_QUICK = Lengths(
    "quick", "short questions, outputs up to 60",
    lambda rng: (((OWN, rng.randint(100, 300)),), 60, rng.randint(20, 60)),
)  # fmt: skip
_PAIR = ("documents", "chat")


def two_kinds(chat: Lengths, chat_rate: float, documents: Lengths, rate: float, seconds: float) -> list[Request]:
    """One tenant sends only documents, the other only short ones; both more than is served."""
    return merged(
        stream(chat, int(chat_rate * seconds), 1, chat_rate, tenant="chat", longest=_POOL),
        stream(documents, int(rate * seconds), 2, rate, tenant="documents", longest=_POOL),
    )


def beside_blocked_documents(bench: Bench) -> tuple[list[Row], list[list[str]]]:
    """Rows, and lines for the table: fairness while documents block and short ones pass them."""
    setting = Scenario(gpu="a100-40", kv_tokens=_POOL, max_model_len=_POOL).with_limits(max_num_seqs=64)
    seconds = bench.seconds(90, 40)
    usual = two_kinds(LENGTHS["chat"], 20.0, _DOCUMENTS, 5.0, seconds)
    orders = {"backfilling": setting, "strict order": setting.with_limits(max_bypasses=0)}
    lines = []
    found: dict[str, tuple[Ledger, WatchedCore]] = {}

    def measure(name: str, order: str, scenario: Scenario, requests: list[Request], until_s: float) -> Run:
        bench.say(f"{name}, {order}")
        done, core = watched(scenario, requests, Ledger(_PAIR), until_s)
        found[f"{name} {order}"] = core.ledger, core
        ledger = core.ledger
        lines.append([
            name, order, f"{until_s:.0f}", str(core.counters.bypasses), str(core.heads),
            *(f"{ledger.served[tenant]:,.0f}" for tenant in _PAIR), f"{ledger.apart:,.0f}", f"{ledger.bound:,.0f}",
            f"{ledger.passed:,.0f}", f"{core.counters.worst_head_wait_ns / 1e9:.1f}",
            f"{done.figures.tokens_per_s:.0f}",
        ])  # fmt: skip
        return done

    for order, scenario in orders.items():
        measure("chat floods", order, scenario, usual, seconds)
    filled, core = found["chat floods backfilling"]
    strict, _ = found["chat floods strict order"]
    kept = all(one.apart <= one.bound and one.excess <= 1 for one in (filled, strict))
    rows = [
        Row(
            "fairness beside backfilling: short requests pass a tenant's blocked documents, and it keeps its share",
            f"service differs by at most {filled.apart:,.0f} tokens over any time in which both wait, the bound is "
            f"{filled.bound:,.0f}; in strict order {strict.apart:,.0f} and {strict.bound:,.0f}. "
            f"{core.counters.bypasses} admissions passed {core.heads} blocked heads",
            f"one tenant sends chat at 20/s, the other only {_DOCUMENTS.text} at 5/s, {seconds:.0f} s; Llama-3.1-8B on "
            f"one A100-40, batch 64, a pool of {_POOL:,} tokens",
            "the same core in strict order (max_bypasses 0)",
            Holds.YES if kept and core.counters.bypasses > 50 else Holds.PARTLY,
            "the bound is that of docs/architecture.md, Bounds, with what was really committed and what really passed; "
            "service is counted apart from the scheduler's counters",
        )
    ]
    small = replace(setting, kv_tokens=16_000, max_model_len=16_000)
    short, long = bench.seconds(60, 30), bench.seconds(120, 60)
    for order, bypasses in (("backfilling", small.limits.max_bypasses), ("strict order", 0)):
        for until_s in (short, long):
            halves = small.with_limits(max_bypasses=bypasses)
            requests = two_kinds(_QUICK, 40.0, _NEVER_TWO, 3.0, until_s)
            measure(f"one at a time, {until_s:.0f} s", order, halves, requests, until_s)
    pairs = {
        order: [found[f"one at a time, {until_s:.0f} s {order}"][0] for until_s in (short, long)]
        for order in ("backfilling", "strict order")
    }
    (early, late), (strict_early, strict_late) = pairs.values()
    lost = 1 - late.served["documents"] / strict_late.served["documents"]
    rows.append(
        Row(
            "VTC's bound, a constant however long both wait, holds beside backfilling too",
            f"where no two documents fit at once: {early.apart:,.0f} tokens after {short:.0f} s, {late.apart:,.0f} "
            f"after {long:.0f} s; in strict order {strict_early.apart:,.0f} and {strict_late.apart:,.0f}. For it the "
            f"short ones get {late.served['chat'] / strict_late.served['chat']:.1f} times the service, and the "
            f"documents {lost:.0%} less",
            f"{_NEVER_TWO.text} (16,000 tokens) at 3/s, and {_QUICK.text} at 40/s; same card, batch 64",
            "strict order (max_bypasses 0)",
            Holds.NO if late.apart > 1.5 * early.apart else Holds.PARTLY,
            "a document waits for the one before it, and what surely ends before that may pass without limit: it takes "
            "memory that the next document can't use. A constant bound would leave that memory empty; what "
            "is bounded is the service that passes one head",
        )
    )
    return rows, [
        ["load", "order", "s", "bypasses", "blocked heads", "documents' service", "chat's service", "most apart",
         "bound", "of it for passing", "head's worst wait s", "new tok/s"],
        *lines,
    ]  # fmt: skip
