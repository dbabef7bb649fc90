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


def test_the_reservation_begins_with_the_very_bypass_that_reaches_the_bound() -> None:
    """Each would outlast the runner, fits in the spare, and comes in one and the same pass."""
    box = Box(limits(max_bypasses=2, max_num_batched_tokens=1024), num_blocks=200, max_model_len=1000)
    box.submit(request("runner", prompt_len=640, max_tokens=27, arrival_ns=0))
    box.step()
    box.submit(request("big", prompt_len=200, max_tokens=4, arrival_ns=1))
    for index in range(4):
        box.submit(request(f"long{index}", prompt_len=2, max_tokens=30, arrival_ns=2 + index))
    box.run()
    assert starts(box) == ["runner", "long0", "long1", "big", "long2", "long3"]
    box.assert_tokens_right()
    box.assert_idle()


@pytest.mark.parametrize(
    ("passing", "waiting", "least", "most"),
    [("quick", "", 4, 6), ("heads", "documents", 4, 6), ("heads", "", 16, 20)],
    ids=["past another's head", "past its own head and another's document", "alone"],
)
def test_a_tenant_passes_no_more_than_its_lead_allows(passing: str, waiting: str, least: int, most: int) -> None:
    """The big head is of the tenant "heads". Each that passes brings 8 + 2 * 2 of service; the lead may be 40."""
    box = Box(limits(max_bypass_lead=40, max_bypasses=16), num_blocks=22)
    box.submit(request("runner", prompt_len=40, max_tokens=40, arrival_ns=0, tenant="runs"))
    box.step()
    box.submit(request("big", prompt_len=60, max_tokens=4, arrival_ns=1, tenant="heads"))
    box.step()
    if waiting:
        box.submit(request("document", prompt_len=60, max_tokens=4, arrival_ns=2, tenant=waiting))
    for index in range(20):
        box.submit(request(f"s{index:02}", prompt_len=8, max_tokens=2, arrival_ns=3 + index, tenant=passing))
    while "big" not in starts(box):
        box.step()
    passed = len(starts(box)) - 2
    assert least <= passed <= most
    box.run()
    box.assert_tokens_right()
    box.assert_idle()


@pytest.mark.parametrize("prompt", [18, 24], ids=["blocked by short ones", "held back by the share"])
def test_a_long_one_is_not_starved_by_long_ones_that_are_shorter(prompt: int) -> None:
    """One of them always runs, so that the big one is always over the share of long contexts."""
    made = limits(max_bypasses=4, long_context_tokens=20, long_context_share=0.5)
    box = Box(made, num_blocks=100, max_model_len=400)
    for index in range(3):
        box.submit(request(f"r{index}", prompt_len=prompt, max_tokens=60, arrival_ns=0))
    box.step()
    box.submit(request("big", prompt_len=340, max_tokens=2, arrival_ns=1))
    for number in range(1500):
        if "big" in starts(box):
            break
        if box.core.num_waiting < 4:
            box.submit(request(f"s{number}", prompt_len=24, max_tokens=8, arrival_ns=2 + number))
        box.step()
    assert number < 150
    box.run()
    box.assert_tokens_right()
    box.assert_idle()


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
