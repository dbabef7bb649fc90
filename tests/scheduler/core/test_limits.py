"""A limit out of its range is refused by name, wherever it comes from; a worker's own limit is kept."""

from __future__ import annotations

from typing import Any

import pytest
from mesh_in_a_box import Box, request

from scheduler.core.limits import Limits
from shared.messages import Outcome


@pytest.mark.parametrize(
    ("limits", "complaint"),
    [
        ({"max_num_seqs": 0}, r"max_num_seqs \(0\) is at least 1"),
        ({"run_ahead": 0}, r"run_ahead \(0\) is at least 1"),
        ({"backfill_window": -1}, r"backfill_window \(-1\) is at least 0"),
        ({"target_itl_ns": -1}, r"target_itl_ns \(-1\) is at least 0"),
        ({"admission_watermark": float("nan")}, r"admission_watermark \(nan\) is at least 0"),
        ({"long_context_share": 1.5}, r"long_context_share \(1.5\) is a share, at most 1"),
        ({"length_quantile": 7}, r"length_quantile \(7\) is above 0 and below 1"),
        ({"length_quantile": 0}, r"length_quantile \(0\) is above 0 and below 1"),
        ({"max_num_seqs": 8, "max_num_batched_tokens": 7}, "is less than max_num_seqs"),
    ],
)
def test_a_limit_out_of_its_range(limits: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        Limits(**limits)


def test_the_edges_are_inside() -> None:
    Limits(max_num_seqs=1, max_num_batched_tokens=1, backfill_window=0, admission_watermark=0.0, long_context_share=1.0)


@pytest.mark.parametrize("policy", ["continuous", "static"])
@pytest.mark.parametrize("most", [0, 3, 8])
def test_a_workers_own_limit_bounds_its_steps_and_its_batch(most: int, policy: str) -> None:
    box = Box(policy=policy, max_batched_tokens=most)
    for number in range(6):
        box.submit(request(f"r{number}", prompt_len=3 + 5 * number, max_tokens=9))
    box.run()
    box.assert_tokens_right()
    widest = max(
        len(plan.decodes) + sum(count for _, count in [*plan.chunks, *plan.padding]) for plan in box.plans
    )  # fmt: skip
    assert widest == (most or 16) if policy == "continuous" else widest <= (most or 16)
    assert 1 < max(len(plan.decodes) for plan in box.plans) <= min(4, most or 4)


def test_beams_that_no_workers_step_holds_are_refused() -> None:
    box = Box(max_batched_tokens=3)
    assert box.submit(request("a", beams=3)).outcome is Outcome.ACCEPTED
    reply = box.submit(request("b", beams=4))
    assert reply.outcome is Outcome.INVALID and "the batch holds 3 sequences" in reply.reason
