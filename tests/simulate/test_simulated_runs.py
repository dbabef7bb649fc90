"""The simulator: the production core, in virtual time, with the same decisions every time."""

from __future__ import annotations

import hashlib
from dataclasses import replace

import pytest

from headrace.simulate.report import SERVED
from headrace.simulate.scenario import Run, Scenario, run
from headrace.simulate.workload import LENGTHS, Request, merged, prefixed, stream, uniform
from shared.messages import StepPlan, encode

TIGHT = Scenario(max_model_len=2048, kv_tokens=6000).with_limits(max_num_seqs=32, max_num_batched_tokens=256)


def decisions(scenario: Scenario, requests: list[Request], concurrency: int = 0) -> tuple[str, Run]:
    """A digest of every plan, and the run."""
    digest = hashlib.blake2b()

    def see(plan: StepPlan) -> None:
        digest.update(encode(plan))

    done = run(scenario, requests, concurrency=concurrency, on_plan=see)
    return digest.hexdigest(), done


def everything(seed: int) -> list[Request]:
    """Priorities, tenants, choices, beams, cancels, deadlines and shared prefixes, mixed."""
    plain = stream(LENGTHS["mixed"], 60, seed, 30.0, "bursty", tenant="a", longest=2048)
    left = [
        replace(request, cancel_ns=1 + index * 40_000_000) if index % 5 == 0 else request
        for index, request in enumerate(plain)
    ]
    late = stream(LENGTHS["mixed"], 20, seed, 10.0, tenant="b", priority=-1, deadline_ns=3_000_000_000, longest=2048)
    many = stream(LENGTHS["instruct"], 20, seed, 10.0, n=3, longest=2048)
    beams = [
        replace(request, beam_width=3, max_tokens=20, outputs=(20,))
        for request in stream(LENGTHS["instruct"], 10, seed + 1, 5.0)
    ]
    alike = stream(prefixed(2, 300, 50, 40), 30, seed, 15.0, tenant="b")
    return merged(left, late, many, beams, alike)


@pytest.mark.parametrize("workers", [1, 2])
def test_the_same_seed_gives_the_same_decisions(workers: int) -> None:
    scenario = replace(TIGHT, workers=workers)
    first, one = decisions(scenario, everything(3))
    again, two = decisions(scenario, everything(3))
    assert first == again
    assert one.figures == two.figures
    assert first != decisions(scenario, everything(4))[0]


@pytest.mark.parametrize("seed", range(4))
def test_every_request_ends_once_and_every_block_comes_back(seed: int) -> None:
    done = run(TIGHT, everything(seed))
    assert all(done.measured.reason)  # Measurements.ended refuses a second end
    done.core.check()
    for worker in done.core.workers.values():
        assert worker.pool.num_free == worker.pool.num_blocks
    shown = done.figures
    assert shown.served + shown.refused + shown.dropped + shown.cancelled == done.measured.population.size
    assert shown.cancelled > 0


@pytest.mark.parametrize("baseline", ["", "vllm-v0", "first-chunk"])
@pytest.mark.parametrize("caching", [True, False])
def test_everybody_gets_as_many_tokens_as_the_workload_says(baseline: str, caching: bool) -> None:
    """Under memory pressure, with preemptions, whatever the scheduler."""
    requests = stream(LENGTHS["mixed"], 80, 1, longest=2048)
    scenario = replace(TIGHT, kv_tokens=3000, baseline=baseline).with_limits(
        enable_prefix_caching=caching, growth_aware_admission=False, admission_watermark=0.0
    )
    done = run(scenario, requests, concurrency=40)
    assert done.figures.preemptions > 0
    assert set(done.measured.reason) <= set(SERVED)
    assert done.measured.tokens == sum(request.outputs[0] for request in requests)
    assert (done.measured.population.left == 0).all()


@pytest.mark.parametrize("policy", ["static", "dynamic", "continuous"])
def test_no_token_comes_before_its_request_or_out_of_order(policy: str) -> None:
    scenario = replace(TIGHT, policy=policy)
    done = run(scenario, stream(LENGTHS["mixed"], 60, 2, 5.0, longest=2048))
    population, measured = done.measured.population, done.measured
    assert (population.first_ns > measured.arrived_ns).all()
    assert (population.last_ns >= population.first_ns).all()
    assert (measured.admitted_ns >= measured.arrived_ns).all()
    assert measured.gaps.counts.sum() == measured.tokens - population.size


def test_choices_share_their_prompt() -> None:
    requests = stream(uniform(320, 32), 8, 1, n=4)
    done = run(TIGHT.with_limits(enable_prefix_caching=False), requests, concurrency=8)
    assert done.core.counters.forks == 8 * 3
    assert done.core.counters.prefill_tokens == 8 * 320
    assert done.figures.served == 32


def test_a_beam_search_takes_its_steps() -> None:
    requests = [replace(one, beam_width=4, max_tokens=24) for one in stream(uniform(48, 24), 5, 1)]
    done = run(TIGHT, requests, concurrency=5)
    assert done.figures.served == 5
    assert done.measured.tokens == 5 * 24
    assert done.core.counters.page_copies > 0


def test_a_request_that_cannot_fit_is_refused_and_the_rest_go_on() -> None:
    requests = merged(stream(uniform(1900, 1000), 1, 1), stream(uniform(32, 8), 5, 1))
    done = run(TIGHT, requests)
    assert done.measured.refused == {"too_long": 1}
    assert done.figures.served == 5


def test_a_horizon_ends_the_run_in_the_middle() -> None:
    requests = stream(uniform(64, 64), 200, 1, 100.0)
    done = run(TIGHT, requests, until_s=1.0)
    assert done.figures.seconds == pytest.approx(1.0, abs=0.05)
    assert 0 < done.measured.tokens < 200 * 64
    assert done.figures.tokens_per_s == pytest.approx(done.measured.tokens / done.figures.seconds)


def test_without_draining_a_closed_loop_ends_when_the_last_request_is_in() -> None:
    requests = stream(uniform(64, 64), 100, 1)
    done = run(TIGHT, requests, concurrency=20, drain=False)
    assert 60 <= done.figures.served <= 80


def test_run_ahead_hides_the_bus() -> None:
    """Each step waits for its plan over the bus, unless the plan was sent ahead."""
    requests = stream(uniform(16, 200), 8, 1)
    slow = replace(TIGHT, bus_us=1000.0)
    behind = run(slow.with_limits(run_ahead=1), requests, concurrency=8).figures
    ahead = run(slow.with_limits(run_ahead=2), requests, concurrency=8).figures
    assert behind.busy_share < 0.9
    assert ahead.busy_share > 0.98
    assert ahead.tokens_per_s > 1.1 * behind.tokens_per_s
