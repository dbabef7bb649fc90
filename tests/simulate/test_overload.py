"""Beyond saturation: more offered load means a longer queue, not more preemptions and not less done (DESIGN 6)."""

from __future__ import annotations

import pytest

from headrace.simulate.scenario import Run, Scenario, run
from headrace.simulate.workload import LENGTHS, stream

TIGHT = Scenario(max_model_len=2048, kv_tokens=6000).with_limits(max_num_seqs=32, max_num_batched_tokens=256)
SATURATION = 32.0
"""Requests per second from which on new tokens per second stand and the queue grows."""

SECONDS = 20


def offered(scenario: Scenario, times: int) -> Run:
    """``times`` the saturation rate, for SECONDS of virtual time."""
    rate = times * SATURATION
    requests = stream(LENGTHS["mixed"], int(rate * SECONDS), 1, rate, longest=2048)
    return run(scenario, requests, until_s=SECONDS)


def preemptions_per_admission(done: Run) -> float:
    return done.figures.preemptions / done.core.counters.admitted


# The default hardly preempts. One that expects short answers admits more than fits, so that there is something to see.
@pytest.mark.parametrize("length_quantile", [TIGHT.limits.length_quantile, 0.1], ids=["default", "hopeful"])
def test_preemptions_and_goodput_do_not_get_worse_beyond_saturation(length_quantile: float) -> None:
    scenario = TIGHT.with_limits(length_quantile=length_quantile)
    runs = {times: offered(scenario, times) for times in (1, 2, 3, 4)}
    assert all(done.core.num_waiting > 50 * times for times, done in runs.items()), "not saturated"
    at_saturation = preemptions_per_admission(runs[1])
    for times in (2, 4):
        assert preemptions_per_admission(runs[times]) <= 1.25 * at_saturation + 0.01, f"at {times} times saturation"
    # New tokens per second: what was computed again does not count.
    goodput = {times: done.figures.tokens_per_s for times, done in runs.items()}
    assert goodput[3] >= 0.95 * max(goodput.values()), goodput
    if length_quantile == 0.1:
        assert at_saturation > 0
