"""The bound on the difference in service between two tenants (docs/architecture.md, "Bounds"), plan by plan.

Service is counted from plans and results, apart from the scheduler's own counters, so that wrong charging is found.
"""

from __future__ import annotations

import random
from itertools import permutations
from typing import Any

import pytest

from headrace.simulate.figures.tenants import Ledger, WatchedCore, watched
from headrace.simulate.scenario import Scenario
from headrace.simulate.workload import OWN, Lengths, Request, merged, stream
from scheduler.core.fairness import VirtualTokenCounters

SECONDS = 10.0
POOL = 6_000
SMALL = Scenario(kv_tokens=POOL, max_model_len=POOL).with_limits(max_num_seqs=16, max_num_batched_tokens=512)


def lengths(prompts: tuple[int, int], outputs: tuple[int, int], max_tokens: int = 0) -> Lengths:
    def draw(rng: random.Random) -> tuple[tuple[tuple[int, int], ...], int, int]:
        return ((OWN, rng.randint(*prompts)),), max_tokens or outputs[1], rng.randint(*outputs)

    return Lengths("own", "", draw)


SHORT = lengths((10, 200), (5, 120), 200)
DOCUMENT = lengths((1_500, 4_000), (5, 60))
HALF = lengths((3_200, 3_800), (80, 120))  # no two of them fit

LOADS = {
    "short and short": (SHORT, 60.0, SHORT, 240.0),
    "documents and short": (DOCUMENT, 15.0, SHORT, 120.0),
    "documents, one at a time, and short": (HALF, 10.0, SHORT, 120.0),
    "documents and documents": (DOCUMENT, 10.0, HALF, 10.0),
}


def contended(
    load: str, seed: int, weights: dict[str, int], n: int = 1, seconds: float = SECONDS, **limits: Any
) -> WatchedCore:
    """Tenants a and b both send more than is served, from the beginning to the end of the run."""
    first, first_rate, second, second_rate = LOADS[load]
    sends: list[list[Request]] = [
        stream(first, int(seconds * first_rate), seed, first_rate, tenant="a"),
        stream(second, int(seconds * second_rate), seed, second_rate, tenant="b", n=n),
    ]
    ledger = Ledger(("a", "b"), weights)
    _, core = watched(SMALL.with_limits(**limits), merged(*sends), ledger, seconds)
    assert ledger.together, "one of the tenants was served out"
    return core


def two_turns(load: str, weights: dict[str, int]) -> float:
    """U_f + U_g: what the difference never exceeds in strict order."""
    longest = {SHORT: (200, 200), DOCUMENT: (4_000, 60), HALF: (3_800, 120)}  # prompt, max_tokens
    kinds = {"a": longest[LOADS[load][0]], "b": longest[LOADS[load][2]]}
    bound = 0.0
    for (tenant, (prompt, most)), (other, (head, _)) in permutations(kinds.items(), 2):
        bound += (prompt + 2 * SMALL.limits.max_num_seqs * most) * 100 / weights.get(tenant, 100)
        bound += head * 100 / weights.get(other, 100)
    return bound


@pytest.mark.parametrize("load", LOADS)
@pytest.mark.parametrize(
    ("seed", "weights", "more"),
    [
        (1, {}, {}),
        (2, {"a": 300, "b": 100}, {"max_bypasses": 4}),
        (3, {}, {"max_bypasses": 1 << 20, "max_bypass_wait_ns": 300_000_000, "growth_aware_admission": False}),
        (4, {"a": 100, "b": 250}, {"max_bypasses": 0}),
    ],
    ids=["default", "few passes", "by time, with preemption", "strict order"],
)
def test_no_lead_is_over_the_bound(load: str, seed: int, weights: dict[str, int], more: dict[str, Any]) -> None:
    core = contended(load, seed, weights, **more)
    assert core.ledger.excess <= 0.01  # counters are in micro-tokens
    assert core.ledger.apart <= core.ledger.bound + 0.01
    if more.get("max_bypasses") == 0:
        assert core.ledger.passed == 0 and core.ledger.apart <= two_turns(load, weights)
    elif load == "documents and short":
        assert core.counters.bypasses >= 10 and core.ledger.passed > 0


def test_choices_that_fork_are_in_the_bound() -> None:
    core = contended("documents and short", 5, {}, n=3)
    assert core.counters.forks > 0 and core.counters.bypasses > 0
    assert core.ledger.excess <= 0.01 and core.ledger.apart <= core.ledger.bound


def test_only_strict_order_bounds_the_difference_by_a_constant() -> None:
    """What passes documents that never fit two at a time is not made up for."""
    load = "documents, one at a time, and short"
    strict = contended(load, 6, {}, seconds=30, max_bypasses=0).ledger.apart
    short, long = (contended(load, 6, {}, seconds=seconds).ledger.apart for seconds in (10, 30))
    assert strict <= two_turns(load, {}) < long
    assert long > 2 * short


@pytest.mark.parametrize("broken", ["charge_input", "charge_output"])
def test_wrong_charging_is_found(broken: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(VirtualTokenCounters, broken, lambda *_: None)
    assert contended("documents and short", 1, {}, max_bypasses=0).ledger.excess > 1_000
