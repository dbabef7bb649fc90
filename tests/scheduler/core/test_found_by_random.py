"""Faults that the random tests found, each as the small case that it comes down to."""

from __future__ import annotations

import pytest
from mesh_in_a_box import Box, request
from test_core_properties import hold, seeded

from scheduler.core.events import Ended, Failed
from scheduler.core.limits import Limits


@pytest.mark.parametrize("seed", [2573, 1229, 2846, 1019, 3571, 1241, 6808, 4742])
def test_seeds_that_once_failed(seed: int) -> None:
    hold(*seeded(seed))


def test_victims_that_share_every_block_are_preempted_together() -> None:
    """Neither beam alone would free a block, and the other sequence needs one."""
    tight = Limits(
        max_num_seqs=4, max_num_batched_tokens=16, prefill_chunk_limit=8, growth_aware_admission=False,
        admission_watermark=0.0, enable_prefix_caching=False, run_ahead=1,
    )  # fmt: skip
    box = Box(tight, num_blocks=4, block_size=16, max_model_len=64)
    box.submit(request("a", 32, 14))
    box.submit(request("b", 18, 15, beams=2, arrival_ns=1))
    box.run()
    assert box.core.counters.preemptions > 0
    box.assert_tokens_right()
    box.assert_idle()


@pytest.mark.parametrize("policy", ["static", "dynamic"])
def test_columns_of_a_cancelled_longest_prompt_are_not_computed(policy: str) -> None:
    box = Box(Limits(max_num_seqs=2, max_num_batched_tokens=16, prefill_chunk_limit=8), policy=policy)
    box.submit(request("a", 40, 1))
    box.submit(request("b", 1, 3))
    box.now += 10**9
    box.step()
    box.cancel("a")
    box.run()
    assert ("b", 0) in box.ends
    assert box.core.counters.padding_tokens < 40


def test_a_search_is_told_of_once_however_it_ends() -> None:
    """Its beams are the scheduler's own affair; a gateway knows only the choices that it asked for."""
    box = Box(Limits(max_num_seqs=8, max_num_batched_tokens=64, max_num_queued_reqs=8), num_blocks=60)
    for number, end in enumerate(("cancel", "lost")):
        box.submit(request(f"r{number}", 5, 20, beams=3, arrival_ns=number))
        for _ in range(6):
            box.step()
        before = len(box.events)
        failed, cancelled = box.core.counters.failed, box.core.counters.cancelled
        if end == "cancel":
            box.cancel(f"r{number}")
            assert (box.core.counters.failed, box.core.counters.cancelled) == (failed, cancelled + 1)
        else:
            box.events += box.core.worker_lost("w0", "gone", box.now)
            assert (box.core.counters.failed, box.core.counters.cancelled) == (failed + 1, cancelled)
        assert len([one for one in box.events[before:] if isinstance(one, Ended | Failed)]) == 1


def test_a_search_that_misses_its_deadline_is_dropped_whole() -> None:
    box = Box(Limits(max_num_seqs=8, max_num_batched_tokens=64), num_blocks=60)
    box.submit(request("r", 5, 30, beams=3), deadline=box.now + 10**9)
    for _ in range(6):
        box.step()
    box.now += 2 * 10**9
    events = box.core.tick(box.now)
    assert [(type(one), one.kind) for one in events if isinstance(one, Failed)] == [(Failed, "dropped")]
    assert box.core.counters.deadline_drops == 1
    box.run()
    box.assert_idle()
