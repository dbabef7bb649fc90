"""The baselines: a batch is formed, padded and held until its longest member ends."""

from __future__ import annotations

from mesh_in_a_box import MS, Box, request

from scheduler.core.limits import Limits


def wide(policy: str) -> Box:
    return Box(Limits(max_num_seqs=4, max_num_batched_tokens=64), policy, num_blocks=600, max_model_len=1000)


def test_static_counts_785_idle_slot_iterations_for_15_beside_800() -> None:
    box = wide("static")
    box.submit(request("short", prompt_len=8, max_tokens=15))
    box.submit(request("long", prompt_len=8, max_tokens=800))
    box.run()
    assert box.core.counters.idle_slot_iterations == 785
    box.assert_tokens_right()
    box.assert_idle()


def test_continuous_refills_the_slot_that_static_leaves_idle() -> None:
    limits = Limits(max_num_seqs=2, max_num_batched_tokens=64)
    box = Box(limits, "continuous", num_blocks=600, max_model_len=1000)
    box.submit(request("short", prompt_len=8, max_tokens=15, arrival_ns=0))
    box.submit(request("long", prompt_len=8, max_tokens=800, arrival_ns=1))
    box.submit(request("next", prompt_len=8, max_tokens=3, arrival_ns=2))
    while ("short", 0) not in box.ends:
        box.step()
    ended_at = next(p.step for p in reversed(box.plans) if 0 in p.decodes)
    while not any(s.request_id == "next" for p in box.plans for s in p.starts):
        box.step()
    joined = next(p for p in box.plans if any(s.request_id == "next" for s in p.starts))
    assert joined.starts[0].slot == 0  # the very slot
    assert joined.step <= ended_at + box.limits.run_ahead
    box.run()
    assert box.core.counters.idle_slot_iterations == 0
    box.assert_tokens_right()


def test_static_waits_for_the_whole_batch() -> None:
    box = wide("static")
    box.submit(request("a", max_tokens=3))
    box.submit(request("b", max_tokens=30))
    box.step()
    box.submit(request("c", max_tokens=3))
    while ("b", 0) not in box.ends:
        box.step()
    assert not any(s.request_id == "c" for p in box.plans for s in p.starts)
    box.run()
    assert ("c", 0) in box.ends
    box.assert_tokens_right()
    box.assert_idle()


def test_prompts_of_a_static_batch_are_padded_to_the_longest_and_end_together() -> None:
    box = wide("static")
    box.submit(request("a", prompt_len=4, max_tokens=4))
    box.submit(request("b", prompt_len=40, max_tokens=4))
    while not box.delivered:
        box.step()
    assert {len(tokens) for tokens in box.delivered.values()} == {1} and len(box.delivered) == 2
    box.run()
    assert box.core.counters.padding_tokens == 36
    box.assert_tokens_right()


def test_dynamic_waits_out_its_window_then_runs() -> None:
    box = wide("dynamic")
    box.submit(request("a", max_tokens=3))
    assert box.plan() is None
    assert box.core.wake_at("w0", box.now) == 50 * MS
    box.now = 50 * MS
    assert box.plan() is not None
    box.run()
    box.assert_tokens_right()


def test_dynamic_runs_a_full_batch_at_once() -> None:
    box = wide("dynamic")
    for name in "abcd":
        box.submit(request(name, max_tokens=3))
    assert box.plan() is not None


def test_cancelled_members_leave_a_static_batch() -> None:
    for steps in range(8):
        box = wide("static")
        box.submit(request("a", prompt_len=20, max_tokens=6))
        box.submit(request("b", prompt_len=80, max_tokens=6))
        for _ in range(steps):
            box.step()
        box.cancel("a")
        box.cancel("b") if steps % 2 else None
        box.run()
        box.step()
        box.assert_idle()
