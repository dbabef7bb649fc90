"""Memory-aware FIFO breaking: small ones may pass a head that does not fit, and the head's wait stays bounded."""

from __future__ import annotations

import pytest
from mesh_in_a_box import Box, request

from scheduler.core.limits import Limits


def limits(**more: object) -> Limits:
    base: dict[str, object] = {"max_num_seqs": 8, "max_num_batched_tokens": 64, "admission_watermark": 0.0}
    return Limits(**base | more)  # type: ignore[arg-type]


def starts(box: Box) -> list[str]:
    return [start.request_id for plan in box.plans for start in plan.starts]


def pressed(box: Box) -> None:
    """A long runner holds much of the pool; the big head does not fit beside it."""
    box.submit(request("runner", prompt_len=40, max_tokens=40, arrival_ns=0))
    box.step()
    box.submit(request("big", prompt_len=60, max_tokens=4, arrival_ns=1))
    box.step()


def test_a_short_one_passes_a_head_that_does_not_fit() -> None:
    box = Box(limits(), num_blocks=22)
    pressed(box)
    box.submit(request("small", prompt_len=4, max_tokens=4, arrival_ns=2))
    box.run()
    assert starts(box) == ["runner", "small", "big"]
    assert box.core.counters.bypasses == 1
    box.assert_tokens_right()
    box.assert_idle()


def test_strict_order_when_no_bypass_is_allowed() -> None:
    box = Box(limits(max_bypasses=0), num_blocks=22)
    pressed(box)
    box.submit(request("small", prompt_len=4, max_tokens=4, arrival_ns=2))
    box.run()
    assert starts(box) == ["runner", "big", "small"]


def test_one_that_would_outlast_the_heads_shadow_time_and_its_spare_does_not_pass() -> None:
    box = Box(limits(), num_blocks=22)
    pressed(box)
    box.submit(request("greedy", prompt_len=4, max_tokens=80, arrival_ns=2))
    box.run()
    assert starts(box) == ["runner", "big", "greedy"]


def test_one_that_fits_in_the_spare_passes_however_long_it_runs() -> None:
    box = Box(limits(), num_blocks=45)
    pressed_more = request("runner", prompt_len=100, max_tokens=27, arrival_ns=0)
    box.submit(pressed_more)
    box.step()
    box.submit(request("big", prompt_len=80, max_tokens=4, arrival_ns=1))
    box.step()
    box.submit(request("long", prompt_len=4, max_tokens=60, arrival_ns=2))
    box.run()
    assert starts(box) == ["runner", "long", "big"]


@pytest.mark.parametrize("bound", [1, 3])
def test_after_so_many_bypasses_the_head_holds_a_reservation(bound: int) -> None:
    box = Box(limits(max_bypasses=bound), num_blocks=22)
    pressed(box)
    order = 2
    while "big" not in starts(box):
        # Each would end after the runner by its max_tokens, though history says that outputs are short.
        if box.core.num_waiting < 4:
            box.submit(request(f"s{order}", prompt_len=2, max_tokens=6, arrival_ns=order))
            order += 1
        box.step()
    assert box.core.counters.bypasses >= bound
    late = request("late", prompt_len=2, max_tokens=120, arrival_ns=1000)
    box.submit(late)
    box.run()
    box.assert_tokens_right()


def test_b17_small_ones_without_pause_cannot_starve_the_big_one() -> None:
    box = Box(limits(max_bypasses=8), num_blocks=30)
    for index in range(6):
        box.submit(request(f"r{index}", prompt_len=6, max_tokens=20, arrival_ns=index))
    box.step()
    box.submit(request("big", prompt_len=96, max_tokens=2, arrival_ns=10))  # 80 % of the pool
    waited = 0
    for number in range(4000):
        if ("big", 0) in box.ends:
            break
        if box.core.num_waiting < 8:
            box.submit(request(f"s{number}", prompt_len=6, max_tokens=12, arrival_ns=11 + number))
        box.step()
        waited += 1
    assert ("big", 0) in box.ends, "the big one starved"
    assert waited < 400
    box.run()
    box.assert_tokens_right()
    box.assert_idle()


def test_with_ample_memory_the_order_is_that_of_arrival() -> None:
    box = Box(limits(max_num_seqs=3), num_blocks=400)
    for index in range(20):
        box.submit(request(f"r{index:02}", prompt_len=3 + index % 5, max_tokens=3 + index % 4, arrival_ns=index))
    box.run()
    assert starts(box) == sorted(starts(box))
    assert box.core.counters.bypasses == 0


def test_the_heads_cached_prefix_is_pinned_against_those_who_pass() -> None:
    box = Box(limits(), num_blocks=28)
    prefix = list(range(300, 332))
    box.submit(request("first", prompt=prefix, max_tokens=1, arrival_ns=0))
    box.run()
    box.submit(request("runner", prompt_len=40, max_tokens=12, arrival_ns=1))
    box.step()
    box.submit(request("big", prompt=[*prefix, *range(400, 452)], max_tokens=2, arrival_ns=2))
    box.step()
    worker = box.core.workers["w0"]
    assert worker.pinned_for is not None and len(worker.pinned) == 8
    for index in range(6):
        box.submit(request(f"s{index}", prompt_len=8, max_tokens=1, arrival_ns=3 + index))
    box.run()
    hit = next(s.computed for plan in box.plans for s in plan.starts if s.request_id == "big")
    assert hit == 32
    box.assert_tokens_right()
    box.assert_idle()


def test_a_cancelled_head_gives_its_pins_and_its_place_back() -> None:
    box = Box(limits(), num_blocks=22)
    pressed(box)
    box.submit(request("next", prompt_len=50, max_tokens=4, arrival_ns=2))
    box.step()
    box.cancel("big")
    box.run()
    assert "next" in starts(box)
    box.assert_idle()


def test_growth_takes_the_pinned_blocks_before_anybody_is_preempted() -> None:
    box = Box(limits(growth_aware_admission=False), num_blocks=20)
    prefix = list(range(300, 332))
    box.submit(request("first", prompt=prefix, max_tokens=1, arrival_ns=0))
    box.run()
    box.submit(request("a", prompt_len=32, max_tokens=40, arrival_ns=1))
    box.step()
    box.submit(request("big", prompt=[*prefix, *range(400, 440)], max_tokens=2, arrival_ns=2))
    box.step()
    assert box.core.workers["w0"].pinned
    box.run()
    assert box.core.counters.preemptions == 0
    box.assert_tokens_right()
    box.assert_idle()
