"""A limit out of its range is refused by name, wherever it comes from."""

from __future__ import annotations

from typing import Any

import pytest

from scheduler.core.limits import Limits


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
