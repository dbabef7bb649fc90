"""The bound on the difference in service between two tenants that wait (docs/architecture.md, "Bounds").

Service is counted from plans and results, apart from the scheduler's own counters, so that wrong charging is found.
"""

from __future__ import annotations

import random
from typing import Any

import pytest

from headrace.simulate.figures.tenants import Ledger, WatchedCore, most_ahead, watched
from headrace.simulate.scenario import Scenario
from headrace.simulate.workload import OWN, Lengths, Request, merged, stream
from scheduler.core.fairness import VirtualTokenCounters

SECONDS = 10.0
POOL = 6_000
LEAD = 2_000
SMALL = Scenario(kv_tokens=POOL, max_model_len=POOL).with_limits(
    max_num_seqs=16, max_num_batched_tokens=512, max_bypass_lead=LEAD
)


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
def test_the_difference_in_service_is_under_the_bound(
    load: str, seed: int, weights: dict[str, int], more: dict[str, Any]
) -> None:
    core = contended(load, seed, weights, **more)
    assert 0 < core.ledger.apart <= core.bound
    if load == "documents and short" and more.get("max_bypasses") != 0:
        assert core.counters.bypasses >= 10 and core.heads > 1


def test_the_bound_is_a_constant_of_the_settings() -> None:
    assert most_ahead(SMALL.limits, prompt=4_000, max_tokens=60) == LEAD + 2 * 4_000 + 2 * 17 * 60
    strict = SMALL.with_limits(max_bypasses=0).limits
    assert most_ahead(strict, prompt=200, max_tokens=200, n=3, weight=200) == (200 + 2 * 3 * 16 * 200) / 2


def test_choices_that_fork_are_in_the_bound() -> None:
    core = contended("documents and short", 5, {}, n=3)
    assert core.counters.forks > 0 and core.counters.bypasses > 0
    assert core.ledger.apart <= core.bound


def test_documents_that_never_fit_two_at_a_time_lose_no_more_however_long_it_goes_on() -> None:
    """Whatever runs, short ones pass the next of them; without a limit on their lead that has no end."""
    load, weights = "documents, one at a time, and short", {"a": 300, "b": 100}
    short, long = (contended(load, 6, weights, seconds=seconds) for seconds in (8, 20))
    assert long.ledger.apart <= 1.2 * short.ledger.apart and long.ledger.apart < long.bound
    assert long.counters.bypasses > 1.5 * short.counters.bypasses > 30
    endless = contended(load, 6, weights, seconds=20, max_bypass_lead=1 << 40)
    assert endless.ledger.apart > 2 * long.bound


@pytest.mark.parametrize("broken", ["charge_input", "charge_output"])
def test_wrong_charging_is_found(broken: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(VirtualTokenCounters, broken, lambda *_: None)
    core = contended("documents and short", 1, {}, max_bypasses=0, seconds=30)
    assert core.ledger.apart > core.bound
