"""Swapping: a victim's blocks go to host memory and come back, if that is cheaper than computing them again."""

from __future__ import annotations

import pytest
from mesh_in_a_box import Box, request

from scheduler.core.limits import Limits


def pressed(host_blocks: int, **more: object) -> Box:
    limits: dict[str, object] = {"max_num_seqs": 4, "max_num_batched_tokens": 16, "growth_aware_admission": False}
    box = Box(Limits(**limits | more), num_blocks=12, host_blocks=host_blocks)  # type: ignore[arg-type]
    for index, name in enumerate("abcd"):
        box.submit(request(name, prompt_len=6, max_tokens=20, arrival_ns=index))
    return box


def test_swapped_sequences_compute_nothing_again() -> None:
    box = pressed(60)
    box.run()
    counters = box.core.counters
    assert counters.preemptions > 0 and counters.swapped_out == counters.swapped_in > 0
    assert counters.recomputed_tokens == 0
    box.assert_tokens_right()
    box.assert_idle()


def test_without_room_in_host_memory_victims_are_recomputed() -> None:
    box = pressed(1, enable_prefix_caching=False)
    box.run()
    assert box.core.counters.recomputed_tokens > 0
    box.assert_tokens_right()
    box.assert_idle()


def test_the_cost_model_prefers_what_was_measured_cheaper() -> None:
    box = pressed(60)
    box.core.workers["w0"].swap_us_per_block = 1e9
    box.run()
    assert box.core.counters.preemptions > 0 and box.core.counters.swapped_out == 0
    off = pressed(60, swap=False)
    off.run()
    assert off.core.counters.preemptions > 0 and off.core.counters.swapped_out == 0


@pytest.mark.parametrize("steps", range(8, 40, 4))
def test_cancelled_while_swapped(steps: int) -> None:
    box = pressed(60)
    for _ in range(steps):
        box.step()
    for name in "bcd":
        box.cancel(name)
        box.core.check()
    box.run()
    box.step()
    box.assert_idle()
