"""How fast a queue is served, and what the core makes of it: Retry-After and predicted misses."""

from __future__ import annotations

import pytest
from mesh_in_a_box import Box, request

from scheduler.core.limits import Limits
from scheduler.core.service_rate import WINDOW_S, ServiceRate
from shared.messages import Outcome
from shared.pool_name import DEFAULT_POOL

S = 1_000_000_000


def test_only_time_in_which_somebody_waits_counts() -> None:
    rate = ServiceRate()
    rate.observe(0, False, 0 * S)
    rate.observe(5, False, 10 * S)
    assert rate.per_s == 0
    rate.observe(5, True, 11 * S)
    rate.observe(15, True, 12 * S)
    rate.observe(25, True, 13 * S)
    assert rate.per_s == pytest.approx(10)
    rate.observe(30, False, 14 * S)
    rate.observe(30, True, 99 * S)
    assert rate.per_s == pytest.approx(10)


def test_it_follows_what_changes_within_its_window() -> None:
    rate = ServiceRate()
    for second in range(60):
        rate.observe(10 * second, True, second * S)
    for second in range(60, 60 + int(WINDOW_S)):
        rate.observe(600, True, second * S)
    assert rate.per_s == pytest.approx(5, rel=0.1)


def test_a_repeated_or_older_time_changes_nothing() -> None:
    rate = ServiceRate()
    for left, second in ((0, 1), (3, 2), (9, 2), (9, 1)):
        rate.observe(left, True, second * S)
    assert rate.per_s == pytest.approx(3)


def crowded(**limits: int) -> Box:
    """A worker of one slot whose queue was measured: one sequence a second leaves it, eight wait."""
    box = Box(Limits(max_num_seqs=1, max_num_batched_tokens=16, **limits))
    for name in "abcdefghi":
        assert box.submit(request(name, prompt_len=4, max_tokens=8)).outcome is Outcome.ACCEPTED
    state = box.core._queues["m", DEFAULT_POOL]
    queue = state.queue
    state.rate = ServiceRate()
    for second in range(1, 4):
        state.rate.observe(queue.left + second, True, second * S)
    return box


def test_a_refusal_says_when_what_waits_is_served() -> None:
    box = crowded(max_num_queued_reqs=9)
    reply = box.submit(request("late"))
    assert reply.outcome is Outcome.QUEUE_FULL
    assert 9_000 <= reply.retry_after_ms <= 12_000 and reply.retry_after_ms % 1000 == 0


def test_the_wait_in_the_queue_counts_in_the_prediction_of_a_miss() -> None:
    box = crowded()
    soon = box.now + 5 * S
    reply = box.submit(request("late", max_tokens=1), deadline=soon)
    assert reply.outcome is Outcome.DEADLINE and "deadline" in reply.reason
    better = box.submit(request("better", max_tokens=1, priority=-1), deadline=soon)
    assert better.outcome is Outcome.ACCEPTED, "nobody waits before it"
    other = box.submit(request("other", max_tokens=1, tenant="other"), deadline=soon)
    assert other.outcome is Outcome.ACCEPTED, "fairness may serve it at once"


def test_the_queue_is_bounded_by_tokens_too() -> None:
    box = Box(Limits(max_num_seqs=1, max_num_batched_tokens=16, max_num_queued_tokens=40))
    assert box.submit(request("a", prompt_len=30, max_tokens=30)).outcome is Outcome.ACCEPTED, "nothing waits"
    assert box.core.waiting_tokens == 60 and box.core.full_queues == {("m", DEFAULT_POOL)}
    refused = box.submit(request("b", prompt_len=1, max_tokens=1))
    assert refused.outcome is Outcome.QUEUE_FULL and "60 tokens" in refused.reason
    box.step()
    assert box.core.waiting_tokens == 0 and not box.core.full_queues
    assert box.submit(request("c", prompt_len=10, max_tokens=10)).outcome is Outcome.ACCEPTED
    assert box.submit(request("d", prompt_len=3, max_tokens=6, n=3)).outcome is Outcome.QUEUE_FULL, "20 + 3 + 3 * 6"
    assert box.submit(request("e", prompt_len=2, max_tokens=6, n=3)).outcome is Outcome.ACCEPTED
    assert box.core.waiting_tokens == 40
    assert box.core.queue_of("m").waiting == box.core.num_waiting == 4
    box.cancel("e", 1)
    box.cancel("e", 0)
    box.cancel("c")
    assert box.core.queue_of("m").waiting == box.core.num_waiting == 1
    box.run()
    assert box.core.waiting_tokens == 0
