"""What the core decides, case by case."""

from __future__ import annotations

import pytest
from mesh_in_a_box import MS, Box, capacity, request

from scheduler.core.core import BadResult, ResultGap, SchedulerCore
from scheduler.core.events import Ended, Failed, Preempted
from scheduler.core.limits import Limits
from scheduler.core.state import KEPT_WHOLE_NS
from shared.messages import Outcome, StepResult, encode, pack_tokens


def test_one_request_runs_to_its_length() -> None:
    box = Box()
    assert box.submit(request("a", prompt_len=10, max_tokens=7)).outcome is Outcome.ACCEPTED
    box.run()
    assert box.ends == {("a", 0): "length"}
    box.assert_tokens_right()
    box.assert_idle()


def test_eos_ends_a_sequence_at_the_worker_and_frees_its_blocks() -> None:
    box = Box(num_blocks=300, max_model_len=1200)
    box.submit(request("a", prompt_len=3, max_tokens=1100, ignore_eos=False, seed=4))
    box.run()
    box.assert_tokens_right()
    assert box.ends["a", 0] == "stop"
    box.assert_idle()


def test_plans_are_deltas() -> None:
    box = Box()
    box.submit(request("a", prompt_len=3, max_tokens=8))
    first = box.plan()
    second = box.plan()
    assert first is not None and [s.request_id for s in first.starts] == ["a"] and first.chunks == [(0, 3)]
    assert second is not None and not second.starts and second.decodes == [0]
    assert second.step == first.step + 1


def test_run_ahead_is_bounded_by_its_depth() -> None:
    for depth in (1, 2, 3):
        box = Box(Limits(max_num_seqs=4, max_num_batched_tokens=16, run_ahead=depth))
        box.submit(request("a", max_tokens=20))
        made = 0
        while box.plan() is not None:
            made += 1
        assert made == depth


def test_decodes_come_first_and_prompts_fill_the_rest_of_the_budget() -> None:
    box = Box()
    box.submit(request("a", prompt_len=4, max_tokens=20))
    box.step()
    box.submit(request("b", prompt_len=40, max_tokens=2))
    while (plan := box.plan()) is None or not plan.chunks:
        box.apply(box.execute())
    assert plan.decodes == [0]
    assert plan.chunks == [(1, 8)]  # the chunk limit


def test_shortest_remaining_prompt_goes_first_and_the_oldest_has_a_share() -> None:
    box = Box(Limits(max_num_seqs=4, max_num_batched_tokens=16, prefill_chunk_limit=16))
    box.submit(request("old", prompt_len=60, max_tokens=2, arrival_ns=1))
    box.submit(request("young", prompt_len=12, max_tokens=2, arrival_ns=2))
    plan = box.plan()
    assert plan is not None and plan.chunks == [(0, 4), (1, 12)]


def test_without_chunking_a_prompt_runs_whole() -> None:
    limits = Limits(max_num_seqs=4, max_num_batched_tokens=32, enable_chunked_prefill=False)
    box = Box(limits)
    box.submit(request("a", prompt_len=5, max_tokens=20))
    box.step()
    box.submit(request("b", prompt_len=30, max_tokens=2))
    assert box.submit(request("c", prompt_len=31, max_tokens=2)).outcome is Outcome.TOO_LONG
    box.run()
    assert [n for plan in box.plans for _, n in plan.chunks] == [5, 30]
    box.assert_tokens_right()


def test_a_prompt_as_long_as_the_budget_is_not_starved_by_decodes() -> None:
    limits = Limits(max_num_seqs=4, max_num_batched_tokens=32, enable_chunked_prefill=False)
    box = Box(limits)
    for name in "abc":
        box.submit(request(name, prompt_len=2, max_tokens=28))
    box.step()
    box.submit(request("long", prompt_len=31, max_tokens=1, arrival_ns=5))
    for _ in range(3):
        box.step()
    assert ("long", 0) in box.ends
    box.run()
    box.assert_tokens_right()


def test_a_slot_is_refilled_at_the_next_plan() -> None:
    box = Box(Limits(max_num_seqs=1, max_num_batched_tokens=16, run_ahead=1))
    box.submit(request("a", prompt_len=4, max_tokens=1))
    box.submit(request("b", prompt_len=4, max_tokens=1))
    assert box.plan() is not None
    box.apply(box.execute())
    refilled = box.plan()
    assert refilled is not None and [s.request_id for s in refilled.starts] == ["b"]
    assert refilled.step == 2


def test_first_scheduling_order_is_arrival_order() -> None:
    box = Box()
    for index, name in enumerate("dcba"):
        box.submit(request(name, arrival_ns=index))
    plan = box.plan()
    assert plan is not None and [s.request_id for s in plan.starts] == ["d", "c", "b", "a"]


def test_preemption_changes_no_token_and_frees_everything() -> None:
    box = Box(num_blocks=12)
    for index, name in enumerate("abcd"):
        box.submit(request(name, prompt_len=6, max_tokens=20, arrival_ns=index))
    box.run()
    assert box.core.counters.preemptions > 0
    assert box.core.counters.recomputed_tokens > 0
    assert any(isinstance(event, Preempted) for event in box.events)
    box.assert_tokens_right()
    box.assert_idle()


def test_the_most_senior_is_never_preempted() -> None:
    box = Box(num_blocks=8)
    for index, name in enumerate("abcd"):
        box.submit(request(name, prompt_len=4, max_tokens=24, arrival_ns=index))
    box.run()
    victims = {event.sequence.request_id for event in box.events if isinstance(event, Preempted)}
    assert victims and "a" not in victims


def test_a_preempted_sequence_resumes_before_anything_is_admitted() -> None:
    box = Box(num_blocks=9)
    for index, name in enumerate("ab"):
        box.submit(request(name, prompt_len=8, max_tokens=16, arrival_ns=index))
    while not box.core.counters.preemptions:
        box.step()
    box.submit(request("late", prompt_len=1, max_tokens=1, arrival_ns=9))
    box.run()
    order = [start.request_id for plan in box.plans for start in plan.starts]
    assert order == ["a", "b", "b", "late"]
    box.assert_tokens_right()


def test_a_request_that_can_never_fit_is_refused_at_submit() -> None:
    box = Box(num_blocks=4, max_model_len=128)  # 16 tokens
    reply = box.submit(request("big", prompt_len=17, max_tokens=1))
    assert reply.outcome is Outcome.NEVER_FITS and "KV blocks" in reply.reason
    assert box.submit(request("exact", prompt_len=16, max_tokens=1)).outcome is Outcome.ACCEPTED
    for name in "abc":
        box.submit(request(name, prompt_len=2, max_tokens=2))
    box.run()
    assert len(box.ends) == 4
    box.assert_tokens_right()


def test_refusals_name_their_reason() -> None:
    box = Box(Limits(max_num_seqs=2, max_num_batched_tokens=16, max_num_queued_reqs=3))
    assert "limit of 128" in box.submit(request("long", prompt_len=128, max_tokens=1)).reason
    assert box.submit(request("none", prompt_len=0)).outcome is Outcome.INVALID
    bad = request("ids")
    bad = type(bad)(**{f: getattr(bad, f) for f in bad.__struct_fields__} | {"prompt": pack_tokens([997])})
    assert box.submit(bad).outcome is Outcome.INVALID
    odd = type(bad)(**{f: getattr(bad, f) for f in bad.__struct_fields__} | {"prompt": b"abc"})
    assert box.submit(odd).outcome is Outcome.INVALID
    other = type(bad)(**{f: getattr(bad, f) for f in bad.__struct_fields__} | {"model": "other"})
    assert box.submit(other).outcome is Outcome.UNKNOWN_MODEL


def test_a_leader_that_has_met_no_worker_yet_calls_no_model_unknown() -> None:
    core = SchedulerCore(Limits())
    assert core.submit(request("early"), 0).outcome is Outcome.NO_WORKER


def test_all_choices_are_queued_or_none() -> None:
    box = Box(Limits(max_num_seqs=2, max_num_batched_tokens=16, max_num_queued_reqs=4))
    never = box.submit(request("eight", n=8))
    assert (never.outcome, never.retry_after_ms) == (Outcome.INVALID, 0), "no time to try again: it never fits"
    assert "the queue holds 4 (--max-num-queued-reqs)" in never.reason
    assert box.submit(request("four", n=4)).outcome is Outcome.ACCEPTED
    reply = box.submit(request("another", n=4))
    assert reply.outcome is Outcome.QUEUE_FULL and reply.retry_after_ms > 0
    assert box.core.num_waiting == 4
    box.run()
    assert {choice for _, choice in box.ends} == {0, 1, 2, 3}
    assert len({tuple(tokens) for tokens in box.delivered.values()}) == 4
    box.assert_tokens_right()


def test_a_submit_is_idempotent() -> None:
    box = Box()
    assert box.submit(request("a")).outcome is Outcome.ACCEPTED
    assert box.core.submit(request("a"), box.now).outcome is Outcome.DUPLICATE
    box.run()
    assert box.core.submit(request("a"), box.now).outcome is Outcome.DUPLICATE
    assert box.core.counters.submitted == 1


def test_a_higher_attempt_replaces_the_lower_and_resumes_its_tokens() -> None:
    box = Box()
    box.submit(request("a", max_tokens=12))
    for _ in range(6):
        box.step()
    had = box.delivered["a", 0][:4]
    while box.queues["w0"]:
        box.apply(box.execute())
    box.delivered["a", 0] = list(had)
    box.submit(request("a", max_tokens=12, attempt=2, resumed=[pack_tokens(had)]))
    box.run()
    box.assert_tokens_right()
    box.assert_idle()


@pytest.mark.parametrize("steps", range(12))
def test_cancel_in_every_state_frees_everything(steps: int) -> None:
    box = Box(num_blocks=9)
    for index, name in enumerate("abc"):
        box.submit(request(name, prompt_len=8, max_tokens=12, arrival_ns=index))
    for _ in range(steps):
        box.step()
    box.cancel("b")
    box.cancel("b")
    box.core.check()
    box.run()
    assert {name for name, _ in box.ends} >= {"a", "c"}
    box.ends.pop(("b", 0), None)
    box.assert_tokens_right()
    box.assert_idle()


def test_a_cancel_that_overtakes_its_submit_still_cancels() -> None:
    box = Box()
    box.cancel("a")
    assert box.submit(request("a")).outcome is Outcome.ACCEPTED
    assert box.plan() is None and not box.core.live_requests()


def test_tombstones_and_ended_requests_are_forgotten_in_time() -> None:
    box = Box()
    box.cancel("ghost")
    box.submit(request("a"))
    box.run()
    box.now += box.limits.tombstone_ns + MS
    box.core.tick(box.now)
    assert not box.core._tombstones and not box.core._requests


def test_an_ended_request_soon_holds_no_tokens_and_is_still_known() -> None:
    box = Box()
    box.submit(request("a", n=2))
    box.submit(request("b", max_tokens=60))
    while ("a", 1) not in box.ends or ("a", 0) not in box.ends:
        box.step()
    box.core.tick(box.now)
    assert all(one.tokens for one in box.core.sequences_of("a")), "whoever drives the core may still tell of it"
    box.now += KEPT_WHOLE_NS + MS
    box.core.tick(box.now)
    assert not box.core.sequences_of("a")
    assert box.core.sequences_of("b")[0].tokens, "it runs"
    assert box.submit(request("a", n=2)).outcome is Outcome.DUPLICATE
    box.run()
    box.assert_idle()
    assert box.ends["b", 0] == "length"


def test_cancelled_slots_are_dropped_even_when_nothing_runs() -> None:
    box = Box()
    box.submit(request("a", max_tokens=30))
    box.step()
    box.step()
    box.cancel("a")
    box.run()
    box.step()
    assert box.plans[-1].drops == [0]
    assert not box.batches["w0"].slots


def test_a_repeated_result_changes_nothing() -> None:
    box = Box()
    box.submit(request("a", max_tokens=5))
    box.plan()
    result = box.execute()
    box.apply(result)
    before = encode_state(box)
    box.apply(result)
    assert encode_state(box) == before
    box.run()
    box.assert_tokens_right()


def test_a_result_out_of_order_asks_for_the_missing_one() -> None:
    box = Box()
    box.submit(request("a", max_tokens=5))
    box.plan()
    box.plan()
    first, second = box.execute(), box.execute()
    with pytest.raises(ResultGap) as caught:
        box.core.apply(second, box.now)
    assert caught.value.step == first.step
    box.apply(first)
    box.apply(second)
    box.run()
    box.assert_tokens_right()


def test_results_of_other_epochs_and_incarnations_are_ignored() -> None:
    box = Box()
    box.submit(request("a"))
    box.plan()
    good = box.execute()
    stale = StepResult(good.epoch - 1, good.worker, good.incarnation, good.step, good.tokens, good.ended)
    other = StepResult(good.epoch, good.worker, good.incarnation + 1, good.step, good.tokens, good.ended)
    assert box.core.apply(stale, box.now) == [] and box.core.apply(other, box.now) == []
    with pytest.raises(BadResult):
        box.core.apply(StepResult(good.epoch, good.worker, good.incarnation, good.step, [1, 2, 3]), box.now)
    with pytest.raises(BadResult):
        box.core.apply(StepResult(good.epoch, good.worker, good.incarnation, 99, []), box.now)


def test_a_lost_worker_loses_its_running_sequences_and_keeps_the_queue() -> None:
    box = Box(Limits(max_num_seqs=1, max_num_batched_tokens=16), workers=1)
    box.submit(request("a", max_tokens=30))
    box.submit(request("b", max_tokens=3, arrival_ns=1))
    box.step()
    events = box.core.worker_lost("w0", "silent", box.now)
    assert [(e.sequence.request_id, e.kind) for e in events if isinstance(e, Failed)] == [("a", "lost")]
    assert box.core.submit(request("c"), box.now).outcome is Outcome.NO_WORKER
    box.queues["w0"].clear()
    box.add_worker("w0", box.runners["w0"].capacity, incarnation=2)
    box.run()
    assert ("b", 0) in box.ends
    box.assert_idle()


def test_waiting_without_any_worker_is_handed_back_to_its_gateway() -> None:
    box = Box()
    box.submit(request("a"))
    box.core.worker_lost("w0", "silent", box.now + 1)
    assert box.core.tick(box.now + MS) == []
    events = box.core.tick(box.now + box.limits.no_worker_grace_ns + MS)
    assert [e.kind for e in events if isinstance(e, Failed)] == ["lost"]
    assert not box.core.live_requests()


def test_what_only_a_lost_worker_could_hold_fails_and_holds_up_nobody() -> None:
    box = Box(num_blocks=6)  # 24 tokens
    box.add_worker("big", capacity(num_blocks=40))
    box.submit(request("huge", prompt_len=20, max_tokens=60, arrival_ns=0))
    box.core.worker_lost("big", "silent", box.now)
    del box.queues["big"]
    box.submit(request("small", prompt_len=4, max_tokens=4, arrival_ns=1))
    for _ in range(12):
        box.step()
    assert ("small", 0) in box.ends
    events = box.core.tick(box.now + box.limits.no_worker_grace_ns + MS)
    assert [event.sequence.request_id for event in events if isinstance(event, Failed)] == ["huge"]
    box.assert_idle()


def test_a_restarted_worker_under_the_same_name_loses_the_old_batch() -> None:
    box = Box()
    box.submit(request("a", max_tokens=30))
    box.step()
    box.queues["w0"].clear()
    box.add_worker("w0", box.runners["w0"].capacity, incarnation=2)
    assert [e.kind for e in box.events if isinstance(e, Failed)] == ["lost"]
    box.assert_idle()


def test_what_a_gateway_no_longer_knows_is_cancelled() -> None:
    box = Box()
    box.submit(request("a", max_tokens=30))
    box.submit(request("b", max_tokens=3))
    box.submit(request("c", max_tokens=3, gateway="other"))
    box.now += MS
    events = box.core.reconcile("g", ["b"], before_ns=box.now, now=box.now)
    assert [e.sequence.request_id for e in events if isinstance(e, Ended)] == ["a"]
    box.run()
    assert {name for name, _ in box.ends} == {"b", "c"}


def test_two_workers_share_the_load() -> None:
    box = Box(workers=2)
    for index in range(8):
        box.submit(request(f"r{index}", max_tokens=20, arrival_ns=index))
    for _ in range(6):
        for worker in ("w0", "w1"):
            box.step(worker)
    assert {len(worker.running) for worker in box.core.workers.values()} == {4}
    box.run()
    box.assert_tokens_right()
    box.assert_idle()


def test_a_request_goes_to_a_worker_that_can_hold_its_worst_case() -> None:
    box = Box(num_blocks=6)  # 24 tokens
    box.add_worker("big", capacity(num_blocks=40))
    box.submit(request("long", prompt_len=20, max_tokens=60))
    box.run()
    assert [plan.worker for plan in box.plans if plan.starts] == ["big"]
    box.assert_tokens_right()


def test_a_draining_worker_admits_nothing_and_finishes_what_it_has() -> None:
    box = Box()
    box.submit(request("a", max_tokens=5))
    box.step()
    box.core.worker_draining("w0")
    assert box.submit(request("b")).outcome is Outcome.NO_WORKER
    for _ in range(10):
        box.step()
    assert ("a", 0) in box.ends


def test_limits_that_contradict_each_other_are_refused() -> None:
    with pytest.raises(ValueError, match="max_num_batched_tokens"):
        Limits(max_num_seqs=64, max_num_batched_tokens=32)


def encode_state(box: Box) -> tuple[object, ...]:
    return (
        [encode(plan) for plan in box.plans],
        box.core.counters,
        [(s.request_id, list(s.tokens), s.pending) for w in box.core.workers.values() for s in w.running],
    )


def test_a_prompt_that_is_too_long_for_one_step_of_a_worker_goes_to_another() -> None:
    limits = Limits(max_num_seqs=4, max_num_batched_tokens=64, enable_chunked_prefill=False, placement="least-loaded")
    box = Box(limits, workers=0)
    box.add_worker("a", capacity(max_batched_tokens=16))
    box.add_worker("large", capacity())
    assert box.submit(request("r", 30, 6)).outcome is Outcome.ACCEPTED
    box.run()


def test_a_search_that_is_wider_than_any_batch_that_is_left_holds_nobody_up() -> None:
    box = Box(Limits(max_num_seqs=8, max_num_batched_tokens=64), workers=0)
    box.add_worker("small", capacity(max_batched_tokens=2))
    box.add_worker("large", capacity())
    assert box.submit(request("b", 5, 6, beams=4)).outcome is Outcome.ACCEPTED
    box.core.worker_lost("large", "gone", box.now, suspect=False)
    del box.queues["large"]
    box.submit(request("r", 5, 6, arrival_ns=1))
    box.now += box.limits.no_worker_grace_ns + MS
    box.events += box.core.tick(box.now)
    assert [one.sequence.request_id for one in box.events if isinstance(one, Failed)] == ["b"]
    box.run()
    assert box.ends == {("r", 0): "length"}
