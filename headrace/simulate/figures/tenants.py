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
from shared.messages import StepPlan, Submit, SubmitReply, unpack_tokens


@dataclass
class Ledger:
    """Service by weight of two tenants, and how far one may be ahead of the other by the bound."""

    pair: tuple[str, str]
    weight: dict[str, int] = field(default_factory=dict)  # percent; 100 where it is not named
    apart: float = 0.0  # most that service differed over any interval in which both waited
    ahead: dict[str, float] = field(default_factory=dict)  # most that each gained on the other over such an interval
    served: dict[str, float] = field(default_factory=dict)
    together: bool = False  # both wait
    _leads: tuple[float, float] = (0.0, 0.0)  # least and greatest lead of the first tenant since both wait

    def __post_init__(self) -> None:
        self.served = dict.fromkeys(self.pair, 0.0)
        self.ahead = dict.fromkeys(self.pair, 0.0)

    def look(self, units: dict[str, int], both_wait: bool) -> None:
        """To be told the service so far, before and after every plan."""
        self.served = {tenant: count * 100 / self.weight.get(tenant, 100) for tenant, count in units.items()}
        first, second = (self.served[tenant] for tenant in self.pair)
        lead = first - second
        if not (both_wait and self.together):
            self._leads = (lead, lead)
        self.together = both_wait
        if both_wait:
            gains = (lead - self._leads[0], self._leads[1] - lead)
            for tenant, gain in zip(self.pair, gains, strict=True):
                self.ahead[tenant] = max(self.ahead[tenant], gain)
            self._leads = (min(self._leads[0], lead), max(self._leads[1], lead))
            self.apart = max(self.ahead.values())


def most_ahead(limits: Limits, prompt: int, max_tokens: int, n: int = 1, weight: int = 100) -> float:
    """U + S of docs/architecture.md, "Bounds": what one tenant is ahead of another at most, while both wait.

    ``prompt``, ``max_tokens`` and ``n`` are the greatest of its requests, ``weight`` is in percent.
    """
    heads, lead = (0, 0) if limits.max_bypasses == 0 else (1, limits.max_bypass_lead)
    inputs = INPUT_WEIGHT * (1 + heads) * prompt
    outputs = OUTPUT_WEIGHT * n * (limits.max_num_seqs + heads) * max_tokens
    return lead + (inputs + outputs) * 100 / weight


class WatchedCore(SchedulerCore):
    """The core, with a ledger of two tenants beside it. One class, one worker, no beam search."""

    def __init__(self, limits: Limits, ledger: Ledger, policy: str = "continuous") -> None:
        super().__init__(limits, policy)
        self.ledger = ledger
        self.heads = 0  # that were blocked while both tenants waited
        self._head: Sequence | None = None
        self._generated: dict[str, int] = dict.fromkeys(ledger.pair, 0)  # output of ended sequences
        self._inputs: dict[str, int] = dict.fromkeys(ledger.pair, 0)
        self._greatest: dict[str, tuple[int, int, int]] = dict.fromkeys(ledger.pair, (0, 0, 0))
        self._admitted: set[tuple[str, int]] = set()

    @property
    def bound(self) -> float:
        """On the difference in service over any interval, for the requests that came."""
        limits, weight = self.limits, self.ledger.weight
        return sum(most_ahead(limits, *most, weight.get(tenant, 100)) for tenant, most in self._greatest.items())

    def submit(self, submit: Submit, now: int) -> SubmitReply:
        tenant = submit.tenant
        if tenant in self.ledger.weight:  # simulated requests have none of their own
            submit = msgspec.structs.replace(submit, tenant_weight=self.ledger.weight[tenant])
        reply = super().submit(submit, now)
        sizes = len(unpack_tokens(submit.prompt)), submit.sampling.max_tokens, submit.n
        prompt, outputs, n = (max(pair) for pair in zip(sizes, self._greatest[tenant], strict=True))
        self._greatest[tenant] = prompt, outputs, n
        return reply

    def plan(self, worker_name: str, now: int) -> tuple[StepPlan | None, list[CoreEvent]]:
        queue = self.queues[self.workers[worker_name].serves]
        self._look(queue)
        plan, events = super().plan(worker_name, now)
        for start in plan.starts if plan is not None else []:
            if (start.request_id, start.choice) not in self._admitted:
                self._admitted.add((start.request_id, start.choice))
                if start.parent < 0:
                    sequence = next(s for s in self._requests[start.request_id].sequences if s.choice == start.choice)
                    self._inputs[sequence.submit.tenant] += INPUT_WEIGHT * len(sequence.tokens)
        self._look(queue)
        if queue.blocked is not self._head:
            self._head = queue.blocked
            self.heads += self._head is not None and self.ledger.together
        return plan, events

    def _look(self, queue: WaitingQueue) -> None:
        units = {tenant: self._inputs[tenant] + count for tenant, count in self._generated.items()}
        for worker in self.workers.values():
            for sequence in worker.sequences():
                units[sequence.submit.tenant] += OUTPUT_WEIGHT * sequence.generated
        waiting = {tenant for tenants in queue._classes.values() for tenant in tenants}
        self.ledger.look(units, waiting.issuperset(self.ledger.pair))

    def _end(self, sequence: Sequence, reason: str, now: int, status: Status = Status.ENDED) -> None:
        if sequence.status is not Status.WAITING:
            self._generated[sequence.submit.tenant] += OUTPUT_WEIGHT * sequence.generated
        super()._end(sequence, reason, now, status)


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
_NO_LIMIT = 1 << 40


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

    def measure(name: str, order: str, scenario: Scenario, requests: list[Request], until_s: float) -> None:
        bench.say(f"{name}, {order}")
        done, core = watched(scenario, requests, Ledger(_PAIR), until_s)
        found[f"{name} {order}"] = core.ledger, core
        ledger = core.ledger
        lines.append([
            name, order, f"{until_s:.0f}", str(core.counters.bypasses), str(core.heads),
            *(f"{ledger.served[tenant]:,.0f}" for tenant in _PAIR), f"{ledger.apart:,.0f}",
            f"{core.bound:,.0f}" if scenario.limits.max_bypass_lead < _NO_LIMIT else "none",
            f"{core.counters.worst_head_wait_ns / 1e9:.1f}", f"{done.figures.tokens_per_s:.0f}",
        ])  # fmt: skip

    for order, scenario in orders.items():
        measure("chat floods", order, scenario, usual, seconds)
    filled, core = found["chat floods backfilling"]
    strict, in_order = found["chat floods strict order"]
    kept = filled.apart <= core.bound and strict.apart <= in_order.bound
    rows = [
        Row(
            "fairness beside backfilling: short requests pass a tenant's blocked documents, and it keeps its share",
            f"service differs by at most {filled.apart:,.0f} tokens over any time in which both wait, the bound is "
            f"{core.bound:,.0f}; in strict order {strict.apart:,.0f} and {in_order.bound:,.0f}. "
            f"{core.counters.bypasses} admissions passed {core.heads} blocked heads",
            f"one tenant sends chat at 20/s, the other only {_DOCUMENTS.text} at 5/s, {seconds:.0f} s; Llama-3.1-8B on "
            f"one A100-40, batch 64, a pool of {_POOL:,} tokens",
            "the same core in strict order (max_bypasses 0)",
            Holds.YES if kept and core.counters.bypasses > 50 else Holds.PARTLY,
            "the bound is that of docs/architecture.md, Bounds; service is counted apart from the scheduler's counters",
        )
    ]
    small = replace(setting, kv_tokens=16_000, max_model_len=16_000)
    short, long = bench.seconds(45, 30), bench.seconds(90, 60)
    orders = {
        "backfilling": small,
        "no limit on the lead": small.with_limits(max_bypass_lead=_NO_LIMIT),
        "strict order": small.with_limits(max_bypasses=0),
    }
    for order, halves in orders.items():
        for until_s in (short, long) if order != "strict order" else (long,):
            requests = two_kinds(_QUICK, 40.0, _NEVER_TWO, 3.0, until_s)
            measure(f"one at a time, {until_s:.0f} s", order, halves, requests, until_s)
    early, late, early_free, late_free = (
        found[f"one at a time, {until_s:.0f} s {order}"][0] for order in list(orders)[:2] for until_s in (short, long)
    )
    strict, _ = found[f"one at a time, {long:.0f} s strict order"]
    bounds = [found[f"one at a time, {until_s:.0f} s backfilling"][1].bound for until_s in (short, long)]
    gained, lost = (late.served[tenant] / strict.served[tenant] - 1 for tenant in ("chat", "documents"))
    rows.append(
        Row(
            "VTC's form of bound, a constant however long both wait, holds beside backfilling too",
            f"where no two documents fit at once: {early.apart:,.0f} tokens after {short:.0f} s, {late.apart:,.0f} "
            f"after {long:.0f} s, the bound is {bounds[1]:,.0f}; with no limit on the lead {early_free.apart:,.0f} and "
            f"{late_free.apart:,.0f}. Against strict order the short ones get {gained:+.0%} service, and the "
            f"documents {lost:+.1%}",
            f"{_NEVER_TWO.text} (16,000 tokens) at 3/s, and {_QUICK.text} at 40/s; same card, batch 64",
            "no limit on the lead (max_bypass_lead), and strict order (max_bypasses 0)",
            Holds.YES if early.apart <= bounds[0] and late.apart <= bounds[1] < late_free.apart else Holds.PARTLY,
            f"past the lead of {small.limits.max_bypass_lead:,} the memory beside a document stays empty, as in strict "
            "order, until the documents have caught up; that is what the constant costs",
        )
    )
    return rows, [
        ["load", "order", "s", "bypasses", "blocked heads", "documents' service", "chat's service", "most apart",
         "bound", "head's worst wait s", "new tok/s"],
        *lines,
    ]  # fmt: skip
