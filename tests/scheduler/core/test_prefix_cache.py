"""Prefix cache and copy-on-write: what is shared is right, what is written is private."""

from __future__ import annotations

import msgspec
import pytest
from mesh_in_a_box import Box, request

from scheduler.core.limits import Limits

PROMPT = list(range(40, 73))


def wide(**limits: int) -> Box:
    made = Limits(**{"max_num_seqs": 8, "max_num_batched_tokens": 64, "prefill_chunk_limit": 64} | limits)
    return Box(made, num_blocks=60)


@pytest.mark.parametrize("length", [15, 16, 17, 32, 33])
def test_b15_a_prompt_wholly_in_the_cache_at_block_edges(length: int) -> None:
    box = Box(Limits(max_num_seqs=8, max_num_batched_tokens=128), num_blocks=60, block_size=16)
    for index in range(3):
        box.submit(request(f"r{index}", prompt=PROMPT[:length], max_tokens=5))
        box.run()
    for index in range(3, 7):
        box.submit(request(f"r{index}", prompt=PROMPT[:length], max_tokens=5))
    box.run()
    box.assert_tokens_right()
    hit = (length - 1) // 16 * 16
    assert [start.computed for plan in box.plans for start in plan.starts] == [0] + [hit] * 6
    box.assert_idle()


def test_generated_tokens_are_found_again_by_the_next_turn() -> None:
    box = wide()
    box.submit(request("first", prompt=PROMPT[:6], max_tokens=20))
    box.run()
    answer = box.delivered["first", 0]
    box.submit(request("second", prompt=PROMPT[:6] + answer + [1, 2], max_tokens=3))
    box.run()
    start = next(s for plan in box.plans for s in plan.starts if s.request_id == "second")
    assert start.computed == 24  # 6 + 20 tokens, the last of them never computed, in blocks of 4
    box.assert_tokens_right()


def test_a_salt_keeps_its_content_to_itself() -> None:
    box = wide()
    for name, salt in (("a", ""), ("b", "tenant"), ("c", "tenant"), ("d", "")):
        box.submit(request(name, prompt=PROMPT, max_tokens=2, salt=salt))
        box.run()
    assert [s.computed for plan in box.plans for s in plan.starts] == [0, 0, 32, 32]
    box.assert_tokens_right()


def test_pages_that_hold_other_types_are_other_content() -> None:
    """A worker that came back with --kv-cache-dtype changed, or its neighbour, must not be taken to hold the same."""
    content = set()
    for dtype, kv_dtype in (("float32", ""), ("bfloat16", ""), ("float32", "int8"), ("float32", "float8_e4m3fn")):
        box = wide()
        (worker,) = box.core.workers.values()
        worker.capacity = msgspec.structs.replace(worker.capacity, dtype=dtype, kv_dtype=kv_dtype)
        box.submit(request("a", prompt=PROMPT, max_tokens=2))
        box.run()
        content.add(frozenset(worker.pool._by_hash))
    assert [len(found) for found in content] == [8] * 4 and len(frozenset.union(*content)) == 32


def test_a_page_is_hit_only_from_the_plan_after_the_one_that_writes_it() -> None:
    box = wide()
    box.submit(request("a", prompt=PROMPT, max_tokens=2))
    box.submit(request("b", prompt=PROMPT, max_tokens=2))
    first = box.plan()
    assert first is not None and [s.computed for s in first.starts] == [0, 0]
    box.submit(request("c", prompt=PROMPT, max_tokens=2))
    second = box.plan()
    assert second is not None and [s.computed for s in second.starts] == [32]
    box.run()
    box.assert_tokens_right()
    box.assert_idle()


def long_prompts(**limits: int) -> Box:
    made = Limits(**{"max_num_seqs": 8, "max_num_batched_tokens": 128, "prefill_chunk_limit": 64} | limits)
    return Box(made, num_blocks=400, max_model_len=400)


def test_equal_prompts_that_come_together_are_computed_once() -> None:
    box = long_prompts()
    prompt = [7 * index % 300 + 10 for index in range(203)]
    for index in range(6):
        box.submit(request(f"r{index}", prompt=prompt, max_tokens=4, arrival_ns=index))
    box.submit(request("other", prompt_len=200, max_tokens=4, arrival_ns=9))
    box.run()
    computed = {start.request_id: start.computed for plan in box.plans for start in plan.starts}
    assert computed.pop("r0") == 0 and computed.pop("other") == 0
    assert list(computed.values()) == [128] * 5  # what is left then is too little to wait for
    assert box.core.counters.prefill_tokens == 203 + 5 * 75 + 200
    box.assert_tokens_right()
    box.assert_idle()


def test_nobody_waits_for_a_prefix_that_is_a_small_part_of_it_or_short() -> None:
    box = long_prompts()
    common = list(range(10, 74))  # 64 tokens: computed sooner than waited for
    for index in range(3):
        box.submit(request(f"r{index}", prompt=common + [index] * 100, max_tokens=4, arrival_ns=index))
    first = box.plan()
    assert first is not None and len(first.starts) == 3
    box.run()
    box.assert_tokens_right()


def test_who_waits_for_a_prefix_does_not_hold_up_others_and_survives_its_end() -> None:
    box = long_prompts(max_num_batched_tokens=64)
    prompt = [7 * index % 300 + 10 for index in range(203)]
    for index in range(3):
        box.submit(request(f"r{index}", prompt=prompt, max_tokens=4, arrival_ns=index))
    box.submit(request("other", prompt_len=40, max_tokens=4, arrival_ns=9))
    first = box.plan()
    assert first is not None and [start.request_id for start in first.starts] == ["r0", "other"]
    box.core.cancel("r0", 1, -1, box.now)
    box.run()
    order = [start.request_id for plan in box.plans for start in plan.starts]
    assert order == ["r0", "other", "r1", "r2"]
    box.assert_tokens_right()
    box.assert_idle()


def test_a_preempted_sequence_finds_most_of_itself_again() -> None:
    box = Box(Limits(max_num_seqs=4, max_num_batched_tokens=32), num_blocks=14)
    for index, name in enumerate("abcd"):
        box.submit(request(name, prompt=PROMPT[index : index + 6], max_tokens=24, arrival_ns=index))
    box.run()
    counters = box.core.counters
    assert counters.preemptions > 0 and counters.resumed_hits > 0
    box.assert_tokens_right()
    box.assert_idle()


def test_without_prefix_caching_nothing_is_hit() -> None:
    box = wide(enable_prefix_caching=False)
    for name in "ab":
        box.submit(request(name, prompt=PROMPT, max_tokens=2))
        box.run()
    assert [s.computed for plan in box.plans for s in plan.starts] == [0, 0]
    assert box.core.counters.prefix_hits == 0


def test_choices_fork_from_one_prefill_and_copy_only_the_shared_tail() -> None:
    box = wide()
    box.submit(request("r", prompt=PROMPT[:17], n=4, max_tokens=10, seed=7))
    box.run()
    counters = box.core.counters
    assert counters.prefill_tokens == 17 and counters.forks == 3
    assert counters.page_copies == 3  # the last writer keeps the original
    assert len({tuple(tokens) for tokens in box.delivered.values()}) == 4
    assert box.runners["w0"].kv_bytes_copied == 3 * 4 * 8
    box.assert_tokens_right()
    box.assert_idle()


def test_a_prompt_of_whole_blocks_forks_without_a_copy() -> None:
    box = wide()
    box.submit(request("r", prompt=PROMPT[:16], n=4, max_tokens=10))
    box.run()
    assert box.core.counters.forks == 3 and box.core.counters.page_copies == 0
    box.assert_tokens_right()


def test_shared_pages_are_held_once() -> None:
    box = wide()
    box.submit(request("r", prompt=PROMPT[:32], n=4, max_tokens=10))
    box.step()
    pool = box.core.workers["w0"].pool
    assert pool.num_shared == 8 and pool.num_used <= 8 + 4
    box.run()
    box.assert_idle()


def test_choices_beyond_the_slots_wait_and_find_the_prompt_in_the_cache() -> None:
    box = wide(max_num_seqs=2)
    box.submit(request("r", prompt=PROMPT[:17], n=5, max_tokens=6))
    box.run()
    assert box.core.counters.forks == 1
    assert box.core.counters.prefix_hits == 3 * 16 and box.core.counters.prefill_tokens == 17
    box.assert_tokens_right()
    box.assert_idle()


@pytest.mark.parametrize("steps", range(5))
@pytest.mark.parametrize("choice", [0, 1, -1])
def test_cancelling_choices_before_and_after_the_fork(steps: int, choice: int) -> None:
    box = wide(max_num_batched_tokens=8, prefill_chunk_limit=8)
    box.submit(request("r", prompt=PROMPT[:20], n=3, max_tokens=6))
    for _ in range(steps):
        box.step()
    box.cancel("r", choice)
    box.core.check()
    box.run()
    assert {c for _, c in box.ends} >= ({0, 1, 2} - {choice} if choice >= 0 else set())
    box.ends.pop(("r", choice), None)
    if choice >= 0:
        box.assert_tokens_right()
    box.step()
    box.assert_idle()


def test_preemption_among_forks_frees_only_what_is_not_shared() -> None:
    for blocks in range(8, 16):
        box = Box(Limits(max_num_seqs=6, max_num_batched_tokens=32), num_blocks=blocks)
        box.submit(request("r", prompt=PROMPT[:9], n=4, max_tokens=16))
        box.submit(request("q", prompt=PROMPT[:9], n=2, max_tokens=16, arrival_ns=1))
        box.run()
        box.assert_tokens_right()
        box.assert_idle()
